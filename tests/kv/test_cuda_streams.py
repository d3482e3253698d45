"""CUDA streams without CUDA: what is asked of driver and binding, in which order things happen, and what is left out."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from agentkv import log
from agentkv.kv import host as host_module
from agentkv.kv import pins as pins_module
from agentkv.kv.device import DevicePool
from agentkv.kv.geometry import Geometry
from agentkv.kv.host import HostArena
from agentkv.kv.streams import DONE, HostEvent, Memory, Run
from agentkv.kv.streams.batch import BatchCopy
from agentkv.kv.streams.cuda import CudaStreams
from agentkv.kv.streams.pretend import (
    ANY_ORDER,
    STREAM_ORDER,
    PretendBinding,
    PretendDriver,
    PretendEvent,
    PretendStream,
)

PADDED = Geometry(layers=2, kv_heads=1, head_dim=8, dtype="float32")
WHOLE = Geometry(layers=2, kv_heads=1, head_dim=16, dtype="float32")
BLOCKS, SLOTS, PIECE_SLOTS = 9, 12, 4


class Rig:
    """Memory, driver, binding and streams; `pinned` host slots are registered, PIECE_SLOTS at a time."""

    def __init__(self, geometry, *, pinned=SLOTS, major=13, batch=None):
        self.geometry = geometry
        self.driver = PretendDriver()
        self.binding = PretendBinding(self.driver, major=major)
        left = [pinned]

        def register(address, size, _flags):
            slots = size // geometry.slot_bytes
            if slots > left[0]:
                return 2
            left[0] -= slots
            self.binding.regions.append((address, address + size))
            return 0

        runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=lambda _address: 0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pins_module, "cudart", lambda: runtime)
            patch.setattr(pins_module, "clear_cuda_error", lambda: None)
            patch.setattr(pins_module, "warn_once", lambda *_, **__: None)
            patch.setattr(host_module, "_PIN_PIECE_BYTES", PIECE_SLOTS * geometry.slot_bytes)
            self.arena = HostArena(geometry, SLOTS * geometry.slot_bytes, pin=True)
        self.pool = DevicePool(geometry, "cpu", BLOCKS * geometry.block_bytes)
        size = self.pool.pool.numel() * self.pool.pool.element_size()
        self.binding.regions.append((self.pool.address, self.pool.address + size))
        batch = BatchCopy(self.binding) if batch is None else batch
        self.streams = CudaStreams(torch.device("cpu"), batch=batch, native=self.driver)
        self.streams.bind(Memory(pool=self.pool, arena=self.arena))

    def compute(self, fn):
        """A kernel: runs when the compute stream gets there. Returns the event behind it."""
        self.streams.compute.push(fn)
        return self.streams.record()

    def fill(self, block, value):
        return self.compute(lambda: self.pool.pool[block].fill_(value))

    def slot(self, i):
        """(lowest, highest) number in the block of slot i, and whether its padding is as it was."""
        view = self.arena.view(i)
        numbers = torch.frombuffer(view, dtype=torch.float32)[: self.geometry.block_bytes // 4]
        return float(numbers.min()), float(numbers.max())

    def block(self, i):
        return float(self.pool.pool[i].min()), float(self.pool.pool[i].max())

    def close(self):
        self.streams.close()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pins_module, "cudart", lambda: SimpleNamespace(cudaHostUnregister=lambda _address: 0))
            self.arena.close()


@pytest.fixture
def rig():
    made = []

    def make(geometry=WHOLE, **options):
        made.append(Rig(geometry, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


# -- the call


@pytest.mark.parametrize("major", [12, 13])
def test_a_job_is_one_call_with_one_set_of_attributes(rig, major):
    """On the side stream of its direction; the fake refuses what the driver would. CUDA 12 answers with failIdx too."""
    one = rig(major=major)
    one.fill(2, 2.0)
    one.streams.copy("d2h", [Run(1, 2, 3), Run(7, 8, 2)], [one.fill(7, 7.0)]).wait()
    (call,) = one.binding.calls
    assert one.streams._side["d2h"].cuda_stream == call.stream
    assert 3 == len(call.copies)
    assert (2.0, 2.0) == one.slot(3)
    assert (7.0, 7.0) == one.slot(8)
    one.streams.copy("h2d", [Run(4, 3, 1)], [one.streams.record()]).wait()
    assert one.streams._side["h2d"].cuda_stream == one.binding.calls[1].stream
    assert (2.0, 2.0) == one.block(4)
    assert "cudaMemcpyBatchAsync" == one.streams.copy_path


def test_padding_stays_as_it_is(rig):
    """Down and up again, byte for byte."""
    one = rig(PADDED)
    for i in range(SLOTS):
        one.arena.view(i)[:] = b"\x33" * one.geometry.slot_bytes
    for block in range(1, 5):
        one.fill(block, float(block))
    one.streams.copy("d2h", [Run(1, 3, 4)], [one.streams.record()]).wait()
    one.streams.copy("h2d", [Run(5, 3, 2)], []).wait()
    assert [(1.0, 1.0), (2.0, 2.0)] == [one.block(5), one.block(6)]
    assert all(set(one.arena.view(i)[one.geometry.block_bytes :]) == {0x33} for i in range(SLOTS))
    assert {0x33} == set(one.arena.view(2)) == set(one.arena.view(7))


def test_device_memory_is_never_read_in_any_order(rig):
    """R5: only complete host memory is; never "during the call", which would make the call wait for its copies."""
    one = rig()
    down = one.streams.copy("d2h", [Run(1, 0, 1)], [])
    early = one.streams.copy("h2d", [Run(2, 0, 1)], [down])
    early.wait()
    one.streams.copy("h2d", [Run(3, 0, 1)], [down, one.streams.record()])
    one.streams.copy("d2h", [Run(3, 1, 1)], [DONE])
    assert [STREAM_ORDER, STREAM_ORDER, ANY_ORDER, STREAM_ORDER] == [call.order for call in one.binding.calls]


def test_a_binding_that_refuses_is_asked_no_more(rig, monkeypatch):
    """The job is copied all the same, one line says why, and the refusal is taken off the thread's error state."""
    lines = []
    monkeypatch.setattr(log, "_warned", set())
    monkeypatch.setattr(log, "_write", lambda event, fields: lines.append((event, fields["reason"])))
    one = rig()
    one.binding.refuse = 801
    one.fill(1, 1.0)
    for slot in (3, 4):
        one.streams.compute.synchronize()
        one.streams.copy("d2h", [Run(1, slot, 2)], [one.streams.record()]).wait()
        assert (1.0, 1.0) == one.slot(slot)
    assert 1 == len(one.binding.calls)
    assert 0 == one.binding.last_error
    assert [("kv_batch_copy_off", "cudaMemcpyBatchAsync answered 801")] == lines
    assert "copy_ per run: cudaMemcpyBatchAsync answered 801" == one.streams.copy_path


