"""Prewarm: a waiting context is computed (or fetched) again shortly before its tool ends, by a request of one token.

Covers anything OpenAI-compatible: when (the forecast's low quantile less the time that it takes), once per wait at most,
never while the server is busy, never beyond the task's budget, broken off when the tool ends. What it does there is the
server's affair: blocks come from a slower tier or are computed, and what is still held becomes what was used last.
Runs on one thread of its own, one request at a time; nobody waits for it.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from agentkv import log
from agentkv.adapters.base import DeliveryReceipt, Outcome, Unreachable
from agentkv.adapters.replay import Keep, Sending, shortened
from agentkv.clock import Clock
from agentkv.core.forecast import Forecast, last_of
from agentkv.core.hint import Hint, HintKind, SessionFacts
from agentkv.core.reported import Reported, reported
from agentkv.core.usage import Usage

LOW = 0.1
"""The quantile of the wait at which the context should be there."""
FIRST_S_PER_TOKEN = 0.5e-3
MOST_LOAD_S = 30.0
SOONEST_S = 1.0
"""A context that was used so short a time ago is still there."""
WITHIN_S = 60.0
_REFUSED = (400, 422)


class Purse(Protocol):
    """The budgets and books of tasks. Called from one thread."""

    def opens(self, task: str, model: str, usage: Usage) -> Callable[[], None] | None:
        """Set aside what it may cost: the way to give that back; None where it does not fit."""
        ...

    def paid(self, about: SessionFacts, usage: Usage, *, purpose: str, seconds: float, **said: Any) -> None:
        """It happened: a fact of the ledger."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """When to send, and what for; `fields` say how this server is told to write nothing (else it writes one token)."""

    due_s: float
    purpose: str = "prewarm"
    fields: Mapping[str, Any] = field(default_factory=dict)


class Strategy(Protocol):
    """Decides when a waiting session's prompt is worth sending again. No I/O but `ready`."""

    def plan(self, wait: Wait, now_s: float) -> Plan | None:
        """The next time; None for never in this wait."""
        ...

    def ready(self, wait: Wait, now_s: float) -> str:
        """Asked when it is due: "" to send, else why not (and not again in this wait)."""
        ...

    def sent(self, wait: Wait, began_s: float, seconds: float) -> None:
        """It was sent at `began_s`, and answered `seconds` later."""
        ...

    def refused(self, wait: Wait) -> None:
        """It was sent, and the server did not take it (400, 422)."""
        ...


@dataclass(slots=True, kw_only=True)
class Wait:
    """What a session waits for: calls with their start and whole duration. `sent`: how often it was sent in this wait. `plan`: for the next time."""

    about: SessionFacts
    since_s: float
    calls: dict[str, tuple[float, Forecast]] = field(default_factory=dict)
    sent: int = 0
    last_s: float = 0.0
    version: int = 0
    plan: Plan | None = None

    def forecast(self, now_s: float) -> Forecast | None:
        """How long it will still take; None without a tool."""
        left = [whole.after(max(0.0, now_s - began_s)) for began_s, whole in self.calls.values()]
        return last_of(left) if left else None


