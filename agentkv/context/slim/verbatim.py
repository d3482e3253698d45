"""Outputs whose text itself was asked for: the contents of a file, which an agent may want to edit word by word.

Such a text stays as it is while it is within its bound. Over it the head, the tail and the lines that define something
(functions, classes, headings) are shown.
"""

from __future__ import annotations

import re

from agentkv.context.slim.clean import lines_of
from agentkv.context.slim.diffs import is_diff
from agentkv.context.slim.logs import MANY_CHARS, MANY_LINES, log
from agentkv.context.slim.pick import CONTEXT, EDGE, FILLER, MATTER, NOISE, render
from agentkv.context.slim.runners import is_pytest

_TOOLS = re.compile(
    r"(?i)^(?:[\w.-]{0,60}(?:__|[./:]))?(?:(?:read|view|open|cat|get|show|load|fs)[_-]?(?:multiple[_-]?|text[_-]?)?"
    r"(?:files?|documents?)(?:[_-]?contents?)?|files?[_-]?(?:read|view|open)|fs[_-]?read|read|cat|view)$"
)
"""With or without the name of a server in front: `Read`, `filesystem__read_text_file`."""
_COMMAND = re.compile(
    r"^\s*(?:sudo\s+)?(?:cat|head|tail|bat|nl|less|more|sed(?=\s+-n|\s*$))(?:\s+(?P<rest>[^|;&<>]*))?$"
)
_LOGGED = re.compile(r"\.(?:log|out|err|jsonl|ndjson|csv|tsv)\b|/var/log/")
_DEFINES = re.compile(
    r"^(?:\d{1,7}\t)?\s{0,8}(?:(?:export|public|private|protected|static|async|pub(?:\([a-z]+\))?|final|abstract|default)\s+)*"
    r"(?:def|class|func|function|fn|struct|enum|interface|type|trait|impl|module|namespace)\s+[\w$<(]|^#{1,4} \S|^\[[\w.\"-]+\]$"
)
_NUMBERED = re.compile(r" *\d{1,7}(?:\t|$)")
_PADDING = re.compile(r"(?m)^ {1,8}(?=\d{1,7}(?:\t|$))")
_HEAD_LINES, _TAIL_LINES = 30, 10
_FEW_DEFINITIONS = 2
_NUMBERED_LINES, _GLANCE = 20, 4_000


def verbatim(tool: str, command: str) -> bool:
    """Whether the output is the text of a file that is no log. `command` is the command line, or only its first word."""
    found = _COMMAND.match(command[:500])
    if found is not None:
        return not _LOGGED.search(found["rest"] or "")
    return not command and _TOOLS.match(tool[:100]) is not None


def newlines(text: str, tool: str, command: str) -> str:
    """A file's text with one newline at each line's end, however it was written: no terminal draws over it."""
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text and verbatim(tool, command) else text


def is_file(tool: str, command: str, text: str) -> bool:
    """As `verbatim`; where only a word of the command is known, the text must not be a diff or a test run."""
    if not verbatim(tool, command):
        return False
    return " " in command.strip() or not (is_diff(tool, command, text) or is_pytest(tool, command, text))


def unpadded(text: str) -> str:
    """A file's text with the blanks before its line numbers left out, where its first lines all have one."""
    first = text[:_GLANCE].split("\n")[:_NUMBERED_LINES]
    return _PADDING.sub("", text) if "\t" in first[0] and all(map(_NUMBERED.match, first)) else text


def outline(text: str, budget: int) -> str:
    """Head, tail and definitions of a file within `budget` tokens; one that defines nothing is treated as a log."""
    lines = lines_of(text)
    defines = [at for at, line in enumerate(lines[:MANY_LINES]) if _DEFINES.match(line)]
    if len(lines) > MANY_LINES or len(text) > MANY_CHARS or len(defines) < _FEW_DEFINITIONS:
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
