"""Mutations: each guard of the data plane is taken out by hand, and a scenario must notice.

Completes `test_rules.py` (which has the waits of the copies themselves): what callers tell the tiers (R1, R2, R6),
drops under way (R4), the order of batched copies (R5), pins (R8), the lock (R8), one read for all (R9), progress
(R11), checksums. Every scenario is also clean under many seeds with the guard in place. The engine's own guards:
`engine/local/test_kv_cases_rules.py`.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

from agentkv.core.residency import Action, Tier
from agentkv.kv import family as family_module
from agentkv.kv.device import DevicePool
from agentkv.kv.geometry import Geometry
from agentkv.kv.room import Room
from agentkv.kv.slab import Slab
from agentkv.kv.streams import DONE, Memory, Run
from agentkv.kv.streams.adversarial import AdversarialStreams
from agentkv.kv.streams.batch import BatchCopy
from agentkv.kv.streams.cpu import CpuStreams
from agentkv.kv.streams.path import CopyPath
from agentkv.kv.tiers import Tiers
from agentkv.kv.transfers import Transfers

GEOMETRY = Geometry(layers=2, kv_heads=1, head_dim=16, dtype="float32")
SEEDS = range(25)
MANY = range(25, 425)


class Bounded(AdversarialStreams):
    """Notes copies that leave the memory, instead of making them."""

    def __init__(self, seed):
        super().__init__(seed)
        self.outside = []

    def copy(self, direction, runs, after):
        outside = [run for run in runs if run.device_block < 1 or run.host_block < 0]
        self.outside += outside
        assert not outside, outside
        return super().copy(direction, runs, after)


def spoilt(scenario, make, seeds=SEEDS):
    """The seeds under which a wrong byte was read, or the books did not add up."""
    bad = []
    for seed in seeds:
        r = make(seed)
        try:
            scenario(r)
            r.settle()
        except (AssertionError, ValueError, IndexError) as error:
            bad.append((seed, repr(error)))
        else:
            if r.wrong or r.streams.outside:
                bad.append((seed, "wrong bytes"))
        finally:
            if r.slab is not None:
                r.slab.close()
    return bad


# -- scenarios


def write_at_once(r):
    """A block goes down in the moment its computation was launched, and comes back."""
    keys = r.keys("a", 4)
    r.turn_of("a", keys)
    r.park("a")
    lease = r.turn_of("a", keys)
    assert 4 == lease.from_host


def suspend_in_flight(r):
    """A sequence is sent back while its step is still in flight; what it had becomes room for a restore."""
    keys = r.keys("b", 3)
    r.turn_of("b", keys)
    r.park("b")
    blocks = r.until(lambda: r.tiers.allocate(4))
    r.streams.launch(lambda: r.tiers.pool[blocks].fill_(7.0))
    r.tiers.release("a", blocks, used=r.streams.record())
    lease = r.turn_of("b", keys)
    assert 3 == lease.loaded_blocks


def read_late(r):
    """A sequence ends while its last read is still queued; others are loaded where its blocks were."""
    ours, theirs = r.keys("a", 4), r.keys("b", 4)
    r.turn_of("b", theirs)
    r.park("b")
    r.turn_of("a", ours)
    r.moved("a", Action.WRITE, Tier.HOST)
    lease = r.start("a", ours)
    r.tiers.release("a", lease.blocks, used=r.streams.record())
    lease = r.turn_of("b", theirs)
    assert 4 == lease.loaded_blocks


def drop_while_loading(r):
    """A session is dropped while its load is under way, the host is wanted by another; its sequence still reads."""
    ours = r.keys("a", 4)
    r.turn_of("a", ours)
    r.park("a")
    r.turn_of("b", r.keys("b", 4))
    r.settle()
    lease = r.start("a", ours)
    r.tiers.pump()
    r.tiers.drop("a")
    r.move("b", Action.WRITE, Tier.HOST)
    r.settle()
    assert 4 == lease.loaded_blocks
    r.tiers.release("a", lease.blocks, used=r.streams.record())
    r.settle()
    r.turn_of("b", r.keys("b", 4))


def lease_under_pressure(r):
    """A restored sequence reads its blocks again while others take every block that nobody has pinned."""
    keys = r.keys("a", 3)
    r.turn_of("a", keys)
    r.park("a")
    lease = r.start("a", keys)
    r.settle()
    for name in ("x", "y", "z"):
        r.turn_of(name, r.keys(name, 1))
        r.read("a", lease.blocks, keys, lease.ticket)
    r.settle()
    assert 3 == lease.loaded_blocks
    r.tiers.release("a", lease.blocks, used=r.streams.record())


def share_one_read(r):
    """Three sessions miss on one prefix that is on disk only: one read, one load, three leases."""
    keys = r.keys("a", 4)
    r.turn_of("a", keys)
    r.park("a", Tier.DISK)
    r.tiers.vacate("a", Tier.HOST)
    assert (0, 0, 4, 0) == r.where("a")
    before = r.tiers.stats()
    leases = [r.start(name, keys) for name in ("a", "b", "c")]
    r.settle()
    after = r.tiers.stats()
    size = 4 * r.tiers.geometry.block_bytes
    assert (size, size) == tuple(after["bytes"][lane] - before["bytes"][lane] for lane in ("read", "h2d"))
    for name, lease in zip("abc", leases, strict=True):
        assert lease.blocks == leases[0].blocks
        r.tiers.release(name, lease.blocks, used=r.streams.record())


def full_of_what_cannot_be_written(r):
    """The device is full of blocks that no tier can take, and another session wants to run."""
    r.turn_of("a", r.keys("a", 4))
    r.turn_of("b", r.keys("b", 4))
    r.settle()


def rot(r):
    """A bit of a block on disk turns."""
    keys = r.keys("a", 4)
    r.turn_of("a", keys)
    r.park("a", Tier.DISK)
    r.tiers.vacate("a", Tier.HOST)
    size = r.slab.slot_bytes
    (path,) = r.slab.path.glob("segment-*")
    with path.open("r+b") as file:
        at = next(at for at in range(0, 64 * size, size) if any((file.seek(at), file.read(64))[1]))
        file.seek(at + 9)
        byte = file.read(1)[0]
        file.seek(at + 9)
        file.write(bytes([byte ^ 16]))
    assert r.turn_of("a", keys).from_disk


CLEAN = [
    (write_at_once, {"device": 5}),
    (suspend_in_flight, {"device": 4}),
    (read_late, {"device": 4}),
    (drop_while_loading, {"device": 9, "host": 4}),
    (lease_under_pressure, {"device": 4}),
    (share_one_read, {"disk": 16}),
    (full_of_what_cannot_be_written, {"device": 4, "host": 0}),
    (rot, {"disk": 16}),
]


@pytest.fixture
def make(rig_class, tmp_path):
    """Makes a function from a seed to a rig on the adversary's streams."""

    def sized(**sizes):
        return lambda seed: rig_class(streams=Bounded(seed), directory=tmp_path, **sizes)

    return sized


