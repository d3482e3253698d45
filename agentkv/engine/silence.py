"""Silence: how long a streamed answer may say nothing, whatever else arrives meanwhile.

Covers comments and empty chunks that go on for ever: to a library's time-out they are life. Does not cover how much may
arrive, nor a head or a whole answer that drips (`bounded.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from agentkv.errors import RemoteError


@asynccontextmanager
async def silence(most_s: float) -> AsyncIterator[Callable[[int], None]]:
    """RemoteError where nothing is said for so long, whatever else arrives. What is yielded is told how much was said so far."""
    loop = asyncio.get_running_loop()
    before = 0

    def heard(said: int) -> None:
        nonlocal before
        if said != before:
            before = said
            limit.reschedule(loop.time() + most_s)

    limit = asyncio.timeout(most_s)
    try:
        async with limit:
            yield heard
    except TimeoutError:
        if not limit.expired():
            raise
        raise RemoteError(f"timed out: the answer went on, but said nothing for {most_s:g} s") from None
