"""Ways: every endpoint that calls of one AgentKV go to, each with its adapter, its queue of hints and its route.

Covers the remote engine's own endpoint, and those that people's own clients call through `kv.http_client()`: they are
found by the address of a request. Where such a client has a way of its own there (a proxy, a transport, its own
certificates), nothing but its requests goes to that server: no probe, no prewarm, no keep-alive. Does not cover one endpoint's queue (`reach.py`) nor what its requests carry
(`routes.py`). An endpoint hears of sessions that it answered, the engine's own of all.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from agentkv import log
from agentkv.adapters.base import Extra
from agentkv.adapters.found import Found, checked
from agentkv.adapters.inject import Injector, Place, model_of, tokens_of, within_s
from agentkv.adapters.inject_clients import is_direct
from agentkv.adapters.places import place, place_of
from agentkv.adapters.prewarm import Prewarm
from agentkv.adapters.probe import Endpoints, Known, provider
from agentkv.budget.facts import Fact, TaskFact
from agentkv.clock import Clock
from agentkv.core.hint import Hint, HintKind, SessionFacts
from agentkv.core.task import UNATTRIBUTED, Caller
from agentkv.runtime.books import Books
from agentkv.runtime.emit import Emitter
from agentkv.runtime.purse import TaskPurse
from agentkv.runtime.ratefiles import rates_folder
from agentkv.runtime.reach import Reach
from agentkv.runtime.routes import Route
from agentkv.runtime.sessions import session_of

MOST_WAYS = 16
"""Other endpoints that are told hints; calls to further ones go as they are."""
_MOST_SEEN = 1024


@dataclass(slots=True, kw_only=True)
class Way:
    """One endpoint. `seen`: sessions that it answered, and their tasks."""

    found: Found
    reach: Reach
    route: Route
    warm: Prewarm | None = None
    seen: OrderedDict[str, str] = field(default_factory=OrderedDict)

    def tell(self, hint: Hint) -> None:
        """Tell hints of sessions that it answered."""
        session = hint.session or hint.task
        if session in self.seen:
            self.reach.tell(hint)
            if self.warm is not None:
                self.warm.hear(hint)
            if hint.kind is HintKind.SESSION_END:
                self.seen.pop(session, None)

    def turn(self, kind: HintKind, about: SessionFacts) -> None:
        """Somebody's own client starts or ends a call, of which no hint tells."""
        if self.warm is not None:
            self.warm.hear(
                Hint(id="", kind=kind, at_s=0.0, ts_ms=0, task=about.task, session=about.session, about=about)
            )

    def saw(self, session: str, task: str) -> None:
        """It answers a call of this session."""
        self.seen[session] = task
        while len(self.seen) > _MOST_SEEN:
            self.seen.popitem(last=False)


