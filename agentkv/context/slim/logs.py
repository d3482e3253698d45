"""The rule for any text: what tells of failures with its neighbours, summaries, both ends, the rest while it fits.

Also folds stack traces (the exception, the first and the last frame, frames of the user's own code) and lines that
repeat (equal but for numbers) into one with a count. Of a very long text only both ends and the places with a word of
failure are looked at line by line.
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate

from agentkv.context.slim.alarm import SUMMARY, WARNING, hits, is_alarm, mask
from agentkv.context.slim.clean import lines_of
from agentkv.context.slim.pick import CONTEXT, EDGE, FILLER, HOLE, MATTER, MUST, NOISE, cost, render

HEAD_LINES, TAIL_LINES = 4, 8
MANY_LINES = 12_000
MANY_CHARS = 500_000
"""Texts of more lines or characters are looked at in windows."""
_WINDOW, _WINDOW_CHARS = 4_000, 120_000
_AROUND = 12
_SOFT_SHARE = 8
_SOFT_LEAST = 80
_REPEATS = 3

_FRAME = re.compile(
    r"^\s{1,40}(?:File \"[^\"]*\", line \d+|at \S.*[(:]|\d+:\s+(?:0x)?\w|#\d+ )|^\s{1,40}at \S+|^goroutine \d+|^\s{1,40}\S+\.(?:go|rs):\d+"
)
_FOREIGN = re.compile(
    r"site-packages|dist-packages|/lib/python\d|<frozen |node_modules|node:internal|internal/|\bjava\.|\bjavax\.|\bsun\."
    r"|org\.junit|org\.springframework|/rustc/|std::|core::|/usr/local/go/|runtime\."
)
_TRACE_HEAD = re.compile(r"Traceback \(most recent call last\)|^Caused by:|^\s*\.\.\. \d+ more")


def log(text: str, budget: int) -> str:
    """The best of any text within `budget` tokens, roughly."""
    lines = lines_of(text)
    window = _window(text, lines)
    if window is None:
        folded, ranks = fold_repeats(lines, ranked(lines))
        soft = soft_budget(text, budget) if max(ranks, default=NOISE) >= MATTER else budget
        return render(folded, ranks, budget, soft=soft)  # where nothing stands out, every line counts
    spans = _spans(window)
    lines = [lines[first] if first == last else "" for first, last in spans]
    folded, ranks = fold_repeats(lines, ranked(lines))
    for at, (first, last) in enumerate(spans):
        if first < last:
            ranks[at] = HOLE
    return _renumbered(render(folded, ranks, budget, soft=soft_budget(text, budget)), spans)


def _spans(window: Sequence[int]) -> list[tuple[int, int]]:
    """(n, n) for each line of the window, (first, last) for what lies between two of them; one line is no hole."""
    spans: list[tuple[int, int]] = []
    for at in window:
        if spans and spans[-1][1] + 1 < at:
            spans.append((spans[-1][1] + 1, at - 1))
        spans.append((at, at))
    return spans


def soft_budget(text: str, budget: int) -> float:
    """What lines of no weight may use: an eighth of the text, so that a log shrinks even where it would fit."""
    return min(budget, max(_SOFT_LEAST, cost(text) / _SOFT_SHARE))


def ranked(lines: Sequence[str]) -> list[int]:
    """A rank for every line of a log."""
    ranks = [_rank(line) for line in lines]
    for at in [*range(min(HEAD_LINES, len(lines))), *range(max(0, len(lines) - TAIL_LINES), len(lines))]:
        if lines[at]:
            ranks[at] = max(ranks[at], EDGE)
    for at, line in enumerate(lines):
        if ranks[at] == MUST and is_alarm(line):
            for near in (at - 1, at + 1, at + 2):
                if 0 <= near < len(lines) and ranks[near] == FILLER:
                    ranks[near] = CONTEXT
    fold_traces(lines, ranks)
    return ranks


def _rank(line: str) -> int:
    if not line:
        return NOISE
    if is_alarm(line) or SUMMARY.search(line):
        return MUST
    return MATTER if WARNING.search(line) else FILLER


def fold_traces(lines: Sequence[str], ranks: list[int]) -> None:
    """Frames of a stack trace: first, last and the user's own matter; the others are noise."""
    at = 0
    while at < len(lines):
        if _FRAME.match(lines[at]) is None:
            if _TRACE_HEAD.search(lines[at]):
                ranks[at] = MUST
            at += 1
            continue
        start = at
        while at < len(lines) and (_FRAME.match(lines[at]) or lines[at].startswith(("    ", "\t"))):
            at += 1
        frames = [number for number in range(start, at) if _FRAME.match(lines[number])]
        if len(frames) < _REPEATS:
            continue
        for frame, after in zip(frames, [*frames[1:], at], strict=True):
            own = not _FOREIGN.search(lines[frame])
            rank = MATTER if frame in {frames[0], frames[-1]} else CONTEXT if own else NOISE
            for number in range(frame, after):
                ranks[number] = rank


