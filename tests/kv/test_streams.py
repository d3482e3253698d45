"""Backends of streams: what each promises, and that the adversary is one."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentkv.kv.device import DevicePool
from agentkv.kv.geometry import Geometry
from agentkv.kv.host import HostArena
from agentkv.kv.streams import DONE, HostEvent, Memory, Run, cut_runs, runs_of
from agentkv.kv.streams.adversarial import AdversarialStreams
from agentkv.kv.streams.cpu import CpuStreams, pieces
from agentkv.units import MIB

PADDED = Geometry(layers=2, kv_heads=1, head_dim=8, dtype="float32")
WHOLE = Geometry(layers=2, kv_heads=1, head_dim=16, dtype="float32")
LARGE = Geometry(layers=16, kv_heads=8, head_dim=128, dtype="float32")
MIDDLE = Geometry(layers=4, kv_heads=4, head_dim=64, dtype="bfloat16")


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


def test_a_big_copy_is_cut_in_pieces():
    """Every byte is in one piece, and no piece is so long that one thread waits for the other's."""
    cut = pieces([(0, 10 * MIB, 5 * MIB), (100 * MIB, 200 * MIB, 7)])
    wanted = [(at * MIB, (10 + at) * MIB, n * MIB) for at, n in ((0, 2), (2, 2), (4, 1))]
    assert [*wanted, (100 * MIB, 200 * MIB, 7)] == cut


@pytest.fixture
def scattered():
    """Room for 120 blocks of 64 KiB on both sides, each as [slots, bytes]."""
    arena = HostArena(MIDDLE, 121 * MIDDLE.slot_bytes)
    pool = DevicePool(MIDDLE, "cpu", 120 * MIDDLE.block_bytes)
    streams = CpuStreams()
    streams.bind(Memory(pool=pool, arena=arena))
    device = pool.pool.view(121, -1).view(torch.uint8).numpy()
    yield streams, device, np.frombuffer(arena.buffer, dtype=np.uint8).reshape(121, -1)
    streams.close()


def _scattered_over(lengths, generator):
    """Where runs of these lengths begin, if they lie side by side in a random order."""
    order = generator.permutation(len(lengths))
    starts = np.empty(len(lengths), dtype=int)
    starts[order] = np.cumsum([0, *np.array(lengths)[order][:-1]])
    return [int(start) for start in starts]


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
@given(lengths=st.lists(st.integers(1, 3), min_size=1, max_size=40), seed=st.integers(0, 1 << 32))
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_scattered_runs_arrive_byte_for_byte(scattered, direction, lengths, seed):
    """Runs of any length from anywhere to anywhere, drawn by two threads: every block is right, no other changes."""
    streams, device, host = scattered
    generator = np.random.default_rng(seed)
    for side in (device, host):
        side[:, ::64] = generator.integers(0, 256, side[:, ::64].shape, dtype=np.uint8)
    starts = [_scattered_over(lengths, generator) for _ in range(2)]
    runs = [Run(d, h, n) for d, h, n in zip(*starts, lengths, strict=True)]
    devices = [run.device_block + i for run in runs for i in range(run.n)]
    hosts = [run.host_block + i for run in runs for i in range(run.n)]
    wanted_device, wanted_host = device.copy(), host.copy()
    if direction == "h2d":
        wanted_device[devices] = host[hosts]
    else:
        wanted_host[hosts] = device[devices]
    streams.copy(direction, runs, []).wait()
    assert np.array_equal(wanted_device, device)
    assert np.array_equal(wanted_host, host)


def test_a_slow_thread_holds_up_no_other(monkeypatch, scattered):
    """The helper that is stuck in one piece leaves all others to the mover's own thread."""
    streams, *_ = scattered
    done, helper_stuck, mine_done = [], threading.Event(), threading.Event()
    me = threading.get_ident()

    def memmove(to, source, size):
        if threading.get_ident() != me:
            helper_stuck.set()
            assert mine_done.wait(10)
            return
        assert helper_stuck.wait(10)
        done.append(size)
        if len(done) == 59:
            mine_done.set()

    monkeypatch.setattr("ctypes.memmove", memmove)
    streams.copy("h2d", [Run(1 + 2 * i, 2 * i, 1) for i in range(60)], []).wait()
    assert 59 == len(done)


def test_runs_are_cut_at_borders_of_the_host_side():
    """Host memory is registered piece by piece, and one copy must not span two pieces."""
    runs = [Run(0, 2, 9), Run(20, 4, 4), Run(30, 7, 1)]
    wanted = [Run(0, 2, 2), Run(2, 4, 4), Run(6, 8, 3), Run(20, 4, 4), Run(30, 7, 1)]
    assert wanted == cut_runs(runs, 4)
    assert [Run(0, 2, 1), Run(1, 3, 1)] == cut_runs([Run(0, 2, 2)], 1)
