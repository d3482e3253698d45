"""Stream: an answer on its way from an engine to a caller, sync and async alike.

Covers chunks in order, the end, cancelling, and when a cancelled call has left its engine. Does not cover the values
that pass through (`base.py`), nor what a call cost (`runtime/books.py`).
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Self

from agentkv import log
from agentkv.core.reported import Reported
from agentkv.engine.base import Attempt, Chunk, Generation
from agentkv.errors import GenerationCancelled


class Stream:
    """An answer on its way. One producer (the engine), one consumer, sync or async; both see the same chunks.

    Iterating yields Chunks and ends when the answer is complete; `result()` / `await aresult()` wait for the whole
    Generation (iterating first is not needed). A failed call raises its error from any of these. `cancel()` is
    idempotent and may come from any thread; iterating then raises GenerationCancelled. Leaving a `with` block
    cancels what has not ended.
    """

    def __init__(self, *, on_cancel: Callable[[], None] | None = None, settles: bool = False) -> None:
        """`settles`: the engine tells by `settle` when a cancelled call has left it; then is known what it used."""
        self._ready = threading.Condition()
        self._chunks: deque[Chunk] = deque()
        self._generation: Generation | None = None
        self._error: BaseException | None = None
        self._on_cancel = on_cancel
        self._settles = settles
        self._settled = False
        self._watchers: list[Callable[[], None]] = []
        self._end_callbacks: list[Callable[[Generation | None, BaseException | None], None]] = []
        self.partial: list[int] = []
        """Token ids produced so far: what a cancelled call really generated."""
        self.device_s = 0.0  # busy device seconds of this call so far, where the engine measures them
        self._texts_without_ids = 0
        self.attempts: tuple[Attempt, ...] = ()
        """Tries that failed before the one whose answer this is; complete when the stream has ended."""
        self.spent: Callable[[], Reported] | None = None
        """What a call that fails or is cancelled used so far, where its engine knows better than `partial`."""

    # -- producer

    def push(self, chunk: Chunk) -> None:
        """Hand a chunk to the consumer; ignored once the stream has ended."""
        with self._ready:
            if self.ended:
                return
            self._chunks.append(chunk)
            self.partial.extend(chunk.token_ids)
            self._texts_without_ids += not chunk.token_ids
            self._notify()

    def finish(self, generation: Generation) -> None:
        """End the stream well; ignored once it has ended."""
        with self._ready:
            if self.ended:
                return
            self._generation = generation
            self._ended()

    def fail(self, error: BaseException, *, settled: bool = True) -> bool:
        """End the stream with an error; ignored (False) once it has ended. Not `settled`: `settle` is to come."""
        with self._ready:
            if self.ended:
                return False
            self._error = error
            self._ended() if settled else self._notify()
            return True

    def on_end(self, callback: Callable[[Generation | None, BaseException | None], None]) -> None:
        """Call `callback(generation, error)` once when the stream ends, before any consumer sees the end; that of a
        cancelled call when it has left its engine.

        It runs in the thread that ends the stream (at once if that has happened) and must be quick and never raise.
        """
        with self._ready:
            if self._settled:
                callback(self._generation, self._error)
            else:
                self._end_callbacks.append(callback)

    def settle(self) -> None:
        """A cancelled call has left its engine. Nothing happens to a call that ended otherwise, or is under way."""
        with self._ready:
            if self.ended and not self._settled:
                self._ended()

    def _ended(self) -> None:
        self._settled = True
        for callback in self._end_callbacks:
            try:
                callback(self._generation, self._error)
            except Exception as error:  # a broken book must leave neither the engine nor the consumer hanging
                log.failed("stream_end_callback_failed", error=repr(error))
        self._end_callbacks.clear()
        self._notify()

    def _notify(self) -> None:
        self._ready.notify_all()
        for watcher in self._watchers:
            watcher()

    # -- consumer

    @property
    def ended(self) -> bool:
        """True once a Generation or an error is there (chunks may still wait to be read)."""
        return self._generation is not None or self._error is not None

    @property
    def partial_tokens(self) -> int:
        """How many tokens came so far; where an engine gives no ids (a remote one), one for each piece of text."""
        return len(self.partial) or self._texts_without_ids

    def cancel(self) -> None:
        """Stop the call; the engine frees what it held. Nothing happens if the stream has ended."""
        error = GenerationCancelled("the call was cancelled")
        if self.fail(error, settled=not self._settles) and self._on_cancel is not None:
            self._on_cancel()

    def wait_settled(self, timeout_s: float) -> bool:
        """Wait until the callbacks of `on_end` have run; False if that takes longer."""
        with self._ready:
            return self._ready.wait_for(lambda: self._settled, timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def __iter__(self) -> Iterator[Chunk]:
        while True:
            with self._ready:
                while not self._chunks and not self.ended:
                    self._ready.wait()
                chunk = self._take()
            if chunk is None:
                return
            yield chunk

    def _take(self) -> Chunk | None:
        if self._chunks:
            return self._chunks.popleft()
        if self._error is not None:
            raise self._error
        return None

    def result(self, timeout_s: float | None = None) -> Generation:
        """Wait for the whole answer. Raises the call's error, or TimeoutError."""
        with self._ready:
            if not self._ready.wait_for(lambda: self.ended, timeout_s):
                raise TimeoutError(f"no answer within {timeout_s} s")
            if self._error is not None:
                raise self._error
            assert self._generation is not None
            return self._generation

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        with _Wakeup(self) as wakeup:
            while True:
                with self._ready:
                    waiting = not self._chunks and not self.ended
                    chunk = None if waiting else self._take()
                if waiting:
                    await self._wait_or_cancel(wakeup)
                elif chunk is None:
                    return
                else:
                    yield chunk

    async def aresult(self) -> Generation:
        """`result()` for coroutines; cancelling the awaiting task cancels the call."""
        with _Wakeup(self) as wakeup:
            while not self.ended:
                await self._wait_or_cancel(wakeup)
        return self.result()

    async def _wait_or_cancel(self, wakeup: _Wakeup) -> None:
        try:
            await wakeup.wait()
        except BaseException:
            self.cancel()
            raise


class _Wakeup:
    """An asyncio event that a Stream's producer sets from its own thread."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        import asyncio  # 20 ms that `import agentkv` must not pay

        self._event = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def __enter__(self) -> Self:
        with self._stream._ready:
            self._stream._watchers.append(self._set)
        return self

    def __exit__(self, *_: object) -> None:
        with self._stream._ready:
            self._stream._watchers.remove(self._set)

    def _set(self) -> None:
        with contextlib.suppress(RuntimeError):  # the consumer's loop was closed: nobody waits there any more
            self._loop.call_soon_threadsafe(self._event.set)

    async def wait(self) -> None:
        await self._event.wait()
        self._event.clear()