def fold_repeats(lines: Sequence[str], ranks: Sequence[int]) -> tuple[list[str], list[int]]:
    """Lines and ranks in which lines that are equal but for numbers stand once, with a count; alarms only if equal."""
    keys = [
        (line if rank >= MUST else mask(line)) if rank and line.strip() else None
        for line, rank in zip(lines, ranks, strict=True)
    ]
    counts = Counter(key for key in keys if key is not None)
    last = {key: at for at, key in enumerate(keys) if key is not None}
    told, out_ranks = list(lines), list(ranks)
    seen: set[str] = set()
    for at, key in enumerate(keys):
        exact = ranks[at] >= MUST
        if key is None or counts[key] < (2 if exact else _REPEATS):
            continue
        if key not in seen:
            seen.add(key)
            told[at] = f"{lines[at]} (x{counts[key]}{'' if exact else ' like this'})"
        elif exact or at != last[key]:
            out_ranks[at] = NOISE
    return told, out_ranks


def runs(text: str, budget: int) -> str | None:
    """Lines that follow each other and are equal but for the time that they begin with: the first, with a count.

    Nothing else is touched: in a text that fits, a number that differs is what somebody asked for. None where this does
    not help, or not enough.
    """
    lines = lines_of(text)
    kept: list[str] = []
    for key, group in itertools.groupby(lines, key=lambda line: _STAMP.sub("", line)):
        same = list(group)
        folded = len(same) >= _REPEATS and key.strip()
        kept += [f"{same[0]} (x{len(same)})"] if folded else same
    if len(kept) == len(lines) or sum(map(cost, kept)) > budget:
        return None
    return "\n".join(kept)


def repeats(text: str, budget: int) -> str | None:
    """A text of any kind in which at least half of the lines repeat others: each once, with a count. None for any other, and where that is too long."""
    lines = lines_of(text)
    if len(lines) > MANY_LINES or len(text) > MANY_CHARS:
        return None
    folded, ranks = fold_repeats(lines, [max(rank, CONTEXT) if rank else NOISE for rank in ranked(lines)])
    kept = [line for line, rank in zip(folded, ranks, strict=True) if rank]
    if len(kept) * 2 > len(lines) or sum(map(cost, kept)) > budget:
        return None
    return "\n".join(kept)


def _window(text: str, lines: Sequence[str]) -> list[int] | None:
    """Which lines of a very long text are looked at: both ends, and around the words of failure; None: all."""
    if len(lines) <= MANY_LINES and len(text) <= MANY_CHARS:
        return None
    head = _within(lines, range(min(_WINDOW, len(lines))))
    tail = _within(lines, range(len(lines) - 1, max(-1, len(lines) - _WINDOW), -1))
    chosen = set(head) | set(tail)
    middle = _middle(text, lines)
    chosen.update(_within(lines, [at for at in middle if at not in chosen]))
    return sorted(chosen)


def _within(lines: Sequence[str], wanted: Iterable[int]) -> list[int]:
    """The first of `wanted` lines that together have no more than _WINDOW_CHARS characters."""
    taken, left = [], _WINDOW_CHARS
    for at in wanted:
        left -= len(lines[at])
        if left < 0:
            break
        taken.append(at)
    return taken


def _middle(text: str, lines: Sequence[str]) -> list[int]:
    """Numbers of the lines around words of failure, in the order in which the words were looked for."""
    places = list(hits(text))
    if not places:
        return []
    # a piece of a cut line has no newline behind it: where a text has such lines, places are near the truth only
    newline = text.count("\n") / max(1, len(lines) - 1)
    starts = list(accumulate((len(line) + newline for line in lines), initial=0.0))
    found: dict[int, None] = {}
    for place in places:
        middle = bisect_right(starts, place) - 1
        found.update(dict.fromkeys(range(max(0, middle - _AROUND), min(len(lines), middle + _AROUND))))
    return list(found)


_STAMP = re.compile(r"^[\[(]?(?:\d{4}-\d\d-\d\d[T ])?\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?[\])]?\s*")
_GAP = re.compile(r"^\.\.\. lines (\d+)-(\d+)$", re.MULTILINE)


def _renumbered(told: str, spans: Sequence[tuple[int, int]]) -> str:
    """Gaps in the whole text's line numbers."""
    return _GAP.sub(lambda gap: f"... lines {spans[int(gap[1]) - 1][0] + 1}-{spans[int(gap[2]) - 1][1] + 1}", told)
