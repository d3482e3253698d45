"""Bounded: the answer of an HTTP server that may neither fill the memory nor go on for ever.

Covers asynchronous answers of either HTTP library that the openai package builds on: a line or an answer without end, bodies
of errors and of whole answers that drip, and encodings (what unpacks to gigabytes is a few bytes on the way, so that packed
answers are unpacked here, within the same bounds). No time-out of a library notices any of that, for something always arrives.
A stream of events may go on as long as it says something (`silence.py`).
"""

from __future__ import annotations

import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from functools import cache
from importlib import import_module
from typing import Any

LONGEST_LINE_BYTES = 16 * 2**20
"""An event is some hundred bytes; the longest are tool calls that arrive whole, and errors."""
MOST_BYTES = 256 * 2**20
"""A million tokens, an event of some 250 bytes each."""
MOST_ERROR_BYTES = 2**20
_PIECE_BYTES = 2**18
_ERROR = 400
_WINDOWS = {"gzip": 31, "x-gzip": 31, "deflate": 15}


def bound(response: Any, *, within_s: float = float("inf")) -> None:
    """Let `response`'s body fail with the library's own ReadError beyond the bounds.

    A body that is no stream of events has to be there `within_s`: ReadTimeout.
    """
    library = import_module(type(response).__module__.partition(".")[0])
    if not isinstance(response.stream, library.AsyncByteStream) or response.is_closed:
        return
    unpack = _unpacking(response, library)
    is_error = response.status_code >= _ERROR
    is_whole = is_error or not response.headers.get("content-type", "").startswith("text/event-stream")
    ends_s = time.monotonic() + within_s if is_whole else float("inf")
    count = _Count(library, MOST_ERROR_BYTES if is_error else MOST_BYTES, ends_s)
    response.stream = _kind(library)(response.stream, unpack, count)


def _unpacking(response: Any, library: Any) -> Callable[[bytes], Iterator[bytes]] | None:
    """How pieces of the body become what was meant, in small pieces; the response then says nothing of an encoding."""
    coding = response.headers.get("content-encoding", "").strip().lower()
    if coding in ("", "identity"):
        return None
    if coding not in _WINDOWS:
        raise library.ReadError(f"the answer has the encoding {coding[:40]!r}, which was not asked for")
    unpacker = zlib.decompressobj(_WINDOWS[coding])
    del response.headers["content-encoding"]

    def unpacked(piece: bytes) -> Iterator[bytes]:
        while piece:
            try:
                part = unpacker.decompress(piece, _PIECE_BYTES)
            except zlib.error as error:
                raise library.ReadError(f"the answer is no {coding}: {error}") from None
            yield part
            piece = unpacker.unconsumed_tail

    return unpacked


class _Count:
    """What has come so far, held against the bounds."""

    def __init__(self, library: Any, most_bytes: int, ends_s: float) -> None:
        self._library = library
        self._most_bytes = most_bytes
        self._ends_s = ends_s
        self._line_bytes = 0
        self._bytes = 0

    def took(self, piece: bytes) -> bytes:
        """The piece; raises the library's own error where it is one too many."""
        end = piece.rfind(b"\n")
        self._line_bytes = self._line_bytes + len(piece) if end < 0 else len(piece) - end
        self._bytes += len(piece)
        if self._line_bytes > LONGEST_LINE_BYTES:
            raise self._library.ReadError(f"the answer has a line of more than {LONGEST_LINE_BYTES >> 20} MiB")
        if self._bytes > self._most_bytes:
            raise self._library.ReadError(f"the answer does not end: more than {self._most_bytes >> 20} MiB")
        if time.monotonic() > self._ends_s:
            raise self._library.ReadTimeout("the answer was begun, but not there in time")
        return piece


@cache
def _kind(library: Any) -> Any:
    base: Any = library.AsyncByteStream

    class Bounded(base):  # type: ignore[misc]  # one of two libraries
        def __init__(self, inner: Any, unpack: Callable[[bytes], Iterator[bytes]] | None, count: _Count) -> None:
            self._inner = inner
            self._unpack = unpack
            self._count = count

        async def __aiter__(self) -> AsyncIterator[bytes]:
            took, unpack = self._count.took, self._unpack
            async for piece in self._inner:
                if unpack is None:
                    yield took(piece)
                    continue
                for part in unpack(piece):
                    yield took(part)

        async def aclose(self) -> None:
            await self._inner.aclose()

    return Bounded
