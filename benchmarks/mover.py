"""Copies against the hardware's limit, and what handing them over costs the caller. No model.

`memcpy_share_*`: scattered blocks through the CPU streams against one contiguous memmove of as many bytes with as many
threads, there and back. `submit_ms_2048`: a write-through of a session of 2,048 blocks, seen by whoever asks for it.
`planner_us`: the inline part of a tool's start (the dearest event), 16 new blocks of 256, real tiers. `runs_per_2048`: of how many
runs 2,048 host slots consist after long random use.
"""

from __future__ import annotations

import ctypes
import itertools
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from common import a_over_a, arguments, emit, interleaved, median, quantile, say
from contexts import Context

from agentkv.clock import SystemClock
from agentkv.core.residency import Action, Receipt, Tier
from agentkv.hints.forecaster import Forecaster
from agentkv.kv.device import DevicePool
from agentkv.kv.freemap import FreeMap
from agentkv.kv.geometry import Geometry
from agentkv.kv.host import HostArena
from agentkv.kv.streams import Direction, Memory, Run
from agentkv.kv.streams.cpu import CpuStreams
from agentkv.kv.tiers import Tiers
from agentkv.policy import ladder
from agentkv.runtime.planner import Planner
from agentkv.units import MIB

BLOCKS = {
    "192k": Geometry(layers=12, kv_heads=2, head_dim=128, dtype="bfloat16"),
    "2m": Geometry(layers=32, kv_heads=8, head_dim=128, dtype="bfloat16"),
}
TINY = Geometry(layers=2, kv_heads=1, head_dim=32, dtype="float32")
JOB_BYTES = 64 * MIB
MEMORY_BYTES = 4 * JOB_BYTES
DIRECTIONS: tuple[Direction, Direction] = ("d2h", "h2d")


def shares(name: str, repeats: int) -> dict[str, float]:
    """Each round copies one job's worth down and another one up, either way."""
    geometry = BLOCKS[name]
    arena = HostArena(geometry, MEMORY_BYTES)
    pool = DevicePool(geometry, "cpu", MEMORY_BYTES)
    streams = CpuStreams()
    streams.bind(Memory(pool=pool, arena=arena))
    chance = random.Random(1)  # noqa: S311  chance that can be repeated, no secret
    slots, blocks, size = arena.slots, JOB_BYTES // geometry.block_bytes, geometry.block_bytes

    def scattered() -> list[Run]:
        places = (chance.sample(range(1, slots), blocks), chance.sample(range(slots), blocks))
        return [Run(device, host, 1) for device, host in sorted(zip(*places, strict=True))]

    def through_streams() -> float:
        jobs = [(direction, scattered()) for direction in DIRECTIONS]
        started = time.perf_counter()
        for direction, runs in jobs:
            streams.copy(direction, runs, []).wait()
        return time.perf_counter() - started

    def contiguous() -> float:
        jobs, half = [], blocks // 2
        for direction in DIRECTIONS:
            device = pool.address + chance.randrange(1, slots - blocks) * size
            host = arena.address + chance.randrange(slots - blocks) * size
            to, source = (device, host) if direction == "h2d" else (host, device)
            jobs.append((to, source, half * size, (blocks - half) * size))
        started = time.perf_counter()
        for to, source, first, second in jobs:
            other = helper.submit(ctypes.memmove, to + first, source + first, second)
            ctypes.memmove(to, source, first)
            other.result()
        return time.perf_counter() - started

    with ThreadPoolExecutor(1) as helper:
        sides = {"streams": through_streams, "contiguous": contiguous, "again": contiguous}
        interleaved(sides, 3)
        times = interleaved(sides, repeats)
    streams.close()
    arena.close()
    moved = 2 * blocks * size
    return {
        f"memcpy_share_{name}": round(_ratio(times["contiguous"], times["streams"]), 3),
        f"a_over_a_{name}": round(_ratio(times["contiguous"], times["again"]), 3),
        f"streams_gb_s_{name}": round(moved / median(times["streams"]) / 1e9, 1),
        f"contiguous_gb_s_{name}": round(moved / median(times["contiguous"]) / 1e9, 1),
    }


def _ratio(one: list[float], other: list[float]) -> float:
    return median([a / b for a, b in zip(one, other, strict=True)])


def tiers_for(blocks: int) -> Tiers:
    """Room for so many tiny blocks on the device and twice as many on the host."""
    return Tiers(geometry=TINY, device_bytes=blocks * TINY.block_bytes, host_bytes=2 * blocks * TINY.slot_bytes)


