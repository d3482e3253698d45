"""Outputs of compilers, linters and type checkers: each finding with its place once, what failed, what sums up.

Knows "path:line:col: error: ..." (gcc, clang, mypy, go, javac, flake8, ruff), "path(line,col): error" (tsc) and a head
with "--> path:line:col" below it (rustc, ruff), whose frames of source code are left out but for errors.
"""

from __future__ import annotations

import re

from agentkv.context.slim.alarm import SUMMARY, WARNING, is_alarm
from agentkv.context.slim.clean import lines_of
from agentkv.context.slim.logs import MANY_CHARS
from agentkv.context.slim.pick import CONTEXT, EDGE, FILLER, MATTER, MUST, NOISE, render

_FINDING = re.compile(
    r"^[^\s:()][^:()\n]{0,200}(?::\d+(?::\d+)?:|\(\d+(?:,\d+)?\):)\s+(?:(fatal error|error|warning|note|info)\b|([A-Z]{1,6}\d{1,5})\b)"
)
_HEAD = re.compile(r"^(?:(error|warning|note)(?:\[[\w:-]+\])?: |([A-Z]{1,6}\d{1,5}) )\S")
_ARROW = re.compile(r"^\s*-->\s+(\S+?:\d+(?::\d+)?)\s*$")
_FRAME = re.compile(r"^\s*\d*\s*\|(?:\s|$)|^\s*[\^~|]+[\s\^~|]*$|^\s*\|?\s*[~^]+")
_COMMAND = re.compile(
    r"^(?:gcc|cc|g\+\+|c\+\+|clang(?:\+\+)?|ld|ar|ranlib|rustc|javac|libtool|/usr/bin/\S+|\S+-(?:gcc|g\+\+))\s.*-"
    r"|^\[\s*\d+(?:%|/\d+)\]|^\s+(?:Compiling|Checking|Downloaded|Downloading|Fresh) \S+ v|^make\[\d+\]: (?:Entering|Leaving)"
)
_WHERE = re.compile(
    r"^\S+: (?:In|At) (?:function|member function|constructor|top level)|^In file included from|^\s+from \S+:\d+"
)
_HELP = re.compile(r"^(?:help|  = (?:note|help)): ?")
_TOOLS = re.compile(
    r"\b(?:make|gcc|g\+\+|clang|cc|ninja|cmake|cargo|rustc|tsc|mypy|pyright|ruff|flake8|pylint|eslint|javac|go (?:build|vet))\b"
)
_FEW, _MANY = 1, 4


def is_build(_tool: str, command: str, text: str) -> bool:
    """Whether there are findings with their places: one after a build's command, a few after any."""
    need = _FEW if _TOOLS.search(command[:400]) else _MANY
    found = 0
    for line in [*text[:8_000].split("\n"), *text[-4_000:].split("\n")]:
        found += _FINDING.match(line[:400]) is not None or _ARROW.match(line[:400]) is not None
        if found >= need:
            return True
    return False


def build(text: str, budget: int) -> str | None:
    """Findings once each, errors with their line of source."""
    if len(text) > MANY_CHARS:
        return None
    lines = lines_of(text)
    told, ranks = list(lines), [FILLER] * len(lines)
    seen: set[str] = set()
    error_at = -1
    for at, line in enumerate(lines):
        arrow = _ARROW.match(line)
        if arrow is not None and at and _HEAD.match(lines[at - 1]):
            told[at - 1] = f"{arrow[1]}: {lines[at - 1]}"
            ranks[at] = NOISE
            if told[at - 1] in seen:
                ranks[at - 1] = NOISE
            seen.add(told[at - 1])
            continue
        ranks[at] = _rank(line, seen)
        if ranks[at] == MUST:
            error_at = at
        elif ranks[at] == NOISE and error_at == at - 1 and "|" in line:
            ranks[at] = CONTEXT
    return render(told, ranks, budget)


def _rank(line: str, seen: set[str]) -> int:
    finding = _FINDING.match(line) or _HEAD.match(line)
    if finding is not None and finding.re is _FINDING:
        if line in seen:
            return NOISE
        seen.add(line)
    if finding is not None:
        return {"note": FILLER, "info": FILLER, "warning": MATTER}.get(finding[1] or "", MUST)
    if not line or _FRAME.match(line) or _COMMAND.match(line) or _WHERE.match(line):
        return NOISE
    if _HELP.match(line):
        return FILLER if line.startswith("  =") else NOISE
    if is_alarm(line) or SUMMARY.search(line):
        return MUST
    return MATTER if WARNING.search(line) else EDGE
