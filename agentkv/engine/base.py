"""The Engine protocol, its values, and the stream that carries an answer to sync and async callers alike.

Covers: Chunk, Generation, Stream, Engine, TieredEngine. Does not cover: what is asked (`request.py`), any real engine
(`local/`, `remote.py`) nor the one for users' tests (`scripted.py`).
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, Self

from agentkv import log
from agentkv.core.forecast import Forecast
from agentkv.core.message import ToolCall
from agentkv.core.reported import Reported
from agentkv.core.residency import Move, Receipt, Residency
from agentkv.core.task import Caller
from agentkv.core.usage import Timing, Usage
from agentkv.engine.request import Request, ResponseFormat, Sampling, ToolChoice, changed, refuse_unless
from agentkv.errors import GenerationCancelled

__all__ = [
    "Attempt", "CallDelta", "Choice", "Chunk", "Engine", "FinishReason", "Generation", "Request", "ResponseFormat",
    "Sampling", "Stream", "TieredEngine", "TokenLogprob", "ToolChoice", "changed", "refuse_unless",
]  # fmt: skip

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """A token of the text with its natural log probability, after bias and penalties, before temperature and top_p.

    `raw` are its own bytes, which need not be whole characters; joined, those of an answer are its text in UTF-8: end
    tokens and what a stop string cut off have no entry. `top`: the likeliest tokens, best first, as entries of this kind.
    """

    token_id: int
    raw: bytes
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CallDelta:
    """A piece of a tool call while it is written: the first of an `index` has `id` and `name`; `arguments` add up."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A piece of the answer: never half a character, never part of a stop string.

    `choice` says which of `n` it belongs to. `logprobs` are the entries of the tokens that became certain with it.
    A call that streams has its pieces in `calls`; one that does not is in the Generation only. `reasoning`: a piece of
    what the model thinks before it answers.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    choice: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    calls: tuple[CallDelta, ...] = ()
    reasoning: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One of several answers to a request; the fields are a Generation's own."""

    text: str
    raw: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    tool_calls: tuple[ToolCall, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    unfinished: tuple[ToolCall, ...] = ()
    reasoning: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """`text` is the join of all chunks, `reasoning` that of all thoughts; `raw` is what the model really wrote, tool calls
    and all: send it again so.

    Of several choices (`Request.n`) this is the first and `others` are the rest, in order; `usage` is of them all, with
    the prompt counted once.
    """

    text: str
    raw: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    timing: Timing = field(default_factory=Timing)
    tool_calls: tuple[ToolCall, ...] = ()
    session: str = ""
    model: str = ""
    restored_blocks: int = 0
    """Blocks that came back from host or disk for this call, on demand; `restored_bytes` is their size."""
    restored_bytes: int = 0
    estimated: bool = False
    """True where the usage was counted here because the server reported none, or an impossible one."""
    service_tier: str = ""
    """The tier that a hosted model was served in; "" is the standard one."""
    cached_by: Mapping[str, int] = field(default_factory=dict)
    """The cached tokens by the tier that they came from, where an engine tells."""
    worker: str = ""
    """Which of a router's workers answered, and the share of the prompt that it was believed to hold; where told."""
    expected_hit_rate: float | None = None
    stopped_by: str = ""
    """ "budget": no model was asked, the call did not fit into it."""
    logprobs: tuple[TokenLogprob, ...] = ()
    unfinished: tuple[ToolCall, ...] = ()
    """Calls that streamed until the answer was cut inside of the last one, whose arguments are no valid JSON. Run none
    of them: half of what the model meant is not what it meant. `tool_calls` is empty then.
    """
    reasoning: str = ""
    others: tuple[Choice, ...] = ()
    drafted_tokens: int = 0
    """Output tokens of all choices that were guessed ahead, and how many of them the model then chose (`accepted_tokens`)."""
    accepted_tokens: int = 0

    @property
    def choices(self) -> tuple[Generation | Choice, ...]:
        """All of them, the first one being this."""
        return (self, *self.others)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A try at a call that failed and was repeated: what it used as far as can be known, and why it failed."""

    spent: Reported
    error: str
    seconds: float = 0.0


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


class Engine(Protocol):
    """Answers model calls. `submit` never blocks on the model; it raises RequestInvalid for a request that cannot be
    answered, before anything is started.
    """

    model: str

    def submit(self, request: Request) -> Stream:
        """Start a call."""
        ...

    def count_tokens(self, request: Request) -> int:
        """Input tokens of a request (exact for the local engine, an estimate elsewhere)."""
        ...

    def stats(self) -> Mapping[str, Any]:
        """Counters as plain JSON values."""
        ...

    def close(self) -> None:
        """End every call with Closed, free everything. Idempotent."""
        ...


class TieredEngine(Engine, Protocol):
    """An engine whose KV can be moved between tiers."""

    context_tokens: int

    def last_session(self, caller: Caller) -> str | None:
        """The session that the caller's branch used last; None if it has none."""
        ...

    def residency(self, session: str) -> Residency | None:
        """Where the session's blocks are; None for an unknown session. Cheap (no device work)."""
        ...

    def apply(self, move: Move, on_receipt: Callable[[Receipt], None] | None = None) -> bool:
        """Submit a move inline and return at once: True if copies were submitted. The receipt comes later, from
        another thread (at once when there is nothing to do). Never raises: a failure is a receipt.
        """
        ...

    def expect(
        self, session: str, at_s: float | None, forecast: Forecast | None = None, started_s: float | None = None
    ) -> None:
        """When the session is expected back (monotonic seconds; None = it is back or unknown), and the forecast from which
        that follows, counted from `started_s`: victims are chosen by it.
        """
        ...

    def rank_by(self, rank: Callable[[Any, float], tuple[float, ...]]) -> None:
        """Have a policy's key (policy.evict.EvictKey) say who gives way when memory is short: the greatest first."""
        ...

    def finish_task(self, task: str) -> None:
        """Destroy the task's sessions without writing a byte; blocks shared with others stay."""
        ...

    def finish_sessions(self, sessions: Iterable[str]) -> None:
        """The same for single sessions; unknown ones are no-ops."""
        ...
