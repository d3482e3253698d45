"""Outputs whose text itself was asked for: the contents of a file, which an agent may want to edit word by word.

Such a text stays as it is while it is within its bound. Over it the head, the tail and the lines that define something
(functions, classes, headings) are shown.
"""

from __future__ import annotations

import re

from agentkv.context.slim.clean import lines_of
from agentkv.context.slim.logs import MANY_CHARS, MANY_LINES, log
from agentkv.context.slim.pick import CONTEXT, EDGE, FILLER, MATTER, NOISE, render

_TOOLS = re.compile(r"(?i)^(?:read|view|open|cat|get|show)[_-]?(?:text[_-]?)?files?(?:[_-]?contents?)?$|^(?:cat|view)$")
_COMMAND = re.compile(r"^\s*(?:sudo\s+)?(?:cat|head|tail|bat|nl|less|more|sed\s+-n)\s+(?P<rest>[^|;&<>]*)$")
_LOGGED = re.compile(r"\.(?:log|out|err|jsonl|ndjson|csv|tsv)\b|/var/log/")
_DEFINES = re.compile(
    r"^\s{0,8}(?:(?:export|public|private|protected|static|async|pub(?:\([a-z]+\))?|final|abstract|default)\s+)*"
    r"(?:def|class|func|function|fn|struct|enum|interface|type|trait|impl|module|namespace)\s+[\w$<(]|^#{1,4} \S|^\[[\w.\"-]+\]$"
)
_NUMBERED = re.compile(r"^\s*(?:cat\s+(?:-\w+\s+)*-\w*n|nl\b)")
_PADDING = re.compile(r"(?m)^ {1,8}(?=\d{1,7}(?:\t|$))")
_HEAD_LINES, _TAIL_LINES = 30, 10


def verbatim(tool: str, command: str) -> bool:
    """Whether the output is the text of a file that is no log."""
    found = _COMMAND.match(command[:500])
    if found is not None:
        return not _LOGGED.search(found["rest"])
    return not command and _TOOLS.match(tool[:100]) is not None


def numbered(command: str) -> bool:
    """Whether a file was asked for with line numbers."""
    return _NUMBERED.match(command[:500]) is not None


def unpadded(text: str) -> str:
    """`text` with the blanks before line numbers left out."""
    return _PADDING.sub("", text)


def outline(text: str, budget: int) -> str:
    """Head, tail and definitions of a file within `budget` tokens."""
    lines = lines_of(text)
    if len(lines) > MANY_LINES or len(text) > MANY_CHARS:
        return log(text, budget)
    ranks = [FILLER if line.strip() else NOISE for line in lines]
    for at, line in enumerate(lines):
        if _DEFINES.match(line):
            ranks[at] = MATTER
        elif at < _HEAD_LINES:
            ranks[at] = CONTEXT if ranks[at] else NOISE
        elif at >= len(lines) - _TAIL_LINES:
            ranks[at] = EDGE if ranks[at] else NOISE
    return render(lines, ranks, budget)
