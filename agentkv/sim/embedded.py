"""Embedded: the simulator with the habits of the embedded engine, for runs that are held against a real one.

Covers what differs from `simulator.py`: steps one by one (`stepwise.py`); a call starts with the blocks of its prompt
(and one to spare if others run) and grows while it answers; each turn's stall as the engine books it (from its arrival to
the first step of its own prompt, and what it computed again). Not modelled:
that a call which cannot grow sends the youngest back; it grows all the same, past the device's size, until its end.
"""

from __future__ import annotations

import functools

from agentkv.core.residency import Tier
from agentkv.policy.rules import Rules
from agentkv.sim.costs import Costs
from agentkv.sim.device import Call
from agentkv.sim.simulator import BLOCK_TOKENS, Simulator, Task
from agentkv.sim.stepwise import Pace, Stepwise, steady
from agentkv.sim.workload import Workload


class Embedded(Simulator):
    """As `Simulator`. After `run`, `stalls_s[session]` has each turn's stall and `ended_s[session]` the end of its last."""

    def __init__(
        self, workload: Workload, costs: Costs, rules: Rules, *, shared_tokens: int, pace: Pace = steady
    ) -> None:
        engine = functools.partial(Stepwise, pace=pace)
        super().__init__(workload, costs, rules, shared_tokens=shared_tokens, engine=engine)
        self.stalls_s: dict[str, list[float]] = {}
        self.ended_s: dict[str, float] = {}

    def _need(self, task: Task) -> int:
        return max(1, -(-task.turn.prompt_tokens // BLOCK_TOKENS) - self._shared)

    def _seat(self, task: Task) -> bool:
        spare = 1 if self._seated else 0
        missing = self._need(task) - task.context.device - task.context.incoming
        return self.memory.make_room(max(0, missing) + spare, task.context) and super()._seat(task)

    def _call_ended(self, call: Call) -> None:
        task = call.owner
        assert isinstance(task, Task)
        context, memory = task.context, self.memory
        assert call.first_step_s is not None
        again_s = task.lost_s if task.index else 0.0
        self.stalls_s.setdefault(context.name, []).append(call.first_step_s - task.arrived_s + again_s)
        self.ended_s[context.name] = self.now_s()
        grown = max(1, task.blocks - self._shared) - context.seat
        if grown > 0:
            memory.make_room(grown, context)
            memory.used[Tier.DEVICE] += grown
            context.seat += grown
        super()._call_ended(call)
