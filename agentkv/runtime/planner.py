"""The planner: who waits for what, and which moves follow from that, each at its time.

Tool starts and ends come in on the caller's own thread, and the first decision is made and submitted there. One
thread sleeps until the next moment at which the policy asked to be asked again (a heap, no polling). A session that
falls silent without a tool (its run ended, or an undeclared wait) becomes a wait on a person after `idle_s`.
Does not cover: the decision itself (`policy/`), the copies (`kv/`), the learning (`hints/`).
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from agentkv import log
from agentkv.clock import Clock
from agentkv.core.forecast import Forecast, last_of
from agentkv.core.hint import ToolStatus
from agentkv.core.residency import Policy, Receipt
from agentkv.engine.base import TieredEngine
from agentkv.hints.forecaster import Forecaster
from agentkv.policy.wait import JUST_BEGUN_S

PERSON = "person"
"""The tool name under which waits on people are learnt."""
PERSON_S = 127.0
"""The median wait on a person in recorded coding sessions; used until this process has seen a few of its own."""
_FEW = 5
_SILENCE = 0
"""The version of an entry that asks whether a session is still silent; waits have others."""


@dataclass(slots=True)
class _Call:
    tool: str
    command: str
    started_s: float
    forecast: Forecast


@dataclass(slots=True)
class _Wait:
    """What a session waits for; `forecast` counts from `base_s` and covers the last of all calls.

    Without a forecast the session is silent since `base_s`.
    """

    calls: dict[str, _Call] = field(default_factory=dict)
    forecast: Forecast | None = None
    base_s: float = 0.0
    version: int = 0


class Planner:
    """Turns waits into moves. Every method is quick, never raises, and may be called from any thread."""

    def __init__(
        self,
        *,
        engine: TieredEngine,
        policy: Policy,
        forecaster: Forecaster,
        clock: Clock,
        on_receipt: Callable[[Receipt], None],
        idle_s: float = 2.0,
        threaded: bool = True,
    ) -> None:
        self._engine = engine
        self._policy = policy
        self._forecaster = forecaster
        self._clock = clock
        self._on_receipt = on_receipt
        self._idle_s = idle_s
        self._threaded = threaded
        self._waits: dict[str, _Wait] = {}
        self._heap: list[tuple[float, int, str, int]] = []
        self._listening: set[str] = set()  # sessions for whose silence the heap has an entry, at their first due time
        self._order = itertools.count(1)
        self._wakeup = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    # -- what happens

    def tool_started(self, session: str, call_id: str, tool: str, command: str, forecast: Forecast) -> None:
        """A tool call of this session starts now: decide and submit inline."""
        now_s = self._clock.now_s()
        with self._wakeup:
            wait = self._waits.setdefault(session, _Wait())
            wait.calls.pop(PERSON, None)
            wait.calls[call_id] = _Call(tool, command, now_s, forecast)
            self._recombine(wait, now_s)
        self._decide(session)

    def tool_progressed(self, session: str, call_id: str, forecast: Forecast) -> None:
        """The call is now believed to take `forecast` in all, counted from its start."""
        now_s = self._clock.now_s()
        with self._wakeup:
            wait = self._waits.get(session)
            if wait is None or call_id not in wait.calls:
                return
            call = wait.calls[call_id]
            wait.calls[call_id] = _Call(call.tool, call.command, call.started_s, forecast)
            self._recombine(wait, now_s)
        self._decide(session)

    def tool_ended(self, session: str, call_id: str) -> None:
        """The call is over. With others still running the wait goes on; what is not back is loaded on demand."""
        with self._wakeup:
            wait = self._waits.get(session)
            if wait is None or wait.calls.pop(call_id, None) is None:
                return
            if wait.calls:
                self._recombine(wait, self._clock.now_s())
            else:
                self._fall_silent(session, wait)
                return
        self._decide(session)

    def turn_started(self, session: str) -> None:
        """The session's next model call is here: nothing waits any more, and a person's wait is learnt."""
        with self._wakeup:
            wait = self._waits.pop(session, None)
            person = wait.calls.get(PERSON) if wait is not None else None
        if person is not None:
            self._forecaster.learn(PERSON, "", self._clock.now_s() - person.started_s, ToolStatus.SUCCEEDED)
        self._engine.expect(session, None)

    def turn_ended(self, session: str) -> None:
        """A model call is over; silence from now on is a wait on a person."""
        with self._wakeup:
            wait = self._waits.setdefault(session, _Wait())
            if not wait.calls:
                self._fall_silent(session, wait)

    def forget(self, sessions: list[str]) -> None:
        """These sessions are over."""
        with self._wakeup:
            gone = [self._waits.pop(session, None) for session in sessions]
        for wait in gone:
            if wait is not None and PERSON in wait.calls:
                self._forecaster.never(PERSON)

    def close(self) -> None:
        """Stop the thread. Idempotent; moves already submitted run on."""
        with self._wakeup:
            self._closed = True
            thread = self._thread
            self._wakeup.notify()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    # -- deciding (the lock is not held while policy and engine work)

    def _decide(self, session: str) -> None:
        with self._wakeup:
            wait = self._waits.get(session)
            if wait is None or wait.forecast is None or self._closed:
                return
            forecast, base_s, version = wait.forecast, wait.base_s, wait.version
        try:
            residency = self._engine.residency(session)
            if residency is None:
                self._let_go(session)
                return
            now_s = self._clock.now_s()
            decision = self._policy(residency, forecast, base_s, now_s)
            for move in decision.moves:
                self._engine.apply(move, self._on_receipt)
            at_s = now_s + _left(forecast, now_s - base_s).quantile_s(0.5)
            self._engine.expect(session, at_s, forecast, base_s)
        except Exception as error:
            log.failed("planner_failed", session=session, error=repr(error))
            return
        if decision.ask_again_s is not None:
            self._ask_at(decision.ask_again_s, session, version)

    def _let_go(self, session: str) -> None:
        """The engine does not know the session: unless a tool of it still runs, nobody will end this wait."""
        with self._wakeup:
            wait = self._waits.get(session)
            if wait is not None and not wait.calls.keys() - {PERSON}:
                del self._waits[session]

    def _ask_at(self, due_s: float, session: str, version: int) -> None:
        with self._wakeup:
            if self._closed:
                return
            heapq.heappush(self._heap, (due_s, next(self._order), session, version))
            if self._thread is None and self._threaded:
                self._thread = threading.Thread(target=self._run, name="agentkv-planner", daemon=True)
                self._thread.start()
            elif self._heap[0][0] == due_s:
                self._wakeup.notify()

    def _recombine(self, wait: _Wait, now_s: float) -> None:
        wait.forecast = last_of([_left(call.forecast, now_s - call.started_s) for call in wait.calls.values()])
        wait.base_s = now_s
        wait.version = next(self._order)

    def _fall_silent(self, session: str, wait: _Wait) -> None:
        wait.forecast = None
        wait.base_s = self._clock.now_s()
        wait.version = next(self._order)
        if session not in self._listening:  # else it is asked at the time due then, and put off
            self._listening.add(session)
            self._ask_at(wait.base_s + self._idle_s, session, _SILENCE)

    def tick(self) -> float | None:
        """Do what is due now; seconds until the next due time, None when nothing is planned.

        The planner's own thread lives on this; tests and simulations with a manual clock call it themselves.
        """
        while True:
            with self._wakeup:
                if not self._heap:
                    return None
                left_s = self._heap[0][0] - self._clock.now_s()
                if left_s > 0:
                    return left_s
                _, _, session, version = heapq.heappop(self._heap)
                wait = self._waits.get(session)
                if version == _SILENCE:
                    self._listening.discard(session)
                    if wait is None or wait.forecast is not None:
                        continue
                    due_s = wait.base_s + self._idle_s
                    if due_s > self._clock.now_s():
                        self._listening.add(session)
                        self._ask_at(due_s, session, _SILENCE)
                        continue
                    self._await_person(wait)
                elif wait is None or wait.version != version:
                    continue
            self._decide(session)

    def _run(self) -> None:
        while True:
            left_s = self.tick()
            with self._wakeup:
                if self._closed:
                    return
                if left_s is None:
                    left_s = math.inf
                if self._heap:
                    left_s = min(left_s, self._heap[0][0] - self._clock.now_s())
                if left_s > 0:
                    self._wakeup.wait(min(left_s, 3600.0))

    def _await_person(self, wait: _Wait) -> None:
        now_s = self._clock.now_s()
        forecast = self._forecaster.forecast(PERSON, "", PERSON_S)
        if forecast.n >= _FEW:
            forecast = self._forecaster.forecast(PERSON, "")
        wait.calls[PERSON] = _Call(PERSON, "", wait.base_s, forecast)
        self._recombine(wait, now_s)


def _left(forecast: Forecast, elapsed_s: float) -> Forecast:
    """What is left after `elapsed_s`; for a call that has just begun the arithmetic would cost more than it tells."""
    return forecast if elapsed_s < JUST_BEGUN_S else forecast.after(elapsed_s)
