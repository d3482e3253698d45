"""OpenAI: where a session's requests are routed, how long its prefix is kept, and in which service tier it is served.

Covers `prompt_cache_key` (one for a task and its sub-agents: they share the beginning), `prompt_cache_options` and one
breakpoint behind the instructions for gpt-5.6 and later, and the flex tier for what nobody waits for, where the price list
has it. The old completions know none of these. Not sent unless asked for: `prompt_cache_retention` for older models (it keeps prompts for a day), and the priority
tier (it costs more). Keys are digests: a task's name does not leave this machine.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from agentkv.adapters.base import DeliveryReceipt, Extra, Outcome
from agentkv.adapters.hosted_prices import cache_prices, has_long, has_tier
from agentkv.adapters.hosted_waits import HostedWaits
from agentkv.adapters.prewarm import Plan, Wait
from agentkv.clock import Clock, SystemClock
from agentkv.core.hint import Hint, HintKind, SessionFacts
from agentkv.core.task import UNATTRIBUTED

OPTIONS_FROM = (5, 6)
"""The first generation with `prompt_cache_options` and breakpoints."""
SHORT_S, LONG_S = 1800.0, 43_200.0
"""The two lifetimes of its options, "30m" and "12h"; only Responses take the second."""
BREAKPOINT = "prompt_cache_breakpoint"
_GENERATION = re.compile(r"(?:.*/)?gpt-(\d+)(?:\.(\d+))?(?=$|[-@:])")
_CACHED_ROUTES = ("/chat/completions", "/responses")
_STABLE_ROLES = ("system", "developer")
_LOW = 0
_MOST_SESSIONS = 4096


class OpenAIHosted:
    """The provider's own API. `pays_priority`: people's calls may go in the dearer tier. `long_retention`: "24h" for older models."""

    name = "openai"
    patience_s = 1.0

    def __init__(
        self,
        base_url: str,  # noqa: ARG002  all adapters are made alike
        *,
        api_key: str = "",  # noqa: ARG002
        clock: Clock | None = None,
        known: Any = None,  # noqa: ARG002
        pays_priority: bool = False,
        long_retention: bool = False,
    ) -> None:
        self._clock = clock or SystemClock()
        self._pays_priority = pays_priority
        self._long_retention = long_retention
        self._waits: dict[str, HostedWaits] = {}
        self._ended_s: dict[str, tuple[str, float, str]] = {}
        self._lock = threading.Lock()
        self._responses: OrderedDict[str, None] = OrderedDict()  # sessions whose last call was one

    def carries(self, about: SessionFacts) -> Extra | None:
        """Fields for the next call; nothing for a caller of whom nothing is known."""
        if about.session == UNATTRIBUTED:
            return None
        body: dict[str, Any] = {"prompt_cache_key": key_of(about)}
        paths: dict[str, Mapping[str, Any]] = {}
        tier = self._tier(about)
        if tier:
            body["service_tier"] = tier
        generation = generation_of(about.model)
        if generation >= OPTIONS_FROM:
            body["prompt_cache_options"] = {"ttl": "30m"}
            if self._is_long(about):
                paths["/responses"] = {"prompt_cache_options": {"ttl": "12h"}}
            marks = frozenset((BREAKPOINT,))
            return Extra(
                body=body, paths=paths, routes=_CACHED_ROUTES, shape=broken, marks=marks,
                saw=partial(self._saw, about.session) if about.purpose == "answer" else None,
            )  # fmt: skip
        if self._long_retention and generation > (_LOW, _LOW):
            body["prompt_cache_retention"] = "24h"
        return Extra(body=body, routes=_CACHED_ROUTES)

    def ended(self, session: str, *, tokens: int, cached_tokens: int | None) -> None:
        """Nothing was taken that had to be given back."""

    def _tier(self, about: SessionFacts) -> str:
        if about.priority < 0 and has_tier(about.model, "flex"):
            return "flex"
        if about.priority > 0 and self._pays_priority and has_tier(about.model, "priority"):
            return "priority"
        return ""

    def _is_long(self, about: SessionFacts) -> bool:
        """Whether twelve hours are worth their price, where the list has one: by how long this session's calls were apart."""
        if not has_long(about.model):
            return False
        waits = self._waits_of(about.model)
        choice = waits.choose(about.session, live_tokens=about.tokens, new_tokens=max(1, about.osl or 1))
        return choice.mark == "long"

    def _waits_of(self, model: str) -> HostedWaits:
        return self._waits.setdefault(model, HostedWaits(cache_prices(model, short_s=SHORT_S, long_s=LONG_S)))

    def _saw(self, session: str, request: Any) -> None:
        """The session's last call was taken."""
        with self._lock:
            self._responses.pop(session, None)
            if request.url.path.endswith("/responses"):
                self._responses[session] = None
            while len(self._responses) > _MOST_SESSIONS:
                self._responses.popitem(last=False)

    def strategy(self) -> PreparesResponses:
        """Responses can prepare a cache without an answer; chats cannot."""
        return PreparesResponses(responds=lambda session: session in self._responses)

    # -- hints

    def deliver(self, hint: Hint, within_s: float) -> DeliveryReceipt:  # noqa: ARG002  nothing is sent
        session, now_s = hint.session or hint.task, self._clock.now_s()
        model = "" if hint.about is None else hint.about.model
        match hint.kind:
            case HintKind.TURN_END:
                self._ended_s[session] = (model, now_s, "person")
            case HintKind.TOOL_START if session in self._ended_s:
                known, at_s, _ = self._ended_s[session]
                self._ended_s[session] = (known, at_s, "tool")
            case HintKind.TURN_START if session in self._ended_s:
                known, at_s, kind = self._ended_s.pop(session)
                self._waits_of(known).learn(session, "tool" if kind == "tool" else "person", max(0.0, now_s - at_s))
            case HintKind.SESSION_END:
                self._ended_s.pop(session, None)
                self._responses.pop(session, None)
        return DeliveryReceipt(
            adapter=self.name, hint=hint.id, kind=str(hint.kind), session=session, outcome=Outcome.ADVISORY,
            detail="goes with the next request",
        )  # fmt: skip

    def tick(self) -> tuple[Sequence[DeliveryReceipt], float | None]:
        return (), None

    def reset(self) -> None:
        """Nothing is known of the server."""

    def close(self) -> None:
        """Nothing is open."""


