"""Transports over an Exchange for httpx and httpx2 alike: one body, made for whichever library asks.

The two libraries have the same shapes and no common base, so the classes are made by `sync_transport(library)` and
`async_transport(library)`. The library's read timeout is kept; its other timeouts have no meaning without a socket.
"""

from __future__ import annotations

import asyncio
import functools
import queue
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from agentkv.server.exchange import Ended, Event, Exchange, Started

Begin = Callable[[Any, bytes, Callable[[Event], None]], Exchange]
"""begin(request, body, deliver): start an exchange for a request of either library."""


@functools.cache
def sync_transport(library: Any) -> type[Any]:
    """The transport class for `library.Client`; construct it with a Begin."""

    class Body(library.SyncByteStream):  # type: ignore[misc]  # the base is known only when this runs
        def __init__(self, inbox: _Inbox, exchange: Exchange) -> None:
            self._inbox = inbox
            self._exchange = exchange

        def __iter__(self) -> Iterator[bytes]:
            while isinstance(piece := self._inbox.next(), bytes):
                yield piece

        def close(self) -> None:
            self._exchange.hang_up()

    class Transport(library.BaseTransport):  # type: ignore[misc]  # likewise
        def __init__(self, begin: Begin) -> None:
            self._begin = begin

        def handle_request(self, request: Any) -> Any:
            inbox = _Inbox(library, request)
            exchange = self._begin(request, request.read(), inbox.deliver)
            try:
                return _response(library, inbox.next(), Body(inbox, exchange))
            except BaseException:
                exchange.hang_up()
                raise

    return Transport


@functools.cache
def async_transport(library: Any) -> type[Any]:
    """The transport class for `library.AsyncClient`; construct it with a Begin."""

    class Body(library.AsyncByteStream):  # type: ignore[misc]  # as above
        def __init__(self, inbox: _AsyncInbox, exchange: Exchange) -> None:
            self._inbox = inbox
            self._exchange = exchange

        async def __aiter__(self) -> AsyncIterator[bytes]:
            while isinstance(piece := await self._inbox.next(), bytes):
                yield piece

        async def aclose(self) -> None:
            self._exchange.hang_up()

    class Transport(library.AsyncBaseTransport):  # type: ignore[misc]  # as above
        def __init__(self, begin: Begin) -> None:
            self._begin = begin

        async def handle_async_request(self, request: Any) -> Any:
            inbox = _AsyncInbox(library, request)
            exchange = inbox.exchange = self._begin(request, await request.aread(), inbox.deliver)
            try:
                return _response(library, await inbox.next(), Body(inbox, exchange))
            except BaseException:
                exchange.hang_up()
                raise

    return Transport


class _Inbox:
    """Events on their way to a thread."""

    def __init__(self, library: Any, request: Any) -> None:
        self._library = library
        self._request = request
        self._wait_s = _read_timeout_s(request)
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.deliver = self._events.put

    def next(self) -> Event:
        """The next event; raises the library's own errors if it does not come or says that the response was lost."""
        try:
            event = self._events.get(timeout=self._wait_s)
        except queue.Empty:
            raise self._library.ReadTimeout(f"nothing came within {self._wait_s} s", request=self._request) from None
        return _unless_lost(event, self._library)


class _AsyncInbox:
    """Events on their way to a coroutine on another loop."""

    def __init__(self, library: Any, request: Any) -> None:
        self._library = library
        self._request = request
        self._wait_s = _read_timeout_s(request)
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self.exchange: Exchange | None = None

    def deliver(self, event: Event) -> None:
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
        except RuntimeError:  # the client's loop was closed: nobody will read this
            if self.exchange is not None:
                self.exchange.hang_up()

    async def next(self) -> Event:
        """As `_Inbox.next`."""
        try:
            async with asyncio.timeout(self._wait_s):
                event = await self._events.get()
        except TimeoutError:
            raise self._library.ReadTimeout(f"nothing came within {self._wait_s} s", request=self._request) from None
        return _unless_lost(event, self._library)


def _read_timeout_s(request: Any) -> float | None:
    timeout: float | None = request.extensions.get("timeout", {}).get("read")
    return timeout


def _unless_lost(event: Event, library: Any) -> Event:
    if isinstance(event, Ended) and event.lost is not None:
        raise library.RemoteProtocolError(event.lost)
    return event


def _response(library: Any, head: Event, body: Any) -> Any:
    assert isinstance(head, Started), f"ASGI sends the head first, not {head!r:.100}"
    return library.Response(head.status, headers=head.headers, stream=body, extensions={"http_version": b"HTTP/1.1"})
