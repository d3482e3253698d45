"""The OpenAI-compatible ASGI app over anything that takes a Request and gives a Stream.

Covers: POST /v1/chat/completions, /v1/completions, /v1/responses and /tokenize (how many tokens either body's prompt
has), GET /v1/models; who is calling. `rest.py` has the endpoints that are nobody else's: hints, health, metrics. What
each field does is `requests.py` and `responses.py`; how errors look is `refusals.py`; who comes in is `admission.py`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from agentkv.clock import Clock, SystemClock
from agentkv.core.message import Message
from agentkv.core.task import UNATTRIBUTED, Caller
from agentkv.engine.base import Generation, Request, Sampling, changed
from agentkv.engine.extras import check_extras, passed_headers
from agentkv.engine.stream import Stream
from agentkv.errors import ExtraMissing, RequestInvalid

try:
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.requests import ClientDisconnect
    from starlette.requests import Request as HttpRequest
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route
except ImportError as missing:
    raise ExtraMissing("the app needs starlette: pip install 'agentkv-sdk[local]'") from missing

from agentkv.hints.wire import WireHint
from agentkv.server.admission import KEY_STATE, Admission, Life
from agentkv.server.answers import EventStream, whole_answer
from agentkv.server.events import ResponseReply
from agentkv.server.fields import read_json, refuse
from agentkv.server.keys import Key, Keys
from agentkv.server.origins import cors
from agentkv.server.refusals import error_body, refusal
from agentkv.server.replies import ChatReply, CompletionReply, Reply, new_id
from agentkv.server.requests import Asked, chat_request, completion_request
from agentkv.server.responses import in_words_of_responses, response_request
from agentkv.server.rest import Rest
from agentkv.server.stalls import Stalls
from agentkv.server.stored import Stored

TASK_HEADER = "x-agentkv-task"
SESSION_HEADER = "x-agentkv-session"
IGNORED_HEADER = "x-agentkv-ignored"
SAMPLING_HEADER = "x-agentkv-sampling"
HINTS_HEADER = "x-agentkv-hints"
"""What became of the hints in a call's `kv_hints`, one by one."""
CALLER_STATE = "agentkv_caller"
"""The key of the ASGI scope's state under which a transport says who called."""
MOST_BODY_BYTES = 64 << 20
SHORT_BODY_BYTES = 64 << 10
"""A longer body takes milliseconds to read."""
NO_TASK = "default"
"""The task of a tenant's calls that name none."""

_Read = TypeVar("_Read")
Enter = Callable[[Key, str], None]
"""enter(key, task): a call of this key is about to be made for this task."""


def create_app(
    submit: Callable[[Request], Stream],
    *,
    model: str,
    count_tokens: Callable[[Request], int],
    caller: Callable[[], Caller] | None = None,
    clock: Clock | None = None,
    keys: Keys | None = None,
    enter: Enter | None = None,
    life: Life | None = None,
    stalls: Stalls | None = None,
    metrics: Callable[[], str] | None = None,
    most_body_bytes: int = MOST_BODY_BYTES,
    allow_origins: Sequence[str] = (),
    sampled: Callable[[Sampling], Mapping[str, Any]] = Sampling.told,
    passes_on: bool = False,
) -> Starlette:
    """The app. `submit`, `count_tokens`, `enter` and `metrics` run on worker threads: they may render, tokenise, wait.

    Who is calling: the header x-agentkv-task, else what the in-process transport found at the call's own place, else
    `caller()`, else nobody known. The header x-agentkv-session joins a session by name. With `keys` every call needs
    one; its tasks and sessions are the tenant's own, and so is the salt of its KV. Without `stalls` and `metrics` their
    endpoints are 404. Scripts of web pages may call from `allow_origins` only. `sampled` tells how a call's tokens
    are chosen, for the header x-agentkv-sampling. `passes_on`: what is not read here, fields and headers, goes on to the
    engine's server as it is; only for callers who may say anything there. Raises ConfigError for what is no origin.
    """
    life = life or Life()
    doors = _Doors(
        submit,
        model=model,
        count_tokens=count_tokens,
        caller=caller or Caller,
        clock=clock or SystemClock(),
        enter=enter,
        stalls=stalls,
        most_body_bytes=most_body_bytes,
        sampled=sampled,
        passes_on=passes_on,
    )
    rest = Rest(model=model, life=life, stalls=stalls, metrics=metrics, body=doors.body)
    routes = [
        Route("/v1/chat/completions", guarded(doors.chat), methods=["POST"]),
        Route("/v1/completions", guarded(doors.completions), methods=["POST"]),
        Route("/v1/responses", guarded(doors.responses), methods=["POST"]),
        Route("/tokenize", guarded(doors.tokenize), methods=["POST"]),
        Route("/v1/models", doors.models),
        Route("/v1/models/{name:path}", guarded(doors.one_model)),
        *(Route(path, guarded(endpoint), methods=[method]) for method, path, endpoint in rest.routes()),
    ]
    return Starlette(
        routes=routes,
        exception_handlers={HTTPException: _http_error},
        middleware=[
            *cors(allow_origins, told=(SESSION_HEADER, IGNORED_HEADER, SAMPLING_HEADER, HINTS_HEADER)),
            Middleware(Admission, life=life, keys=keys),
        ],
    )


