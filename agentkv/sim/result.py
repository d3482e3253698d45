"""Result: what one run tells: times, stalls, shares, bytes. Tally collects it on the way."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from agentkv.core.residency import Tier

if TYPE_CHECKING:
    from agentkv.sim.costs import Costs
    from agentkv.sim.device import Call
    from agentkv.sim.facts import Task
    from agentkv.sim.memory import Memory
    from agentkv.sim.simulator import Simulator


class Lane(NamedTuple):
    """What a task does from `time_s` on: load, run, wait, queue or end."""

    time_s: float
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Seconds, bytes, shares of 1.

    A resume *stall* is how much later a turn's first token came than with its context kept and the device idle (a
    session's first turn apart). `task_*`: from a session's start to its end, waits included. `gain` figures compare
    policies and are `compare.py`'s.
    """

    policy: str
    sessions: int
    turns: int
    task_mean_s: float
    task_p95_s: float
    stall_mean_s: float
    stall_p50_s: float
    stall_p95_s: float
    stall_p99_s: float
    makespan_s: float
    turns_per_s: float
    device_idle: float
    useful: float
    """Effective utilisation: the share of device time that computed what had not been computed before."""
    device_byte_s: float
    """Byte-seconds of device memory held by sessions that wait."""
    up_bytes: float
    down_bytes: float
    read_bytes: float
    written_bytes: float
    wasted_prefetch_bytes: float
    lost_tokens: int
    hit_share: float
    block_bytes: int
    lanes: dict[str, list[Lane]] | None = field(default=None, repr=False)
    occupancy: list[tuple[float, float, float, float]] | None = field(default=None, repr=False)

    @property
    def moved_bytes(self) -> float:
        """Over the host link in both directions, and to and from disk."""
        return self.up_bytes + self.down_bytes + self.read_bytes + self.written_bytes


class Tally:
    """Counts while a run goes on."""

    def __init__(self, lanes: dict[str, list[Lane]] | None) -> None:
        self.lanes = lanes
        self.occupancy: list[tuple[float, float, float, float]] = []
        self.stalls_by_session: dict[str, list[float]] = {}
        self.tasks: list[float] = []
        self.sessions_ended = self.turns = self.waits = 0
        self.lost_tokens = self.hit_tokens = self.reusable_tokens = self.prefetched = 0
        self.lost_s = 0.0
        self._device_block_s = 0.0
        self._time_s = 0.0

    def pass_time(self, seconds: float, memory: Memory) -> None:
        """Nothing changes for so long."""
        if seconds > 0:
            self._device_block_s += seconds * memory.used[Tier.DEVICE]
            self._time_s += seconds
            if self.lanes is not None:
                used = memory.used
                self.occupancy.append((self._time_s - seconds, used[Tier.DEVICE], used[Tier.HOST], used[Tier.DISK]))

    def answered(self, task: Task, call: Call, costs: Costs) -> None:
        """A call has ended."""
        turn = task.turn
        self.turns += 1
        self.lost_s += task.lost_s
        if task.index > 0:
            kept = task.reusable * 16
            alone_s = costs.prefill.extend_s(kept, turn.prompt_tokens) + costs.decode_base_s
            stall_s = max(0.0, call.first_token_s - task.arrived_s - alone_s)
            self.stalls_by_session.setdefault(task.session.name, []).append(stall_s)

    def ended(self, started_s: float, now_s: float) -> None:
        """A session has ended."""
        self.sessions_ended += 1
        self.tasks.append(now_s - started_s)

    def result(self, sim: Simulator) -> Result:
        """Once everything has ended."""
        device, memory = sim._device, sim.memory
        time_s = max(self._time_s, 1e-9)
        busy = device.busy_s
        stalls = [stall_s for each in self.stalls_by_session.values() for stall_s in each]
        return Result(
            policy=sim.rules.name, sessions=self.sessions_ended, turns=self.turns,
            task_mean_s=_mean(self.tasks), task_p95_s=quantile(self.tasks, 0.95),
            stall_mean_s=_mean(stalls), stall_p50_s=quantile(stalls, 0.5),
            stall_p95_s=quantile(stalls, 0.95), stall_p99_s=quantile(stalls, 0.99),
            makespan_s=time_s, turns_per_s=self.turns / time_s, device_idle=1 - busy / time_s,
            useful=max(0.0, busy - self.lost_s) / time_s,
            device_byte_s=self._device_block_s * memory.block_bytes,
            up_bytes=sim._h2d.carried_bytes, down_bytes=sim._d2h.carried_bytes,
            read_bytes=sim._read.carried_bytes if sim._read else 0.0,
            written_bytes=sim._write.carried_bytes if sim._write else 0.0,
            wasted_prefetch_bytes=float(memory.wasted_blocks * memory.block_bytes),
            lost_tokens=self.lost_tokens, hit_share=self.hit_tokens / max(1, self.reusable_tokens),
            block_bytes=memory.block_bytes,
            lanes=self.lanes, occupancy=self.occupancy if self.lanes is not None else None,
        )  # fmt: skip


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def quantile(values: list[float], q: float) -> float:
    """The q-quantile by linear interpolation; 0 of nothing."""
    if not values:
        return 0.0
    ordered = sorted(values)
    position = q * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])
