"""Outputs of package installers: what went wrong, what was installed; the names of what was fetched on one line."""

from __future__ import annotations

import re

from agentkv.context.slim.alarm import SUMMARY, WARNING, is_alarm
from agentkv.context.slim.clean import lines_of
from agentkv.context.slim.logs import MANY_CHARS, fold_repeats
from agentkv.context.slim.pick import CONTEXT, EDGE, MATTER, MUST, NOISE, render

_COMMAND = re.compile(
    r"\b(?:pip3?|uv|npm|pnpm|yarn|conda|mamba|poetry|pdm|apt(?:-get)?|dnf|yum|apk|brew|gem|bundle|cargo|go)\b[^|;&]{0,80}?"
    r"\b(?:install|add|ci|i|sync|update|upgrade|download|wheel|get|fetch)\b"
)
_RESULT = re.compile(r"^(?:Successfully installed|added \d+ packages|Would install) ", re.MULTILINE)
_FETCHED = re.compile(
    r"^\s*(?:Collecting|Requirement already satisfied:|Get:\d+ \S+ \S+ \S+|Selecting previously unselected package|Unpacking|Setting up) (\S+)"
)
_CAUSE = re.compile(r"^\s*[\u00d7\u2502\u2570]|exit code: \d|\[end of output\]|^\s*(?:note|hint): ")
_QUIET = re.compile(
    r"(?i)^\s*(?:debug|skipping link|link requires|found link|adding|removing|copying|creating|removed|added|.*(?:cannot be|could not) (?:cached|used from cache))\b.*"
)
_MANY_FETCHED = 40
_TAIL_LINES = 6


def is_install(_tool: str, command: str, text: str) -> bool:
    """Whether an installer wrote this."""
    return _COMMAND.search(command[:400]) is not None or _RESULT.search(text[-3_000:]) is not None


def install(text: str, budget: int) -> str | None:
    """Errors with their surroundings, warnings, what sums up; else only names."""
    if len(text) > MANY_CHARS:
        return None
    lines = lines_of(text)
    told, ranks = list(lines), [NOISE] * len(lines)
    names: dict[str, None] = {}
    first = -1
    for at, line in enumerate(lines):
        fetched = _FETCHED.match(line)
        if fetched is not None:
            first = at if first < 0 else first
            names[fetched[1]] = None
        elif line and not _QUIET.match(line):
            ranks[at] = _rank(line)
    for at, rank in enumerate(list(ranks)):
        if rank == MUST and is_alarm(lines[at]):
            for near in range(max(0, at - 2), min(len(lines), at + 4)):
                ranks[near] = max(ranks[near], CONTEXT if lines[near].strip() else NOISE)
    for at in range(max(0, len(lines) - _TAIL_LINES), len(lines)):
        ranks[at] = max(ranks[at], EDGE if lines[at] and not _QUIET.match(lines[at]) else NOISE)
    if first >= 0:
        more = f" and {len(names) - _MANY_FETCHED} more" if len(names) > _MANY_FETCHED else ""
        told[first] = f"packages: {' '.join(list(names)[:_MANY_FETCHED])}{more}"
        ranks[first] = CONTEXT
    told, ranks = fold_repeats(told, ranks)
    return render(told, ranks, budget)


def _rank(line: str) -> int:
    if is_alarm(line) or _RESULT.match(line) or _CAUSE.search(line) or SUMMARY.search(line):
        return MUST
    return MATTER if WARNING.search(line) else NOISE
