"""Route: what a remote engine's requests carry, and what is heard of the calls that carried it.

Covers one endpoint: the adapter's Extra for each call, and its injection into the HTTP request (user's values win, refused
fields are left out). Does not cover hints beside the calls (`reach.py`) nor which endpoint a call goes to (`ways.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from agentkv import log
from agentkv.adapters.base import Extra, Routing, Telling
from agentkv.adapters.inject import Injector
from agentkv.adapters.replay import Keep
from agentkv.core.hint import SessionFacts
from agentkv.core.task import UNATTRIBUTED
from agentkv.core.usage import Usage
from agentkv.engine.base import Request
from agentkv.runtime.sessions import PRIORITIES, SessionBook, session_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """What a call under way was given."""

    session: str
    extra: Extra | None


class Route:
    """Implements `engine.remote.Routing` over one adapter. Thread-safe. `within_s`: the time-out of its engine's calls."""

    def __init__(
        self, adapter: Any, *, book: SessionBook | None = None, injector: Injector | None = None,
        within_s: float | None = None,
    ) -> None:  # fmt: skip
        self._within_s = within_s
        self._adapter = adapter
        self._routing = adapter if isinstance(adapter, Routing) else None
        self._book = book or SessionBook()
        self._injector = injector or Injector()
        self.keep: Keep | None = None
        """Where the sessions' last requests are kept, if somebody sends them again."""
        self.running = 0
        """Calls that are under way."""
        self._lock = threading.Lock()

    @property
    def injector(self) -> Injector:
        """What adds fields to requests, and remembers which were refused."""
        return self._injector

    def session(self, request: Request) -> str:
        """The session of a request: its own, else its caller's branch's."""
        return request.session or session_of(request.caller)

    def begun(self, request: Request, model: str) -> str:
        """A call is about to be made; its session. Quick."""
        session = self.session(request)
        if request.purpose == "answer":
            self._book.begun(session, request.caller, model=model, priority=request.priority)
        return session

    def opened(self, request: Request, model: str) -> Carried:
        """The call begins; may wait for its context to be brought back. Never raises."""
        session = self.session(request)
        with self._lock:
            self.running += 1
        about = replace(
            self._book.facts(session, task=request.caller.task, purpose=request.purpose),
            model=model, priority=PRIORITIES[request.priority], within_s=self._within_s,
        )  # fmt: skip
        return Carried(session=session, extra=self.carries(about))

    def flow(self, http_request: Any, carried: Carried) -> Generator[Any, Any, Any]:
        """The HTTP request with what was given; see `Injector.flow`."""
        return self._injector.flow(http_request, carried.extra)

    def ended(self, carried: Carried, usage: Usage | None) -> Mapping[str, int] | None:
        """The call is over; `usage` None where it was not answered or nothing was reported. Never raises.

        Where its cached tokens came from, if the engine tells that elsewhere than in its answers.
        """
        with self._lock:
            self.running -= 1
        try:
            if carried.extra is not None and carried.extra.owed and self._routing is not None:
                tokens = 0 if usage is None else usage.total_tokens
                cached = None if usage is None else usage.cached_tokens
                self._routing.ended(carried.session, tokens=tokens, cached_tokens=cached)
            if usage is not None and isinstance(self._adapter, Telling):
                return self._adapter.cached_by(usage)
        except Exception as error:
            log.failed("routing_failed", error=repr(error))
        return None

    def carries(self, about: SessionFacts) -> Extra | None:
        """What a call of this session is to carry. Never raises."""
        extra: Extra | None = None
        if self._routing is not None:
            try:
                extra = self._routing.carries(about)
            except Exception as error:
                log.failed("routing_failed", error=repr(error))
        keep = self.keep
        if keep is not None and about.purpose == "answer" and about.task != UNATTRIBUTED:
            saw = None if extra is None else extra.saw
            extra = replace(extra or Extra(owed=False), saw=partial(_kept, keep, about.session, saw))
        if extra is None or extra.session == about.session:
            return extra
        return replace(extra, session=about.session)


def _kept(keep: Keep, session: str, saw: Callable[[Any], None] | None, request: Any) -> None:
    keep.put(session, request)
    if saw is not None:
        saw(request)
