"""llama.cpp's server: contexts are saved to files and restored into slots while their agents wait.

Covers `LlamaCpp`: a hint becomes slot actions by the policy's own rule (`policy.hazard` unless another is given), a call is
routed to its context's slot, more sessions than slots share them, the end of a session leaves no content behind.
Needs a server with `--slot-save-path`; without it hints are UNSUPPORTED. Books: `slots.py`. An action on a slot that
computes would hang until it is idle, so those are never asked for.
"""

from __future__ import annotations

import heapq
import itertools
import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentkv import log
from agentkv.adapters.base import DeliveryReceipt, Extra, Outcome, Unreachable
from agentkv.adapters.http import Endpoint
from agentkv.adapters.probe import Known
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
"""How long a call waits for a slot before it goes without one (the server then queues it)."""
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
        with self._turn:
            started_s = self._clock.now_s()
            try:
                self._connected(within_s)
                outcome, detail = self._acted(hint, session)
            except Unreachable as error:
                outcome, detail = Outcome.FAILED, str(error)
            seconds = self._clock.now_s() - started_s
            return self._receipt(session, outcome, detail, seconds, kind=str(hint.kind), hint=hint.id)

    def _acted(self, hint: Hint, session: str) -> tuple[Outcome, str]:
        if not self._saves:
            return Outcome.UNSUPPORTED, "the server was started without --slot-save-path"
        assert self._pool is not None
        now_s = self._clock.now_s()
        match hint.kind:
            case HintKind.TOOL_START | HintKind.TOOL_UPDATE if hint.call is not None and hint.wait is not None:
                wait = self._waits.setdefault(session, _Wait())
                wait.calls[hint.call.call_id] = (now_s - hint.call.elapsed_s, hint.wait)
                return self._decided(session, wait)
            case HintKind.TOOL_END | HintKind.TOOL_ERROR if hint.call is not None:
                wait = self._waits.get(session) or _Wait()
                wait.calls.pop(hint.call.call_id, None)
                if wait.calls:
                    return self._decided(session, wait)
                self._waits.pop(session, None)
                if session in self._pool.sessions:
                    self._pool.sessions[session].due_s = now_s
                return self._brought_back(session)
            case HintKind.SESSION_END:
                self._waits.pop(session, None)
                steps = self._pool.drop(session)
                self._turn.notify_all()
                return self._told(steps)
            case HintKind.TURN_START:
                self._waits.pop(session, None)
        return Outcome.ADVISORY, "noted"

    def tick(self) -> tuple[Sequence[DeliveryReceipt], float | None]:
        with self._turn:
            while self._heap and self._heap[0][0] <= self._clock.now_s():
                _, version, session = heapq.heappop(self._heap)
                wait = self._waits.get(session)
                if wait is not None and wait.version == version and self._pool is not None and self._saves:
                    self._decided(session, wait)
            deeds, self._deeds = self._deeds, []
            return deeds, max(0.0, self._heap[0][0] - self._clock.now_s()) if self._heap else None

    def reset(self) -> None:
        with self._turn:
            if self._pool is not None:
                self._pool.forget_slots()
            self._saves = True

    def close(self) -> None:
        with self._turn:
            self._closed = True
            self._turn.notify_all()  # calls that wait for a slot go without one
        self._server.close()

    # -- calls

    def carries(self, about: SessionFacts) -> Extra | None:
        fields = self.fields(about.session)
        return Extra(body=fields) if fields else None

    def fields(self, session: str) -> Mapping[str, Any]:
        """The slot of this session's next call, once its context is there; nothing where it takes any."""
        with self._turn:
            try:
                self._connected(CONNECT_S)
            except Unreachable:
                return {}
            pool = self._pool
            if pool is None or not self._saves:
                return {}
            if session == UNATTRIBUTED or (session in pool.sessions and pool.sessions[session].busy):
                pool.disturb()  # it will take any slot that is idle
                return {}
            slot = self._claimed(pool, session)
            if slot is None:
                pool.disturb()
                return {}
            return {"id_slot": slot}

    def ended(self, session: str, *, tokens: int, cached_tokens: int | None) -> None:
        with self._turn:
            held = None if self._pool is None else self._pool.sessions.get(session)
            if self._pool is None or held is None:
                return
            if held.busy and cached_tokens is not None and cached_tokens < _TOO_FEW * min(held.tokens, tokens):
                log.count("llamacpp_slot_was_lost")
                self._pool.disturb()
            self._told(self._pool.release(session, self._clock.now_s(), tokens=tokens))
            self._turn.notify_all()

    def _claimed(self, pool: SlotPool, session: str) -> int | None:
        ends_s = self._clock.now_s() + self._room_s
        self._waiting_calls += 1
        try:
            while True:
                claim = pool.claim(session, self._clock.now_s())
                if claim is not None:
                    break
                left_s = ends_s - self._clock.now_s()
                if self._closed or left_s <= 0 or not self._turn.wait(left_s):
                    return None
        finally:
            self._waiting_calls -= 1
        self._waits.pop(session, None)  # the end of its tools may have come too late to be told
        slot, steps = claim
        self._told(steps)
        return slot

    # -- deciding

    def _decided(self, session: str, wait: _Wait) -> tuple[Outcome, str]:
        """What the policy says of this wait, done; asked again when it wishes."""
        now_s = self._clock.now_s()
        residency = self._residency(session)
        if residency is None:
            return Outcome.ADVISORY, "nothing is held"
        assert self._pool is not None
        forecast = last_of([whole.after(max(0.0, now_s - began_s)) for began_s, whole in wait.calls.values()])
        self._pool.sessions[session].due_s = now_s + forecast.quantile_s(0.5)
        if residency.device_blocks and residency.free_blocks and not residency.pressed:
            self._ask_at(now_s + max(_SOON_S, forecast.quantile_s(0.1)), session, wait)
            return Outcome.ADVISORY, "stays: another slot is free"
        decision = self._policy(residency, forecast, now_s, now_s)
        done = [(Outcome.ADVISORY, decision.reason)]
        for move in decision.moves:
            match move.action:
                case Action.WRITE:
                    done.append(self._told(self._pool.save(session)))
                case Action.DEMOTE:
                    done.append(self._told(self._pool.leave(session)))
                    self._turn.notify_all()
                case Action.PREFETCH:
                    done.append(self._brought_back(session))
                case Action.DROP:
                    done.append(self._told(self._pool.drop(session)))
                    self._turn.notify_all()
        if decision.ask_again_s is not None:
            self._ask_at(decision.ask_again_s, session, wait)
        worst = (Outcome.ADVISORY, Outcome.APPLIED, Outcome.FAILED)
        outcome = max((outcome for outcome, _ in done), key=worst.index)
        return outcome, "; ".join(detail for _, detail in done if detail)

    def _ask_at(self, due_s: float, session: str, wait: _Wait) -> None:
        wait.version = next(self._versions)
        heapq.heappush(self._heap, (due_s, wait.version, session))

    def _residency(self, session: str) -> Residency | None:
        """The context as one block: in its slot (device), in its file (host), or both."""
        assert self._pool is not None
        held = self._pool.sessions.get(session)
        if held is None or held.busy or (held.slot is None and not held.file):
            return None
        others = sum(h.slot is None and not h.busy for s, h in self._pool.sessions.items() if s != session)
        queued = self._waiting_calls
        restore_s = held.tokens * self._restore_s_per_token
        in_slot = held.slot is not None
        return Residency(
            session=session, tokens=held.tokens, block_bytes=1, total_blocks=1, device_blocks=int(in_slot),
            host_blocks=int(bool(held.file)), unwritten_blocks=int(in_slot and not held.clean),
            restore_host_s=restore_s, recompute_s=max(restore_s, held.tokens * 1e-3), pressed=queued + others > 0,
            free_blocks=len(self._pool.free_slots()), queued=queued, demand_blocks=queued,
        )  # fmt: skip

    def _brought_back(self, session: str) -> tuple[Outcome, str]:
        assert self._pool is not None
        steps = self._pool.bring_back(session, self._clock.now_s())
        if steps is None:
            return Outcome.ADVISORY, "no slot is free for it"
        return self._told(steps)

    # -- the server

    def _connected(self, within_s: float) -> None:
        if self._pool is not None:
            return
        slots = self._server.get("/slots", within_s)
        if not isinstance(slots, list) or not slots:
            raise Unreachable("/slots: no list of slots")
        self._pool = SlotPool(len(slots), prefix=self._prefix)

    def _told(self, steps: Sequence[Step]) -> tuple[Outcome, str]:
        """Carry the steps out; each has a receipt of its own, too."""
        assert self._pool is not None
        outcome, words = Outcome.ADVISORY, []
        for step in steps:
            began_s = self._clock.now_s()
            try:
                self._do(step)
                done, detail = Outcome.APPLIED, f"{step.deed} slot {step.slot}"
            except Unreachable as error:
                self._pool.failed(step)
                done, detail = Outcome.FAILED, f"{step.deed} slot {step.slot}: {error}"
            self._deeds.append(
                self._receipt(step.session, done, detail, self._clock.now_s() - began_s, kind=step.deed, hint="")
            )
            outcome = Outcome.FAILED if Outcome.FAILED in (outcome, done) else done
            words.append(detail)
        return outcome, ", ".join(words)

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
