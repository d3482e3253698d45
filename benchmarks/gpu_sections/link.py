"""Link: copies of scattered blocks by block size, path and direction; GB/s, and host time per descriptor.

Paths: "batch" is one call per job, "loop" torch's copy_ per block, "gather" one big copy to or from a buffer on the
device that a kernel gathers or scatters (it costs multiprocessors, so it is no default). On a CPU: "memmove".
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import torch

from agentkv.kv.streams import Direction, Event, Memory, Run, Streams
from gpu_sections.scene import GEOMETRIES, KIB, MIB, Found, Line, Scene, at_least, at_most, finish, middle, timed

_MOST_BYTES = 1024 * MIB
_MOST_BLOCKS = 8192
_JOB_BYTES = 64 * MIB
_FROM = 192 * KIB


class Side:
    """One path over one memory."""

    def __init__(self, memory: Memory, streams: Streams, blocks: int) -> None:
        self._streams = streams
        streams.bind(memory)
        size = memory.pool.geometry.block_bytes
        chance = random.Random(7)  # noqa: S311  an order that can be repeated
        pairs = list(
            zip(chance.sample(range(1, blocks + 1), blocks), chance.sample(range(blocks), blocks), strict=True)
        )
        per_job = max(1, _JOB_BYTES // size)
        self.jobs = [[Run(d, h, 1) for d, h in pairs[at : at + per_job]] for at in range(0, blocks, per_job)]
        self.bytes = blocks * size
        self.blocks = blocks

    def go(self, directions: tuple[Direction, ...]) -> tuple[float, float]:
        """(GB/s of all directions together, microseconds of host time per descriptor)."""
        submit_s: list[float] = []

        def one(direction: Direction) -> None:
            events: list[Event] = []
            submit_s.append(timed(lambda: events.extend(self._streams.copy(direction, job, ()) for job in self.jobs)))
            finish(events)

        def all_of_them() -> None:
            others = [threading.Thread(target=one, args=(direction,)) for direction in directions[1:]]
            for thread in others:
                thread.start()
            one(directions[0])
            for thread in others:
                thread.join()

        passed = timed(all_of_them)
        return len(directions) * self.bytes / passed / 1e9, max(submit_s) / self.blocks * 1e6


class Gathered:
    """Index kernels on the device and one big copy, for comparison."""

    def __init__(self, memory: Memory, blocks: int) -> None:
        assert memory.arena is not None
        pool = memory.pool.pool
        self._rows = pool.view(pool.shape[0], -1)
        order = random.Random(7).sample(range(1, blocks + 1), blocks)  # noqa: S311
        self._index = torch.tensor(order, device=pool.device)
        self._device = torch.empty_like(self._rows[:blocks])
        host = torch.frombuffer(memory.arena.buffer, dtype=torch.uint8)[: blocks * memory.pool.geometry.block_bytes]
        self._host = host.view(pool.dtype).view(blocks, -1)
        self._bytes = host.numel()

    def go(self, scene: Scene, direction: Direction) -> float:
        """GB/s."""

        def one() -> None:
            if direction == "d2h":
                torch.index_select(self._rows, 0, self._index, out=self._device)
                self._host.copy_(self._device, non_blocking=True)
            else:
                self._device.copy_(self._host, non_blocking=True)
                self._rows.index_copy_(0, self._index, self._device)
            scene.sync()

        return self._bytes / timed(one) / 1e9


def run(scene: Scene) -> Found:
    """All sizes."""
    figures: dict[str, Any] = {}
    lines: list[Line] = []
    for size, geometry in GEOMETRIES.items():
        most = 10 * MIB if scene.small else _MOST_BYTES
        blocks = min(_MOST_BLOCKS, most // size)
        repeats = 2 if scene.small else 5
        with scene.memory(geometry, blocks) as memory:
            found = _one_size(scene, memory, blocks, repeats)
        figures[f"{size // KIB}_kib"] = {"blocks": blocks, **found}
        if size >= _FROM:
            best = "batch" if "batch_h2d_gb_s" in found else next(iter(_paths(scene)))
            lines += [
                at_least(scene, f"{way} at {size // KIB} KiB", found[f"{best}_{way}_gb_s"], 50, "GB/s")
                for way in ("h2d", "d2h")
            ]
            if best == "batch":
                lines.append(at_most(scene, f"host time at {size // KIB} KiB", found["batch_us"], 1, "us/descriptor"))
    return Found(figures=figures, lines=lines)


def _paths(scene: Scene) -> dict[str, Callable[[], Streams]]:
    if not scene.on_gpu:
        return {"memmove": scene.streams}
    from agentkv.kv.streams.batch import available

    paths: dict[str, Callable[[], Streams]] = {"loop": lambda: scene.streams(batched=False)}
    why = available()
    if why:
        note = f"no batched copies: {why}"
        if note not in scene.notes:
            scene.notes.append(note)
        return paths
    return {"batch": scene.streams, **paths}


def _one_size(scene: Scene, memory: Memory, blocks: int, repeats: int) -> dict[str, float]:
    found: dict[str, float] = {}
    ways: dict[str, tuple[Direction, ...]] = {"h2d": ("h2d",), "d2h": ("d2h",), "both": ("h2d", "d2h")}
    for path, make in _paths(scene).items():
        streams = make()
        side = Side(memory, streams, blocks)
        side.go(("h2d", "d2h"))
        costs: list[float] = []
        for way, directions in ways.items():
            results = [side.go(directions) for _ in scene.repeats(repeats)]
            found[f"{path}_{way}_gb_s"] = round(middle([gb_s for gb_s, _ in results]), 2)
            costs += [us for _, us in results] if len(directions) == 1 else []
        found[f"{path}_us"] = round(middle(costs), 3)
        streams.close()
    gathered = Gathered(memory, blocks)
    for direction in ways["both"]:
        found[f"gather_{direction}_gb_s"] = round(middle([gathered.go(scene, direction) for _ in range(repeats)]), 2)
    return found
