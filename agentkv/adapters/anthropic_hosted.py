"""Anthropic: marks for the prompt cache, for as long as the next call is likely to be off, and keep-alives that pay.

Covers `cache_control` marks in bodies of `/v1/messages`: at the end of what is stable (tools, system), where the last call
ended, and at the end; at most three, all for five minutes or all for an hour, or none where nothing would be read again.
A body with a mark of the user's own is left alone, and so is every other route: the OpenAI-compatible one has no marks.
The choice is `policy.hosted`'s, over waits that are learnt here.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from agentkv.adapters.base import DeliveryReceipt, Extra, Outcome
from agentkv.adapters.hosted_prices import cache_prices
from agentkv.adapters.hosted_waits import HostedWaits, Kind
from agentkv.adapters.keepalive import KeepingAlive
from agentkv.adapters.replay import has_budget
from agentkv.clock import Clock, SystemClock
from agentkv.core.hint import Hint, HintKind, SessionFacts
from agentkv.core.task import UNATTRIBUTED
from agentkv.policy.hosted import Mark

MOST_MARKS = 4
"""What the provider takes in one request; ours are three at most."""
FEWEST_TOKENS = 1024
"""A shorter prefix is not cached by any model."""
TTL: dict[Mark, str] = {"short": "5m", "long": "1h"}
MARK = "cache_control"
_QUOTED_MARK = b'"cache_control"'
_ROUTES = ("/v1/messages",)
_CHARS_PER_TOKEN = 4
_MARKABLE = ("text", "image", "document", "tool_use", "tool_result", "search_result")
_MOST_SESSIONS = 4096


class AnthropicHosted:
    """The provider's own API, or whatever speaks it. `deliver`, `tick` and `reset` by one thread, the rest from any."""

    name = "anthropic"
    patience_s = 1.0

    def __init__(
        self, base_url: str, *, api_key: str = "", clock: Clock | None = None, known: Any = None  # noqa: ARG002
    ) -> None:  # fmt: skip
        self._clock = clock or SystemClock()
        self._keeps = False
        self._lock = threading.Lock()
        self._waits: OrderedDict[str, HostedWaits] = OrderedDict()  # by model: prices differ
        self._sessions: OrderedDict[str, tuple[str, int]] = OrderedDict()  # its model, and how many messages it had

    def carries(self, about: SessionFacts) -> Extra | None:
        """Marks for the body; nothing for a caller of whom nothing is known."""
        if about.session == UNATTRIBUTED:
            return None
        return Extra(
            routes=_ROUTES, shape=partial(self._marked, about.session), marks=frozenset((MARK,)),
            saw=partial(self._saw, about.session),
        )  # fmt: skip

    def _saw(self, session: str, request: Any) -> None:
        """It was taken; without marks where those were refused, too short, or the user's own affair: nothing to keep alive."""
        if request.read().rfind(_QUOTED_MARK) < 0 and (waits := self._waits_of_session(session)) is not None:
            waits.unmarked(session)

    def ended(self, session: str, *, tokens: int, cached_tokens: int | None) -> None:
        """Nothing was taken that had to be given back."""

    def _marked(self, session: str, path: str, body: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The body with our marks; None where there is nothing to mark or the user marks it."""
        messages = body.get("messages")
        if not path.endswith(_ROUTES) or not isinstance(messages, list) or not messages or is_marked(body):
            return None
        model, tokens = str(body.get("model", "")), _size(body) // _CHARS_PER_TOKEN
        waits = self.waits_of(model)
        choice = waits.call(
            session, _kind(messages), tokens=tokens, now_s=self._clock.now_s(), keepable=not has_budget(body)
        )
        with self._lock:
            before = self._sessions.pop(session, (model, 0))
            self._sessions[session] = (model, len(messages))
            while len(self._sessions) > _MOST_SESSIONS:
                self._sessions.popitem(last=False)
        if choice.mark == "none" or tokens < FEWEST_TOKENS:
            return None
        ended_at = before[1] if before[0] == model else 0
        return marked(body, {"type": "ephemeral", "ttl": TTL[choice.mark]}, ended_at=ended_at)

    def waits_of(self, model: str) -> HostedWaits:
        """What is learnt of the waits behind calls of a model, with its prices."""
        with self._lock:
            waits = self._waits.get(model)
            if waits is None:
                waits = self._waits[model] = HostedWaits(cache_prices(model), keeps=self._keeps)
                while len(self._waits) > 64:  # noqa: PLR2004  models at once
                    self._waits.popitem(last=False)
            return waits

    def strategy(self) -> KeepingAlive:
        """When a prefix is worth reading just before it expires. From now on choices count on that."""
        self._keeps = True
        with self._lock:
            for waits in self._waits.values():
                waits.keeps = True
        return KeepingAlive(waits=self._waits_of_session)

    def _waits_of_session(self, session: str) -> HostedWaits | None:
        with self._lock:
            model, _ = self._sessions.get(session, ("", 0))
            return self._waits.get(model)

    # -- hints

    def deliver(self, hint: Hint, within_s: float) -> DeliveryReceipt:  # noqa: ARG002  nothing is sent
        outcome, detail = Outcome.ADVISORY, "noted for the next request's mark"
        session = hint.session or hint.task
        if hint.kind is HintKind.SESSION_END:
            waits = self._waits_of_session(session)
            if waits is not None:
                waits.forget(session)
            with self._lock:
                self._sessions.pop(session, None)
            outcome, detail = Outcome.UNSUPPORTED, "a cached prefix cannot be dropped; it expires"
        return DeliveryReceipt(
            adapter=self.name, hint=hint.id, kind=str(hint.kind), session=session, outcome=outcome, detail=detail
        )

    def tick(self) -> tuple[Sequence[DeliveryReceipt], float | None]:
        return (), None

    def reset(self) -> None:
        """Nothing is known of the server."""

    def close(self) -> None:
        """Nothing is open."""


def is_marked(body: Mapping[str, Any]) -> bool:
    """Whether the body has a mark anywhere: then its caching is the user's own affair."""
    if MARK in body:
        return True
    parts: list[Any] = [*_list(body.get("tools")), *_list(body.get("system"))]
    for message in _list(body.get("messages")):
        if isinstance(message, Mapping):
            for block in _list(message.get("content")):
                parts.append(block)
                parts += _list(block.get("content")) if isinstance(block, Mapping) else []
    return any(isinstance(part, Mapping) and MARK in part for part in parts)


def marked(body: Mapping[str, Any], mark: Mapping[str, str], *, ended_at: int = 0) -> Mapping[str, Any] | None:
    """The body with marks at the end of what is stable, at the end of the first `ended_at` messages, and at the end.

    The order is the provider's: tools, system, messages. What cannot hold a mark (thinking, an empty text) has none.
    """
    made = dict(body)
    found = _stable(made, mark)
    messages = list(made["messages"])
    for place in sorted({ended_at - 1, len(messages) - 1}):
        if 0 <= place < len(messages):
            message = _message(messages[place], mark)
            if message is not None:
                messages[place] = message
                found = True
    made["messages"] = messages
    return made if found else None


def _stable(made: dict[str, Any], mark: Mapping[str, str]) -> bool:
    system = made.get("system")
    if isinstance(system, str) and system.strip():
        made["system"] = [{"type": "text", "text": system, MARK: dict(mark)}]
        return True
    if blocks := _block(system, mark):
        made["system"] = blocks
        return True
    tools = _list(made.get("tools"))
    place = len(tools) - 1
    while place >= 0 and isinstance(tools[place], Mapping) and tools[place].get("defer_loading"):
        place -= 1  # it is not part of the prompt yet, and refused with a mark
    if place >= 0 and isinstance(tools[place], Mapping):
        made["tools"] = [*tools[:place], {**tools[place], MARK: dict(mark)}, *tools[place + 1 :]]
        return True
    return False


def _message(message: Any, mark: Mapping[str, str]) -> dict[str, Any] | None:
    if not isinstance(message, Mapping):
        return None
    content = message.get("content")
    if isinstance(content, str):
        if not content.strip():
            return None
        return {**message, "content": [{"type": "text", "text": content, MARK: dict(mark)}]}
    blocks = _block(content, mark)
    return None if blocks is None else {**message, "content": blocks}


def _block(blocks: Any, mark: Mapping[str, str]) -> list[Any] | None:
    """The blocks with the last that can hold a mark marked; None where the last one cannot."""
    if not isinstance(blocks, list) or not blocks or not isinstance(blocks[-1], Mapping):
        return None
    last = blocks[-1]
    if last.get("type") not in _MARKABLE or (last.get("type") == "text" and not str(last.get("text", "")).strip()):
        return None
    return [*blocks[:-1], {**last, MARK: dict(mark)}]


def _kind(messages: Sequence[Any]) -> Kind:
    """What the call follows: a tool, or a person."""
    last = messages[-1] if isinstance(messages[-1], Mapping) else {}
    blocks = _list(last.get("content"))
    tool = any(isinstance(block, Mapping) and block.get("type") == "tool_result" for block in blocks)
    return "tool" if tool else "person"


def _size(body: Mapping[str, Any]) -> int:
    """About how many characters the prompt has."""
    return sum(_chars(body.get(name)) for name in ("tools", "system", "messages"))


def _chars(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):  # as JSON is parsed; asking for a Mapping takes five times as long
        return sum([_chars(part) for name, part in value.items() if name != "data"])
    return sum(map(_chars, value)) if isinstance(value, list) else 0


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