class _Doors:
    """The endpoints. An exception becomes a refusal in `guarded`."""

    def __init__(
        self,
        submit: Callable[[Request], Stream],
        *,
        model: str,
        count_tokens: Callable[[Request], int],
        caller: Callable[[], Caller],
        clock: Clock,
        enter: Enter | None,
        stalls: Stalls | None,
        most_body_bytes: int,
        sampled: Callable[[Sampling], Mapping[str, Any]],
        passes_on: bool,
    ) -> None:
        self._submit = submit
        self._model = model
        self._count_tokens = count_tokens
        self._caller = caller
        self._clock = clock
        self._enter = enter
        self._stalls = stalls
        self._most_body_bytes = most_body_bytes
        self._sampled = sampled
        self._passes_on = passes_on
        self._reading: dict[str, Any] = {"model": model, "passes_on": passes_on}
        self._stored = Stored()
        self._card = {"id": model, "object": "model", "created": clock.wall_ms() // 1000, "owned_by": "agentkv"}

    async def chat(self, http: HttpRequest) -> Response:
        asked = await self._read(http, partial(chat_request, **self._reading))
        reply = ChatReply(id=new_id("chatcmpl-"), **self._frame(asked))
        return await self._answer(http, asked, reply)

    async def completions(self, http: HttpRequest) -> Response:
        asked = await self._read(http, partial(completion_request, **self._reading))
        reply = CompletionReply(id=new_id("cmpl-"), echo=asked.echo, **self._frame(asked))
        return await self._answer(http, asked, reply)

    def _frame(self, asked: Asked) -> dict[str, Any]:
        return {
            "model": self._model,
            "created_s": self._clock.wall_ms() // 1000,
            "n": asked.request.n,
            "usage": asked.include_usage,
        }

    async def responses(self, http: HttpRequest) -> Response:
        tenant = _tenant(http)
        earlier = partial(self._stored.get, tenant)
        asked = await self._read(http, partial(response_request, **self._reading, earlier=earlier))

        def keep(response_id: str, answer: Message) -> None:
            self._stored.put(tenant, response_id, (*asked.kept, answer))

        reply = ResponseReply(
            model=self._model,
            created_s=self._clock.wall_ms() // 1000,
            told=asked.told,
            store=asked.store,
            keep=keep,
        )
        try:
            return await self._answer(http, asked.asked, reply)
        except RequestInvalid as error:
            raise in_words_of_responses(error) from error

    async def _answer(self, http: HttpRequest, asked: Asked, reply: Reply) -> Response:
        request, key = self._identified(http, asked.request), _key(http)
        headers = {SAMPLING_HEADER: json.dumps(self._sampled(request.sampling), separators=(",", ":"))}
        hinted = await self._hinted(key, asked.hints)
        stream = await _in_thread(self._started, request, key)
        if self._stalls is not None:
            self._note(stream, request, key, asked.lifecycle)
        headers |= {IGNORED_HEADER: ",".join(asked.ignored)} if asked.ignored else {}
        headers |= {HINTS_HEADER: hinted} if hinted else {}
        if asked.stream:
            return EventStream(stream, reply, headers)
        generation = await whole_answer(stream, http.receive)
        session = _own(key, generation.session)
        if session.isascii() and session.isprintable():
            headers[SESSION_HEADER] = session
        return JSONResponse(reply.whole(generation), headers=headers)

    async def _hinted(self, key: Key | None, hints: Sequence[WireHint]) -> str:
        """Take what the call brings along before it begins: the end of its tool, for instance."""
        stalls = self._stalls
        if not hints:
            return ""
        if stalls is None:
            refuse("kv_hints", "is taken where hints are", code="unsupported_parameter")
        receipts = await asyncio.to_thread(lambda: [stalls.hint(key, hint) for hint in hints])
        return ",".join(receipt["outcome"] for receipt in receipts)

    def _started(self, request: Request, key: Key | None) -> Stream:
        if self._enter is not None and key is not None:
            self._enter(key, request.caller.task)
        return self._submit(request)

    def _note(self, stream: Stream, request: Request, key: Key | None, lifecycle: str | None) -> None:
        """Hints about this call's task, session or lifecycle will find their way."""
        stalls = self._stalls

        def ended(generation: Generation | None, _: BaseException | None) -> None:
            if stalls is not None and generation is not None:
                stalls.called(key, request.caller.task, generation.session, lifecycle)

        stream.on_end(ended)

    def _identified(self, http: HttpRequest, request: Request) -> Request:
        task, session, key = _header(http, TASK_HEADER), _header(http, SESSION_HEADER), _key(http)
        found = (http.scope.get("state") or {}).get(CALLER_STATE)
        who = Caller(task=task) if task else found or self._caller()
        if self._passes_on:
            headers = passed_headers(http.scope["headers"])
            check_extras({}, headers)
            request = changed(request, extra_headers=headers)
        if key is None:
            return changed(request, caller=who, session=session or None)
        own = who.task if who.task != UNATTRIBUTED else NO_TASK
        who = replace(who, task=key.task(own))
        return changed(request, caller=who, session=key.task(session) if session else None, salt=key.salt)

    async def tokenize(self, http: HttpRequest) -> Response:
        def read(body: Any) -> Asked:
            prompted = isinstance(body, dict) and "prompt" in body
            return (completion_request if prompted else chat_request)(body, **self._reading)

        request = self._identified(http, (await self._read(http, read)).request)
        return JSONResponse({"count": await asyncio.to_thread(self._count_tokens, request)})

    async def models(self, _: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self._card]})

    async def one_model(self, http: HttpRequest) -> Response:
        if http.path_params["name"] != self._model:
            refuse("model", f"is not served here; this is {self._model!r}", code="model_not_found")
        return JSONResponse(self._card)

    async def _read(self, http: HttpRequest, read: Callable[[Any], _Read]) -> _Read:
        """What `read` makes of the body; a long one is read on a worker thread, so that streams go on meanwhile."""
        body = await self._raw(http)
        if len(body) <= SHORT_BODY_BYTES:
            return read(read_json(body))
        return await asyncio.to_thread(lambda: read(read_json(body)))

    async def body(self, http: HttpRequest) -> Any:
        """The JSON value of a request's body; RequestInvalid if it is too long or none."""
        return await self._read(http, lambda value: value)

    async def _raw(self, http: HttpRequest) -> bytes:
        parts, size = [], 0
        async for part in http.stream():
            size += len(part)
            if size > self._most_body_bytes:
                refuse("body", f"is longer than {self._most_body_bytes} bytes", code="body_too_large")
            parts.append(part)
        return b"".join(parts)