@pytest.mark.parametrize(("scenario", "sizes"), CLEAN)
def test_every_scenario_is_clean_with_its_guard(make, scenario, sizes):
    """No legal order of events spoils a byte."""
    assert [] == spoilt(scenario, make(**sizes))


@pytest.mark.slow
@pytest.mark.parametrize(("scenario", "sizes"), CLEAN)
def test_every_scenario_is_clean_under_four_hundred_more_seeds(make, scenario, sizes):
    """The same with other seeds."""
    assert [] == spoilt(scenario, make(**sizes), MANY)


# -- mutations


def test_r1_a_commit_that_does_not_say_when_the_block_was_written_is_noticed(make, monkeypatch):
    """The write-out would start before compute has written the block."""
    commit = Tiers.commit
    monkeypatch.setattr(
        Tiers,
        "commit",
        lambda self, session, block, key, parent, _written: commit(self, session, block, key, parent, DONE),
    )
    assert spoilt(write_at_once, make(device=5))


@pytest.mark.parametrize(("scenario", "rule"), [(read_late, "R2"), (suspend_in_flight, "R6")])
def test_r2_and_r6_a_release_that_does_not_say_when_the_step_ends_is_noticed(make, monkeypatch, scenario, rule):
    """Its blocks would be loaded into while the last step still reads (R2) or writes (R6) them."""
    release = Tiers.release
    monkeypatch.setattr(
        Tiers,
        "release",
        lambda self, session, blocks, *, used, behind=False: release(self, session, blocks, used=DONE, behind=behind),
    )
    assert spoilt(scenario, make(device=4)), rule


