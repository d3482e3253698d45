"""Runs: sets of block numbers as sorted, disjoint, non-touching half-open ranges.

Covers what the simulator does to a session's copies in a tier: add, cut, intersect, take from the end. A context has
one to three runs per tier, so plain tuples beat anything clever. Pure functions on values.
"""

from __future__ import annotations

Runs = tuple[tuple[int, int], ...]

NONE: Runs = ()


def size(runs: Runs) -> int:
    """How many blocks."""
    return sum(hi - lo for lo, hi in runs)


def span(lo: int, hi: int) -> Runs:
    """The blocks lo..hi-1."""
    return ((lo, hi),) if hi > lo else NONE


def union(a: Runs, b: Runs) -> Runs:
    """Blocks in either."""
    if not a or not b:
        return a or b
    out: list[tuple[int, int]] = []
    for lo, hi in sorted(a + b):
        if out and lo <= out[-1][1]:
            if hi > out[-1][1]:
                out[-1] = (out[-1][0], hi)
        else:
            out.append((lo, hi))
    return tuple(out)


def minus(a: Runs, b: Runs) -> Runs:
    """Blocks in `a` and not in `b`."""
    for cut_lo, cut_hi in b:
        left: list[tuple[int, int]] = []
        for lo, hi in a:
            if hi <= cut_lo or lo >= cut_hi:
                left.append((lo, hi))
                continue
            if lo < cut_lo:
                left.append((lo, cut_lo))
            if hi > cut_hi:
                left.append((cut_hi, hi))
        a = tuple(left)
    return a


def both(a: Runs, b: Runs) -> Runs:
    """Blocks in both."""
    return minus(a, minus(a, b)) if a and b else NONE


def below(a: Runs, limit: int) -> Runs:
    """Blocks of `a` before block `limit`."""
    if not a or a[-1][1] <= limit:
        return a
    return tuple((lo, min(hi, limit)) for lo, hi in a if lo < limit)


def last(a: Runs, count: int) -> Runs:
    """The last `count` blocks of `a`, or all."""
    out: list[tuple[int, int]] = []
    for lo, hi in reversed(a):
        if count <= 0:
            break
        out.append((max(lo, hi - count), hi))
        count -= hi - out[-1][0]
    return tuple(reversed(out))


def first(a: Runs, count: int) -> Runs:
    """The first `count` blocks of `a`, or all."""
    out: list[tuple[int, int]] = []
    for lo, hi in a:
        if count <= 0:
            break
        out.append((lo, min(hi, lo + count)))
        count -= out[-1][1] - lo
    return tuple(out)


def leading(a: Runs) -> int:
    """How many blocks from block 0 on are there without a hole."""
    return a[0][1] if a and a[0][0] == 0 else 0
