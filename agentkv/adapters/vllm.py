"""vLLM: who calls goes with each request, hints go to our plug-in inside it, where there is one.

Covers `kv_transfer_params` (whose context it is: with the plug-in only), `session_id`, `cache_salt`, and `priority` with its
sign turned, where the server was found to take one. Without the plug-in stock vLLM can be told nothing between two calls;
`wants_prewarm` then says that a small request ahead of the next call is all that helps. Does not cover moving KV: that is the
plug-in's (docs/vllm.md).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from agentkv.adapters.base import DeliveryReceipt, Extra, Outcome, Unreachable, receipted
from agentkv.adapters.vllm_door import DoorCaller, Plug, default_socket
from agentkv.clock import Clock, SystemClock
from agentkv.core.hint import Hint, HintKind, SessionFacts
from agentkv.core.task import UNATTRIBUTED
from agentkv.hints.wire import WireContext, WireHint, WireNext, safe

_HERE = ("localhost", "127.0.0.1", "::1")


class Vllm:
    """One server. `deliver`, `tick` and `reset` by one thread; `carries` and `ended` from any.

    `socket`: where its plug-in listens; by default the one place for each user ($AGENTKV_VLLM_SOCKET), and only for a
    server on this machine whose port is one of those that the plug-in tells. `known` says whether it takes a priority: unless that was found out, none is sent.
    """

    name = "vllm"
    patience_s = 1.0

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str = "",  # noqa: ARG002  every adapter is made with it; the plug-in is reached by a socket
        clock: Clock | None = None,
        known: Any = None,
        socket: str | Path | None = None,
    ) -> None:
        place = urlsplit(base_url)
        path = Path(socket) if socket is not None else default_socket() if (place.hostname or "") in _HERE else None
        port = None if socket is not None else _port(place)
        self._clock = clock or SystemClock()
        self._door = None if path is None else DoorCaller(path)
        self._plug = None if path is None else Plug(path, port=port, clock=self._clock)
        if self._plug is not None:
            self._plug.serves()  # asked here, where somebody may wait, rather than by the first call
        self._priority = getattr(known, "priority", None) is True

    @property
    def plugged(self) -> bool:
        """Whether our plug-in answers, and for this server."""
        return self._plug is not None and self._plug.serves()

    @property
    def wants_prewarm(self) -> bool:
        """Whether a small request ahead of a call is the only way to have its context ready."""
        return not self.plugged

    # -- calls

    def carries(self, about: SessionFacts) -> Extra | None:
        """Body fields of the next call; a caller that nobody knows has only its salt and priority."""
        body: dict[str, Any] = {}
        if about.session and about.session != UNATTRIBUTED:
            name = safe(about.session)
            body["session_id"] = name
            if self.plugged:
                body["kv_transfer_params"] = {"agentkv": {"session": name}}
        if about.salt:
            body["cache_salt"] = hidden(about.salt)
        if about.priority and self._priority:
            body["priority"] = -max(-100, min(100, int(about.priority)))  # there the lower goes first
        return Extra(body=body, priority_ok=self._priority, session=about.session) if body else None

    def ended(self, session: str, *, tokens: int, cached_tokens: int | None) -> None:
        """Nothing was taken that had to be given back."""

    # -- hints

    def deliver(self, hint: Hint, within_s: float) -> DeliveryReceipt:
        return receipted(self.name, hint, lambda: self._told(hint, within_s), self._clock)

    def _told(self, hint: Hint, within_s: float) -> tuple[Outcome, str]:
        if self._door is None or self._plug is None or not self._plug.serves():
            if hint.kind in (HintKind.TURN_START, HintKind.TURN_END):
                return Outcome.ADVISORY, "goes with the request"
            return Outcome.UNSUPPORTED, "our plug-in does not serve here (docs/vllm.md)"
        try:
            answer = self._door.say(wired(hint).to_line(), within_s)
        except Unreachable:
            self._plug.doubt()
            raise
        outcome = answer.get("outcome")
        known = outcome if outcome in {str(one) for one in Outcome} else Outcome.FAILED
        return Outcome(known), str(answer.get("detail", ""))[:200]

    def tick(self) -> tuple[Sequence[DeliveryReceipt], float | None]:
        return (), None

    def reset(self) -> None:
        """A new server has a new door."""
        self.close()
        if self._plug is not None:
            self._plug.forget()

    def close(self) -> None:
        if self._door is not None:
            self._door.close()


def _port(place: SplitResult) -> int | None:
    try:
        return place.port or (443 if place.scheme == "https" else 80)
    except ValueError:  # a port that is no number
        return None


def wired(hint: Hint) -> WireHint:
    """The neutral hint with what is known of its session; what becomes of its KV is for the plug-in to say."""
    about = hint.about
    if about is None:
        return WireHint.of(hint)
    return WireHint.of(
        hint,
        parent=about.parent,
        turn=max(0, about.turn),
        next=WireNext(priority=max(-100, min(100, about.priority)), osl=about.osl),
        ctx=WireContext(model=about.model, tokens=max(0, about.tokens)),
    )


def hidden(salt: str) -> str:
    """A digest of a tenant's salt, short and plain enough for every route: it parts caches as well, the secret stays here."""
    return hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=16, person=b"agentkv.vllm").hexdigest()
