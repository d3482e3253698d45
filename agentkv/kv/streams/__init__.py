"""Streams: the order of compute and copies, as CUDA has it, behind one protocol for every backend.

Covers the protocol and the events that need no device. The backends: `cpu`, `cuda`, `adversarial`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from agentkv.kv.device import DevicePool
    from agentkv.kv.host import HostArena

Direction = Literal["h2d", "d2h"]


class Run(NamedTuple):
    """`n` neighbouring blocks: device blocks `device_block`... and host slots `host_block`..."""

    device_block: int
    host_block: int
    n: int


def runs_of(pairs: Iterable[tuple[int, int]]) -> list[Run]:
    """(device block, host slot) pairs as few runs."""
    runs: list[Run] = []
    for device, host in sorted(pairs):
        last = runs[-1] if runs else None
        if last and (device, host) == (last.device_block + last.n, last.host_block + last.n):
            runs[-1] = last._replace(n=last.n + 1)
        else:
            runs.append(Run(device, host, 1))
    return runs


def cut_runs(runs: Iterable[Run], every: int) -> list[Run]:
    """The same copies, none across a host slot whose number is a multiple of `every`."""
    cut: list[Run] = []
    for run in runs:
        done = 0
        while done < run.n:
            n = min(run.n - done, every - (run.host_block + done) % every)
            cut.append(Run(run.device_block + done, run.host_block + done, n))
            done += n
    return cut


class Event(Protocol):
    """A point on a stream."""

    def query(self) -> bool:
        """True once everything before the point is done."""
        ...

    def wait(self) -> None:
        """Block the calling thread until the point is reached."""
        ...


class Done:
    """An event that has happened."""

    def query(self) -> bool:
        return True

    def wait(self) -> None:
        return


DONE = Done()


class HostEvent:
    """An event that some thread sets."""

    def __init__(self) -> None:
        self._set = threading.Event()

    def query(self) -> bool:
        return self._set.is_set()

    def wait(self) -> None:
        self._set.wait()

    def set(self) -> None:
        self._set.set()


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What copies go between: the pool and the arena (None without a host tier)."""

    pool: DevicePool
    arena: HostArena | None


class Streams(Protocol):
    """One compute stream and one copy stream per direction; each keeps its own order, nothing orders them but events.

    `bind` is called once, by `Tiers`. `taken` and `freed` tell which slots change owner; only the adversary acts on
    them (it poisons what nobody may read any more).
    """

    def bind(self, memory: Memory) -> None: ...

    def launch(self, fn: Callable[[], None]) -> None:
        """Run `fn` on the compute stream: now on the CPU, in order but later elsewhere."""
        ...

    def record(self) -> Event:
        """The compute stream's position now."""
        ...

    def compute_wait(self, event: Event) -> None:
        """What is launched from now on runs after `event`."""
        ...

    def copy(self, direction: Direction, runs: Sequence[Run], after: Sequence[Event]) -> Event:
        """Copy `runs` on the side stream of that direction once `after` have happened. May block: call it from a
        mover's thread only.
        """
        ...

    def taken(self, *, device: Sequence[int] = (), host: Sequence[int] = (), compute: bool = False) -> None:
        """These slots have a new owner; `compute` if it is a sequence that will write them."""
        ...

    def freed(self, *, device: Sequence[tuple[int, Event]] = (), host: Sequence[int] = ()) -> None:
        """These slots have no owner; a device block may still be read until its event."""
        ...

    def close(self) -> None: ...


def streams_for(device: DevicePool) -> Streams:
    """The backend for where the pool is."""
    if device.pool.is_cuda:
        from agentkv.kv.streams.cuda import CudaStreams

        return CudaStreams(device.pool.device)
    from agentkv.kv.streams.cpu import CpuStreams

    return CpuStreams()
