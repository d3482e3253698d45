"""Copies between a real pool and a real arena: bytes, padding, and the waits of rules R1, R2 and R7.

On CUDA compute dawdles for milliseconds before it writes or reads, so a copy that does not wait is seen.
"""

from __future__ import annotations

import random

import pytest
import torch

from agentkv.kv.device import DevicePool
from agentkv.kv.geometry import Geometry
from agentkv.kv.host import HostArena
from agentkv.kv.streams import Memory, Run, runs_of

PADDED = Geometry(layers=2, kv_heads=1, head_dim=8, dtype="float32")
WHOLE = Geometry(layers=4, kv_heads=2, head_dim=64, dtype="bfloat16")
BLOCKS = 64
CYCLES = 20_000_000


@pytest.fixture(params=[PADDED, WHOLE], ids=["padded", "whole"])
def memory(request, scene):
    with scene.memory(request.param, BLOCKS) as made:
        yield made


@pytest.fixture(params=["batched", "one_by_one"])
def streams(request, scene, memory):
    if request.param == "batched" and scene.on_gpu:
        from agentkv.kv.streams.batch import available

        if available():
            pytest.skip(available())
    made = scene.streams(batched=request.param == "batched")
    made.bind(memory)
    yield made
    if scene.on_gpu:  # no copy was refused on the way
        words = made.copy_path
        assert words.startswith("cudaMemcpyBatchAsync" if request.param == "batched" else "copy_ per run"), words
    made.close()


def dawdle(scene, streams):
    """Hold the compute stream up."""
    if scene.on_gpu:
        streams.launch(lambda: torch.cuda._sleep(CYCLES))


def fill(memory, streams, block, value):
    streams.launch(lambda: memory.pool.pool[block].fill_(value))


def slot(memory, i):
    """(lowest, highest) number of the block in slot i."""
    geometry = memory.pool.geometry
    view = torch.frombuffer(memory.arena.view(i), dtype=getattr(torch, geometry.dtype))
    numbers = view[: memory.pool.pool[0].numel()].float()
    return float(numbers.min()), float(numbers.max())


def block(memory, streams, i):
    seen = []
    streams.launch(lambda: seen.append(memory.pool.pool[i].float()))
    streams.record().wait()
    return float(seen[0].min()), float(seen[0].max())


def test_scattered_blocks_go_down_and_come_back_elsewhere(memory, streams):
    """Byte for byte, padding untouched."""
    chance = random.Random(3)
    blocks = chance.sample(range(1, BLOCKS + 1), BLOCKS)
    slots = chance.sample(range(BLOCKS), BLOCKS)
    for i in range(BLOCKS):
        memory.arena.view(i)[:] = b"\x55" * memory.arena.slot_bytes
    for value, name in enumerate(blocks):
        fill(memory, streams, name, value)
    down = streams.copy("d2h", runs_of(zip(blocks, slots, strict=True)), [streams.record()])
    down.wait()
    assert [(float(i), float(i)) for i in range(BLOCKS)] == [slot(memory, i) for i in slots]
    padding = memory.pool.geometry.block_bytes
    assert all(set(memory.arena.view(i)[padding:]) <= {0x55} for i in range(BLOCKS))
    others = chance.sample(blocks, BLOCKS)
    up = streams.copy("h2d", runs_of(zip(others, slots, strict=True)), [streams.record()])
    streams.compute_wait(up)
    assert [(float(i), float(i)) for i in range(BLOCKS)] == [block(memory, streams, i) for i in others]


def test_a_copy_down_comes_after_the_compute_that_writes(scene, memory, streams):
    """R1: the host gets what compute wrote, and nobody waited on the host."""
    dawdle(scene, streams)
    fill(memory, streams, 5, 7.0)
    written = streams.record()
    event = streams.copy("d2h", [Run(5, 3, 2)], [written])
    if scene.on_gpu:
        assert not written.query()
        assert not event.query()
    event.wait()
    assert (7.0, 7.0) == slot(memory, 3)


def test_a_copy_up_comes_after_the_compute_that_reads(scene, memory, streams):
    """R2: whoever had the block before still reads its own bytes."""
    fill(memory, streams, 5, 7.0)
    seen = []
    dawdle(scene, streams)
    streams.launch(lambda: seen.append(memory.pool.pool[5].clone()))
    event = streams.copy("h2d", [Run(5, 3, 1)], [streams.record()])
    event.wait()
    assert bool((seen[0] == 7.0).all())
    assert (0.0, 0.0) == block(memory, streams, 5)


def test_compute_that_waits_for_a_copy_reads_its_bytes(memory, streams):
    """R7, over blocks that were NaN before."""
    for name in range(1, BLOCKS + 1):
        fill(memory, streams, name, float("nan"))
    ready = streams.record()
    streams.compute_wait(streams.copy("h2d", [Run(1, 0, BLOCKS)], [ready]))
    assert (0.0, 0.0) == block(memory, streams, 1)
    assert (0.0, 0.0) == block(memory, streams, BLOCKS)


def test_down_and_straight_up_again(scene, memory, streams):
    """A copy up of what another still writes: it must not be read early."""
    fill(memory, streams, 9, 2.0)
    dawdle(scene, streams)
    fill(memory, streams, 9, 3.0)
    down = streams.copy("d2h", [Run(9, 9, 1)], [streams.record()])
    streams.compute_wait(streams.copy("h2d", [Run(20, 9, 1)], [down]))
    assert (3.0, 3.0) == block(memory, streams, 20)


def test_memory_that_could_not_be_pinned_is_copied_right(scene):
    """Behind the compute that writes and the compute that reads, whoever has to wait for that."""
    arena = HostArena(PADDED, BLOCKS * PADDED.slot_bytes)
    pool = DevicePool(PADDED, scene.device, BLOCKS * PADDED.block_bytes)
    memory = Memory(pool=pool, arena=arena)
    streams = scene.streams()
    streams.bind(memory)
    dawdle(scene, streams)
    fill(memory, streams, 5, 7.0)
    down = streams.copy("d2h", [Run(5, 3, 1)], [streams.record()])
    streams.compute_wait(streams.copy("h2d", [Run(6, 3, 1)], [down]))
    assert (7.0, 7.0) == block(memory, streams, 6)
    seen = []
    dawdle(scene, streams)
    streams.launch(lambda: seen.append(pool.pool[6].clone()))
    streams.copy("h2d", [Run(6, 9, 1)], [streams.record()]).wait()
    assert bool((seen[0] == 7.0).all())
    assert (0.0, 0.0) == block(memory, streams, 6)
    streams.close()
    arena.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_without_its_wait_a_copy_is_early(scene, memory, streams):
    """The control: the tests above can fail."""
    fill(memory, streams, 5, 1.0)
    streams.record().wait()
    dawdle(scene, streams)
    fill(memory, streams, 5, 7.0)
    streams.copy("d2h", [Run(5, 3, 1)], []).wait()
    assert (1.0, 1.0) == slot(memory, 3)
    streams.record().wait()