class Prewarming:
    """Once per wait, at the low quantile less the load time. `busy()` says why the server has no room now, or ""."""

    def __init__(self, *, busy: Callable[[], str]) -> None:
        self._busy = busy
        self._s_per_token: float | None = None

    def plan(self, wait: Wait, now_s: float) -> Plan | None:
        forecast = wait.forecast(now_s)
        if forecast is None or wait.sent or not wait.about.tokens:
            return None
        due_s = now_s + forecast.quantile_s(LOW) - self.load_s(wait.about)
        return None if due_s < wait.since_s + SOONEST_S else Plan(due_s=due_s)

    def ready(self, wait: Wait, now_s: float) -> str:  # noqa: ARG002  the same for all
        return self._busy()

    def load_s(self, about: SessionFacts) -> float:
        """How long the prompt takes: as prewarms did, else as calls did, else a guess."""
        if self._s_per_token is not None:
            return min(MOST_LOAD_S, about.tokens * self._s_per_token)
        return min(MOST_LOAD_S, about.tokens * FIRST_S_PER_TOKEN if about.load_s is None else about.load_s)

    def sent(self, wait: Wait, began_s: float, seconds: float) -> None:  # noqa: ARG002
        self.took(wait.about.tokens, seconds)

    def refused(self, wait: Wait) -> None:
        """The next wait has another request."""

    def took(self, tokens: int, seconds: float) -> None:
        """A prewarm of so many tokens took so long."""
        if tokens > 0:
            rate = seconds / tokens
            before = self._s_per_token
            self._s_per_token = rate if before is None else before + (rate - before) / 2


