"""Backends of streams: what each promises, and that the adversary is one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from agentkv.kv.device import DevicePool
from agentkv.kv.geometry import Geometry
from agentkv.kv.host import HostArena
from agentkv.kv.streams import DONE, HostEvent, Memory, Run, cut_runs, runs_of
from agentkv.kv.streams.adversarial import AdversarialStreams
from agentkv.kv.streams.cpu import CpuStreams, _halves

PADDED = Geometry(layers=2, kv_heads=1, head_dim=8, dtype="float32")
WHOLE = Geometry(layers=2, kv_heads=1, head_dim=16, dtype="float32")
LARGE = Geometry(layers=16, kv_heads=8, head_dim=128, dtype="float32")


@pytest.fixture(params=[PADDED, WHOLE, LARGE], ids=["padded", "whole", "large"])
def memory(request):
    geometry = request.param
    arena = HostArena(geometry, 6 * geometry.slot_bytes)
    yield Memory(pool=DevicePool(geometry, "cpu", 5 * geometry.block_bytes), arena=arena)
    arena.close()


@pytest.fixture(params=["cpu", "adversarial"])
def streams(request, memory):
    made = CpuStreams() if request.param == "cpu" else AdversarialStreams(1)
    made.bind(memory)
    yield made
    made.close()


def slot(memory, i):
    return np.frombuffer(memory.arena.view(i), dtype=np.float32)[: memory.pool.geometry.block_bytes // 4]


def test_runs_go_down_and_come_back(memory, streams):
    """Blocks 1, 2 and 4 to slots 3, 4 and 0, and back into 3, 4 and 1: bytes and order hold."""
    for block in range(1, 5):
        memory.pool.pool[block] = float(block)
    down = streams.copy("d2h", [Run(1, 3, 2), Run(4, 0, 1)], [streams.record()])
    down.wait()
    assert [1.0, 2.0, 4.0] == [float(slot(memory, i).min()) for i in (3, 4, 0)]
    assert [1.0, 2.0, 4.0] == [float(slot(memory, i).max()) for i in (3, 4, 0)]
    streams.copy("h2d", [Run(3, 3, 2), Run(1, 0, 1)], [down]).wait()
    assert [4.0, 2.0, 1.0, 2.0] == [float(memory.pool.pool[block].mean()) for block in range(1, 5)]


def test_compute_keeps_its_order(streams):
    """What was launched first has run first, and all of it before a later event."""
    seen = []
    for i in range(5):
        streams.launch(lambda i=i: seen.append(i))
    streams.record().wait()
    assert [0, 1, 2, 3, 4] == seen


def test_compute_waits_for_a_host_event(streams):
    """An event that some thread sets holds compute back."""
    event = HostEvent()
    event.set()
    seen = []
    streams.compute_wait(event)
    streams.launch(lambda: seen.append(1))
    streams.record().wait()
    assert [1] == seen


def test_the_adversary_lets_compute_wait(memory):
    """Until the event is set nothing behind it runs."""
    streams = AdversarialStreams(0)
    streams.bind(memory)
    event, seen = HostEvent(), []
    streams.compute_wait(event)
    streams.launch(lambda: seen.append(1))
    while streams.step():
        pass
    assert [] == seen
    event.set()
    streams.close()
    assert [1] == seen


def test_the_adversary_shows_early_readers_poison(memory):
    """Under some seed a reader that does not wait sees NaN, under some other the old bytes."""
    seen = set()
    for seed in range(20):
        streams = AdversarialStreams(seed)
        streams.bind(memory)
        memory.pool.pool[1] = 1.0
        slot(memory, 0)[:] = 2.0
        streams.copy("h2d", [Run(1, 0, 1)], [])
        value = []
        streams.launch(lambda value=value: value.append(float(memory.pool.pool[1].mean())))
        streams.close()
        seen.add(str(value[0]))
        assert 2.0 == float(memory.pool.pool[1].mean())
    assert {"1.0", "nan", "2.0"} == seen


def test_the_adversary_poisons_what_nobody_owns(memory):
    """Freed blocks and slots turn to NaN, but not before their last read, and not once they are taken again."""
    streams = AdversarialStreams(0)
    streams.bind(memory)
    memory.pool.pool[1:4] = 1.0
    slot(memory, 0)[:] = 1.0
    event = HostEvent()
    streams.compute_wait(event)
    late = streams.record()
    streams.freed(device=[(1, DONE), (2, late), (3, DONE)], host=[0])
    streams.taken(device=[3])
    streams.step()
    assert torch.isnan(memory.pool.pool[1]).all()
    assert (memory.pool.pool[2:4] == 1.0).all()
    assert np.isnan(slot(memory, 0)).all()
    event.set()
    late.wait()
    streams.step()
    assert torch.isnan(memory.pool.pool[2]).all()


def test_the_adversary_raises_in_whoever_waits_next(memory):
    """A launched function's error surfaces at the next wait, as a kernel's does."""
    streams = AdversarialStreams(0)
    streams.bind(memory)
    streams.launch(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        streams.record().wait()
    streams.record().wait()


def test_neighbours_become_one_run():
    """Only if both sides are neighbours."""
    assert [Run(1, 5, 2), Run(3, 9, 1), Run(7, 0, 2)] == runs_of([(8, 1), (1, 5), (3, 9), (2, 6), (7, 0)])


def test_a_big_copy_is_cut_in_halves():
    """Two threads get about the same number of bytes, and together every byte once."""
    first, second = _halves([(0, 1000, 10), (100, 2000, 30)])
    assert [(0, 1000, 10), (100, 2000, 10)] == first
    assert [(110, 2010, 20)] == second


def test_runs_are_cut_at_borders_of_the_host_side():
    """Host memory is registered piece by piece, and one copy must not span two pieces."""
    runs = [Run(0, 2, 9), Run(20, 4, 4), Run(30, 7, 1)]
    wanted = [Run(0, 2, 2), Run(2, 4, 4), Run(6, 8, 3), Run(20, 4, 4), Run(30, 7, 1)]
    assert wanted == cut_runs(runs, 4)
    assert [Run(0, 2, 1), Run(1, 3, 1)] == cut_runs([Run(0, 2, 2)], 1)