def guarded(endpoint: Callable[[HttpRequest], Awaitable[Response]]) -> Callable[[HttpRequest], Awaitable[Response]]:
    """`endpoint` with every exception told as a refusal."""

    async def answered(http: HttpRequest) -> Response:
        try:
            return await endpoint(http)
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as error:
            status, body, headers = refusal(error)
            return JSONResponse(body, status_code=status, headers=headers)

    return answered


async def _in_thread(submit: Callable[[Request, Key | None], Stream], request: Request, key: Key | None) -> Stream:
    """`submit` on a worker thread; if we are cancelled meanwhile, so is the call that it starts."""
    starting = asyncio.ensure_future(asyncio.to_thread(submit, request, key))
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        starting.add_done_callback(_abandon)
        raise


def _abandon(started: asyncio.Future[Stream]) -> None:
    if not started.cancelled() and started.exception() is None:
        started.result().cancel()


async def _http_error(_: HttpRequest, error: Any) -> Response:
    body = error_body(str(error.detail), "invalid_request_error", None, None)
    return JSONResponse(body, status_code=error.status_code, headers=error.headers)


def _key(http: HttpRequest) -> Key | None:
    key: Key | None = (http.scope.get("state") or {}).get(KEY_STATE)
    return key


def _tenant(http: HttpRequest) -> str:
    key = _key(http)
    return "" if key is None else key.name


def _own(key: Key | None, name: str) -> str:
    """A task's or session's name as its tenant knows it."""
    return name if key is None else name.removeprefix(key.task(""))


def _header(http: HttpRequest, name: str) -> str:
    """A header's text: UTF-8, which HTTP itself carries as Latin-1."""
    try:
        return http.headers.get(name, "").encode("latin-1").decode()
    except UnicodeDecodeError as error:
        raise RequestInvalid(f"the header {name} is not UTF-8", param=name, code="invalid_unicode") from error
