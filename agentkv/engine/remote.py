"""RemoteEngine: any OpenAI-compatible endpoint, through the openai package.

Covers: streamed chats and raw prompts, tool calls, usage (asked for, and counted here where a server reports none),
cancel that closes the connection, errors as RemoteError. Does not cover: hints to a foreign engine (`routing` is
asked what a request is to carry), nor forced tokens.
All calls run on one event-loop thread, so that a cancel bites at any point, before the first byte too.
"""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, Protocol

from agentkv import log
from agentkv.clock import Clock, SystemClock
from agentkv.context.tokens import count_text
from agentkv.core.reported import Reported, told_beside
from agentkv.core.task import Caller
from agentkv.core.usage import Timing, Usage
from agentkv.engine.attempts import FailedTry, noting_async_client, repeating
from agentkv.engine.base import Attempt, Chunk, Generation, Request, refuse_unless
from agentkv.engine.loop import LoopThread
from agentkv.engine.silence import silence
from agentkv.engine.stream import Stream
from agentkv.engine.wire import PASSED_ON, Gathered, call_arguments, texts_of
from agentkv.errors import Closed, ConfigError, RemoteError, RequestInvalid


class Routing(Protocol):
    """Who knows what calls are to carry for their engine, and is told when they are over. Nothing here raises."""

    def session(self, request: Request) -> str:
        """The session of a request."""
        ...

    def begun(self, request: Request, model: str) -> str:
        """The same, of one that is submitted now. Quick."""
        ...

    def opened(self, request: Request, model: str) -> Any:
        """What the call was given; may block. For the two below."""
        ...

    def flow(self, http_request: Any, given: Any) -> Generator[Any, Any, Any]:
        """Yields the HTTP requests to send, is sent their responses, and returns the one that counts."""
        ...

    def ended(self, given: Any, usage: Usage | None) -> Mapping[str, int] | None:
        """The call is over (None: without an answer, or nobody reported); where its cached tokens came from, if known."""
        ...


_MOST_SESSIONS = 4096
_TOKENS_PER_MESSAGE = 4  # what a chat template adds around each message, about


@dataclass(slots=True)
class _Call:
    """A call under way: how far it got, and the tries that failed."""

    gathered: Gathered = field(default_factory=Gathered)
    sent: bool = False
    opened: bool = False
    given: Any = None
    flow: Callable[[Any], Generator[Any, Any, Any]] | None = None
    reported: Usage | None = None
    failed: list[FailedTry] = field(default_factory=list)
    repeating: Callable[[bool], None] | None = None
    refused: Exception | None = None


_call: ContextVar[_Call | None] = ContextVar("agentkv_remote_call", default=None)


def _note(failed: FailedTry) -> None:
    call = _call.get()
    if call is not None:
        call.failed.append(failed)


def _refuses() -> str:
    """Why the call must not be tried again; "" if it may."""
    call = _call.get()
    if call is None or call.repeating is None:
        return ""
    try:
        call.repeating(bool(call.failed) and not call.failed[-1].refused)
    except Exception as error:
        call.refused = error
        return str(error)
    return ""


def _flow(http_request: Any) -> Generator[Any, Any, Any] | None:
    call = _call.get()
    return None if call is None or call.flow is None else call.flow(http_request)


