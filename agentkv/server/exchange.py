"""One HTTP exchange with an ASGI app, without HTTP: what the app sends is handed on piece by piece, at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from agentkv import log
from agentkv.engine.loop import LoopThread
from agentkv.errors import Closed

Message = MutableMapping[str, Any]
AsgiApp = Callable[[Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The response's head."""

    status: int
    headers: list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The response's end; with `lost` it came too early, and says why."""

    lost: str | None = None


Event = Started | bytes | Ended


class Exchange:
    """Runs the app for one request on a loop thread; `deliver` gets Started, then bytes, then one Ended.

    `deliver` is called on the loop's thread and must not block. `hang_up` may come from any thread: the app reads
    http.disconnect, and what it still sends raises OSError there.
    """

    def __init__(
        self, app: AsgiApp, loop: LoopThread, *, scope: Message, body: bytes, deliver: Callable[[Event], None]
    ) -> None:
        self._app = app
        self._loop = loop
        self._scope = scope
        self._unread: bytes | None = body
        self._deliver = deliver
        self._over = asyncio.Event()  # binds to the loop that first waits on it, which is the app's
        self._hung_up = False
        self._whole = False

    def start(self) -> None:
        """Begin. Raises Closed if the loop thread is."""
        self._loop.spawn(self._run)

    def hang_up(self) -> None:
        """The client is gone; nothing happens if the response was whole."""
        if self._whole or self._hung_up:
            return
        self._hung_up = True
        try:
            self._loop.call(self._over.set)
        except Closed:
            return  # closing has cancelled the app already

    async def _run(self) -> None:
        lost = "the app ended before its response did"
        try:
            await self._app(self._scope, self._receive, self._send)
        except asyncio.CancelledError:
            lost = "the app was closed"
            raise
        except Exception as error:
            if not self._hung_up:
                lost = "the app failed"
                log.failed("in_process_app_failed", error=repr(error))
        finally:
            if not self._whole:
                self._deliver(Ended(lost="the client hung up" if self._hung_up else lost))

    async def _receive(self) -> Message:
        if self._unread is not None:
            body, self._unread = self._unread, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._over.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self._hung_up:
            raise OSError("the client hung up")
        if message["type"] == "http.response.start":
            self._deliver(Started(status=message["status"], headers=list(message.get("headers", []))))
        elif message["type"] == "http.response.body":
            body = message.get("body", b"")
            if body:
                self._deliver(bytes(body))
            if not message.get("more_body", False):
                self._whole = True
                self._over.set()
                self._deliver(Ended())
