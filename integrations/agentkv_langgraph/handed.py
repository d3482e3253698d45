"""Streams of a model call whose config was handed over: their request is made for whom that config names.

LangChain tells `_stream` nothing of the run that it is called for, unlike `_generate`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from contextlib import aclosing, closing
from contextvars import ContextVar
from typing import Any, TypeVar

from agentkv.core.task import Caller

_T = TypeVar("_T")
handed: ContextVar[Caller | None] = ContextVar("agentkv_handed", default=None)
"""Whom the config of the stream names that begins here."""


def steps(stream: Iterator[_T], caller: Caller | None) -> Iterator[_T]:
    """The stream, begun for `caller`; between its steps nobody is named."""
    source: Any = stream
    return _steps(source, caller) if caller is not None else stream


def asteps(stream: AsyncIterator[_T], caller: Caller | None) -> AsyncIterator[_T]:
    """The same in an event loop."""
    source: Any = stream
    return _asteps(source, caller) if caller is not None else stream


def _steps(stream: Generator[_T, None, None], caller: Caller) -> Iterator[_T]:
    with closing(stream):
        handed.set(caller)
        try:
            first = next(stream)
        except StopIteration:
            return
        finally:
            handed.set(None)
        yield first
        yield from stream


async def _asteps(stream: AsyncGenerator[_T, None], caller: Caller) -> AsyncIterator[_T]:
    async with aclosing(stream):
        handed.set(caller)
        try:
            first = await anext(stream)
        except StopAsyncIteration:
            return
        finally:
            handed.set(None)
        yield first
        async for item in stream:
            yield item
