"""Watched: a response that tells once when it is over: read, closed, or opened and dropped unread; and what was heard of it.

Covers HTTP libraries of httpx's kind, sync and async. What is dropped is noticed when it is collected, which may happen in
the middle of anything, under any lock: so a thread of its own tells then, which ends when no stream is open any more.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import queue
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from functools import lru_cache
from typing import Any

from agentkv.adapters.heard import Heard

_LINGER_S = 0.5
_FINE = 300


class Once:
    """Does its work at most once, with what was heard of the answer, if anything."""

    def __init__(self, work: Callable[[Heard | None], None]) -> None:
        self._work: Callable[[Heard | None], None] | None = work

    def __call__(self, heard: Heard | None = None) -> None:
        work, self._work = self._work, None
        if work is not None:
            work(heard)

    @property
    def done(self) -> bool:
        return self._work is None


def watched(response: Any, over: Once) -> Any:
    """The response, which tells `over` when it is closed or dropped."""
    fine, packed = response.status_code < _FINE, response.headers.get("content-encoding", "identity") != "identity"
    if response.is_closed:
        heard = Heard(listens=fine)
        with contextlib.suppress(Exception):  # closed before it was read: it says nothing
            heard.take(response.content)
        over(heard)
        return response
    made = _kind(type(response).__module__.partition(".")[0])(response.stream, over, Heard(listens=fine and not packed))
    _dropped.expect(made, over)
    response.stream = made
    return response


@lru_cache
def _kind(name: str) -> Any:
    """The class of watched streams of an HTTP library."""
    library: Any = importlib.import_module(name)

    class Watched(library.SyncByteStream, library.AsyncByteStream):  # type: ignore[misc]
        def __init__(self, stream: Any, over: Once, heard: Heard) -> None:
            self._stream, self._over, self._heard = stream, over, heard

        def __iter__(self) -> Iterator[bytes]:
            for piece in self._stream:
                self._heard.take(piece)
                yield piece

        async def __aiter__(self) -> AsyncIterator[bytes]:
            async for piece in self._stream:
                self._heard.take(piece)
                yield piece

        def close(self) -> None:
            try:
                self._stream.close()
            finally:
                self._over(self._heard)

        async def aclose(self) -> None:
            try:
                await self._stream.aclose()
            finally:
                self._over(self._heard)

    return Watched


class _Dropped:
    """Tells of streams that are collected. What a collection calls here takes no lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[Once] = queue.SimpleQueue()
        self._open: dict[int, Once] = {}
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None

    def expect(self, stream: Any, over: Once) -> None:
        """`over` is told when `stream` is gone, whether or not it was told before."""
        number = next(self._numbers)
        self._open[number] = over
        weakref.finalize(stream, self._gone, number, over).atexit = False
        with self._lock:
            if self._thread is None or not self._thread.is_alive():  # a fork leaves threads behind
                self._thread = threading.Thread(target=self._run, name="agentkv-dropped", daemon=True)
                self._thread.start()

    def _gone(self, number: int, over: Once) -> None:
        if not over.done:
            self._queue.put(over)  # before it is taken away: the thread must not end in between
        self._open.pop(number, None)

    def _run(self) -> None:
        while True:
            try:
                over = self._queue.get(timeout=_LINGER_S)
            except queue.Empty:
                with self._lock:
                    if all(over.done for over in self._open.copy().values()) and self._queue.empty():
                        self._thread = None
                        return
            else:
                over()
                del over


_dropped = _Dropped()