# -- memory that is not pinned


def test_pageable_memory_is_copied_run_by_run(rig):
    """In words too."""
    one = rig(pinned=0)
    assert "copy_ per run: host memory is not pinned" == one.streams.copy_path
    one.fill(1, 1.0)
    one.streams.compute.synchronize()
    one.streams.copy("d2h", [Run(1, 3, 2)], []).wait()
    one.streams.copy("h2d", [Run(5, 3, 2)], []).wait()
    assert (1.0, 1.0) == one.slot(3) == one.block(5)
    assert [] == one.binding.calls


def test_a_job_that_touches_an_unpinned_slot_is_copied_run_by_run(rig):
    """The first pieces were registered, the last one was not."""
    one = rig(pinned=8)
    assert "cudaMemcpyBatchAsync for the 8 of 12 host slots that are pinned" == one.streams.copy_path
    one.streams.copy("d2h", [Run(1, 6, 2)], [])
    one.streams.copy("d2h", [Run(1, 7, 2)], [])
    one.streams.copy("d2h", [Run(1, 0, 1), Run(3, 11, 1)], [])
    assert 1 == len(one.binding.calls)


def test_a_pageable_source_is_complete_before_it_is_staged(rig):
    """The driver reads it inside of the call, so the mover's thread waits for the copy that still writes it."""
    one = rig(pinned=8)
    down = one.streams.copy("d2h", [Run(1, 0, 1)], [one.fill(1, 1.0)])
    assert not down.query()
    one.streams.copy("h2d", [Run(2, 0, 1), Run(3, 11, 1)], [down])
    assert down.query()
    one.streams.close()
    assert (1.0, 1.0) == one.block(2)


# -- order


@pytest.mark.parametrize("geometry", [WHOLE, PADDED], ids=["whole", "padded"])
def test_a_copy_down_comes_after_the_compute_that_writes(rig, geometry):
    """R1, on real bytes."""
    one = rig(geometry)
    one.streams.copy("d2h", [Run(1, 3, 2)], [one.fill(1, 5.0)]).wait()
    assert (5.0, 5.0) == one.slot(3)


def test_a_copy_up_comes_after_the_compute_that_reads(rig):
    """R2: the block's last owner still sees its own bytes."""
    one = rig()
    seen = []
    one.fill(1, 1.0)
    read = one.compute(lambda: seen.append(one.block(1)))
    one.streams.copy("h2d", [Run(1, 0, 1)], [read]).wait()
    assert [(1.0, 1.0)] == seen
    assert (0.0, 0.0) == one.block(1)


