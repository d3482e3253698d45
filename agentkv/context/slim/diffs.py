"""Diffs and git logs: commits, files with their counts, hunks, changed lines; little of what did not change."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from agentkv.context.slim.clean import lines_of
from agentkv.context.slim.logs import MANY_CHARS
from agentkv.context.slim.pick import CONTEXT, EDGE, FILLER, MATTER, MUST, NOISE, render

_SIGNS = re.compile(r"^(?:diff --git a/|commit [0-9a-f]{12,40}\b|@@ -\d+(?:,\d+)? \+\d+)", re.MULTILINE)
_COMMIT = re.compile(r"^commit ([0-9a-f]{12})[0-9a-f]*(.*)$")
_FILE = re.compile(r"^diff --git a/(.+?) b/(.+)$")
_HUNK = re.compile(r"^@@ -\S+ \+\S+ @@")
_META = re.compile(
    r"^(?:index [0-9a-f]+\.\.|--- |\+\+\+ |old mode|new mode|similarity index|rename (?:from|to)|copy (?:from|to))"
)
_KIND = re.compile(r"^(new|deleted) file mode")
_PERSON = re.compile(r"^(?:Author|AuthorDate|Commit|CommitDate|Date|Merge):\s+(.*)$")
_STAT = re.compile(r"^ (\S.*?) +\| +(\d+|Bin)\b(.*)$")
_LONG_MESSAGE = 5
_LONG_HUNK = 3
"""Changed lines of a hunk that come before those of which there are many."""


@dataclass(slots=True)
class _File:
    at: int
    path: str
    kind: str = ""
    added: int = 0
    removed: int = 0


@dataclass(slots=True)
class _State:
    """Where in the output the next line stands."""

    file: _File | None = None
    files: list[_File] = field(default_factory=list)
    in_hunk: bool = False
    changed: int = 0
    message: int = 0
    commits: list[tuple[int, int]] = field(default_factory=list)
    """Where each commit's line and the first line of its message are (-1: no message)."""
    people: set[str] = field(default_factory=set)


def is_diff(_tool: str, _command: str, text: str) -> bool:
    """Whether git wrote a diff or a log."""
    return _SIGNS.search(text[:20_000]) is not None


def diff(text: str, budget: int) -> str | None:
    """The same changes in fewer words: every commit and file before every hunk before every line."""
    if len(text) > MANY_CHARS:
        return None
    lines = lines_of(text)
    told, ranks = list(lines), [FILLER] * len(lines)
    state = _State()
    for at, line in enumerate(lines):
        ranks[at], told[at] = _head(at, line, state) or _body(at, line, state)
    for at, message_at in state.commits:
        if message_at >= 0:
            ranks[at], told[message_at] = NOISE, f"{told[at][7:16]} {told[message_at].strip()}"
    for file in state.files:
        told[file.at] = f"{file.path}{file.kind} +{file.added} -{file.removed}"
    for at, line in enumerate(lines):  # one unchanged line at each side of a change
        if ranks[at] == NOISE and line[:1] == " " and line.strip():
            near = lines[max(0, at - 1) : at + 2]
            if any(other[:1] in ("+", "-") and not _META.match(other) for other in near):
                ranks[at] = FILLER
    return render(told, ranks, budget)


def _head(at: int, line: str, state: _State) -> tuple[int, str] | None:
    """Rank and words of a line that opens something; None for one inside a hunk or a message."""
    commit = _COMMIT.match(line)
    if commit is not None:
        state.file, state.in_hunk, state.message = None, False, 0
        state.commits.append((at, -1))
        return MUST, f"commit {commit[1]}{commit[2]}"
    file = _FILE.match(line)
    if file is not None:
        path = file[2] if file[1] == file[2] else f"{file[1]} => {file[2]}"
        state.file, state.in_hunk = _File(at, path), False
        state.files.append(state.file)
        return MATTER, line
    if _HUNK.match(line):
        state.in_hunk, state.changed = True, 0
        return CONTEXT, line
    return None


def _body(at: int, line: str, state: _State) -> tuple[int, str]:
    if state.in_hunk:
        return _change(line, state)
    kind, stat = _KIND.match(line), _STAT.match(line)
    if kind is not None and state.file is not None:
        state.file.kind = f" ({kind[1]})"
    if kind is not None or not line or _META.match(line):
        return NOISE, line
    if _PERSON.match(line):
        known = line in state.people
        state.people.add(line)
        return NOISE if known else EDGE, line
    if stat is not None:
        return MATTER, f" {stat[1]} | {stat[2]}{stat[3] if stat[2] == 'Bin' else ''}"
    if line.startswith("    "):
        state.message += 1
        if state.message == 1 and state.commits:
            state.commits[-1] = (state.commits[-1][0], at)
        return MUST if state.message <= _LONG_MESSAGE else CONTEXT, line[2:]
    return CONTEXT, line


def _change(line: str, state: _State) -> tuple[int, str]:
    sign = line[:1]
    if sign in ("+", "-"):
        state.changed += 1
        if state.file is not None:
            state.file.added += sign == "+"
            state.file.removed += sign == "-"
        return (CONTEXT if state.changed <= _LONG_HUNK else EDGE) if line[1:].strip() else FILLER, line
    if sign in (" ", "\\", ""):
        return NOISE, line
    state.in_hunk = False
    return CONTEXT, line
