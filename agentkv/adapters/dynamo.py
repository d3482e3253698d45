"""NVIDIA Dynamo: who calls and how urgently goes with each request, tools are events, the end of a session is told.

Covers `nvext` (only fields that 1.6.1 knows: it refuses all others), the session headers, session-final as a request of
its own, tool events by ZMQ (`dynamo_events.py`). Does not cover moving KV: a client cannot ask Dynamo for that.
What is real there depends on the server: `priority` needs `--router-mode kv` with a queue threshold, a session stays on
its worker with `--router-session-affinity-ttl-secs`, `osl` counts with `--router-track-output-blocks`.
"""

from __future__ import annotations

import hashlib
import math
import os
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentkv.adapters.base import DeliveryReceipt, Extra, Outcome, Unreachable, receipted
from agentkv.adapters.dynamo_events import TOPIC, ToolEvents, ZmqMissing, record_of
from agentkv.adapters.http import Endpoint
from agentkv.clock import Clock, SystemClock
from agentkv.core.hint import Hint, HintKind, SessionFacts
from agentkv.core.task import UNATTRIBUTED
from agentkv.hints.wire import safe

SESSION, PARENT, FINAL = "X-Dynamo-Session-ID", "X-Dynamo-Parent-Session-ID", "X-Dynamo-Session-Final"
EVENTS_VARIABLE = "DYN_REQUEST_TRACE_TOOL_EVENTS_ZMQ_ENDPOINT"
"""The frontend's own variable; where it is set here as well, tool events go there."""
TOPIC_VARIABLE = "DYN_REQUEST_TRACE_TOOL_EVENTS_ZMQ_TOPIC"
PREFILL_VARIABLE = "AGENTKV_DYNAMO_PREFILL"
_MOST_OSL = 2**32 - 1
_MOST_SESSIONS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a response's `nvext` says of the call, where it was asked (`details=True`); None for what it does not say.

    `hit_rate` is the router's own expectation of the share of the prompt that its worker holds, 0..1.
    """

    worker: int | None = None
    hit_rate: float | None = None
    ttft_s: float | None = None
    queued: int | None = None


class Dynamo:
    """One frontend. `deliver`, `tick` and `reset` by one thread; `carries` and `ended` from any.

    `speculative_prefill`: after a turn Dynamo computes the beginning of the next one, at once and on any worker. It knows
    neither tools nor salt then, so that a session with either never asks for it. Off by default (None: the environment's
    AGENTKV_DYNAMO_PREFILL): it gained and lost in as many of our runs, see docs/engines.md.
    `tool_events`: the frontend's ZMQ address; "" for the environment's, or none. `details`: have each answer tell its
    worker and timing in `nvext` (None: where somebody is billed for it); worker and hit rate stand in the bill, `told`
    reads all of it.
    """

    name = "dynamo"
    patience_s = 2.0

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str = "",
        clock: Clock | None = None,
        known: Any = None,
        tool_events: str = "",
        topic: str = "",
        speculative_prefill: bool | None = None,
        details: bool | None = None,
    ) -> None:
        self._server = Endpoint(base_url, api_key=api_key)
        self._clock = clock or SystemClock()
        self._models: Sequence[str] = tuple(getattr(known, "models", ()))
        address = tool_events or os.environ.get(EVENTS_VARIABLE, "")
        self._events = (
            ToolEvents(address, topic=topic or os.environ.get(TOPIC_VARIABLE, "") or TOPIC) if address else None
        )
        given = os.environ.get(PREFILL_VARIABLE, "").lower() in ("1", "true", "yes")
        self._prefills = given if speculative_prefill is None else speculative_prefill
        self._details = details
        self._lock = threading.Lock()
        self._called: OrderedDict[str, str] = OrderedDict()  # sessions that it knows, with their model
        self._tooled: OrderedDict[str, None] = OrderedDict()

    # -- calls

    def carries(self, about: SessionFacts) -> Extra | None:
        """Body and headers of the next call; nothing identifies a caller that nobody knows."""
        with self._lock:
            tooled = about.session in self._tooled
            if about.session != UNATTRIBUTED:
                _note(self._called, about.session, about.model)
        nvext: dict[str, Any] = {}
        hints = self._hints(about, tooled=tooled)
        if hints:
            nvext["agent_hints"] = hints
        if about.salt:
            nvext["cache_salt"] = hidden(about.salt)
        known = about.session != UNATTRIBUTED
        if known if self._details is None else self._details:
            nvext["extra_fields"] = ["worker_id", "timing"]
        headers = headers_of(about)
        if not nvext and not headers:
            return None
        return Extra(body={"nvext": nvext} if nvext else {}, headers=headers, session=about.session)

    def ended(self, session: str, *, tokens: int, cached_tokens: int | None) -> None:
        """Nothing was taken that had to be given back."""

    def _hints(self, about: SessionFacts, *, tooled: bool) -> dict[str, Any]:
        hints: dict[str, Any] = {}
        if about.priority:
            hints["priority"] = max(-100, min(100, int(about.priority)))
        if about.osl:
            hints["osl"] = max(1, min(_MOST_OSL, int(about.osl)))
        if self._prefills and not about.salt and not tooled and about.purpose == "answer":
            hints["speculative_prefill"] = True
        return hints

    # -- hints

    def deliver(self, hint: Hint, within_s: float) -> DeliveryReceipt:
        return receipted(self.name, hint, lambda: self._acted(hint, within_s), self._clock)

    def _acted(self, hint: Hint, within_s: float) -> tuple[Outcome, str]:
        match hint.kind:
            case HintKind.TURN_START | HintKind.TURN_END:
                return Outcome.ADVISORY, "goes with the request"
            case HintKind.SESSION_END:
                return self._final(hint.session or hint.task, within_s)
            case HintKind.TOOL_UPDATE:
                return Outcome.UNSUPPORTED, "Dynamo has no event for that"
        return self._tool(hint, within_s)

    def _tool(self, hint: Hint, within_s: float) -> tuple[Outcome, str]:
        with self._lock:
            _note(self._tooled, hint.session or hint.task, None)
        record = record_of(hint)
        if record is None:
            return Outcome.UNSUPPORTED, "a tool event without a tool"
        if self._events is None:
            return Outcome.UNSUPPORTED, f"no address for tool events: set {EVENTS_VARIABLE} as the frontend has it"
        try:
            self._events.send(record, within_s)
        except ZmqMissing as error:
            return Outcome.UNSUPPORTED, str(error)
        return Outcome.ADVISORY, "recorded there; nothing acts on it"

    def _final(self, session: str, within_s: float) -> tuple[Outcome, str]:
        """A request of its own, of one token: a router that keeps programs lets go of this one and passes nothing on."""
        with self._lock:
            model = self._called.pop(session, None)
            self._tooled.pop(session, None)
        if model is None:
            return Outcome.ADVISORY, "it made no call there"
        model = model or next(iter(self._models), "")
        if not model:
            return Outcome.UNSUPPORTED, "the model's name is not known"
        body = {"model": model, "messages": [{"role": "user", "content": "."}], "max_tokens": 1, "stream": False}
        headers = {SESSION: safe(session), FINAL: "true"}
        try:
            answer = self._server.post("/v1/chat/completions", body, within_s, headers=headers)
        except Unreachable:
            with self._lock:
                _note(self._called, session, model)  # it may be told again
            raise
        if not isinstance(answer, Mapping):
            raise Unreachable("/v1/chat/completions: an answer of another kind")
        return Outcome.ADVISORY, "told as the session's last request"

    def tick(self) -> tuple[Sequence[DeliveryReceipt], float | None]:
        return (), None

    def reset(self) -> None:
        """Its tables may be empty: sessions that were called before have nothing to be released there."""
        with self._lock:
            self._called.clear()
        if self._events is not None:
            self._events.close()

    def close(self) -> None:
        if self._events is not None:
            self._events.close()
        self._server.close()


def headers_of(about: SessionFacts) -> dict[str, str]:
    """Who calls, in Dynamo's own headers and no others: elsewhere the same names mean other things.

    Callers that nobody knows get none: under one name they would all be kept on one worker.
    """
    if not about.session or about.session == UNATTRIBUTED:
        return {}
    headers = {SESSION: safe(about.session)}
    if about.parent and about.parent not in (about.session, UNATTRIBUTED):
        headers[PARENT] = safe(about.parent)
    return headers


def hidden(salt: str) -> str:
    """A digest of a tenant's salt: it parts caches as well, and the secret stays here."""
    return hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=16, person=b"agentkv.dynamo").hexdigest()


def told(response: Any) -> Told:
    """What a response or a stream's chunk says in `nvext`. Never raises; what cannot be true is None."""
    body = response if isinstance(response, Mapping) else getattr(response, "model_extra", None) or {}
    nvext = body.get("nvext") if isinstance(body, Mapping) else None
    workers, timing = _map(nvext, "worker_id"), _map(nvext, "timing")
    ttft_ms, hit_rate = _number(timing.get("ttft_ms")), _number(timing.get("kv_hit_rate"))
    return Told(
        worker=_count(workers.get("decode_worker_id")),
        hit_rate=hit_rate if hit_rate is not None and hit_rate <= 1 else None,
        ttft_s=None if ttft_ms is None else ttft_ms / 1000,
        queued=_count(timing.get("router_queue_depth")),
    )


def _map(body: Any, name: str) -> Mapping[str, Any]:
    part = body.get(name) if isinstance(body, Mapping) else None
    return part if isinstance(part, Mapping) else {}


def _number(value: Any) -> float | None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
    return float(value) if good else None


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _note(table: OrderedDict[str, Any], session: str, value: Any) -> None:
    table[session] = value
    table.move_to_end(session)
    while len(table) > _MOST_SESSIONS:
        table.popitem(last=False)