def test_r4_giving_a_dropped_sessions_host_copies_back_while_they_are_read_is_noticed(make, monkeypatch):
    """Its sequence still loads from them when others are written there."""
    forget = Transfers.forget

    def hasty(self, block):
        if block.has(Tier.HOST):
            self.give(Tier.HOST, self.book.vacate(block, Tier.HOST))
        forget(self, block)

    monkeypatch.setattr(Transfers, "forget", hasty)
    assert spoilt(drop_while_loading, make(device=9, host=4))


def test_r8_a_lease_that_does_not_pin_is_noticed(make, monkeypatch):
    """The blocks of a running sequence would go to whoever needs room, and it would read what that one writes."""
    acquire, release = Tiers.acquire, Tiers.release
    loose = set()

    def unpinned(self, session, keys):
        lease = acquire(self, session, keys)
        for block in self._book.leading(keys) if lease else ():
            block.pins -= 1
        loose.update(lease.blocks if lease else ())
        return lease

    def forgiving(self, session, blocks, *, used, behind=False):
        kept = [block for block in blocks if block not in loose]
        loose.difference_update(blocks)
        release(self, session, kept, used=used, behind=behind)

    monkeypatch.setattr(Tiers, "acquire", unpinned)
    monkeypatch.setattr(Tiers, "release", forgiving)
    assert "wrong bytes" in {why for _, why in spoilt(lease_under_pressure, make(device=4))}


def test_r9_a_read_for_each_session_is_noticed(make, monkeypatch):
    """Bytes are counted: a prefix that three sessions miss is read and loaded once."""
    shared = Transfers.up

    def up(transfers, blocks, to, **options):
        for block in blocks:
            block.up = None
        shared(transfers, blocks, to, **options)

    monkeypatch.setattr(Transfers, "up", up)
    assert spoilt(share_one_read, make(disk=16), range(3))


def test_r11_keeping_what_cannot_be_written_is_noticed(make, monkeypatch):
    """With nobody willing to give a block up, the waiting session would wait for ever."""
    on_device = Room.on_device
    monkeypatch.setattr(
        Room, "on_device", lambda self, n, *, below=None, write=True: on_device(self, n, below=below, write=False)
    )
    assert "no progress" in spoilt(full_of_what_cannot_be_written, make(device=4, host=0), range(1))[0][1]


def test_reading_the_disk_without_its_checksums_is_noticed(make, monkeypatch):
    """The rotten block would be served."""
    read = Slab.read
    monkeypatch.setattr(Slab, "read", lambda self, images, *, verify=True: read(self, images, verify=False))
    assert "wrong bytes" in spoilt(rot, make(disk=16), range(1))[0][1]


# -- R5: device memory is never read in any order


