"""One event loop on one thread of its own, for code that must serve sync and async callers alike."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Coroutine
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
        self._last: Callable[[], Awaitable[None]] | None = None
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

    def spawn(self, work: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
        """Run a coroutine on the loop; returns the way to cancel it, from any thread. Closing cancels it too.

        `work` handles its own errors. Raises Closed.
        """
        tasks: list[asyncio.Task[None]] = []

        def begin() -> None:
            task = asyncio.ensure_future(work())
            tasks.append(task)
            self._tasks.add(task)  # the loop alone holds tasks weakly
            task.add_done_callback(self._tasks.discard)

        def cancel() -> None:
            with contextlib.suppress(Closed):
                self.call(lambda: tasks[0].cancel())  # noqa: PLW0108  `begin` may not have run yet

        self.call(begin)
        return cancel

    def _started(self) -> asyncio.AbstractEventLoop:
        running = threading.Event()

        async def live() -> None:
            self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
            running.set()
            await self._stop.wait()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            if self._last is not None:
                await self._last()

        self._thread = threading.Thread(target=lambda: asyncio.run(live()), name=self._name, daemon=True)
        self._thread.start()
        running.wait()
        assert self._loop is not None
        return self._loop

    def close(self, *, last: Callable[[], Awaitable[None]] | None = None) -> None:
        """Cancel what runs, run `last` if the loop ever ran, end the loop and its thread.

        Idempotent; from the loop's own thread it does not wait.
        """
        with self._lock:
            first, self._closed = not self._closed, True
            if first and self._loop is not None and self._stop is not None:
                self._last = last
                self._loop.call_soon_threadsafe(self._stop.set)
        if self._thread is not None and not self.is_current:
            self._thread.join()
