"""InProcess: OpenAI clients, sync and async, that call an ASGI app in this process without a socket.

The app runs on one event-loop thread. Chunks reach the client as they are sent, a client that closes its response is
an http.disconnect to the app, and who is calling is looked up at the call's own place (context variables end there).
The transports themselves are in `httpx_like.py`. Clients on trio are not covered.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, Self

from agentkv import log
from agentkv.engine.loop import LoopThread
from agentkv.server.app import CALLER_STATE
from agentkv.server.exchange import AsgiApp, Event, Exchange
from agentkv.server.httpx_like import async_transport, sync_transport

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

BASE_URL = "http://agentkv.local/v1"


class InProcess:
    """An app and the loop thread that runs it. Thread-safe; `close()` is idempotent and leaves no thread behind.

    `identify()` is called on the caller's own thread or task for each request; the app finds its answer in the ASGI
    scope's state. After close, calls raise Closed.
    """

    def __init__(self, app: AsgiApp, *, identify: Callable[[], Any] | None = None) -> None:
        self._app = app
        self._identify = identify
        self._loop = LoopThread("agentkv-doors")

    def openai(self, **options: Any) -> OpenAI:
        """An `openai.OpenAI` on this app. No retries and no timeout unless `options` (its own arguments) say so."""
        import openai

        library = _openai_library()
        client = library.Client(transport=self.transport(library), trust_env=False)
        return openai.OpenAI(**self._defaults(client) | options)

    def async_openai(self, **options: Any) -> AsyncOpenAI:
        """An `openai.AsyncOpenAI` on this app; it may be used on any asyncio loop."""
        import openai

        library = _openai_library()
        client = library.AsyncClient(transport=self.async_transport(library), trust_env=False)
        return openai.AsyncOpenAI(**self._defaults(client) | options)

    def _defaults(self, client: Any) -> dict[str, Any]:
        return {"base_url": BASE_URL, "api_key": "in-process", "http_client": client, "max_retries": 0, "timeout": None}

    def transport(self, library: ModuleType) -> Any:
        """A sync transport for `httpx` or `httpx2` clients."""
        return sync_transport(library)(self._begin)

    def async_transport(self, library: ModuleType) -> Any:
        """An async transport for `httpx` or `httpx2` clients."""
        return async_transport(library)(self._begin)

    def _begin(self, request: Any, body: bytes, deliver: Callable[[Event], None]) -> Exchange:
        if self._loop.is_current:
            raise RuntimeError("a sync client was called on the app's own loop thread, where it would wait for itself")
        url = request.url
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": request.method,
            "headers": [(name.lower(), value) for name, value in request.headers.raw],
            "scheme": url.scheme,
            "path": url.path,
            "raw_path": url.raw_path.split(b"?")[0],
            "query_string": url.query,
            "root_path": "",
            "server": (url.host, url.port),
            "client": ("in-process", 0),
            "state": {CALLER_STATE: self._caller()},
        }
        exchange = Exchange(self._app, self._loop, scope=scope, body=body, deliver=deliver)
        exchange.start()
        return exchange

    def _caller(self) -> Any:
        try:
            return None if self._identify is None else self._identify()
        except Exception as error:
            log.failed("identify_failed", error=repr(error))
            return None

    def close(self) -> None:
        """Cancel what runs, end the loop thread. Responses still open end with a connection error."""
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _openai_library() -> Any:
    """The HTTP library that the installed openai builds on."""
    name = "httpx2" if importlib.util.find_spec("httpx2") else "httpx"
    return importlib.import_module(name)
