"""Bounded: the body of an HTTP answer that may not go on without a line end for ever.

Covers an asynchronous stream of either HTTP library that the openai package builds on. A server that sends without end,
and never ends a line, would otherwise fill the memory of whoever looks for the next event: no time-out notices it, for
something always arrives. How long an answer may take in all is its caller's affair.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import cache
from importlib import import_module
from typing import Any

LONGEST_LINE_BYTES = 16 * 2**20
"""An event is some hundred bytes; the longest are tool calls that arrive whole, and errors."""


def bound(response: Any) -> None:
    """Let `response`'s body fail with the library's own ReadError where a line gets longer than that."""
    library = import_module(type(response).__module__.partition(".")[0])
    if isinstance(response.stream, library.AsyncByteStream) and not response.is_closed:
        response.stream = _kind(library)(response.stream)


@cache
def _kind(library: Any) -> Any:
    base: Any = library.AsyncByteStream

    class Bounded(base):  # type: ignore[misc]  # one of two libraries
        def __init__(self, inner: Any) -> None:
            self._inner = inner

        async def __aiter__(self) -> AsyncIterator[bytes]:
            line_bytes = 0
            async for piece in self._inner:
                end = piece.rfind(b"\n")
                line_bytes = line_bytes + len(piece) if end < 0 else len(piece) - end
                if line_bytes > LONGEST_LINE_BYTES:
                    raise library.ReadError(f"the answer has a line of more than {LONGEST_LINE_BYTES >> 20} MiB")
                yield piece

        async def aclose(self) -> None:
            await self._inner.aclose()

    return Bounded
