"""Heard: what an answer says of its tokens, listened to while it passes.

Covers whole answers and streams of any route: the last report in the beginning and the end of the body, which is all that
is held. Does not cover packed bodies, nor answers that say nothing: then nothing is known, and nothing was held up.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentkv.core.reported import merged, reported

HEAD_BYTES = 8 << 10
"""Anthropic's streams tell of the cache at their beginning."""
TAIL_BYTES = 64 << 10
_REPORT = re.compile(r'"(usage|timings)"\s*:\s*(?=\{)')  # inside a text its quotes would be escaped
_DECODER = json.JSONDecoder()
_CACHED = ("cache_n", "cached_tokens", "cache_read_input_tokens", "prompt_cache_hit_tokens")
_DETAILS = ("prompt_tokens_details", "input_tokens_details")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spoken:
    """Prompt and answer together, and what of the prompt was reused (None: not said)."""

    tokens: int
    cached_tokens: int | None


class Heard:
    """One answer. `take` each piece of its body, then ask for `usage`. Not thread-safe.

    listens=False: of one whose pieces mean nothing here; then nothing is held nor known.
    """

    def __init__(self, *, listens: bool = True) -> None:
        self._listens = listens
        self._head = b""
        self._tail: deque[bytes] = deque()
        self.held = 0
        """Bytes that are kept."""

    def take(self, piece: bytes) -> None:
        """The next piece of the body."""
        if not self._listens:
            return
        room = HEAD_BYTES - len(self._head)
        if room > 0:
            self._head += piece[:room]
            self.held += len(piece[:room])
            piece = piece[room:]
        if not piece:
            return
        self._tail.append(piece[-TAIL_BYTES:])
        self.held += len(self._tail[-1])
        while self.held - len(self._head) - len(self._tail[0]) >= TAIL_BYTES:
            self.held -= len(self._tail.popleft())

    def usage(self) -> Spoken | None:
        """What it said; None where it says nothing that could be. Never raises."""
        text = b"".join((self._head, *self._tail)).decode("utf-8", "replace")
        said: dict[str, Any] = {}
        for found in _REPORT.finditer(text):
            try:
                report, _ = _DECODER.raw_decode(text, found.end())
            except (ValueError, RecursionError):
                continue
            said = merged(said, {found.group(1): report})
        told = reported(said) if said else None
        return None if told is None else Spoken(tokens=told.usage.total_tokens, cached_tokens=_cached(said))


def _cached(said: Mapping[str, Any]) -> int | None:
    """As it says, if it does: a server that is silent about its cache may still have found everything there."""
    usage = said.get("usage", {})
    for report in (said.get("timings", {}), usage, *(usage.get(name) for name in _DETAILS)):
        for name in _CACHED if isinstance(report, Mapping) else ():
            value = report.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
                return value
    return None
