"""Lists: paths by folder, hits of a search by file, `ls -l` as size and name, tables by their ends."""

from __future__ import annotations

import re

from agentkv.context.slim.alarm import is_alarm
from agentkv.context.slim.clean import lines_of
from agentkv.context.slim.logs import MANY_CHARS
from agentkv.context.slim.pick import CONTEXT, EDGE, FILLER, MATTER, MUST, NOISE, cost, render

_PATH = re.compile(r"^(?!https?:)[^\s:,;|=(){}\[\]<>\"']*/[^\s:,;|=(){}\[\]<>\"'/]+$")
_HIT = re.compile(r"^(?![a-z]+://)(?=[^:\n]*[./])([A-Za-z_./~][^\s:]{0,200}):(\d{1,7}):(.*)$")
_NEAR_HIT = re.compile(r"-(\d{1,7})-(.*)$")
"""What stands behind the path in a line of context."""
_LONG = re.compile(
    r"^([-dlbcps])[rwxsStT-]{9}[.+@]?\s+\d+\s+(?:\S+\s+){0,2}?(\d[\d.,]*[KMGTP]?)\s+"
    r"(?:[A-Z][a-z]{2}\s+\d{1,2}\s+[\d:]{4,5}\s+|\d{4}-\d\d-\d\d\s+[\d:.]+\s+(?:[+-]\d{4}\s+)?)?(\S.*)$"
)
_FEW, _SHARE = 5, 0.7
_TABLE_LINES, _TABLE_HEAD, _TABLE_TAIL = 20, 12, 4
_TABLE_NAMES, _TABLE_SHARE = 2, 0.9
_NAMES = 12
_GLANCE = 4_000


def is_paths(_tool: str, _command: str, text: str) -> bool:
    """Whether most lines are one path each."""
    return _share(_PATH, text) >= _SHARE


def by_folder(text: str, budget: int) -> str | None:
    """Every path, the folder once: "src/a/: b.py c.py"; None if that is too long."""
    if len(text) > MANY_CHARS:
        return None
    told = "\n".join(f"{folder}: {' '.join(names)}" if folder else " ".join(names) for folder, names in _folders(text))
    return told if cost(told) <= budget * 2 else None


def by_folder_cut(text: str, budget: int) -> str | None:
    """Folders with their first names and how many there are."""
    if len(text) > MANY_CHARS:
        return None
    told = []
    for folder, names in _folders(text):
        more = f" .. {len(names)} in all" if len(names) > _NAMES else ""
        told.append(f"{folder}: {' '.join(names[:_NAMES])}{more}" if folder else names[0])
    return _ends(told, budget)


def _folders(text: str) -> list[tuple[str, list[str]]]:
    """(folder with its slash, names) for neighbouring paths of one folder; ("", [line]) for other lines."""
    found: list[tuple[str, list[str]]] = []
    for line in text.split("\n"):
        if _PATH.match(line[:400]) is None:
            if line:
                found.append(("", [line]))
            continue
        folder, slash, name = line.rpartition("/")
        if found and found[-1][0] == folder + slash:
            found[-1][1].append(name)
        else:
            found.append((folder + slash, [name]))
    return found


def is_hits(_tool: str, _command: str, text: str) -> bool:
    """Whether most lines are "path:line:text"."""
    return _share(_HIT, text) >= _SHARE


def by_file(text: str, budget: int) -> str | None:
    """Every hit, its file once."""
    if len(text) > MANY_CHARS:
        return None
    told = "\n".join(_by_file(text))
    return told if cost(told) <= budget * 2 else None


def by_file_cut(text: str, budget: int) -> str | None:
    """Files with their first hits."""
    return None if len(text) > MANY_CHARS else _ends(_by_file(text), budget)


def _by_file(text: str) -> list[str]:
    told: list[str] = []
    paths = {hit[1] for line in text.split("\n") if (hit := _HIT.match(line)) is not None}
    current = ""
    for line in text.split("\n"):
        path, rest = _place(line, current, paths)
        if path and path != current:
            told.append(path)
        current = path or current
        told.append(rest)
    return told


def _place(line: str, current: str, paths: set[str]) -> tuple[str, str]:
    """The file of a hit or of a line of context beside one, and the rest of it; "" and the line for any other."""
    hit = _HIT.match(line)
    if hit is not None:
        return hit[1], f"{hit[2]}:{hit[3]}"
    for path in (current, *sorted(paths, key=len, reverse=True)[:_NAMES]):
        near = _NEAR_HIT.match(line, len(path)) if path and line.startswith(path) else None
        if near is not None:
            return path, f"{near[1]}-{near[2]}"
    return "", line


def is_long_listing(_tool: str, _command: str, text: str) -> bool:
    """Whether `ls -l` wrote this."""
    return _share(_LONG, text) >= _SHARE


def long_listing(text: str, budget: int) -> str | None:
    """Size and name of each entry; rights, owners and times are left out."""
    if len(text) > MANY_CHARS:
        return None
    told = []
    for line in lines_of(text):
        entry = _LONG.match(line)
        if entry is not None:
            told.append(f"{entry[3]}/" if entry[1] == "d" else f"{entry[3]} {entry[2]}")
        elif line and not line.startswith("total "):
            told.append(line)
    return _ends(told, budget)


def is_table(_tool: str, _command: str, text: str) -> bool:
    """Whether many lines have the same number of the same separator."""
    lines = text[: _GLANCE * 2].split("\n")[:-1][:60]
    if len(lines) < _TABLE_LINES:
        return False
    marks = {mark: max(line.count(mark) for line in lines[:_TABLE_NAMES]) for mark in ",\t|;"}
    like = {mark: sum(line.count(mark) == number for line in lines) for mark, number in marks.items()}
    return any(marks[mark] > 1 and like[mark] >= len(lines) * _TABLE_SHARE for mark in marks)


def table(text: str, budget: int) -> str | None:
    """The head of a table, its first and last rows, rows that tell of a failure."""
    if len(text) > MANY_CHARS:
        return None
    lines = lines_of(text)
    ranks = [FILLER if line else NOISE for line in lines]
    for at, line in enumerate(lines):
        if at < _TABLE_NAMES:
            ranks[at] = MUST
        elif is_alarm(line):
            ranks[at] = MATTER
        elif at < _TABLE_HEAD:
            ranks[at] = CONTEXT
        elif at >= len(lines) - _TABLE_TAIL:
            ranks[at] = EDGE
    return render(lines, ranks, budget, soft=budget / 3)


def _ends(lines: list[str], budget: int) -> str:
    """The first and the last of equal `lines`, with the number left out where they do not fit."""
    if sum(map(cost, lines)) <= budget:
        return "\n".join(lines)
    kept_head, kept_tail, left = 0, 0, budget - 12.0
    while kept_head + kept_tail < len(lines):
        tail = kept_head >= 3 * (kept_tail + 1)
        left -= cost(lines[-1 - kept_tail] if tail else lines[kept_head])
        if left < 0:
            break
        kept_tail, kept_head = kept_tail + tail, kept_head + (not tail)
    gap = f".. {len(lines) - kept_head - kept_tail} more .."
    return "\n".join([*lines[:kept_head], gap, *lines[len(lines) - kept_tail :]])


def _share(pattern: re.Pattern[str], text: str) -> float:
    lines = [line for line in text[:_GLANCE].split("\n")[:60] if line]
    if len(text) > _GLANCE and len(lines) > 1:
        lines.pop()
    return sum(pattern.match(line) is not None for line in lines) / len(lines) if len(lines) >= _FEW else 0.0
