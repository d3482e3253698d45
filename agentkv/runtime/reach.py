"""Reach: hints on their way to a foreign engine, on a thread of their own, each at most once and with a receipt.

Covers the bounded queue, the deadline, the breaker for an engine that is away, and ends of sessions, which are kept until
it has answered. Whatever an adapter does, the agent is neither stopped nor delayed: telling costs it an append. Does not
cover what an engine is told (`adapters/`), nor the embedded engine, which the planner moves itself.
"""

from __future__ import annotations

import math
import threading
from collections import Counter, OrderedDict, deque
from dataclasses import replace
from typing import Any

from agentkv import log
from agentkv.adapters.base import Adapter, DeliveryReceipt, Outcome
from agentkv.clock import Clock
from agentkv.core.hint import Hint, HintKind

DEADLINE_S = 0.05
"""A hint that is older is not worth telling, unless its adapter is more patient."""
MOST_QUEUED = 256
MOST_KEPT = 256
MOST_ENDS = 4096
"""Sessions whose end could not be told yet."""
_MOST_TRIES = 5
"""So often an end fails that an engine which answers others does not take."""
_FAILURES = 3
_FIRST_AWAY_S = 1.0
_MOST_AWAY_S = 30.0
_FAREWELL_S = 1.0


class Reach:
    """Delivers hints to one adapter. Thread-safe; `close()` is idempotent."""

    def __init__(self, adapter: Adapter, *, clock: Clock) -> None:
        self._adapter = adapter
        self._clock = clock
        self._queue: deque[tuple[float, Hint]] = deque()
        self._wakeup = threading.Condition()
        self._outcomes: Counter[str] = Counter()
        self._receipts: deque[DeliveryReceipt] = deque(maxlen=MOST_KEPT)
        self._thread: threading.Thread | None = None
        self._closed = False
        self._failures = 0
        self._away_s = _FIRST_AWAY_S
        self._away_until_s: float | None = None
        self._ends: OrderedDict[str, tuple[Hint, int]] = OrderedDict()
        self._ends_due_s = 0.0
        self._ends_pause_s = _FIRST_AWAY_S

    def tell(self, hint: Hint) -> None:
        """Deliver this hint soon. In a full queue there is room for ends of sessions only."""
        with self._wakeup:
            if self._closed:
                return
            if len(self._queue) >= MOST_QUEUED:
                _, hint_out = self._queue.popleft() if hint.kind is HintKind.SESSION_END else (0.0, hint)
                self._note(self._kept(hint_out, self._failed(hint_out, "the queue is full")))
                if hint_out is hint:
                    return
            self._queue.append((self._clock.now_s(), hint))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="agentkv-reach", daemon=True)
                self._thread.start()
            self._wakeup.notify()

    def note(self, receipt: DeliveryReceipt) -> None:
        """List the receipt of something that was done beside the queue."""
        with self._wakeup:
            self._note(receipt)

    def receipts(self) -> tuple[DeliveryReceipt, ...]:
        """The latest receipts, oldest first."""
        with self._wakeup:
            return tuple(self._receipts)

    def stats(self) -> dict[str, Any]:
        """How many hints were applied, advisory, unsupported or failed, and the last receipts in words."""
        with self._wakeup:
            counts = {str(outcome): self._outcomes[outcome] for outcome in Outcome}
            last = [f"{r.kind} {r.session}: {r.outcome}, {r.detail} ({r.seconds:.3f} s)" for r in self._receipts][-8:]
            return {
                "adapter": self._adapter.name, **counts, "queued": len(self._queue),
                "away": self._away_until_s is not None, "last": last,
            }  # fmt: skip

    def close(self) -> None:
        """Tell the ends of sessions that are still queued, in at most a second, and stop."""
        with self._wakeup:
            if self._closed:
                return
            self._closed = True
            thread = self._thread
            self._wakeup.notify()
        if thread is not None and thread is not threading.current_thread():
            thread.join(self._adapter.patience_s + _FAREWELL_S)
        try:
            self._adapter.close()
        except Exception as error:
            log.failed("reach_close_failed", error=repr(error))

    # -- the thread

    def _run(self) -> None:
        while (taken := self._next()) is not None:
            for queued_s, hint in taken:
                receipt, sound = self._delivered(queued_s, hint)
                with self._wakeup:
                    if hint.kind is HintKind.TURN_START:  # the session lives again
                        self._ends.pop(_session(hint), None)
                    self._note(self._kept(hint, receipt) if sound else receipt)
            self._tell_an_end()
        self._say_farewell()

    def _next(self) -> list[tuple[float, Hint]] | None:
        """The next hint, or none when only the adapter or an end had something due; None when this was closed."""
        due_s = self._ticked()
        with self._wakeup:
            if self._ends:
                left_s = max(0.0, max(self._ends_due_s, self._away_until_s or 0.0) - self._clock.now_s())
                due_s = left_s if due_s is None else min(due_s, left_s)
            if not self._queue and not self._closed:
                self._wakeup.wait(due_s)
            if self._closed:
                return None
            return [self._queue.popleft()] if self._queue else []

    def _kept(self, hint: Hint, receipt: DeliveryReceipt) -> DeliveryReceipt:
        """An end that did not reach the engine is told again when that answers. With `wakeup` held."""
        if hint.kind is not HintKind.SESSION_END or _reached(receipt):
            return receipt
        self._ends[_session(hint)] = (hint, 0)
        if len(self._ends) > MOST_ENDS:
            self._ends.popitem(last=False)
            log.count("session_end_lost")
        self._ends_later()
        return replace(receipt, detail=f"{receipt.detail}; it is told again")

    def _ends_later(self) -> None:
        self._ends_due_s = self._clock.now_s() + self._ends_pause_s

    def _tell_an_end(self) -> None:
        """One of the ends that are kept, if it is time. One that fails goes behind the others, and says nothing of the engine."""
        now_s = self._clock.now_s()
        with self._wakeup:
            if not self._ends or now_s < max(self._ends_due_s, self._away_until_s or 0.0):
                return
            session, (hint, tries) = self._ends.popitem(last=False)
            tries += not self._failures
        receipt, sound = self._delivered(now_s, hint, judged=False)
        with self._wakeup:
            if _reached(receipt) or not sound or tries >= _MOST_TRIES:
                self._note(receipt)
                return
            self._ends.setdefault(session, (hint, tries))
            self._ends_pause_s = min(2 * self._ends_pause_s, _MOST_AWAY_S)
            self._ends_later()

    def _say_farewell(self) -> None:
        """Ends that are kept or queued, one try more; an engine that is away is asked once."""
        ends_s = self._clock.now_s() + _FAREWELL_S
        ends = [hint for hint, _ in self._ends.values()]
        ends += [hint for _, hint in self._queue if hint.kind is HintKind.SESSION_END]
        if self._away_until_s is not None:
            self._away_until_s = self._clock.now_s()
        for hint in ends:
            left_s = ends_s - self._clock.now_s()
            if left_s > 0:
                self._note(self._delivered(self._clock.now_s(), hint, most_s=left_s)[0])

    def _ticked(self) -> float | None:
        if self._away_until_s is not None:
            return None
        try:
            deeds, due_s = self._adapter.tick()
        except Exception as error:
            log.failed("reach_tick_failed", adapter=self._adapter.name, error=repr(error))
            return 1.0
        if deeds:
            with self._wakeup:
                for receipt in deeds:
                    self._note(receipt)
        return due_s

    def _delivered(
        self, queued_s: float, hint: Hint, *, most_s: float = math.inf, judged: bool = True
    ) -> tuple[DeliveryReceipt, bool]:  # fmt: skip
        """Its receipt, and whether the adapter is sound: one that raises would do so again.

        `judged`: whether a failure says something of the engine.
        """
        now_s = self._clock.now_s()
        if self._away_until_s is not None:
            if now_s < self._away_until_s:
                return self._failed(hint, "the engine is away"), True
            self._try(self._adapter.reset)
        left_s = max(DEADLINE_S, self._adapter.patience_s) - (now_s - queued_s)
        if left_s <= 0:
            if hint.kind is not HintKind.SESSION_END:
                return self._failed(hint, "too late"), True
            left_s = DEADLINE_S
        sound = True
        try:
            receipt = self._adapter.deliver(hint, min(left_s, most_s))
        except Exception as error:
            log.failed("reach_adapter_failed", adapter=self._adapter.name, error=repr(error))
            receipt, sound = self._failed(hint, type(error).__name__), False
        if judged or _reached(receipt):
            self._judge(receipt)
        return receipt, sound

    def _judge(self, receipt: DeliveryReceipt) -> None:
        """After a few failures in a row the engine is away, for longer each time. One that says no is there."""
        if _reached(receipt):
            if self._failures:
                self._ends_due_s, self._ends_pause_s = 0.0, _FIRST_AWAY_S
            self._failures, self._away_s, self._away_until_s = 0, _FIRST_AWAY_S, None
            return
        self._failures += 1
        if self._failures >= _FAILURES or self._away_until_s is not None:
            self._away_until_s = self._clock.now_s() + self._away_s
            self._away_s = min(2 * self._away_s, _MOST_AWAY_S)

    def _try(self, work: Any) -> None:
        try:
            work()
        except Exception as error:
            log.failed("reach_adapter_failed", adapter=self._adapter.name, error=repr(error))

    def _failed(self, hint: Hint, detail: str) -> DeliveryReceipt:
        return DeliveryReceipt(
            adapter=self._adapter.name, hint=hint.id, kind=str(hint.kind), session=_session(hint),
            outcome=Outcome.FAILED, detail=detail,
        )  # fmt: skip

    def _note(self, receipt: DeliveryReceipt) -> None:
        self._outcomes[receipt.outcome] += 1
        self._receipts.append(receipt)
        if receipt.outcome is Outcome.FAILED:
            log.count("hint_not_delivered")


def _session(hint: Hint) -> str:
    return hint.session or hint.task


def _reached(receipt: DeliveryReceipt) -> bool:
    return receipt.outcome is not Outcome.FAILED or receipt.refused
