"""Carrying an engine's stream to an HTTP client, whole or as events, and a client's hang-up back to the engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from agentkv.engine.base import Generation
from agentkv.engine.stream import Stream
from agentkv.server.replies import Reply


async def whole_answer(stream: Stream, receive: Receive) -> Generation:
    """Wait for the whole answer; if the client hangs up first, the call is cancelled and GenerationCancelled raised."""
    async with _listening(stream, receive):
        return await stream.aresult()


class EventStream(Response):
    """The answer as server-sent events, each sent as soon as it is known; a hang-up cancels the call.

    An error after the start is told in the reply's own way.
    """

    media_type = "text/event-stream"

    def __init__(self, stream: Stream, reply: Reply, headers: Mapping[str, str]) -> None:
        self.status_code = 200
        self.background = None
        self.body = b""
        self._stream = stream
        self._reply = reply
        self.init_headers({"cache-control": "no-store", "x-accel-buffering": "no", **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002  ASGI's signature
        async with _listening(self._stream, receive):
            with contextlib.suppress(OSError):  # the client is gone: leaving the block cancels the call
                await send({"type": "http.response.start", "status": 200, "headers": self._raw_headers()})
                async for line in _events(self._stream, self._reply):
                    await send({"type": "http.response.body", "body": line, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _raw_headers(self) -> list[tuple[bytes, bytes]]:
        return [(name, value) for name, value in self.raw_headers if name != b"content-length"]


async def _events(stream: Stream, reply: Reply) -> AsyncIterator[bytes]:
    begin = reply.begin()
    if begin:
        yield begin
    try:
        async for chunk in stream:
            told = reply.piece(chunk)
            if told:
                yield told
        generation = await stream.aresult()
    except Exception as error:
        yield reply.failed(error)
        return
    yield reply.end(generation)


@contextlib.asynccontextmanager
async def _listening(stream: Stream, receive: Receive) -> AsyncIterator[None]:
    """Cancel the call when the client hangs up, and on leaving the block if it has not ended."""

    async def listen() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        stream.cancel()

    listener = asyncio.create_task(listen())
    try:
        with stream:
            yield
    finally:
        listener.cancel()
        await asyncio.wait({listener})
