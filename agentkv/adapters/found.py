"""Found: the adapter of an endpoint of which only the address is known; it is asked what it is.

Covers which adapter an endpoint gets and passing everything on. Hosted providers are known by their address; they and all
other public hosts are never asked, unless the user says so; what is nothing we know is left alone: hints are UNSUPPORTED there and requests stay as they are. One that does
not answer is asked again later and later, by hints; a call waits for that once and never again. One that answered is
asked again when it was away, after a while, and when it refuses what its kind takes: if it is another engine now, the
adapter is another one. What is asked is in `probe.py`.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Mapping, Sequence

from agentkv import log
from agentkv.adapters.base import Adapter, DeliveryReceipt, Extra, Outcome, Routing, Telling, Unreachable
from agentkv.adapters.http import Endpoint
from agentkv.adapters.metrics import Hits, Load
from agentkv.adapters.prewarm import Prewarming, Strategy
from agentkv.adapters.probe import PROBE_S, Endpoints, Known, identify, provider
from agentkv.clock import Clock
from agentkv.core.hint import Hint, SessionFacts
from agentkv.core.usage import Usage
from agentkv.errors import ConfigError

__all__ = ["ENGINES", "Found", "adapter_for", "probe"]

ENGINES: dict[str, str] = {
    "llama.cpp": "agentkv.adapters.llamacpp:LlamaCpp",
    "vllm": "agentkv.adapters.vllm:Vllm",
    "dynamo": "agentkv.adapters.dynamo:Dynamo",
    "openai": "agentkv.adapters.openai_hosted:OpenAIHosted",
    "anthropic": "agentkv.adapters.anthropic_hosted:AnthropicHosted",
}
"""What speaks to which engine: `Class(base_url, api_key=..., clock=..., known=...)`. One without an adapter is left alone."""
_FIRST_AGAIN_S = 1.0
_MOST_AGAIN_S = 30.0
AGE_S = 600.0
"""So long an answer holds; then it is asked for again, beside the calls."""


def probe(base_url: str, *, api_key: str = "", within_s: float = PROBE_S) -> str:
    """What answers at `base_url`, "" for what we do not know. Raises Unreachable."""
    return identify(base_url, api_key=api_key, within_s=within_s).engine


def adapter_for(known: Known, base_url: str, *, api_key: str, clock: Clock) -> Adapter | None:
    """The adapter of an engine; None where there is none for it. Never raises."""
    where = ENGINES.get(known.engine)
    if where is None:
        return None
    module, _, name = where.partition(":")
    try:
        made: Adapter = getattr(importlib.import_module(module), name)(
            base_url, api_key=api_key, clock=clock, known=known
        )
    except ImportError as error:
        log.warn_once("adapter_missing", engine=known.engine, error=str(error))
        return None
    except Exception as error:
        log.failed("adapter_failed", engine=known.engine, error=repr(error))
        return None
    return made


def checked(engine: str) -> str:
    """The name of an engine, "auto", "ask" or "off". Raises ConfigError for any other."""
    if engine not in ("auto", "ask", "off") and engine not in ENGINES:
        raise ConfigError(f"speaks={engine!r} is unknown; there are auto, ask, off, {', '.join(ENGINES)}")
    return engine


class Found:
    """Adapter and routing of whatever is at `base_url`.

    `engine` names what it is ("vllm", "anthropic", ...) where that is known better than a probe could tell; "ask" has
    it asked although its address is a public one; "off" leaves it alone. `probe_priority` allows one request of one token that asks whether the server takes a `priority`; `endpoints`
    remembers the answer.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str = "",
        clock: Clock,
        engine: str = "auto",
        endpoints: Endpoints | None = None,
        probe_priority: bool = False,
    ) -> None:
        checked(engine)
        self._base_url = base_url
        self._key = api_key
        self._clock = clock
        self._engine = engine
        self._endpoints = endpoints
        self._probe_priority = probe_priority
        self._lock = threading.Lock()
        self._adapter: Adapter | None = None
        self._routing: Routing | None = None  # the same, if it is one: asking that costs as much as all the rest
        self._asked = engine == "off"
        self._again_s = 0.0
        self._pause_s = _FIRST_AGAIN_S
        self._why = ""
        self._server = Endpoint(base_url, api_key=api_key)
        self._known = Known()
        self._known_s = 0.0
        self._looking = threading.Lock()
        self._closed = False
        self._hits: Hits | None = None
        self._knows: list[Callable[[Known], None]] = []

    @property
    def name(self) -> str:
        return "unknown" if self._adapter is None else self._adapter.name

    @property
    def patience_s(self) -> float:
        return PROBE_S if self._adapter is None else self._adapter.patience_s

    def refused(self, names: frozenset[str], *, path: str = "", model: str = "") -> None:
        """The server does not take these fields, for this path and model: remembered where it says what it is, and still is that."""

        def remembered() -> None:
            if self._endpoints is not None:
                self._endpoints.refused(self._base_url, self._known, names, path=path, model=model)

        if not self._look_soon(_MOST_AGAIN_S, then=remembered):
            remembered()

    @property
    def may_wait(self) -> bool:
        """Whether `carries` may take longer than an event loop has."""
        return not self._asked if self._adapter is None else getattr(self._adapter, "waits", False)

    def on_known(self, hear: Callable[[Known], None]) -> None:
        """Tell `hear` what the endpoint is, when that is known, and each time when it is another."""
        self._knows.append(hear)

    def deliver(self, hint: Hint, within_s: float) -> DeliveryReceipt:
        outcome, detail = Outcome.UNSUPPORTED, "nothing that we know answers there"
        try:
            adapter = self._found()
            self._look_soon(AGE_S)
            if adapter is not None:
                return adapter.deliver(hint, within_s)
        except Unreachable as error:
            outcome, detail = Outcome.FAILED, str(error)
        return DeliveryReceipt(
            adapter=self.name, hint=hint.id, kind=str(hint.kind), session=hint.session or hint.task, outcome=outcome,
            detail=detail,
        )  # fmt: skip

    def tick(self) -> tuple[Sequence[DeliveryReceipt], float | None]:
        return ((), None) if self._adapter is None else self._adapter.tick()

    def reset(self) -> None:
        if self._is_asked_again() and self._looking.acquire(blocking=False):
            try:
                self._look()
            finally:
                self._looking.release()
        if self._adapter is not None:
            self._adapter.reset()

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._server.close()
        if self._adapter is not None:
            self._adapter.close()

    def carries(self, about: SessionFacts) -> Extra | None:
        if not self._asked and self._again_s > 0:  # it did not answer; hints ask again, calls do not wait for it
            return None
        try:
            self._found()
        except Unreachable:
            return None
        self._look_soon(AGE_S)
        return None if self._routing is None else self._routing.carries(about)

    def ended(self, session: str, *, tokens: int, cached_tokens: int | None) -> None:
        if self._routing is not None:
            self._routing.ended(session, tokens=tokens, cached_tokens=cached_tokens)

    def cached_by(self, usage: Usage) -> Mapping[str, int] | None:
        if isinstance(self._adapter, Telling):
            return self._adapter.cached_by(usage)
        return None if self._hits is None else self._hits.of_call(usage.cached_tokens, usage.input_tokens)

    def strategy(self, running: Callable[[], int]) -> Strategy | None:
        """When a waiting prompt is worth sending to this endpoint again; None where it never is. `running`: own calls."""
        made = getattr(self._adapter, "strategy", None)
        if made is not None:
            strategy: Strategy | None = made()
            return strategy
        if self._engine == "auto" and provider(self._base_url) is not None:
            log.warn_once(
                "public_host_not_prewarmed", origin=self._base_url, advice="if it is yours, name it: speaks=..."
            )
            return None
        load = Load(self._server)

        def busy() -> str:
            if not getattr(self._adapter, "wants_prewarm", True):
                return "the engine's own way brings it back"
            told = load.busy()
            if told is None:
                return "own calls are under way" if running() else ""
            return told

        return Prewarming(busy=busy)

    def _found(self) -> Adapter | None:
        """The adapter, if there is one; asks the endpoint what it is where that is not known and not asked just now."""
        if self._asked:
            return self._adapter
        with self._lock:
            if self._asked:
                return self._adapter
            now_s = self._clock.now_s()
            if now_s < self._again_s:
                raise Unreachable(f"not asked again yet: {self._why}")
            try:
                known = self._identified()
            except Unreachable as error:
                self._again_s, self._why = self._clock.now_s() + self._pause_s, str(error)
                self._pause_s = min(2 * self._pause_s, _MOST_AGAIN_S)
                raise
            self._speak_as(known)
            self._asked = True
        for hear in self._knows:
            hear(known)
        return self._adapter

    def _speak_as(self, known: Known) -> None:
        self._known, self._known_s = known, self._clock.now_s()
        self._adapter = adapter_for(known, self._base_url, api_key=self._key, clock=self._clock)
        self._routing = self._adapter if isinstance(self._adapter, Routing) else None
        self._hits = Hits(self._server) if known.engine == "vllm" else None
        if self._hits is not None:
            self._hits.start()

    # -- whether it still is what it was

    def _is_asked_again(self) -> bool:
        return self._asked and not self._closed and self._named() is None

    def _look_soon(self, age_s: float, *, then: Callable[[], None] | None = None) -> bool:
        """Ask on another thread what it is, if nobody has for so long; `then` is done if it is what it was."""
        now_s = self._clock.now_s()
        if now_s - self._known_s < age_s or not self._is_asked_again() or not self._looking.acquire(blocking=False):
            return False
        self._known_s = now_s

        def look() -> None:
            try:
                if self._look() and then is not None:
                    then()
            except Exception as error:
                log.failed("adapter_failed", error=repr(error))
            finally:
                self._looking.release()

        threading.Thread(target=look, name="agentkv-found", daemon=True).start()
        return True

    def _look(self) -> bool:
        """Whether it says that it is what it was. To another one we speak as to that; if nobody answers, as before."""
        try:
            said = self._said()
            self._known_s = self._clock.now_s()
            if said.engine == self._known.engine and (said.engine != "vllm" or said.same(self._known)):
                return True
            known = self._learned(said)
        except Unreachable:
            return False
        with self._lock:
            if self._closed:
                return False
            before = self._adapter
            self._speak_as(known)
        log.count("endpoint_replaced")
        for hear in self._knows:
            hear(known)
        if before is not None:
            before.close()
        return False

    def _named(self) -> str | None:
        """What it is by its name or its address, whatever it says."""
        if self._engine == "ask":
            return None
        return provider(self._base_url) if self._engine == "auto" else self._engine

    def _identified(self) -> Known:
        named = self._named()
        if named is not None:
            return Known(engine=named)
        return self._learned(self._said())

    def _said(self) -> Known:
        return identify(self._base_url, api_key=self._key, within_s=PROBE_S, anyway=self._engine == "ask")

    def _learned(self, known: Known) -> Known:
        """`known` with what is remembered of it."""
        if self._endpoints is None:
            return known
        return self._endpoints.learned(
            self._base_url,
            known,
            api_key=self._key if self._probe_priority else None,
            probe_priority=self._probe_priority,
            anyway=self._engine == "ask",
        )
