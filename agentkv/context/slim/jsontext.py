"""JSON as text: whether it is, how deep it nests, without its blanks, one item a line; and its value, whatever the depth.

Nesting deeper than DEEPEST is cut before it is parsed, so that the outcome does not depend on how much of the
interpreter's stack is left. Linear in the text, never raises.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from agentkv.context.slim.clean import MAX_LINE

DEEPEST = 60
MINIFY_CHARS = 400_000
EXACT_CHARS = 1_000_000
"""Decimals of longer texts come as Python writes them."""

_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_NESTING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[\[{]+|[\]}]+', re.DOTALL)
_BLANK = re.compile(r'("[^"\\]*(?:\\.[^"\\]*)*")|\s+', re.DOTALL)
_ENDS = {("{", "}"), ("[", "]"), ('"', '"')}
_GLANCE = 64


class Number(str):
    """A number as it was written."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Parsed:
    """A JSON value."""

    value: Any


def looks_like_json(text: str) -> bool:
    """Whether `text` could be one JSON value; cheap, and wrong at times."""
    head, end = text[:_GLANCE].lstrip()[:1], text[-_GLANCE:].rstrip()[-1:]
    return (head, end) in _ENDS or (head != "" and head in "-0123456789" and end.isdigit())


def parsed(text: str) -> Parsed | None:
    """The value of `text`, None if that is not JSON. Numbers with a point are kept as written, as `Number`."""
    if not looks_like_json(text):
        return None
    try:
        if _depth(text) > DEEPEST:
            text = _flattened(text)
        return Parsed(json.loads(text, parse_float=Number if len(text) <= EXACT_CHARS else None))
    except (ValueError, RecursionError):
        return None


def minified(text: str) -> str | None:
    """The same JSON without blanks between its tokens, byte for byte otherwise; None where that is not possible."""
    has_blanks = "\n" in text or ": " in text or ", " in text
    if len(text) > MINIFY_CHARS or not has_blanks or parsed(text) is None:
        return None
    return _BLANK.sub(lambda found: found[1] or "", text)


def readable(text: str) -> str | None:
    """JSON of very long lines with one item a line; None where that is not needed or not possible."""
    if len(text) <= MAX_LINE or text.count("\n") * MAX_LINE > len(text) or not looks_like_json(text):
        return None
    try:
        return None if _depth(text) > DEEPEST else json.dumps(json.loads(text), ensure_ascii=False, indent=1)
    except (ValueError, RecursionError):
        return None


def _depth(text: str) -> int:
    """How deep `text` nests, strings aside; 0 where it cannot be deep."""
    if text.count("[") + text.count("{") <= DEEPEST:
        return 0
    depth = deepest = 0
    for brackets in re.findall(r"[\[{]+|[\]}]+", _STRING.sub("", text)):
        depth += len(brackets) if brackets[0] in "[{" else -len(brackets)
        deepest = max(deepest, depth)
    return deepest


def _flattened(text: str) -> str:
    """`text` with whatever lies deeper than DEEPEST as the string "..."."""
    out: list[str] = []
    depth = last = 0
    for found in _NESTING.finditer(text):
        sign, size = found[0][0], found.end() - found.start()
        if sign in "[{":
            if depth <= DEEPEST < depth + size:
                out += [text[last : found.start() + DEEPEST - depth], '"..."']
            depth += size
        elif sign in "]}":
            depth -= size
            if depth <= DEEPEST < depth + size:
                last = found.start() + depth + size - DEEPEST
    if depth:
        raise ValueError("brackets do not match")
    out.append(text[last:])
    return "".join(out)
