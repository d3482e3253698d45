"""Embedded: the simulator with the habits of the embedded engine, for runs that are held against a real one.

Covers what differs from `simulator.py`: steps one by one (`stepwise.py`); a call starts with the blocks of its prompt
(and one to spare if others run) and grows while it answers; if it cannot, the youngest goes back to the queue; each
turn's stall as the engine books it: its queues, its load, and what it computed again. Not modelled: the 50 ms that a
starving call waits before it sends somebody back, and calls that wait for a prefix that another one computes.
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
    """As `Simulator`. After `run`, `stalls_s[session]` has each turn's stall, `ended_s[session]` the end of its last;
    `preemptions` counts calls that were sent back.
    """

    def __init__(
        self, workload: Workload, costs: Costs, rules: Rules, *, shared_tokens: int, pace: Pace = steady
    ) -> None:
        engine = functools.partial(Stepwise, pace=pace, grow=self._grow)
        super().__init__(workload, costs, rules, shared_tokens=shared_tokens, engine=engine)
        assert isinstance(self._device, Stepwise)
        self._stepwise = self._device
        self.stalls_s: dict[str, list[float]] = {}
        self.ended_s: dict[str, float] = {}
        self.preemptions = 0
        self._stalled_s: dict[str, float] = {}  # of calls that were sent back
        self._back: dict[str, tuple[Call, float]] = {}  # the call as it was, and when it went back

    def _need(self, task: Task) -> int:
        sent_back = self._back.get(task.context.name)
        tokens = task.turn.prompt_tokens if sent_back is None else sent_back[0].at + 1
        return self._blocks(tokens)

    def _blocks(self, tokens: int) -> int:
        return max(1, -(-tokens // BLOCK_TOKENS) - self._shared)

    def _seat(self, task: Task) -> bool:
        spare = 1 if self._seated else 0
        missing = self._need(task) - task.context.device - task.context.incoming
        return self.memory.make_room(max(0, missing) + spare, task.context) and super()._seat(task)

    def _compute(self, task: Task) -> None:
        call = task.call
        assert call is not None
        sent_back, _ = self._back.get(task.context.name, (None, 0.0))
        if sent_back is not None:  # what it had written is part of its prompt now
            call.prompt, call.left = sent_back.at + 1, sent_back.left
        super()._compute(task)

    def _grow(self, call: Call) -> bool:
        """Make sure that the next token has a place; the youngest goes back to the queue if need be."""
        task = call.owner
        assert isinstance(task, Task)
        context, memory = task.context, self.memory
        if self._blocks(call.at + 1) <= context.seat:
            return True
        if not memory.make_room(1, context):
            youngest = self._stepwise.running()[-1]
            if youngest is call:
                return False
            self._send_back(youngest)
            if not memory.make_room(1, context):
                return False
        memory.used[Tier.DEVICE] += 1
        context.seat += 1
        return True

    def _send_back(self, call: Call) -> None:
        """Back to the queue without a seat; its full blocks can still be found."""
        task = call.owner
        assert isinstance(task, Task)
        context = task.context
        self.preemptions += 1
        self._stepwise.remove(call)
        self._note_stall(task, call)
        self._back[context.name] = (call, self.now_s())
        del self._seated[context.name]
        self.memory.leave(context, min(context.seat, max(0, call.at // BLOCK_TOKENS - self._shared)))
        self._queue.append(task)
        self._queue.sort(key=lambda one: one.turn_key)

    def _note_stall(self, task: Task, call: Call) -> None:
        name = task.context.name
        since_s = self._back[name][1] if name in self._back else task.arrived_s
        started_s = self.now_s() if call.first_step_s is None else call.first_step_s
        self._stalled_s[name] = self._stalled_s.get(name, 0.0) + started_s - since_s

    def _call_ended(self, call: Call) -> None:
        task = call.owner
        assert isinstance(task, Task)
        context, memory = task.context, self.memory
        self._note_stall(task, call)
        self._back.pop(context.name, None)
        again_s = task.lost_s if task.index else 0.0
        self.stalls_s.setdefault(context.name, []).append(self._stalled_s.pop(context.name) + again_s)
        self.ended_s[context.name] = self.now_s()
        grown = max(1, task.blocks - self._shared) - context.seat
        if grown > 0:  # the place of its last token, which is not computed
            memory.make_room(grown, context)
            memory.used[Tier.DEVICE] += grown
            context.seat += grown
        super()._call_ended(call)
