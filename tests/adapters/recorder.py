"""An adapter that notes what it is told, and hints to tell it."""

from __future__ import annotations

import threading
import time

from agentkv.adapters.base import DeliveryReceipt, Outcome
from agentkv.core.hint import Hint, HintKind


class Recorder:
    """An adapter that notes what it is told; `gate` holds it up, `outcome` is what it says, `error` what it raises."""

    name = "recorder"
    patience_s = 0.05

    def __init__(self):
        self.told, self.resets, self.closed = [], 0, 0
        self.outcome, self.refused, self.error = Outcome.APPLIED, False, None
        self.ends_fail = False
        self.gate = threading.Event()
        self.gate.set()
        self.due = []

    def deliver(self, hint, within_s):
        self.gate.wait(5)
        self.told.append(hint.id)
        if self.error is not None:
            raise self.error
        outcome = Outcome.FAILED if self.ends_fail and hint.kind is HintKind.SESSION_END else self.outcome
        return DeliveryReceipt(
            adapter="recorder", hint=hint.id, kind=str(hint.kind), session="s", outcome=outcome, detail="done",
            refused=self.refused,
        )  # fmt: skip

    def tick(self):
        if self.error is not None:
            raise self.error
        return (self.due.pop(0), 0.01) if self.due else ((), None)

    def reset(self):
        self.resets += 1

    def close(self):
        self.closed += 1


def hint(name, kind=HintKind.TOOL_START, session=""):
    return Hint(id=str(name), kind=kind, at_s=0.0, ts_ms=0, task="t", session=session)


def end(session):
    return hint(f"end {session}", HintKind.SESSION_END, session)


def until(condition, seconds=20.0):
    ends = time.monotonic() + seconds
    while not condition() and time.monotonic() < ends:
        time.sleep(0.002)
    assert condition()
