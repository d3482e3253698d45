"""Simulator: discrete events on a virtual clock, driving the real policy functions over a workload.

Covers what happens to sessions: arrivals, queue, seats, restores, computing (`device.py`), waits, moves. Does not cover
tiers (`memory.py`), links (`link.py`), what is reported (`result.py`), nor several runs (`compare.py`). The device is
one engine; steps are exact for their batch, blocks are exact in runs. Not modelled: preemption in mid-call (a call gets
all blocks of its prompt and its answer before it starts), failures, and copies that slow down computing.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable

from agentkv.core.forecast import Forecast
from agentkv.core.hint import ToolStatus
from agentkv.core.residency import Action, Move, Residency, Tier
from agentkv.errors import ConfigError
from agentkv.hints.forecaster import Forecaster
from agentkv.policy.rules import Rules
from agentkv.policy.schedule import Claims, Queued, always
from agentkv.sim import runs
from agentkv.sim.context import Context
from agentkv.sim.costs import Costs
from agentkv.sim.device import Call, Device
from agentkv.sim.facts import BLOCK_TOKENS, Task, claims_of, demand_of, residency_of, worth_restoring
from agentkv.sim.link import Job, Link
from agentkv.sim.memory import Memory
from agentkv.sim.result import Lane, Result, Tally
from agentkv.sim.workload import Session, Turn, Workload

__all__ = ["BLOCK_TOKENS", "Simulator", "Task"]

MAX_BATCH = 256
IDLE = Forecast(remaining_s=(1.0,), n=0, source="prior", overdue=True)


class Simulator:
    """One run of `workload` under `rules`. `infinite`: memory without bounds. `lanes`: keep the plot's material.

    `shared_tokens`: the prompt's beginning that all sessions share (system prompt and tools): held once, by all.
    `engine` makes the device that computes: `stepwise.Stepwise` for short runs that must be exact to the step.
    `checked`: recount the tiers after every event (tests). Raises ConfigError if a call cannot fit the device.
    """

    def __init__(
        self,
        workload: Workload,
        costs: Costs,
        rules: Rules,
        *,
        infinite: bool = False,
        shared_tokens: int = 2048,
        lanes: bool = False,
        checked: bool = False,
        progress: Callable[[int], None] | None = None,
        engine: Callable[..., Device] = Device,
    ) -> None:
        self.workload, self.costs, self.rules = workload, costs, rules
        self._now_s = 0.0
        self._calendar: list[tuple[float, int, Callable[[], None]]] = []
        self._ids = itertools.count()
        self._shared = shared_tokens // BLOCK_TOKENS
        self._shared_ready = False
        self._block_bytes = costs.token_bytes * BLOCK_TOKENS
        self._progress = progress
        self._checked = checked
        self._queue: list[Task] = []
        self._waiting: dict[str, Task] = {}
        self._seated: dict[str, Task] = {}
        self._loading = 0
        self._next = 0
        self._forecaster = Forecaster()
        self.tally = Tally(lanes={} if lanes else None)
        clock = self.now_s
        self._h2d = Link(costs.h2d_bytes_s, at=self._at, now_s=clock)
        self._d2h = Link(costs.d2h_bytes_s, at=self._at, now_s=clock)
        disk = costs.disk_bytes > 0 and costs.read_bytes_s is not None and costs.write_bytes_s is not None
        self._read = Link(costs.read_bytes_s or 1.0, at=self._at, now_s=clock) if disk else None
        self._write = Link(costs.write_bytes_s or 1.0, at=self._at, now_s=clock) if disk else None
        device = costs.device_bytes // self._block_bytes - self._shared
        self._device_blocks = math.inf if infinite else device
        self._fits(device)
        self.memory = Memory(
            block_bytes=self._block_bytes,
            device=self._device_blocks,
            host=max(0, costs.host_bytes // self._block_bytes - self._shared) if rules.offloads else 0,
            disk=costs.disk_bytes // self._block_bytes if rules.offloads else 0,
            key=rules.evict_key,
            now_s=clock,
            h2d=self._h2d,
            d2h=self._d2h,
            read=self._read if rules.offloads else None,
            write=self._write if rules.offloads else None,
            elsewhere_first=rules.elsewhere_first,
            on_change=self._seat_all,
        )
        self._device = engine(costs, at=self._at, now_s=clock, ended=self._call_ended)

    def now_s(self) -> float:
        """Virtual time."""
        return self._now_s

    def run(self) -> Result:
        """Until every session has ended."""
        load = self.workload
        if load.arrivals_s:
            for session, time_s in zip(load.sessions, load.arrivals_s, strict=True):
                self._at(time_s, lambda session=session: self._begin(session))  # type: ignore[misc]
        else:
            for _ in range(min(load.agents, len(load.sessions))):
                self._at(0.0, self._begin_next)
        calendar = self._calendar
        while calendar:
            time_s, _, call = heapq.heappop(calendar)
            self.tally.pass_time(time_s - self._now_s, self.memory)
            self._now_s = time_s
            call()
            if self._checked:
                self.memory.check()
        if self.tally.sessions_ended != len(load.sessions):
            raise ConfigError(
                f"{len(load.sessions) - self.tally.sessions_ended} sessions wait for room that will never come: "
                f"{self._device_blocks} device blocks are too few"
            )
        return self._result()

    def _at(self, time_s: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._calendar, (time_s, next(self._ids), call))

    def _fits(self, device: float) -> None:
        largest = max(
            -(-(turn.prompt_tokens + turn.output_tokens) // BLOCK_TOKENS)
            for session in self.workload.sessions
            for turn in session.turns
        )
        if largest - self._shared > device:
            raise ConfigError(
                f"a call of {largest * BLOCK_TOKENS} tokens does not fit the device's {int(device + self._shared) * BLOCK_TOKENS}: "
                "use a smaller window, a larger or another card"
            )

    # -- sessions

    def _begin_next(self) -> None:
        if self._next < len(self.workload.sessions):
            self._begin(self.workload.sessions[self._next])

    def _begin(self, session: Session) -> None:
        order, self._next = self._next, self._next + 1
        context = Context(session.name, order, priority=session.priority)
        self.memory.add(context)
        task = Task(session, order, context, self._now_s)
        self._arrive(task)

    def _arrive(self, task: Task) -> None:
        """The task's next call is here."""
        turn, context = task.turn, task.context
        if task.index > 0:  # the last cycle's share, smoothed over about four
            cycle_s = max(1e-9, self._now_s - task.arrived_s)
            context.idle_share += 0.25 * ((self._now_s - context.wait_started_s) / cycle_s - context.idle_share)
        task.arrived_s = self._now_s
        task.version += 1
        self._waiting.pop(context.name, None)
        context.forecast = None
        task.reusable = min(turn.reuse_tokens, turn.prompt_tokens - 1) // BLOCK_TOKENS
        self.memory.cut(context, max(0, task.reusable - self._shared))
        task.queued = Queued(order=task.order, priority=context.priority, arrived_s=self._now_s)
        task.turn_key = self.rules.turn_key(task.queued)
        self._queue.append(task)
        self._mark(task, "queue")
        self._queue.sort(key=_by_turn)
        self._seat_all()

    def _seat_all(self) -> None:
        """Start what may run now, in the policy's order; nobody overtakes one that waits for room."""
        queue = self._queue
        everybody = self.rules.admit is always
        claims: Claims | None = None
        place = 0
        while place < len(queue) and len(self._seated) < MAX_BATCH:
            task = queue[place]
            if not everybody:
                claims = claims or claims_of(self.memory.contexts.values(), self._now_s)
                if not self._admitted(task, claims):
                    place += 1
                    continue
            if not self._seat(task):
                break
            claims = None
            del queue[place]

    def _admitted(self, task: Task, claims: Claims) -> bool:
        capacity = self.memory.capacity
        return self.rules.admit(demand_of(task, claims, capacity, self._block_bytes, busy=bool(self._seated)))

    def _seat(self, task: Task) -> bool:
        context, memory, turn = task.context, self.memory, task.turn
        shared = min(self._shared, task.blocks) if self._shared_ready else 0
        hit = max(0, min(context.leading(), context.total))
        hit = max(hit, min(hit, context.device))
        need = self._need(task)
        hit = worth_restoring(context, hit, self.costs, has_disk=self._read is not None, shared=self._shared)
        if not memory.seat(context, need, hit):
            return False
        task.hit = hit
        start = (hit + shared) * BLOCK_TOKENS if hit or shared else 0
        start = min(start, turn.prompt_tokens - 1)
        # what was computed before and must be computed again; a new session's system prompt is not lost, it is shared
        task.lost_s = self.costs.prefill.extend_s(start, task.reusable * BLOCK_TOKENS)
        self.tally.lost_tokens += max(0, task.reusable * BLOCK_TOKENS - start)
        self.tally.hit_tokens += min(start, task.reusable * BLOCK_TOKENS)
        self.tally.reusable_tokens += task.reusable * BLOCK_TOKENS
        task.call = Call(task, key=task.turn_key, at=start, prompt=turn.prompt_tokens, output=turn.output_tokens)
        self._seated[context.name] = task
        self._mark(task, "load")

        def loaded(_: Job) -> None:
            self._loading -= 1
            context.device = hit
            self._compute(task)

        if memory.load(context, hit, loaded):
            self._loading += 1
        else:
            self._compute(task)
        return True

    def _need(self, task: Task) -> int:
        """Device blocks that a call must have to start: those of its prompt and its answer."""
        return max(1, task.blocks - self._shared)

    def _compute(self, task: Task) -> None:
        assert task.call is not None
        self._shared_ready = True
        self._mark(task, "run")
        self._device.add(task.call)

    def _call_ended(self, call: Call) -> None:
        task = call.owner
        assert isinstance(task, Task)
        context, turn = task.context, task.turn
        context.device = min(context.device, task.hit)
        del self._seated[context.name]
        self.memory.leave(context, max(1, task.blocks - self._shared))
        context.tokens = turn.prompt_tokens + turn.output_tokens
        context.recompute_s = self.costs.prefill.recompute_s(context.tokens)
        self.tally.answered(task, call, self.costs)
        if turn.wait_s is None:
            self._end(task)
        else:
            self._wait(task, turn)
        self._seat_all()

    def _end(self, task: Task) -> None:
        self.memory.forget(task.context)
        self.tally.ended(task.started_s, self._now_s)
        self._mark(task, "end")
        if not self.workload.arrivals_s:
            self._at(self._now_s, self._begin_next)
        self._offer_room()

    def _wait(self, task: Task, turn: Turn) -> None:
        context = task.context
        wait_s = turn.wait_s or 0.0
        context.wait_started_s = self._now_s
        context.forecast = self._foresee(turn)
        task.version += 1
        self._waiting[context.name] = task
        self._mark(task, "wait")
        task.index += 1
        self._at(self._now_s + wait_s, lambda: self._wait_over(task, turn))
        self._decide(task)

    def _wait_over(self, task: Task, turn: Turn) -> None:
        if self.rules.sight == "learned":
            self._forecaster.learn(turn.tool, turn.command, turn.wait_s or 0.0, ToolStatus.SUCCEEDED)
        self._arrive(task)
        self.tally.waits += 1
        if self._progress is not None and self.tally.waits % 256 == 0:
            self._progress(self.tally.waits)

    def _foresee(self, turn: Turn) -> Forecast:
        if self.rules.sight == "oracle":
            return Forecast(remaining_s=(turn.wait_s or 0.0,), n=1, source="declared")
        if self.rules.sight == "elapsed":
            return IDLE
        return self._forecaster.forecast(turn.tool, turn.command)

    # -- moves

    def _decide(self, task: Task) -> None:
        context = task.context
        if context.forecast is None or context.gone:
            return
        decision = self.rules.decide(self.residency(context), context.forecast, context.wait_started_s, self._now_s)
        for move in decision.moves:
            self._apply(context, move)
        again_s = decision.ask_again_s
        if again_s is not None and again_s < math.inf:
            version = task.version
            self._at(max(again_s, self._now_s), lambda: self._ask(task, version))

    def _ask(self, task: Task, version: int) -> None:
        if task.version == version:
            self._decide(task)

    def _apply(self, context: Context, move: Move) -> None:
        memory = self.memory
        if move.action is Action.DROP:
            memory.drop(context)
        elif move.action is Action.PREFETCH:
            if move.to is Tier.DEVICE:
                self.tally.prefetched += memory.prefetch(context, evicts=self.rules.prefetch_evicts)
        else:
            memory.write(context, context.unwritten)
            if move.action is Action.DEMOTE:
                context.demoted_to = move.to
                if move.to is Tier.DISK and self._write is not None:
                    memory.spill(context, runs.size(context.host))
        self._seat_all() if self._queue else None

    def _offer_room(self) -> None:
        """Room has appeared that nobody waits for: whoever is away is asked again, the first back first."""
        if self._queue:
            return
        now_s = self._now_s
        away = [task for task in self._waiting.values() if task.context.device < task.context.total]
        away.sort(key=lambda task: self.rules.evict_key(task.context, now_s))
        for task in away:
            if self.memory.free(Tier.DEVICE) <= 0:
                break
            self._decide(task)

    def residency(self, context: Context) -> Residency:
        """The facts that a policy sees; the same fields as the engine's."""
        return residency_of(context, self.memory, self.costs, offloads=self.rules.offloads, queue=self._queue)

    # -- report

    def _mark(self, task: Task, what: str) -> None:
        if self.tally.lanes is not None:
            self.tally.lanes.setdefault(task.session.name, []).append(Lane(self._now_s, what))

    def _result(self) -> Result:
        return self.tally.result(self)


def _by_turn(task: Task) -> tuple[float, ...]:
    return task.turn_key
