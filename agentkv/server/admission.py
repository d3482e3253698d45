"""Who comes in: the first thing that a request meets, before its body is read.

Covers API keys, too many calls at once, draining; and how many calls are under way. A plain ASGI middleware.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from agentkv.server.keys import Keys
from agentkv.server.refusals import error_body

KEY_STATE = "agentkv_key"
"""The key of the ASGI scope's state under which the caller's API key is found."""
OPEN_PATHS = frozenset({"/health"})
MOST_CALLS = 1024


class Life:
    """Whether a server takes calls, and how many are under way. Its numbers change on the app's loop only."""

    def __init__(self, *, most_calls: int = MOST_CALLS) -> None:
        self.most_calls = most_calls
        self.active = 0
        self.draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    def enter(self) -> None:
        """A call begins."""
        self.active += 1
        self._idle.clear()

    def leave(self) -> None:
        """It has ended, its last byte is sent."""
        self.active -= 1
        if not self.active:
            self._idle.set()

    async def idle(self, timeout_s: float) -> bool:
        """Wait until no call is under way; False if that takes longer than `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True


class Admission:
    """Lets requests through to `app`, or answers 401, 503."""

    def __init__(self, app: ASGIApp, *, life: Life, keys: Keys | None) -> None:
        self._app = app
        self._life = life
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        refused = self._refusal(scope)
        if refused is not None:
            await refused(scope, receive, send)
            return
        self._life.enter()
        try:
            await self._app(scope, receive, send)
        finally:
            self._life.leave()

    def _refusal(self, scope: Scope) -> JSONResponse | None:
        if self._keys is not None:
            key = self._keys.find(_authorization(scope))
            if key is None:
                told = "an API key is needed: send 'Authorization: Bearer <key>' with one that this server knows"
                body = error_body(told, "invalid_request_error", None, "invalid_api_key")
                return JSONResponse(body, status_code=401, headers={"www-authenticate": "Bearer"})
            scope.setdefault("state", {})[KEY_STATE] = key
        if scope["method"] == "GET":
            return None
        if self._life.draining:
            return _later("this server is about to stop; send the call to another one", "draining")
        if self._life.active >= self._life.most_calls:
            told = f"{self._life.active} calls are under way or waiting, as many as are allowed; come again later"
            return _later(told, "too_many_calls")
        return None


def _later(told: str, code: str) -> JSONResponse:
    body = error_body(told, "server_error", None, code)
    return JSONResponse(body, status_code=503, headers={"retry-after": "1"})


def _authorization(scope: Scope) -> str:
    values: list[Any] = [value for name, value in scope["headers"] if name == b"authorization"]
    return values[0].decode("latin-1") if len(values) == 1 else ""