class Prewarm:
    """Hears hints, keeps the last requests, and sends. Thread-safe; `close()` is idempotent.

    `strategy` decides; `purse` pays; `note` hears receipts.
    """

    def __init__(
        self,
        *,
        strategy: Strategy,
        purse: Purse,
        clock: Clock,
        note: Callable[[DeliveryReceipt], None],
        within_s: float = WITHIN_S,
    ) -> None:
        self.keep = Keep()
        self._strategy = strategy
        self._purse = purse
        self._clock = clock
        self._note = note
        self._within_s = within_s
        self._turn = threading.Condition()
        self._waits: dict[str, Wait] = {}
        self._heap: list[tuple[float, int, str]] = []
        self._versions = itertools.count(1)
        self._sending: tuple[str, Sending] | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def hear(self, hint: Hint) -> None:
        """A hint; quick, never raises."""
        if hint.about is None:
            return
        session = hint.about.session
        with self._turn:
            match hint.kind:
                case HintKind.TOOL_START | HintKind.TOOL_UPDATE if hint.call is not None and hint.wait is not None:
                    now_s = self._clock.now_s()
                    wait = self._waits.setdefault(session, Wait(about=hint.about, since_s=now_s))
                    wait.calls[hint.call.call_id] = (now_s - hint.call.elapsed_s, hint.wait)
                    self._plan(session, wait)
                case HintKind.TOOL_END | HintKind.TOOL_ERROR if hint.call is not None:
                    wait_or_none = self._waits.get(session)
                    if wait_or_none is not None:
                        wait_or_none.calls.pop(hint.call.call_id, None)
                        if not wait_or_none.calls:
                            self._over(session)
                case HintKind.TURN_START:
                    self._over(session)
                case HintKind.TURN_END:
                    now_s = self._clock.now_s()
                    self._over(session)
                    wait = self._waits[session] = Wait(about=hint.about, since_s=now_s)
                    self._plan(session, wait)
                case HintKind.SESSION_END:
                    self._over(session)
                    self.keep.drop(session)

    def close(self) -> None:
        """Break off what is on its way, and stop."""
        with self._turn:
            self._closed = True
            if self._sending is not None:
                self._sending[1].cancel()
            self._turn.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(5)

    # -- the plan

    def _over(self, session: str) -> None:
        self._waits.pop(session, None)
        if self._sending is not None and self._sending[0] == session:
            self._sending[1].cancel()

    def _plan(self, session: str, wait: Wait) -> None:
        try:
            plan = self._strategy.plan(wait, self._clock.now_s())
        except Exception as error:
            log.failed("prewarm_failed", error=repr(error))
            return
        wait.version, wait.plan = next(self._versions), plan
        if plan is None or self._closed:
            return
        heapq.heappush(self._heap, (plan.due_s, wait.version, session))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="agentkv-prewarm", daemon=True)
            self._thread.start()
        self._turn.notify_all()

    # -- the thread

    def _run(self) -> None:
        while True:
            with self._turn:
                taken = self._due()
                if taken is None:
                    return
                session, wait = taken
                sending = Sending()
                self._sending = (session, sending)
            sent = False
            try:
                sent = self._send(session, wait, sending)
            except Exception as error:
                log.failed("prewarm_failed", error=repr(error))
            with self._turn:
                self._sending = None
                if sent and self._waits.get(session) is wait:
                    self._plan(session, wait)
                elif not sent:
                    wait.version = next(self._versions)  # what was planned meanwhile is not tried either

    def _due(self) -> tuple[str, Wait] | None:
        """The next session whose time has come; None when this was closed."""
        while not self._closed:
            now_s = self._clock.now_s()
            if self._heap and self._heap[0][0] <= now_s:
                _, version, session = heapq.heappop(self._heap)
                wait = self._waits.get(session)
                if wait is not None and wait.version == version:
                    return session, wait
                continue
            self._turn.wait(self._heap[0][0] - now_s if self._heap else None)
        return None

    def _send(self, session: str, wait: Wait, sending: Sending) -> bool:
        """Whether it was sent and answered; otherwise it is not tried again in this wait."""
        about, now_s = wait.about, self._clock.now_s()
        plan, kept = wait.plan, self.keep.get(session)
        wait.sent, wait.last_s = wait.sent + 1, now_s
        purpose = "prewarm" if plan is None else plan.purpose
        if kept is None:
            return self._told(session, purpose, Outcome.UNSUPPORTED, "its last request was not kept")
        why = self._strategy.ready(wait, now_s)
        if why:
            return self._told(session, purpose, Outcome.ADVISORY, f"left out: {why}")
        asked = Usage(input_tokens=max(1, about.tokens), output_tokens=1, calls=1)
        gives_back = self._purse.opens(about.task, about.model, asked)
        if gives_back is None:
            return self._told(session, purpose, Outcome.ADVISORY, "left out: the task's budget has no room for it")
        try:
            answer: Mapping[str, Any] = sending.run(
                kept, shortened(kept, fields={} if plan is None else plan.fields), self._within_s
            )
            status, error = "ok", ""
        except (Unreachable, ValueError, TypeError) as caught:
            answer, status, error = {}, "aborted" if sending.cancelled else "failed", str(caught)
            if isinstance(caught, Unreachable) and caught.status in _REFUSED:
                self._strategy.refused(wait)
        finally:
            gives_back()
        seconds = self._clock.now_s() - now_s
        told = reported(answer)
        refused = status == "failed"
        if not refused:  # what was broken off may have been computed
            usage = asked if told is None else told.usage
            said = {} if told is None else _said(told)
            self._purse.paid(
                about,
                usage,
                purpose=purpose,
                seconds=seconds,
                status=status,
                estimated=told is None or told.estimated,
                **said,
            )
        if status == "ok":
            self._strategy.sent(wait, now_s, seconds)
            tokens = (
                "" if told is None else f": {told.usage.cached_tokens} of {told.usage.input_tokens} tokens were there"
            )
            return self._told(session, purpose, Outcome.APPLIED, f"sent{tokens}", seconds)
        if status == "aborted":
            return self._told(session, purpose, Outcome.ADVISORY, "broken off: the wait is over", seconds)
        return self._told(session, purpose, Outcome.FAILED, error, seconds)

    def _told(self, session: str, purpose: str, outcome: Outcome, detail: str, seconds: float = 0.0) -> bool:
        self._note(
            DeliveryReceipt(
                adapter="prewarm",
                hint="",
                kind=purpose,
                session=session,
                outcome=outcome,
                detail=detail,
                seconds=seconds,
            )
        )
        return outcome is Outcome.APPLIED


def _said(told: Reported) -> dict[str, Any]:
    return {
        "cached_by": dict(told.cached_by), "service_tier": told.service_tier, "worker": told.worker,
        "expected_hit_rate": told.expected_hit_rate,
    }  # fmt: skip
