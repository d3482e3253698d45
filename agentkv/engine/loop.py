"""One event loop on one thread of its own, for code that must serve sync and async callers alike."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from agentkv.errors import Closed


class LoopThread:
    """An event loop that starts with the first call and ends with `close()`. Thread-safe.

    The thread is a daemon: a program that forgets to close still ends.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def is_current(self) -> bool:
        """Whether the caller is on the loop's thread, where waiting for the loop would never end."""
        return threading.current_thread() is self._thread

    def call(self, fn: Callable[..., object], *args: Any) -> None:
        """Run `fn(*args)` on the loop, soon. Raises Closed."""
        with self._lock:
            if self._closed:
                raise Closed(f"{self._name} is closed")
            loop = self._loop or self._started()
            loop.call_soon_threadsafe(fn, *args)

    def spawn(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a coroutine on the loop; closing cancels it. `work` handles its own errors. Raises Closed."""
        self.call(self._spawn, work)

    def _spawn(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        task = asyncio.ensure_future(work())
        self._tasks.add(task)  # the loop alone holds tasks weakly
        task.add_done_callback(self._tasks.discard)

    def _started(self) -> asyncio.AbstractEventLoop:
        running = threading.Event()

        async def live() -> None:
            self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
            running.set()
            await self._stop.wait()

        self._thread = threading.Thread(target=lambda: asyncio.run(live()), name=self._name, daemon=True)
        self._thread.start()
        running.wait()
        assert self._loop is not None
        return self._loop

    def close(self) -> None:
        """Cancel what runs, end the loop and its thread. Idempotent; from the loop's own thread it does not wait."""
        with self._lock:
            first, self._closed = not self._closed, True
            if first and self._loop is not None and self._stop is not None:
                self._loop.call_soon_threadsafe(self._stop.set)
        if self._thread is not None and not self.is_current:
            self._thread.join()
