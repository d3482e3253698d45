"""Choosing lines by rank under a budget, and telling where lines were left out.

A rank says what a line is worth: MUST before all, NOISE never; a HOLE stands for lines that were not looked at. Ranks from MATTER on may use the whole budget, those
below only the soft part of it, so that a long log does not fill its limit with lines of no weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

HOLE, NOISE, FILLER, EDGE, CONTEXT, MATTER, MUST = -1, 0, 1, 2, 3, 4, 5
GAP_TOKENS = 7
_LONG = {NOISE: 160, FILLER: 160, EDGE: 240, CONTEXT: 240, MATTER: 400, MUST: 700}
"""Characters of a line that are shown, by rank."""


def cost(text: str) -> float:
    """Tokens of `text`, roughly and rather too many."""
    if text.isascii():
        return 1 + len(text) / 3.4
    return 1 + len(text.encode("utf-8", "replace")) / 2.6


def cut(line: str, limit: int) -> str:
    """`line` within `limit` characters: its head, a count of what is left out, its end."""
    if len(line) <= limit + 24:
        return line
    head, tail = limit * 2 // 3, limit // 3
    return f"{line[:head]} ..{len(line) - head - tail} chars.. {line[-tail:]}"


def render(lines: Sequence[str], ranks: Sequence[int], budget: int, *, soft: float | None = None) -> str:
    """The best of `lines` within `budget` tokens (roughly), in their order; soft: the part for ranks below MATTER.

    A gap that swallows more than noise is told as "... lines 40-80" (1-based, as `read_output` takes them).
    """
    shown = {at: cut(line, _LONG[rank]) for at, (line, rank) in enumerate(zip(lines, ranks, strict=True)) if rank > 0}
    kept: set[int] = set()
    left = float(budget)
    for rank in range(MUST, NOISE, -1):
        if rank < MATTER and soft is not None:
            left = min(left, soft)
        wanted = [at for at in shown if ranks[at] == rank]
        for at in _from_both_ends(wanted):
            price = cost(shown[at]) + (0 if at - 1 in kept or at + 1 in kept else GAP_TOKENS * (rank < MUST))
            if price > left:
                break
            left -= price
            kept.add(at)
    return "\n".join(_told(lines, ranks, shown, kept))


def is_gap(line: str) -> bool:
    """Whether `line` is one that `render` put where lines were left out."""
    return line.startswith("... lines ") and line[10:].replace("-", "", 1).isdigit()


def _from_both_ends(items: Sequence[int]) -> list[int]:
    """Two from the front, one from the back, and so on: where a budget ends in between, both ends are there."""
    order, front, back = [], 0, len(items)
    while front < back:
        order.append(items[front])
        front += 1
        if front < back and front % 2 == 0:
            back -= 1
            order.append(items[back])
    return order


def _told(lines: Sequence[str], ranks: Sequence[int], shown: dict[int, str], kept: set[int]) -> list[str]:
    told: list[str] = []
    for is_kept, run in groupby(range(len(lines)), kept.__contains__):
        at = list(run)
        if is_kept:
            told += [shown[number] for number in at]
            continue
        wanted = [number for number in at if ranks[number] == HOLE or (ranks[number] and lines[number].strip())]
        if len(wanted) == 1 and wanted[0] in shown and cost(shown[wanted[0]]) <= GAP_TOKENS:
            told.append(shown[wanted[0]])
        elif wanted:
            told.append(f"... lines {at[0] + 1}-{at[-1] + 1}")
    return told