def submits(repeats: int, blocks: int = 2048) -> dict[str, float]:
    """What the caller of a move pays, and how soon the move is done."""
    with tiers_for(blocks + 64) as tiers:
        context = Context(tiers, "long", blocks)
        context.fill()
        costs: dict[str, list[float]] = {"submit_ms_2048": [], "prefetch_submit_ms_2048": [], "acquire_ms_2048": []}
        whole: list[float] = []

        def timed(name: str, fn: Callable[[], object]) -> None:
            started = time.perf_counter()
            fn()
            costs[name].append((time.perf_counter() - started) * 1e3)

        for _ in range(repeats):
            started = time.perf_counter()
            timed("submit_ms_2048", lambda: context.move(Action.WRITE, Tier.HOST))
            tiers.quiesce(60)
            whole.append((time.perf_counter() - started) * 1e3)
            assert blocks == tiers.vacate("long", Tier.DEVICE)
            timed("prefetch_submit_ms_2048", lambda: context.move(Action.PREFETCH, Tier.DEVICE))
            tiers.quiesce(60)
            assert blocks == tiers.vacate("long", Tier.DEVICE)
            timed("acquire_ms_2048", lambda: tiers.acquire("long", context.keys))
            tiers.quiesce(60)
            lease = context.load()
            for _ in range(2):
                tiers.release("long", lease.blocks, used=tiers.streams.record())
            assert blocks == tiers.vacate("long", Tier.HOST)
    return {
        **{name: round(median(values), 3) for name, values in costs.items()},
        "submit_p99_ms_2048": round(quantile(costs["submit_ms_2048"], 0.99), 3),
        "submit_a_over_a": round(a_over_a(costs["submit_ms_2048"]), 3),
        "write_whole_ms_2048": round(median(whole), 2),
    }


def planner(repeats: int, *, blocks: int = 256, new: int = 16) -> dict[str, float]:
    """A tool starts (the new blocks are written through) and ends, seen by the agent's own thread."""
    receipts: list[Receipt] = []
    forecaster = Forecaster()
    for seconds in (10, 12, 15, 20, 25, 30, 40):
        forecaster.learn("pytest", "pytest -q", seconds)
    started_us, ended_us = [], []
    with tiers_for(blocks + 64) as tiers:
        context = Context(tiers, "agent", blocks)
        context.fill()
        asked = Planner(
            engine=tiers,  # type: ignore[arg-type]  # the three methods that it calls are the tiers' own
            policy=ladder(keep_s=0.5, drop_tokens=256),
            forecaster=forecaster,
            clock=SystemClock(),
            on_receipt=receipts.append,
        )
        for number in range(repeats):
            forecast = forecaster.forecast("pytest", "pytest -q")
            started = time.perf_counter()
            asked.tool_started("agent", f"call-{number}", "pytest", "pytest -q", forecast)
            between = time.perf_counter()
            asked.tool_ended("agent", f"call-{number}")
            ended = time.perf_counter()
            started_us.append((between - started) * 1e6)
            ended_us.append((ended - between) * 1e6)
            tiers.quiesce(60)
            # the next turn appends `new` blocks: as many go at the end, so that the session stays as long
            tiers.hold("agent", "agent", context.keys[: blocks - new], (blocks - new) * 16)
            fresh = context.make(0, new)
            context.commit(fresh, blocks - new)
            context.end(fresh)
        asked.close()
    assert sum(receipt.blocks > 0 for receipt in receipts) >= repeats - 1, "tool starts that wrote nothing"
    return {
        "planner_us": round(median(started_us[1:]), 1),
        "planner_p99_us": round(quantile(started_us[1:], 0.99), 1),
        "planner_end_us": round(median(ended_us[1:]), 1),
        "planner_a_over_a": round(a_over_a(started_us[1:]), 3),
    }


def fragmentation(slots: int = 1_000_000, rounds: int = 6000) -> dict[str, float]:
    """Contexts come, grow, lose their ends and go while the map stays nine tenths full; and a map of holes of 16."""
    chance = random.Random(3)  # noqa: S311  chance that can be repeated, no secret
    free, held = FreeMap(slots), list[list[int]]()
    runs: list[float] = []
    costs: list[float] = []
    for number in range(rounds):
        if held and (len(free) < slots // 10 or (len(free) < slots // 4 and chance.random() < 0.3)):
            context = held.pop(chance.randrange(len(held)))
            kept = chance.choice((0, chance.randrange(len(context))))
            free.give(context[kept:])
            held += [context[:kept]] if kept else []
            continue
        n = chance.choice((1, 1, 1, 3, 20, 256, 256, 2048))
        started = time.perf_counter()
        context = free.take(n)
        if n == 2048 and number > rounds // 2:
            costs.append((time.perf_counter() - started) * 1e3)
            runs.append(1 + sum(after != before + 1 for before, after in itertools.pairwise(context)))
        held.append(context)
    crumbs = FreeMap(slots)
    crumbs.take(slots)
    for at in range(0, slots, 32):
        crumbs.give(range(at, at + 16))
    worst: list[float] = []
    for _ in range(30):
        started = time.perf_counter()
        context = crumbs.take(2048)
        worst.append((time.perf_counter() - started) * 1e3)
        crumbs.give(context)
    return {
        "take_in_crumbs_ms_2048": round(median(worst), 4),
        "runs_per_2048": round(sum(runs) / len(runs), 2),
        "runs_per_2048_worst": max(runs),
        "take_ms_2048": round(median(costs), 4),
    }


def main() -> None:
    args = arguments(__doc__ or "", repeats=(int, 101, "rounds"))
    result: dict[str, float] = {"copy_threads": 2}
    for name in BLOCKS:
        say(args, f"blocks of {name} ...")
        result |= shares(name, args.repeats)
    say(args, "handing over ...")
    result |= submits(max(11, args.repeats // 3))
    result |= planner(5 * args.repeats)
    result |= fragmentation()
    emit(args, result)


if __name__ == "__main__":
    main()