class RemoteEngine:
    """Calls `model` at `base_url`. Thread-safe; `close()` is idempotent.

    The key is `api_key`, else the environment's OPENAI_API_KEY, else none; it is never logged nor part of an error.
    `count(text)` counts tokens where the server reports no usage (default: `context.tokens.count_text`); such a Generation is marked `estimated`, and
    `stats()["estimated_calls"]` counts them. At most `max_parallel` calls are under way, the others queue.
    `timeout_s`: so long nothing of an answer may come, at its beginning and on the way (comments and empty chunks are nothing).
    `max_tokens_field`: newer hosted models want "max_completion_tokens". `reach`: for whoever else speaks to the server.
    """

    def __init__(
        self,
        *,
        base_url: str,
        model: str,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        max_retries: int = 2,
        max_parallel: int = 64,
        max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens",
        count: Callable[[str], int] | None = None,
        clock: Clock | None = None,
        reach: Mapping[str, Any] | None = None,
    ) -> None:
        import openai

        if not base_url.startswith(("http://", "https://")):
            raise ConfigError(f'base_url={base_url!r} is no address; write for instance "http://localhost:8000/v1"')
        if not model or timeout_s <= 0 or max_retries < 0 or max_parallel < 1:
            raise ConfigError(f"{model=}, {timeout_s=}, {max_retries=}, {max_parallel=}: one of them cannot work")
        self.model = model
        self.routing: Routing | None = None
        self._base_url = base_url
        self._reach = dict(reach or {})
        self._shown_url = re.sub(r"//[^/@]*@", "//", base_url)  # without a password
        self._key = api_key or os.environ.get("OPENAI_API_KEY") or ""
        self._timeout_s = timeout_s
        self._client = openai.AsyncOpenAI(
            base_url=base_url,
            api_key=self._key or "none",
            timeout=timeout_s,
            max_retries=max_retries,
            http_client=noting_async_client(_note, _refuses, _flow),
        )
        self._fields = {"max_tokens_field": max_tokens_field, "thought_field": ""}
        self._count = count or partial(count_text, model=model)
        self._clock = clock or SystemClock()
        self._loop = LoopThread("agentkv-remote")
        self._free = asyncio.Semaphore(max_parallel)
        self._askers = ThreadPoolExecutor(max_parallel, "agentkv-routing")  # each may wait; `ended` never for them
        self._takes_usage_option: bool | None = None
        self._lock = threading.Lock()
        self._running: set[Stream] = set()
        self._sessions: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._counts = {"calls": 0, "failed": 0, "estimated_calls": 0}
        self._used = Usage()
        self._closed = False

    @property
    def endpoint(self) -> Mapping[str, Any]:
        """Where the server is and what may be done there, for whoever else speaks to it; holds the key."""
        return {"base_url": self._base_url, "api_key": self._key, "timeout_s": self._timeout_s, **self._reach}

    # -- Engine

    def submit(self, request: Request) -> Stream:
        if request.forced_ids is not None:
            raise RequestInvalid("a remote engine cannot force tokens", param="forced_ids")
        refuse_unless(request, PASSED_ON, engine="a remote engine")
        cancels: list[Callable[[], None]] = []
        stream = Stream(on_cancel=lambda: cancels[0]())  # noqa: PLW0108  it is empty until the call is spawned
        call, submitted_s = _Call(repeating=repeating.get()), self._clock.now_s()
        stream.spent = lambda: self._spent(request, call)  # from now on: nothing, until it is sent
        with self._lock:
            if self._closed:
                raise Closed("this RemoteEngine is closed")
            self._running.add(stream)
            if request.purpose == "answer":
                place = (request.caller.task, request.caller.branch)
                self._sessions[place] = self._begun(request)
                self._sessions.move_to_end(place)
                if len(self._sessions) > _MOST_SESSIONS:
                    self._sessions.popitem(last=False)
            self._counts["calls"] += 1
            cancels.append(self._loop.spawn(lambda: self._run(request, stream, submitted_s, call)))
        stream.on_end(lambda _generation, _error: self._ended(stream))
        return stream

    def _ended(self, stream: Stream) -> None:
        with self._lock:
            self._running.discard(stream)

    def count_tokens(self, request: Request) -> int:
        texts = texts_of(request, thoughts=bool(self._fields["thought_field"]))
        framing = _TOKENS_PER_MESSAGE * (len(request.messages or ()) + 1)
        return sum(self._count(text) for text in texts) + framing

    def stats(self) -> Mapping[str, Any]:
        with self._lock:
            return {
                **self._counts,
                "running": len(self._running),
                "input_tokens": self._used.input_tokens,
                "cached_tokens": self._used.cached_tokens,
                "output_tokens": self._used.output_tokens,
            }

    def close(self) -> None:
        with self._lock:
            first, self._closed = not self._closed, True
            streams = list(self._running)
        if not first:
            return
        for stream in streams:
            stream.fail(Closed("the RemoteEngine was closed"))
        self._loop.close(last=self._client.close)
        self._askers.shutdown(wait=False, cancel_futures=True)

    def last_session(self, caller: Caller) -> str | None:
        """The session of this caller's own branch, if it made a call."""
        with self._lock:
            return self._sessions.get((caller.task, caller.branch))

    def _begun(self, request: Request) -> str:
        return self._session(request) if self.routing is None else self.routing.begun(request, self.model)

    def _session(self, request: Request) -> str:
        if self.routing is not None:
            return self.routing.session(request)
        return request.session or request.caller.task

    # -- a call, on the loop's thread

    async def _run(self, request: Request, stream: Stream, submitted_s: float, call: _Call) -> None:
        _call.set(call)  # each call is a task of its own
        try:
            async with self._free:
                await self._opened(request, call)
                try:
                    generation = await self._answer(request, stream, submitted_s, call)
                except BaseException:
                    await self._over(call)
                    raise
                parts = told_beside(generation.usage, await self._over(call) or {})
                if parts is not None:
                    generation = replace(generation, usage=parts[0], cached_by=parts[1])
        except Exception as error:
            self._counts["failed"] += 1
            stream.attempts = self._attempts(call.failed if call.opened else call.failed[:-1], request)
            told = self._told(error)
            if call.refused is not None:
                call.refused.__cause__ = told
            stream.fail(call.refused or told)
        else:
            stream.attempts = self._attempts(call.failed, request, generation.usage)
            stream.finish(generation)

    async def _opened(self, request: Request, call: _Call) -> None:
        """What its routing wants the call to carry."""
        routing = self.routing
        if routing is None:
            return
        asked = asyncio.get_running_loop().run_in_executor(self._askers, routing.opened, request, self.model)
        try:
            call.given = await asyncio.shield(asked)
        except asyncio.CancelledError:  # what it still gets is given back
            asked.add_done_callback(partial(_give_back, routing))
            raise
        call.flow = lambda http_request: routing.flow(http_request, call.given)

    async def _over(self, call: _Call) -> Mapping[str, int] | None:
        """Whatever became of the call, its routing hears of it; whoever has the answer finds that done."""
        routing = self.routing
        if routing is None or call.flow is None:
            return None
        return await asyncio.shield(asyncio.to_thread(routing.ended, call.given, call.reported))

    async def _answer(self, request: Request, stream: Stream, submitted_s: float, call: _Call) -> Generation:
        started_s = self._clock.now_s()
        first_s = None
        gathered = call.gathered
        call.sent = True
        async with await self._open(request) as chunks:
            call.opened = True
            stream.attempts = self._attempts(call.failed, request)  # the caller may cancel from here on
            async with silence(self._timeout_s) as heard:
                async for chunk in chunks:
                    text, thought = gathered.take(chunk)
                    heard(gathered.said)
                    if first_s is None and (gathered.written or gathered.thought):
                        first_s = self._clock.now_s()
                    if text or thought:
                        stream.push(Chunk(text=text, reasoning=thought))
        self._fields["thought_field"] = gathered.thought_field or self._fields["thought_field"]
        reason, calls = gathered.end()
        spent = self._spent(request, call)
        self._counts["estimated_calls"] += spent.estimated
        self._used += spent.usage
        call.reported = None if spent.estimated else spent.usage
        ended_s = self._clock.now_s()
        first_s = ended_s if first_s is None else first_s
        return Generation(
            text=gathered.text,
            raw=gathered.text,
            token_ids=(),
            finish_reason=reason,
            usage=spent.usage,
            timing=Timing(
                queued_s=started_s - submitted_s,
                prefill_s=first_s - started_s,
                decode_s=ended_s - first_s,
                ttft_s=first_s - submitted_s,
                total_s=ended_s - submitted_s,
            ),
            tool_calls=calls,
            reasoning=gathered.thought,
            session=self._session(request),
            model=gathered.model or self.model,
            estimated=spent.estimated,
            service_tier=spent.service_tier,
            cached_by=spent.cached_by,
            worker=spent.worker,
            expected_hit_rate=spent.expected_hit_rate,
        )

    async def _open(self, request: Request) -> Any:
        """Start the HTTP call, asking for usage.

        A server that rejects the question is asked once without, and never again with it.
        """
        import openai

        arguments = call_arguments(request, model=self.model, **self._fields)
        create: Any = self._client.completions.create
        if request.messages is not None:
            create = self._client.chat.completions.create
        if self._takes_usage_option is False:
            return await create(**arguments)
        try:
            opened = await create(**arguments, stream_options={"include_usage": True})
        except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
            if self._takes_usage_option:
                raise
            try:
                opened = await create(**arguments)
            except openai.APIStatusError:
                raise error from None  # it was not the question
            self._takes_usage_option = False
            log.warn_once("remote_reports_no_usage", base_url=self._shown_url, note="tokens are counted here")
            return opened
        self._takes_usage_option = True
        return opened

    def _spent(self, request: Request, call: _Call) -> Reported:
        """What the call used so far; nothing where no server did anything for it."""
        if call.opened:
            return call.gathered.spent(partial(self.count_tokens, request), self._count)
        if not call.sent or (call.failed and call.failed[-1].refused):
            return Reported(usage=Usage())
        return Reported(usage=Usage(input_tokens=self.count_tokens(request), calls=1), estimated=True)

    def _attempts(
        self, failed: list[FailedTry], request: Request, answered: Usage | None = None
    ) -> tuple[Attempt, ...]:
        """Tries that were refused cost nothing; one that was lost on the way was read, as far as anybody can know."""
        attempts = []
        for one in failed:
            spent = Reported(usage=Usage())
            if not one.refused:
                tokens = self.count_tokens(request) if answered is None else answered.input_tokens
                spent = Reported(usage=Usage(input_tokens=tokens, calls=1), estimated=True)
            attempts.append(Attempt(spent=spent, error=one.error, seconds=one.seconds))
        return tuple(attempts)

    def _told(self, error: Exception) -> Exception:
        """The error for the caller: ours, with the endpoint and its status, and without the key."""
        status = getattr(error, "status_code", None)
        message = f"{self.model} at {self._shown_url}: {error!s:.1000}"
        if self._key:
            message = message.replace(self._key, "***")
        told = RemoteError(message, status=status)
        told.__cause__ = None if self._key and self._key in str(error) else error
        return told


def _give_back(routing: Routing, asked: asyncio.Future[Any]) -> None:
    if not asked.cancelled() and asked.exception() is None:
        asyncio.get_running_loop().run_in_executor(None, routing.ended, asked.result(), None)
