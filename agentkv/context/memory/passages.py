"""Passages: a document cut into pieces that overlap, at the best place near a size. Linear in the document's length."""

from __future__ import annotations

import re
from collections.abc import Iterator

from agentkv.errors import ConfigError

PASSAGE_CHARS = 800
"""Of ASCII text, about 200 tokens; a text whose characters take more bytes is cut shorter."""
OVERLAP = 0.15
"""Share of a passage that the next one repeats, so that no sentence is only ever seen in halves."""

_CUTS = (  # places to cut, best first
    re.compile(r"\n\s*\n"),
    re.compile(r"(?<=[.!?:;])\s|(?<=[。！？；])|\n"),  # noqa: RUF001  ends of sentences in their own scripts
    re.compile(r"\s"),
)


def cut(text: str, max_chars: int = PASSAGE_CHARS) -> Iterator[str]:
    """Passages of `text`, none empty and none longer than `max_chars`. Raises ConfigError for less than 40."""
    if max_chars < 40:  # noqa: PLR2004  a passage has to hold a sentence
        raise ConfigError(f"max_chars={max_chars} is too small for a passage; give 40 or more")
    text = text.strip()
    size = max(40, round(max_chars * len(text) / max(1, len(text.encode("utf-8", "replace")))))
    start = 0
    while len(text) - start > size:
        end = _end(text, start + size // 2, start + size)
        yield from _stripped(text[start:end])
        start = _start(text, end - round(size * OVERLAP), end)
    yield from _stripped(text[start:])


def _stripped(piece: str) -> Iterator[str]:
    piece = piece.strip()
    if piece:
        yield piece


def _end(text: str, low: int, high: int) -> int:
    """The last good place in text[low:high], `high` where there is none."""
    for places in _CUTS:
        found = [match.end() for match in places.finditer(text, low, high)]
        if found:
            return found[-1]
    return high


def _start(text: str, low: int, end: int) -> int:
    """Where the next passage begins: at a word, at most a few words before `end`, and always further on."""
    match = _CUTS[2].search(text, low, end)
    return match.end() if match else low