class Ways:
    """Thread-safe; `close()` is idempotent."""

    def __init__(self, *, emitter: Emitter, clock: Clock, caller: Callable[[], Caller], books: Books) -> None:
        self.spends = False
        """Whether endpoints of people's own clients may be sent requests of ours, paid by the task."""
        self._names: dict[str, str] = {}
        self._books = books
        self._purse = TaskPurse(books)
        self._emitter = emitter
        self._clock = clock
        self._caller = caller
        self._lock = threading.Lock()
        self._ways: dict[str, Way] = {}
        self._own: Way | None = None
        self._closed = False
        self._hears = False
        self._endpoints = Endpoints(rates_folder().parent)
        self._proxied: dict[str, bool] = {}
        self.injector = self._injector(direct=True)  # one for all: what a server does not take, nobody sends it again
        self._indirect = self._injector(direct=False)

    def _injector(self, *, direct: bool) -> Injector:
        return Injector(
            partial(self._carries, direct), on_refused=self._refused if direct else None,
            ended=partial(self._ended, direct), may_wait=partial(self._may_wait, direct),
        )  # fmt: skip

    def injector_of(self, options: Mapping[str, Any], *, spends: bool) -> Injector:
        """What adds fields to the requests of a client with these options; `spends`: it may be sent requests of ours."""
        if is_direct(options):
            self.spends = self.spends or spends
            return self.injector
        if spends:
            log.warn_once(
                "keep_alive_left_out", note="this client has a way of its own, and only its own requests go it"
            )
        return self._indirect

    def name(self, speaks: Mapping[str, str]) -> None:
        """What is at these addresses, where it is not asked, or asked in vain. Raises ConfigError for no engine's name."""
        named = {place(base_url): checked(engine) for base_url, engine in speaks.items()}
        with self._lock:
            self._names |= named

    def own(self, engine: Any) -> None:
        """`engine` is a remote one: its calls take this way, and its endpoint hears every hint."""
        about = engine.endpoint
        self._emitter.book.salt = about.get("salt", "")
        self._emitter.book.routed = True
        where = place(about["base_url"])
        way = self._made(
            where,
            api_key=about["api_key"],
            engine=about.get("engine", "auto"),
            probe=about.get("probe", False),
            spends=lambda: bool(about.get("prewarm", False)),
            within_s=about.get("timeout_s"),
        )
        self._ways[where] = self._own = way
        engine.routing = way.route
        self._emitter.subscribe(partial(_all, way))

    def stats(self) -> dict[str, Any]:
        """Plain JSON values: the engine's endpoint, and under "others" those of people's own clients; {} without any."""
        with self._lock:
            others = {where: way for where, way in self._ways.items() if way is not self._own}
        told = {} if self._own is None else self._own.reach.stats()
        return told | {"others": {where: way.reach.stats() for where, way in others.items()}} if others else told

    def close(self) -> None:
        """Tell the ends of sessions that are still queued, in at most a second each, and stop."""
        with self._lock:
            self._closed = True
            ways = list(self._ways.values())
        for way in ways:
            if way.warm is not None:
                way.warm.close()
            way.reach.close()

    # -- people's own clients

    def _carries(self, direct: bool, request: Any) -> Extra | None:
        who = self._caller()
        way = self._way(request, direct=direct)
        if way is None or who.task == UNATTRIBUTED:
            return None
        session = session_of(who)
        way.saw(session, who.task)
        book = self._emitter.book
        book.seen(session, who, model=model_of(request), tokens=tokens_of(request))
        about = book.facts(session, task=who.task)
        extra = way.route.carries(replace(about, within_s=within_s(request)) if way.found.may_wait else about)
        way.turn(HintKind.TURN_START, about)
        return extra

    def _ended(self, direct: bool, request: Any, extra: Extra, tokens: int, cached_tokens: int | None) -> None:
        way = self._ways.get(self._key(place_of(request), direct=direct))
        if way is not None:
            if extra.owed:
                way.found.ended(extra.session, tokens=tokens, cached_tokens=cached_tokens)
            way.turn(HintKind.TURN_END, self._emitter.book.facts(extra.session))

    def _may_wait(self, direct: bool, request: Any) -> bool:
        way = self._ways.get(self._key(place_of(request), direct=direct))
        return way is None or way.found.may_wait

    def _refused(self, at: Place, names: frozenset[str]) -> None:
        way = self._ways.get(at.origin)
        if way is not None:
            way.found.refused(names, path=at.path, model=at.model)

    def _key(self, where: str, *, direct: bool) -> str:
        """Where a server's way is kept: one for clients that reach it as anybody does, and one for all others."""
        if direct and where not in self._proxied:
            self._proxied[where] = is_proxied(where)
        return where if direct and not self._proxied[where] else f"{where} (by its clients' own way)"

    def _way(self, request: Any, *, direct: bool) -> Way | None:
        where = place_of(request)
        name = self._key(where, direct=direct)
        with self._lock:
            way = self._ways.get(name)
            speaks, hosted = self._names.get(where, "auto"), provider(where)
            if way is None and speaks == "auto" and hosted == "":
                return None  # nobody whom we could tell anything
            if way is None and len(self._ways) < MOST_WAYS and not self._closed:
                if name == where:
                    scheme, _, key = request.headers.get("authorization", "").partition(" ")
                    way = self._made(where, api_key=key if scheme.lower() == "bearer" else "", engine=speaks)
                else:  # what would have to be asked is not known
                    unasked = speaks if speaks not in ("auto", "ask") else "auto" if hosted else "off"
                    way = self._made(where, api_key="", engine=unasked, spends=_never)
                self._ways[name] = way
                self._emitter.subscribe(way.tell)
                if not self._hears:
                    self._hears = True
                    self._books.on_fact(self._fact)
            return way

    def _fact(self, fact: Fact) -> None:
        """A task is over: the sessions that only its own clients knew are, too."""
        if not isinstance(fact, TaskFact) or fact.event != "finished":
            return
        with self._lock:
            ways = [way for way in self._ways.values() if way is not self._own]
        for session in {session for way in ways for session, task in list(way.seen.items()) if task == fact.task}:
            self._emitter.session_end(task=fact.task, session=session)

    def _made(
        self,
        where: str,
        *,
        api_key: str,
        engine: str = "auto",
        probe: bool = False,
        spends: Callable[[], bool] | None = None,
        within_s: float | None = None,
    ) -> Way:
        found = Found(
            where, api_key=api_key, clock=self._clock, engine=engine, endpoints=self._endpoints, probe_priority=probe
        )
        route = Route(found, book=self._emitter.book, injector=self.injector, within_s=within_s)
        way = Way(found=found, reach=Reach(found, clock=self._clock), route=route)

        def known(what: Known) -> None:
            self.injector.forget(where)
            for path, model, name in what.refused:
                self.injector.refuse(where, frozenset((name,)), path=path, model=model)
            if self.spends if spends is None else spends():
                self._warms(way)

        found.on_known(known)
        return way

    def _warms(self, way: Way) -> None:
        """From now on waiting contexts of this endpoint are computed, or renewed, before they are needed."""
        strategy = way.found.strategy(lambda: way.route.running)
        if strategy is not None and way.warm is None and not self._closed:
            way.warm = Prewarm(strategy=strategy, purse=self._purse, clock=self._clock, note=way.reach.note)
            way.route.keep = way.warm.keep


def is_proxied(place: str) -> bool:
    """Whether HTTP libraries reach this address through a proxy that the environment names."""
    parts = urlsplit(place)
    proxies = getproxies()
    return bool(proxies.get(parts.scheme) or proxies.get("all")) and not proxy_bypass(parts.netloc.rstrip(":"))


def _never() -> bool:
    return False


def _all(way: Way, hint: Hint) -> None:
    way.reach.tell(hint)
    if way.warm is not None:
        way.warm.hear(hint)