def test_compute_waits_for_a_copy_without_the_host(rig):
    """R7: the wait is queued, nothing has run when it returns."""
    one = rig()
    one.arena.view(0)[:] = torch.full((one.geometry.block_bytes // 4,), 3.0).numpy().tobytes()
    event = one.streams.copy("h2d", [Run(1, 0, 1)], [])
    one.streams.compute_wait(event)
    seen = []
    after = one.compute(lambda: seen.append(one.block(1)))
    assert not event.query()
    assert [] == seen
    after.wait()
    assert [(3.0, 3.0)] == seen


def test_down_and_up_again_without_waiting_between(rig):
    """The copy up reads what the copy down writes: it is not allowed to read early."""
    one = rig()
    down = one.streams.copy("d2h", [Run(1, 0, 1)], [one.fill(1, 4.0)])
    one.streams.copy("h2d", [Run(2, 0, 1)], [down]).wait()
    assert (4.0, 4.0) == one.block(2)


def test_an_event_of_the_host_is_waited_for_by_the_mover(rig):
    """Both kinds may be mixed."""
    one = rig()
    host = HostEvent()
    host.set()
    one.streams.copy("d2h", [Run(1, 0, 1)], [host, one.fill(1, 4.0), DONE]).wait()
    one.streams.compute_wait(host)
    assert (4.0, 4.0) == one.slot(0)


def test_nothing_runs_before_the_pool_is_ready(rig):
    """It was zeroed on the default stream."""
    one = rig()
    seen = []
    one.driver.default.push(lambda: seen.append("zeroed"))
    one.streams.bind(Memory(pool=one.pool, arena=one.arena))
    one.compute(lambda: seen.append("computed")).wait()
    assert ["zeroed", "computed"] == seen


def test_copies_and_compute_never_share_a_stream(rig):
    """Torch hands its few streams round, for each priority; copies have none, so they take another round's."""
    one = rig()
    sides = one.streams._side.values()
    assert 3 == len({one.streams.compute.cuda_stream, *(side.cuda_stream for side in sides)})
    assert one.streams.compute.priority not in {side.priority for side in sides}


def test_nothing_on_the_engines_path_waits_on_the_host(rig, monkeypatch):
    """Nor does a mover's, to start a copy between the device and pinned memory."""

    def wait(_self):
        raise AssertionError("the host waited")

    one = rig()
    with monkeypatch.context() as patch:
        for kind in (PretendStream, PretendEvent):
            patch.setattr(kind, "synchronize", wait)
        written = one.fill(1, 1.0)
        one.streams.launch(lambda: None)
        down = one.streams.copy("d2h", [Run(1, 0, 1)], [written])
        up = one.streams.copy("h2d", [Run(2, 0, 1)], [down, one.streams.record()])
        one.streams.compute_wait(up)
        one.streams.taken(device=[3], compute=True)
        one.streams.freed(device=[(3, one.streams.record())])
    one.streams.record().wait()
    assert (1.0, 1.0) == one.block(2)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_closes_without_asking_cuda():
    """CUDA does not survive a fork (E26)."""
    one = Rig(WHOLE)
    one.fill(1, 1.0)
    child = os.fork()
    if child == 0:
        one.streams.close()
        os._exit(len(one.streams.compute.queue))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) > 0
    one.close()
    assert not one.streams.compute.queue


# -- events


def test_events_are_used_again_once_nobody_holds_them(rig):
    """A thousand steps need a handful."""
    one = rig()
    one.streams.record().wait()
    before = PretendEvent.made
    for _ in range(1000):
        one.streams.record().wait()
    assert before == PretendEvent.made
    held = [one.streams.record() for _ in range(5)]
    assert before + 4 >= PretendEvent.made
    assert 5 == len({id(event.native) for event in held})


def test_a_stream_that_waits_for_an_event_is_not_disturbed_by_its_next_use(rig):
    """It waits for the point that the event stood for."""
    one = rig()
    one.arena.view(0)[:] = torch.full((one.geometry.block_bytes // 4,), 3.0).numpy().tobytes()
    event = one.streams.copy("h2d", [Run(1, 0, 1)], [])
    one.streams.compute_wait(event)
    native = event.native
    del event
    again = one.streams.record()
    assert native is again.native
    seen = []
    one.compute(lambda: seen.append(one.block(1))).wait()
    assert [(3.0, 3.0)] == seen


def test_an_event_that_has_happened_is_not_asked_for_again(rig):
    """Its answer stays, whatever the driver's event is used for."""
    one = rig()
    event = one.streams.record()
    assert not event.query()
    event.wait()
    event.native.record(one.streams.compute)
    assert event.query()
    event.wait()