class PreparesResponses:
    """Prepares a Responses prompt again where the wait is longer than its cache lives: once, at the low quantile.

    `responds(session)`: whether the session's last call was to Responses.
    """

    def __init__(self, *, responds: Callable[[str], bool]) -> None:
        self._responds = responds

    def plan(self, wait: Wait, now_s: float) -> Plan | None:
        forecast = wait.forecast(now_s)
        if forecast is None or wait.sent or generation_of(wait.about.model) < OPTIONS_FROM:
            return None
        if not self._responds(wait.about.session):
            return None
        due_s = now_s + forecast.quantile_s(0.1) - 5.0
        if due_s <= wait.since_s + SHORT_S:
            return None
        return Plan(due_s=due_s, fields={"prompt_cache_options": {"prewarm": True}})

    def ready(self, wait: Wait, now_s: float) -> str:  # noqa: ARG002
        return ""

    def sent(self, wait: Wait, began_s: float, seconds: float) -> None:
        """Once is enough."""

    def refused(self, wait: Wait) -> None:
        """The next wait has another request."""


def key_of(about: SessionFacts) -> str:
    """The routing key of a session's family, without its name."""
    return f"akv-{hashlib.blake2b(about.task.encode('utf-8', 'surrogatepass'), digest_size=12, person=b'agentkv.key').hexdigest()}"


def generation_of(model: str) -> tuple[int, int]:
    """(5, 6) for gpt-5.6-sol; (0, 0) for what is no such name."""
    found = _GENERATION.match(model)
    return (int(found[1]), int(found[2] or 0)) if found else (_LOW, _LOW)


def broken(path: str, body: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The body with one breakpoint behind its instructions, which other sessions share; None where there is nothing to
    do: no instructions, or breakpoints and options of the user's own.
    """
    messages = body.get("messages" if path.endswith("/chat/completions") else "input")
    if not isinstance(messages, list) or "prompt_cache_options" in body or _has_breakpoint(messages):
        return None
    place = -1
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or message.get("role") not in _STABLE_ROLES:
            break
        place = number
    if place < 0:
        return None
    kind = "text" if path.endswith("/chat/completions") else "input_text"
    content, mark = messages[place].get("content"), {"mode": "explicit"}
    if isinstance(content, str) and content:
        parts: list[Any] = [{"type": kind, "text": content, BREAKPOINT: mark}]
    elif isinstance(content, list) and content and isinstance(content[-1], Mapping) and content[-1].get("type") == kind:
        parts = [*content[:-1], {**content[-1], BREAKPOINT: mark}]
    else:
        return None
    made = dict(body)
    made["messages" if "messages" in body else "input"] = [
        *messages[:place], {**messages[place], "content": parts}, *messages[place + 1 :],
    ]  # fmt: skip
    return made


def _has_breakpoint(messages: Sequence[Any]) -> bool:
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, list) and any(isinstance(part, Mapping) and BREAKPOINT in part for part in content):
            return True
    return False
