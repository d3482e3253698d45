"""What the sections share: the device, sizes, the time that is left, pass lines, and KV memory of a wanted block size."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from agentkv.kv.device import DevicePool
from agentkv.kv.geometry import Geometry
from agentkv.kv.host import HostArena
from agentkv.kv.streams import Event, Memory, Streams
from agentkv.kv.streams.cpu import CpuStreams
from agentkv.kv.streams.cuda import CudaStreams

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
COPY_AND_NOTHING_ELSE = "left out, for comparison"

GEOMETRIES = {
    8 * KIB: Geometry(layers=1, kv_heads=1, head_dim=128, dtype="bfloat16"),
    32 * KIB: Geometry(layers=4, kv_heads=1, head_dim=128, dtype="bfloat16"),
    192 * KIB: Geometry(layers=24, kv_heads=1, head_dim=128, dtype="bfloat16"),
    MIB: Geometry(layers=16, kv_heads=8, head_dim=128, dtype="bfloat16"),
    2 * MIB: Geometry(layers=32, kv_heads=8, head_dim=128, dtype="bfloat16"),
    5 * MIB: Geometry(layers=80, kv_heads=8, head_dim=128, dtype="bfloat16"),
}
"""By the bytes of a block; 2 MiB is Llama 3 8B."""


@dataclass(slots=True, kw_only=True)
class Scene:
    """`device` "cuda" or "cpu"; `small`: sizes for two CPU cores; `scratch`: a folder on the disk to be measured."""

    device: str
    small: bool
    scratch: Path
    deadline_s: float
    notes: list[str] = field(default_factory=list)

    @property
    def on_gpu(self) -> bool:
        """True if figures are those of a GPU."""
        return self.device == "cuda"

    @property
    def left_s(self) -> float:
        """Seconds of the budget that are left."""
        return self.deadline_s - time.monotonic()

    def repeats(self, wanted: int) -> Iterator[int]:
        """0, 1, ... up to `wanted`, fewer (but one) where the budget ends; then there is a note."""
        for number in range(wanted):
            if number and self.left_s < 0:
                self.notes.append(f"{number} of {wanted} repeats: the budget ended")
                return
            yield number

    def sync(self) -> None:
        """Everything that was launched has ended."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def streams(self, *, batched: bool = True) -> Streams:
        """The backend under test; without `batched` copies go run by run."""
        if not self.on_gpu:
            return CpuStreams()
        return CudaStreams(torch.device("cuda:0"), batch=None if batched else COPY_AND_NOTHING_ELSE)

    @contextlib.contextmanager
    def memory(self, geometry: Geometry, blocks: int) -> Iterator[Memory]:
        """A pool and an arena of so many blocks."""
        pool = DevicePool(geometry, self.device, blocks * geometry.block_bytes)
        arena = HostArena(geometry, blocks * geometry.slot_bytes, pin=self.on_gpu)
        try:
            yield Memory(pool=pool, arena=arena)
        finally:
            arena.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A pass line: what was measured, what it must be. `ok` None: this machine cannot tell."""

    what: str
    value: float | None
    bound: str
    ok: bool | None

    def json(self) -> dict[str, Any]:
        """As a plain value."""
        return {"what": self.what, "value": self.value, "bound": self.bound, "ok": self.ok}


def at_least(scene: Scene, what: str, value: float, bound: float, unit: str = "") -> Line:
    """A lower bound, which only a GPU's figures are held against."""
    return Line(
        what=what, value=value, bound=f">= {bound:g} {unit}".strip(), ok=value >= bound if scene.on_gpu else None
    )


def at_most(scene: Scene, what: str, value: float, bound: float, unit: str = "", *, anywhere: bool = False) -> Line:
    """An upper bound; `anywhere`: it holds on a CPU as well."""
    judged = scene.on_gpu or anywhere
    return Line(what=what, value=value, bound=f"<= {bound:g} {unit}".strip(), ok=value <= bound if judged else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A section's result."""

    figures: dict[str, Any]
    lines: list[Line] = field(default_factory=list)


def timed(fn: Callable[[], object]) -> float:
    """Seconds that `fn` took."""
    started = time.perf_counter()
    fn()
    return time.perf_counter() - started


def finish(events: list[Event]) -> None:
    """Wait for all."""
    for event in events:
        event.wait()


def middle(values: list[float]) -> float:
    """The median."""
    return statistics.median(values)


def rank(values: list[float], q: float) -> float:
    """The q-quantile (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(q * (len(ordered) - 1)))]
