"""The OpenAI-compatible ASGI app over anything that takes a Request and gives a Stream.

Covers: POST /v1/chat/completions, /v1/completions and /tokenize (how many tokens either body's prompt has),
GET /v1/models and /health; who is calling. What each field does is `requests.py`; how errors look is `refusals.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from agentkv.clock import Clock, SystemClock
from agentkv.core.task import Caller
from agentkv.engine.base import Request, Stream
from agentkv.errors import ExtraMissing, RequestInvalid

try:
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect
    from starlette.requests import Request as HttpRequest
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route
except ImportError as missing:
    raise ExtraMissing("the app needs starlette: pip install 'agentkv-sdk[local]'") from missing

from agentkv.server.answers import EventStream, whole_answer
from agentkv.server.fields import read_json, refuse
from agentkv.server.refusals import error_body, refusal
from agentkv.server.replies import Frame, new_id
from agentkv.server.requests import Asked, chat_request, completion_request

TASK_HEADER = "x-agentkv-task"
SESSION_HEADER = "x-agentkv-session"
IGNORED_HEADER = "x-agentkv-ignored"
CALLER_STATE = "agentkv_caller"
"""The key of the ASGI scope's state under which a transport says who called."""


def create_app(
    submit: Callable[[Request], Stream],
    *,
    model: str,
    count_tokens: Callable[[Request], int],
    caller: Callable[[], Caller] | None = None,
    clock: Clock | None = None,
) -> Starlette:
    """The app. `submit` and `count_tokens` run on worker threads: they may render, tokenise and wait for a lock.

    Who is calling: the header x-agentkv-task, else what the in-process transport found at the call's own place, else
    `caller()`, else nobody known. The header x-agentkv-session joins a session by name.
    """
    doors = _Doors(
        submit, model=model, count_tokens=count_tokens, caller=caller or Caller, clock=clock or SystemClock()
    )
    return Starlette(
        routes=[
            Route("/v1/chat/completions", _guarded(doors.chat), methods=["POST"]),
            Route("/v1/completions", _guarded(doors.completions), methods=["POST"]),
            Route("/tokenize", _guarded(doors.tokenize), methods=["POST"]),
            Route("/v1/models", doors.models),
            Route("/v1/models/{name:path}", _guarded(doors.one_model)),
            Route("/health", doors.health),
        ],
        exception_handlers={HTTPException: _http_error},
    )


class _Doors:
    """The endpoints. An exception becomes a refusal in `_guarded`."""

    def __init__(
        self,
        submit: Callable[[Request], Stream],
        *,
        model: str,
        count_tokens: Callable[[Request], int],
        caller: Callable[[], Caller],
        clock: Clock,
    ) -> None:
        self._submit = submit
        self._model = model
        self._count_tokens = count_tokens
        self._caller = caller
        self._clock = clock
        self._card = {"id": model, "object": "model", "created": clock.wall_ms() // 1000, "owned_by": "agentkv"}

    async def chat(self, http: HttpRequest) -> Response:
        return await self._answer(http, chat_request(await _body(http), model=self._model), chat=True)

    async def completions(self, http: HttpRequest) -> Response:
        return await self._answer(http, completion_request(await _body(http), model=self._model), chat=False)

    async def _answer(self, http: HttpRequest, asked: Asked, *, chat: bool) -> Response:
        stream = await _in_thread(self._submit, self._identified(http, asked.request))
        frame = Frame(
            model=self._model,
            created_s=self._clock.wall_ms() // 1000,
            chat=chat,
            usage=asked.include_usage,
            id=new_id(chat=chat),
        )
        headers = {IGNORED_HEADER: ",".join(asked.ignored)} if asked.ignored else {}
        if asked.stream:
            return EventStream(stream, frame, headers)
        return JSONResponse(frame.whole(await whole_answer(stream, http.receive)), headers=headers)

    def _identified(self, http: HttpRequest, request: Request) -> Request:
        task = _header(http, TASK_HEADER)
        who = Caller(task=task) if task else (http.scope.get("state") or {}).get(CALLER_STATE) or self._caller()
        return replace(request, caller=who, session=_header(http, SESSION_HEADER) or None)

    async def tokenize(self, http: HttpRequest) -> Response:
        body = await _body(http)
        read = completion_request if isinstance(body, dict) and "prompt" in body else chat_request
        request = read(body, model=self._model).request
        return JSONResponse({"count": await asyncio.to_thread(self._count_tokens, request)})

    async def models(self, _: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self._card]})

    async def one_model(self, http: HttpRequest) -> Response:
        if http.path_params["name"] != self._model:
            refuse("model", f"is not served here; this is {self._model!r}", code="model_not_found")
        return JSONResponse(self._card)

    async def health(self, _: HttpRequest) -> Response:
        return JSONResponse({"status": "ok", "model": self._model})


def _guarded(endpoint: Callable[[HttpRequest], Awaitable[Response]]) -> Callable[[HttpRequest], Awaitable[Response]]:
    async def guarded(http: HttpRequest) -> Response:
        try:
            return await endpoint(http)
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as error:
            status, body, headers = refusal(error)
            return JSONResponse(body, status_code=status, headers=headers)

    return guarded


async def _body(http: HttpRequest) -> Any:
    return read_json(await http.body())


async def _in_thread(submit: Callable[[Request], Stream], request: Request) -> Stream:
    """`submit` on a worker thread; if we are cancelled meanwhile, so is the call that it starts."""
    starting = asyncio.ensure_future(asyncio.to_thread(submit, request))
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


def _header(http: HttpRequest, name: str) -> str:
    """A header's text: UTF-8, which HTTP itself carries as Latin-1."""
    try:
        return http.headers.get(name, "").encode("latin-1").decode()
    except UnicodeDecodeError as error:
        raise RequestInvalid(f"the header {name} is not UTF-8", param=name, code="invalid_unicode") from error
