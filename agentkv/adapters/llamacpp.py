"""llama.cpp's server: contexts are saved to files and restored into slots while their agents wait.

Covers `LlamaCpp`: a hint becomes slot actions by the policy's own rule (`policy.hazard` unless another is given), a call is
routed to its context's slot, more sessions than slots share them, the end of a session leaves no content behind.
Needs a server with `--slot-save-path`; without it hints are UNSUPPORTED. Books: `slots.py`. An action on a slot that
computes would hang until it is idle, so those are never asked for. Actions run on threads of their own (`slot_work.py`):
one that hangs costs its session a receipt, and everybody else nothing.
"""

from __future__ import annotations

import heapq
import itertools
import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from agentkv import log
from agentkv.adapters.base import DeliveryReceipt, Extra, Outcome, Unreachable
from agentkv.adapters.http import Endpoint
from agentkv.adapters.probe import Known
from agentkv.adapters.slot_work import SlotWork, Work
from agentkv.adapters.slots import SlotPool, Step
from agentkv.clock import Clock, SystemClock
from agentkv.core.forecast import Forecast, last_of
from agentkv.core.hint import Hint, HintKind, SessionFacts
from agentkv.core.residency import Action, Policy, Residency
from agentkv.core.task import UNATTRIBUTED
from agentkv.policy.hazard import hazard

ACTION_S = 30.0
"""How long a save or restore may take: the server comes to it between two batches, and a batch of prompt may take long."""
CONNECT_S = 2.0
ROOM_S = 60.0
"""How long a call waits for a slot while other calls compute, before it goes without one (the server then queues it)."""
CALL_S = 3.0
"""How long a call waits for slot actions, its own or those that keep every slot: then it goes without one."""
TOGETHER_S = 0.5
"""How long a hint waits for what it led to: most actions take some ten milliseconds. Later ones have receipts of their own."""
CLOSE_S = 1.0
_CONNECT_AGAIN_S = 5.0
_LOOK_S = 1.0
_NOT_IMPLEMENTED = 501
_FIRST_S_PER_TOKEN = 25e-6
_SOON_S = 0.5
_TOO_FEW = 0.5
"""A call that found less than this share of the context that its slot was believed to hold: somebody else used it."""


@dataclass(slots=True)
class _Wait:
    """What a session waits for: its calls with their start and whole duration."""

    calls: dict[str, tuple[float, Forecast]] = field(default_factory=dict)
    version: int = 0


