"""Stepwise: a device that takes its steps one by one, as the embedded engine does.

Covers what `device.py` leaves out because it reckons in bursts: a chunk of prompt tokens that several calls share,
decoders that do not shorten it, and a machine whose speed changes. For runs of some thousand steps (`replay.py`);
`device.py` is for millions. Steps cost what `costs` says, the same on both.
"""

from __future__ import annotations

from collections.abc import Callable

from agentkv.sim.costs import Costs
from agentkv.sim.device import Call, Device

Pace = Callable[[float], float]
"""pace(time_s): how many times slower than `costs` the machine is at that moment."""


RETRY_S = 0.02
"""When nobody can grow: the embedded engine looks again so soon."""


def steady(_time_s: float) -> float:
    """A machine that is as fast as it was measured, all the time."""
    return 1.0


class Stepwise(Device):
    """As `Device`, step by step; `pace` stretches each step by what it says at the step's beginning.

    `grow(call)` is asked before each decoded token whether it has a place; it may `remove` others.
    """

    def __init__(
        self,
        costs: Costs,
        *,
        at: Callable[[float, Callable[[], None]], None],
        now_s: Callable[[], float],
        ended: Callable[[Call], None],
        pace: Pace = steady,
        grow: Callable[[Call], bool] = lambda _call: True,
    ) -> None:
        super().__init__(costs, at=at, now_s=now_s, ended=ended)
        self._pace = pace
        self._grow = grow
        self._running: list[Call] = []
        self._stepping = False

    def __len__(self) -> int:
        return len(self._running)

    def add(self, call: Call) -> None:
        """This call computes from the next step on."""
        self._running.append(call)
        if not self._stepping:
            self._step()

    def running(self) -> list[Call]:
        """Who computes, first to go first."""
        return sorted(self._running, key=lambda one: one.key)

    def remove(self, call: Call) -> None:
        """This call computes no more for now."""
        self._running.remove(call)

    def _step(self) -> None:
        now_s = self._now_s()
        turns: list[tuple[Call, int]] = []
        left, contexts, prefill_s = self._costs.token_budget, 0, 0.0
        for call in self.running():
            if call not in self._running:
                continue  # sent back for one before it
            if call.at >= call.prompt:
                if self._grow(call):
                    contexts += call.at + 1
                    turns.append((call, 1))
                continue
            count = min(left, call.prompt - call.at)
            if count == 0:
                continue
            if call.first_step_s is None:
                call.first_step_s = now_s
            left -= count
            prefill_s += self._prefill.extend_s(call.at, call.at + count)
            turns.append((call, count))
        turns = [turn for turn in turns if turn[0] in self._running]
        self._stepping = bool(self._running)
        if self._running and not turns:
            self._at(now_s + RETRY_S, self._step)
        if turns:
            seconds = (self._costs.decode_s(contexts) + prefill_s) * self._pace(now_s)
            self._at(now_s + seconds, lambda: self._stepped(turns, seconds))

    def _stepped(self, turns: list[tuple[Call, int]], seconds: float) -> None:
        """The step is over: tokens for everyone whose prompt is there; who has all of its own leaves."""
        self.busy_s += seconds
        for call, count in turns:
            call.at += count
            if call.at < call.prompt:
                continue
            if call.at == call.prompt:
                call.first_token_s = self._now_s()
            call.left -= 1
            if call.left <= 0:
                self._running.remove(call)
                self._ended(call)
        self._step()