class LateDriver:
    """cudaMemcpyBatchAsync at its extremes: "any order" sources are read at the call, others when the stream runs."""

    cudaMemcpySrcAccessOrder = SimpleNamespace(cudaMemcpySrcAccessOrderStream=1, cudaMemcpySrcAccessOrderAny=3)  # noqa: N815
    cudaMemcpyAttributes = SimpleNamespace  # noqa: N815

    def __init__(self):
        self.queue = []

    def cudaMemcpyBatchAsync(self, to, source, sizes, _count, attributes, *_):  # noqa: N802
        for there, here, size in zip(to, source, sizes, strict=True):
            early = ctypes.string_at(here, size) if attributes[0].srcAccessOrder != 1 else None
            self.queue.append(lambda a=there, b=here, n=size, e=early: ctypes.memmove(a, e or b, n))
        return (0,)

    def run(self):
        for copy in self.queue:
            copy()
        self.queue.clear()


def write_out_what_compute_writes_before_the_stream_gets_there():
    """Blocks are computed between the call of their write-out and its turn in the stream; the bytes of both."""
    pool = DevicePool(GEOMETRY, "cpu", 4 * GEOMETRY.block_bytes)
    buffer = mmap.mmap(-1, 4 * GEOMETRY.slot_bytes)
    arena = SimpleNamespace(
        address=ctypes.addressof(ctypes.c_char.from_buffer(buffer)), buffer=buffer, slot_bytes=GEOMETRY.slot_bytes,
        piece_slots=4, pinned_bytes=4 * GEOMETRY.slot_bytes,
    )  # fmt: skip
    driver = LateDriver()
    path = CopyPath(Memory(pool=pool, arena=arena), BatchCopy(driver))
    path.copy("d2h", [Run(1, 0, 2)], stream=7, settled=True)
    pool.pool[1:3] = 5.0
    driver.run()
    copied = torch.frombuffer(bytearray(buffer[: GEOMETRY.block_bytes]), dtype=torch.float32)
    return pool.pool[1].flatten().tolist(), copied.tolist()


def test_r5_reading_device_memory_in_any_order_is_noticed(monkeypatch):
    """A write-out called before its block was computed has the block's bytes, and has not if the order is given up."""
    written, copied = write_out_what_compute_writes_before_the_stream_gets_there()
    assert written == copied
    submit = BatchCopy.submit
    monkeypatch.setattr(
        BatchCopy,
        "submit",
        lambda self, copies, *, stream, any_order: submit(self, copies, stream=stream, any_order=True),
    )
    written, copied = write_out_what_compute_writes_before_the_stream_gets_there()
    assert written != copied


# -- R8: alloc and free share one lock


class NoLock:
    """A lock that lets everybody in."""

    def __enter__(self):
        return True

    def __exit__(self, *_):
        pass

    def acquire(self, *_, **__):
        return True

    def release(self):
        pass

    def _is_owned(self):
        return True


def quarrel(make_rig, turns=400):
    """Four threads take and give device blocks as fast as they can; what went wrong, if anything."""
    r = make_rig()
    owner = [None] * (r.tiers.num_blocks + 1)
    errors = []

    def work(name):
        try:
            for turn in range(turns):
                if errors:
                    return
                blocks = r.tiers.allocate(1 + turn % 3) or []
                assert not [block for block in blocks if owner[block] is not None], "two have one block"
                for block in blocks:
                    owner[block] = name
                for block in blocks:
                    owner[block] = None
                r.tiers.release(name, blocks, used=DONE)
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(str(i),)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    try:
        r.tiers.check()
        assert 0 == r.tiers.stats()["device"]["used"]
    except AssertionError as error:
        errors.append(error)
    r.tiers.close()
    return errors


def test_r8_without_the_lock_two_threads_get_one_block(rig_class, monkeypatch):
    """Taking and giving blocks from four threads is right with the one lock and wrong without it."""

    def make_rig():
        return rig_class(device=12, host=0, streams=CpuStreams())

    assert [] == quarrel(make_rig)
    monkeypatch.setattr(family_module, "OwnLock", NoLock)
    assert any(quarrel(make_rig, 20_000) for _ in range(5))