class LlamaCpp:
    """One server. `deliver`, `tick` and `reset` by one thread; `carries` and `ended` from any."""

    name = "llama.cpp"
    patience_s = 5.0
    waits = True
    """`carries` may wait for a slot, so an event loop must not ask it."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str = "",
        policy: Policy | None = None,
        clock: Clock | None = None,
        known: Known | None = None,  # noqa: ARG002  nothing depends on a version yet
        room_s: float = ROOM_S,
    ) -> None:
        self._server = Endpoint(base_url, api_key=api_key)
        self._policy = policy or hazard().decide
        self._clock = clock or SystemClock()
        self._room_s = room_s
        self._prefix = f"agentkv-{secrets.token_hex(6)}"
        self._turn = threading.Condition()
        self._pool: SlotPool | None = None
        self._counted = False
        self._connects_s = 0.0
        self._work = SlotWork(self._server, self._turn, act=self._do, note=self._done, clock=self._clock)
        self._saves = True
        self._closed = False
        self._waiting_calls = 0
        self._waits: dict[str, _Wait] = {}
        self._heap: list[tuple[float, int, str]] = []
        self._versions = itertools.count(1)
        self._restore_s_per_token = _FIRST_S_PER_TOKEN
        self._deeds: list[DeliveryReceipt] = []

    @property
    def wants_prewarm(self) -> bool:
        """Without files a context that lost its slot can only be computed again."""
        return not self._saves

    # -- hints

    def deliver(self, hint: Hint, within_s: float) -> DeliveryReceipt:
        session = hint.session or hint.task
        started_s = self._clock.now_s()
        refused = False
        try:
            pool = self._connected(within_s)
        except Unreachable as error:
            outcome, detail, refused = Outcome.FAILED, str(error), error.refused
        else:
            with self._turn:
                outcome, detail, steps = self._acted(pool, hint, session)
                work = self._work.begin(pool, steps) if steps else None
            if work is not None:
                outcome, detail = _awaited(work, min(within_s, TOGETHER_S), detail)
                refused = outcome is Outcome.FAILED and work.refused
        seconds = self._clock.now_s() - started_s
        receipt = self._receipt(session, outcome, detail, seconds, kind=str(hint.kind), hint=hint.id)
        return replace(receipt, refused=refused)

    def _acted(self, pool: SlotPool, hint: Hint, session: str) -> tuple[Outcome, str, Sequence[Step]]:
        """What the hint says is noted; the steps that follow from it."""
        if not self._saves:
            return Outcome.UNSUPPORTED, "the server was started without --slot-save-path", ()
        now_s = self._clock.now_s()
        match hint.kind:
            case HintKind.TOOL_START | HintKind.TOOL_UPDATE if hint.call is not None and hint.wait is not None:
                wait = self._waits.setdefault(session, _Wait())
                wait.calls[hint.call.call_id] = (now_s - hint.call.elapsed_s, hint.wait)
                return Outcome.ADVISORY, *self._decided(pool, session, wait)
            case HintKind.TOOL_END | HintKind.TOOL_ERROR if hint.call is not None:
                wait = self._waits.get(session) or _Wait()
                wait.calls.pop(hint.call.call_id, None)
                if wait.calls:
                    return Outcome.ADVISORY, *self._decided(pool, session, wait)
                self._waits.pop(session, None)
                if session in pool.sessions:
                    pool.sessions[session].due_s = now_s
                return Outcome.ADVISORY, *_brought_back(pool, session, now_s)
            case HintKind.SESSION_END:
                self._waits.pop(session, None)
                return Outcome.ADVISORY, "", pool.drop(session)
            case HintKind.TURN_START:
                self._waits.pop(session, None)
        return Outcome.ADVISORY, "noted", ()

    def tick(self) -> tuple[Sequence[DeliveryReceipt], float | None]:
        works: list[Work] = []
        with self._turn:
            while self._heap and self._heap[0][0] <= self._clock.now_s():
                _, version, session = heapq.heappop(self._heap)
                wait = self._waits.get(session)
                if wait is not None and wait.version == version and self._pool is not None and self._saves:
                    _, steps = self._decided(self._pool, session, wait)
                    if steps:
                        works.append(self._work.begin(self._pool, steps))
        _await_all(works, TOGETHER_S)
        with self._turn:
            deeds, self._deeds = self._deeds, []
            due_s = max(0.0, self._heap[0][0] - self._clock.now_s()) if self._heap else None
            lingers = self._pool if self._pool is not None and self._pool.lingers else None
            if lingers is not None:
                self._work.look_for_leaks(lingers)
            if self._work.under_way or lingers is not None:
                due_s = _LOOK_S if due_s is None else min(due_s, _LOOK_S)
            return deeds, due_s

    def reset(self) -> None:
        with self._turn:
            if self._pool is not None:
                self._pool.forget_slots()
            self._counted = False
            self._saves = True

    def close(self) -> None:
        with self._turn:
            self._closed = True
            self._turn.notify_all()  # calls that wait for a slot go without one
        self._work.close(CLOSE_S)
        self._server.close()

    # -- calls

    def carries(self, about: SessionFacts) -> Extra | None:
        fields = self.fields(about.session, within_s=about.within_s)
        return Extra(body=fields) if fields else None

    def fields(self, session: str, *, within_s: float | None = None) -> Mapping[str, Any]:
        """The slot of this session's next call, once its context is there; nothing where it takes any.

        Waits for the slot actions that this takes, and no longer than CALL_S; for a slot while others compute up to
        `room_s`; for all of it up to `within_s`.
        """
        ends_s = self._clock.now_s() + (inf if within_s is None else within_s)
        try:
            pool = self._connected_soon(CONNECT_S if within_s is None else min(CONNECT_S, within_s))
        except Unreachable:
            return {}
        with self._turn:
            if not self._saves:
                return {}
            if session == UNATTRIBUTED or (session in pool.sessions and pool.sessions[session].busy):
                pool.disturb()  # it will take any slot that is idle
                self._work.look_for_leaks(pool)
                return {}
            claim = self._claimed(pool, session, ends_s)
            if claim is None:
                pool.disturb()
                return {}
            slot, steps = claim
            work = self._work.begin(pool, steps) if steps else None
        there = work is None
        try:
            if work is not None:
                there = work.over.wait(min(CALL_S, ends_s - self._clock.now_s())) and work.lost is None
        finally:  # also where somebody interrupts the wait
            if not there:
                log.count("llamacpp_call_without_its_slot")
                with self._turn:
                    pool.give_up(session)
                    pool.disturb()
        held = pool.sessions.get(session)
        there = there and held is not None and held.slot == slot  # a restart may have come between
        return {"id_slot": slot} if there else {}

    def ended(self, session: str, *, tokens: int, cached_tokens: int | None) -> None:
        with self._turn:
            held = None if self._pool is None else self._pool.sessions.get(session)
            if self._pool is None or held is None:
                return
            if held.busy and cached_tokens is not None and cached_tokens < _TOO_FEW * min(held.tokens, tokens):
                log.count("llamacpp_slot_was_lost")
                self._pool.disturb()
            steps = self._pool.release(session, self._clock.now_s(), tokens=tokens)
            if steps:
                self._work.begin(self._pool, steps)
            self._turn.notify_all()

    def _claimed(self, pool: SlotPool, session: str, ends_s: float) -> tuple[int, list[Step]] | None:
        """A slot for a call, and what must be done first; None where there is none for too long."""
        began_s, slept_s = self._clock.now_s(), 0.0
        self._waiting_calls += 1
        try:
            while True:
                claim = pool.claim(session, self._clock.now_s())
                if claim is not None:
                    break
                self._work.look_for_leaks(pool)
                most_s = min(self._room_s, CALL_S) if pool.moving else self._room_s
                left_s = min(most_s, ends_s - began_s) - max(slept_s, self._clock.now_s() - began_s)
                if self._closed or left_s <= 0:
                    return None
                pause_s = min(left_s, _LOOK_S)
                slept_s += 0.0 if self._turn.wait(pause_s) else pause_s
        finally:
            self._waiting_calls -= 1
        self._waits.pop(session, None)  # the end of its tools may have come too late to be told
        return claim

    # -- deciding

    def _decided(self, pool: SlotPool, session: str, wait: _Wait) -> tuple[str, Sequence[Step]]:
        """What the policy says of this wait; asked again when it wishes."""
        now_s = self._clock.now_s()
        residency = self._residency(pool, session)
        if residency is None:
            return "nothing is held", ()
        forecast = last_of([whole.after(max(0.0, now_s - began_s)) for began_s, whole in wait.calls.values()])
        pool.sessions[session].due_s = now_s + forecast.quantile_s(0.5)
        if residency.device_blocks and residency.free_blocks and not residency.pressed:
            self._ask_at(now_s + max(_SOON_S, forecast.quantile_s(0.1)), session, wait)
            return "stays: another slot is free", ()
        decision = self._policy(residency, forecast, now_s, now_s)
        steps: list[Step] = []
        words = [decision.reason]
        for move in decision.moves:
            match move.action:
                case Action.WRITE:
                    steps += pool.save(session)
                case Action.DEMOTE:
                    steps += pool.leave(session)
                case Action.PREFETCH:
                    why, more = _brought_back(pool, session, now_s)
                    words.append(why)
                    steps += more
                case Action.DROP:
                    steps += pool.drop(session)
        if decision.ask_again_s is not None:
            self._ask_at(decision.ask_again_s, session, wait)
        return "; ".join(filter(None, words)), steps

    def _ask_at(self, due_s: float, session: str, wait: _Wait) -> None:
        wait.version = next(self._versions)
        heapq.heappush(self._heap, (due_s, wait.version, session))

    def _residency(self, pool: SlotPool, session: str) -> Residency | None:
        """The context as one block: in its slot (device), in its file (host), or both."""
        held = pool.sessions.get(session)
        if held is None or held.busy or held.moving or (held.slot is None and not held.file):
            return None
        others = sum(h.slot is None and not h.busy for s, h in pool.sessions.items() if s != session)
        queued = self._waiting_calls
        restore_s = held.tokens * self._restore_s_per_token
        in_slot = held.slot is not None
        return Residency(
            session=session, tokens=held.tokens, block_bytes=1, total_blocks=1, device_blocks=int(in_slot),
            host_blocks=int(bool(held.file)), unwritten_blocks=int(in_slot and not held.clean),
            restore_host_s=restore_s, recompute_s=max(restore_s, held.tokens * 1e-3), pressed=queued + others > 0,
            free_blocks=len(pool.free_slots()), queued=queued, demand_blocks=queued,
        )  # fmt: skip

    # -- the server

    def _connected(self, within_s: float) -> SlotPool:
        """The books, once the server has told its slots. Without `turn`."""
        pool = self._pool
        if pool is not None and self._counted:
            return pool
        slots = self._slots(within_s)
        with self._turn:
            if self._pool is None:
                self._pool = SlotPool(slots, prefix=self._prefix)
            elif self._pool.slots != slots:
                self._pool.recount(slots)
            self._counted, self._connects_s = True, 0.0
            return self._pool

    def _slots(self, within_s: float) -> int:
        slots = self._server.get("/slots", within_s)
        if not isinstance(slots, list) or not slots:
            raise Unreachable("/slots: no list of slots")
        return len(slots)

    def _connected_soon(self, within_s: float) -> SlotPool:
        """The same for a call: it does not ask again what somebody has just asked in vain."""
        if not self._counted and self._clock.now_s() < self._connects_s:
            raise Unreachable("not asked again yet")
        try:
            return self._connected(within_s)
        except Unreachable:
            self._connects_s = self._clock.now_s() + _CONNECT_AGAIN_S
            raise

    def _done(self, step: Step, outcome: Outcome, detail: str, seconds: float) -> None:
        """Each step has a receipt of its own, too."""
        receipt = self._receipt(step.session, outcome, detail, seconds, kind=step.deed, hint="")
        with self._turn:
            self._deeds.append(receipt)

    def _do(self, step: Step) -> None:
        body = {"filename": step.file} if step.file else {}
        try:
            answer = self._server.post(f"/slots/{step.slot}?action={step.deed}", body, ACTION_S)
        except Unreachable as error:
            if error.status == _NOT_IMPLEMENTED:
                self._saves = False
                log.warn_once("llamacpp_saves_no_slots", advice="start the server with --slot-save-path")
            raise
        if not isinstance(answer, Mapping):
            raise Unreachable(f"/slots/{step.slot}: an answer of another kind")
        if step.deed == "restore":
            timings, tokens = answer.get("timings"), answer.get("n_restored")
            spent_ms = timings.get("restore_ms") if isinstance(timings, Mapping) else None
            if isinstance(tokens, int) and tokens > 0 and isinstance(spent_ms, int | float) and spent_ms >= 0:
                self._restore_s_per_token += (spent_ms / 1000 / tokens - self._restore_s_per_token) / 4

    def _receipt(
        self, session: str, outcome: Outcome, detail: str, seconds: float, *, kind: str, hint: str
    ) -> DeliveryReceipt:
        return DeliveryReceipt(
            adapter=self.name, hint=hint, kind=kind, session=session, outcome=outcome, detail=detail, seconds=seconds
        )  # fmt: skip


def _brought_back(pool: SlotPool, session: str, now_s: float) -> tuple[str, Sequence[Step]]:
    steps = pool.bring_back(session, now_s)
    return ("no slot is free for it", ()) if steps is None else ("", steps)


def _awaited(work: Work, within_s: float, why: str) -> tuple[Outcome, str]:
    """What came of the work, if that is known in time."""
    if work.over.wait(within_s):
        return work.outcome, "; ".join(filter(None, [why, ", ".join(work.words)]))
    return Outcome.ADVISORY, "; ".join(filter(None, [why, f"under way: {work.told}"]))


def _await_all(works: Sequence[Work], within_s: float) -> None:
    for work in works:
        if not work.over.wait(within_s):
            return
