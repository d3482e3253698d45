"""Found: the adapter of an endpoint of which only the address is known; it is asked what it is, once.

Covers the probe and passing everything on. An endpoint that is nothing we know, and a hosted one, is left alone: hints are
UNSUPPORTED there and requests stay as they are. One that does not answer is asked again with a later hint.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from agentkv.adapters.base import Adapter, DeliveryReceipt, Outcome, Routing, Unreachable
from agentkv.adapters.http import Endpoint
from agentkv.clock import Clock
from agentkv.core.hint import Hint

PROBE_S = 1.0
HOSTED = ("openai.com", "anthropic.com", "azure.com", "googleapis.com", "mistral.ai", "openrouter.ai", "amazonaws.com")
"""Nobody's own server: never probed."""


def probe(base_url: str, *, api_key: str = "", within_s: float = PROBE_S) -> str:
    """What answers at `base_url`: "llama.cpp", or "" for what we do not know. Raises Unreachable."""
    host = urlsplit(base_url).hostname or ""
    if any(host == known or host.endswith(f".{known}") for known in HOSTED):
        return ""
    server = Endpoint(base_url, api_key=api_key)
    try:
        props = server.get("/props", within_s)
    except Unreachable as error:
        if error.status is not None:
            return ""
        raise
    finally:
        server.close()
    return "llama.cpp" if isinstance(props, Mapping) and "total_slots" in props else ""


class Found:
    """Adapter and routing of whatever is at `base_url`."""

    def __init__(self, base_url: str, *, api_key: str = "", clock: Clock) -> None:
        self._base_url = base_url
        self._key = api_key
        self._clock = clock
        self._lock = threading.Lock()
        self._adapter: Adapter | None = None
        self._asked = False

    @property
    def name(self) -> str:
        return "unknown" if self._adapter is None else self._adapter.name

    @property
    def patience_s(self) -> float:
        return PROBE_S if self._adapter is None else self._adapter.patience_s

    def deliver(self, hint: Hint, within_s: float) -> DeliveryReceipt:
        outcome, detail = Outcome.UNSUPPORTED, "nothing that we know answers there"
        try:
            adapter = self._found()
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
        if self._adapter is not None:
            self._adapter.reset()

    def close(self) -> None:
        if self._adapter is not None:
            self._adapter.close()

    def fields(self, session: str) -> Mapping[str, Any]:
        try:
            routing = self._routing(self._found())
        except Unreachable:
            return {}
        return {} if routing is None else routing.fields(session)

    def ended(self, session: str, *, tokens: int, cached_tokens: int | None) -> None:
        routing = self._routing(self._adapter)
        if routing is not None:
            routing.ended(session, tokens=tokens, cached_tokens=cached_tokens)

    def _routing(self, adapter: Adapter | None) -> Routing | None:
        return adapter if isinstance(adapter, Routing) else None

    def _found(self) -> Adapter | None:
        with self._lock:
            if not self._asked:
                kind = probe(self._base_url, api_key=self._key)
                if kind == "llama.cpp":
                    from agentkv.adapters.llamacpp import LlamaCpp

                    self._adapter = LlamaCpp(self._base_url, api_key=self._key, clock=self._clock)
                self._asked = True
            return self._adapter
