"""Ways in for other people's clients: OpenAI clients on the engine itself, and HTTP clients for clients of foreign endpoints.

The app behind the first, and what is known of foreign endpoints, are made when first asked for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from agentkv.clock import Clock
from agentkv.core.task import Caller
from agentkv.engine.base import Engine, Request
from agentkv.engine.stream import Stream
from agentkv.errors import Closed
from agentkv.runtime.books import Books
from agentkv.runtime.emit import Emitter
from agentkv.runtime.sampled import Sampled

if TYPE_CHECKING:
    from agentkv.adapters.inject import Injector
    from agentkv.runtime.agentkv import AgentKV
    from agentkv.runtime.ways import Ways
    from agentkv.server.stalls import Stalls
    from agentkv.server.transport import InProcess


passing: ContextVar[Callable[[object], None] | None] = ContextVar("agentkv_passing", default=None)
"""Told of every call that comes through a door in this context, with the door: it is on the books then."""


class Doors:
    """Makes clients that reach `submit` without a socket. Thread-safe."""

    def __init__(
        self, *, submit: Callable[[Request], Stream], engine: Engine, caller: Callable[[], Caller], emitter: Emitter, clock: Clock,
        books: Books,
    ) -> None:  # fmt: skip
        self._emitter = emitter
        self._clock = clock
        self._books = books
        self._ways: Ways | None = None
        self._closed = False
        self._submit = submit
        self._engine = engine
        self._caller = caller
        self._lock = threading.Lock()
        self._in_process: InProcess | None = None
        self._stalls: Stalls | None = None

    def open(self, kv: AgentKV) -> Any:
        """The way in; the same each time. `kv` opens the scopes that hints tell of."""
        from agentkv.runtime.serving import ToolsOf
        from agentkv.server.app import create_app
        from agentkv.server.stalls import Stalls
        from agentkv.server.transport import InProcess

        with self._lock:
            if self._in_process is None:
                stalls = self._stalls = Stalls(ToolsOf(kv))
                app = create_app(
                    self._submit,
                    model=self._engine.model,
                    count_tokens=self._engine.count_tokens,
                    stalls=stalls,
                    sampled=Sampled(self._engine),
                    passes_on=hasattr(self._engine, "endpoint"),
                )
                self._in_process = InProcess(app, identify=self._identified)
            return self._in_process

    def _identified(self) -> Caller:
        told = passing.get()
        if told is not None:
            told(self)
        return self._caller()

    def http_client(self, *, keep_alive: bool = False, speaks: Mapping[str, str] | None = None, **options: Any) -> Any:
        """An HTTP client for clients of your own: `OpenAI(http_client=...)`, `ChatOpenAI(http_client=...)`, `Anthropic(...)`.

        What it sends carries what its endpoint wants to be told of whoever is calling; your own fields and headers win.
        `options` are the HTTP library's own. Such calls are not billed here, see `AgentKV.record_call`. With `keep_alive`
        (for endpoints that are new from then on) a waiting prompt is sent again where that pays: to keep a cache that one
        pays for, or to compute a context shortly before its tool ends; the task pays, within its budget. With `proxy`,
        `transport`, `mounts`, `cert` or `verify` nothing but your own requests goes to the endpoint.
        `speaks` says what is at public addresses, which are never asked: `{"https://llm.example.com/v1": "vllm"}`, or "ask".
        """
        from agentkv.adapters.inject import injecting_client

        return injecting_client(self._injector(keep_alive, speaks, options), **options)

    def async_http_client(
        self, *, keep_alive: bool = False, speaks: Mapping[str, str] | None = None, **options: Any
    ) -> Any:
        """The same for `AsyncOpenAI`, ChatOpenAI's `http_async_client` and `AsyncAnthropic`."""
        from agentkv.adapters.inject import injecting_async_client

        return injecting_async_client(self._injector(keep_alive, speaks, options), **options)

    def _injector(self, spends: bool, speaks: Mapping[str, str] | None, options: Mapping[str, Any]) -> Injector:
        ways = self.ways()
        ways.name(speaks or {})
        return ways.injector_of(options, spends=spends)

    def ways(self) -> Ways:
        """The endpoints that calls go to. Closed for a closed AgentKV."""
        from agentkv.runtime.ways import Ways

        with self._lock:
            if self._closed:
                raise Closed("this AgentKV is closed; make a new one")
            if self._ways is None:
                self._ways = Ways(emitter=self._emitter, clock=self._clock, caller=self._caller, books=self._books)
            return self._ways

    def stats(self) -> dict[str, Any]:
        """What foreign endpoints were told; {} where there are none."""
        ways = self._ways
        return {} if ways is None else ways.stats()

    def close(self) -> None:
        """End what is under way, and tell foreign endpoints what they are still to hear. Idempotent."""
        with self._lock:
            self._closed = True
            doors, ways, stalls = self._in_process, self._ways, self._stalls
        if doors is not None:
            doors.close()
        if stalls is not None:
            stalls.close()
        if ways is not None:
            ways.close()
