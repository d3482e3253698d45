"""Trouble: failing disks, rotten bytes, copies that raise. Never a wrong byte, never a leak, never a stall."""

from __future__ import annotations

import errno
import threading

import pytest

from agentkv.core.residency import Action, Outcome, Tier
from agentkv.kv.slab import Slab
from agentkv.kv.streams.adversarial import AdversarialStreams
from agentkv.kv.streams.cpu import CpuStreams


class FailingDisk(Slab):
    """A slab whose system calls fail on demand."""

    fail_writes = False
    fail_reads = False

    def write(self, images, **options):
        if self.fail_writes:
            for segment in self._segments:
                segment.transfer = _fails
        super().write(images, **options)

    def read(self, images, *, verify=True):
        if self.fail_reads:
            for segment in self._segments:
                segment.transfer = _fails
        return super().read(images, verify=verify)

    def heal(self):
        self.fail_writes = self.fail_reads = False
        for segment in self._segments:
            vars(segment).pop("transfer", None)


def _fails(*_):
    raise OSError(errno.EIO, "Input/output error")


class FailingStreams(CpuStreams):
    """Copies of one direction raise."""

    failing = None

    def copy(self, direction, runs, after):
        if direction == self.failing:
            raise RuntimeError("copy engine lost")
        return super().copy(direction, runs, after)


@pytest.fixture
def disk(tmp_path, rig_class):
    """A rig over a failing disk: `r.slab` fails on demand."""

    def make(**options):
        probe = rig_class(**{**options, "host": 2})
        slab = FailingDisk(tmp_path / "slab", 32 * 4096, probe.tiers.geometry.block_bytes, retry_s=0)
        probe.close()
        made.append(rig_class(slab=slab, **options))
        return made[-1]

    made = []
    yield make
    for one in made:
        one.close()


def on_disk(r, name, blocks=4):
    """A session whose only copies are on disk."""
    r.turn_of(name, r.keys(name, blocks))
    r.park(name, Tier.DISK)
    r.evict(name, Tier.HOST)
    assert (0, 0, blocks, 0) == r.where(name)


def flip_bit(r, session, index):
    """One bit of that block's slot on disk turns."""
    slot = r.tiers._book.holdings[session].chain[index].where[Tier.DISK]
    (path,) = r.slab.path.iterdir()
    with path.open("r+b") as file:
        file.seek(slot * r.slab.slot_bytes + 7)
        byte = file.read(1)[0]
        file.seek(slot * r.slab.slot_bytes + 7)
        file.write(bytes([byte ^ 4]))


@pytest.mark.parametrize("index", [0, 1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_a_rotten_block_is_computed_again_and_nothing_else(disk, index, seed):
    """The lease says from where it failed, the counter counts, the bad slot is freed, the rest is right."""
    r = disk(streams=AdversarialStreams(seed))
    on_disk(r, "a")
    flip_bit(r, "a", index)
    keys = r.keys("a", 4)
    lease = r.turn_of("a", keys)
    r.settle()
    assert index == lease.ticket.failed_from
    assert [] == r.wrong
    stats = r.tiers.stats()
    assert (1, 1) == (stats["checksum_failures"], stats["lost_on_disk"])
    assert 3 == stats["disk"]["used"]
    assert 4 == stats["device"]["used"]
    assert 0 == r.turn_of("a", keys).loaded_blocks


def test_two_sessions_on_one_rotten_prefix_both_go_on(disk):
    """One read, two leases that fail at the same block, no retry, no leak (K7)."""
    r = disk()
    on_disk(r, "a")
    flip_bit(r, "a", 2)
    keys = r.keys("a", 4)
    leases = {name: r.start(name, keys) for name in ("a", "b")}
    r.settle()
    for name, lease in leases.items():
        assert 2 == lease.ticket.failed_from
        r.tiers.check()
        r.tiers.release(name, lease.blocks[2:], used=r.streams.record())
        blocks = lease.blocks[:2]
        for at in range(2, 4):
            r.write(name, blocks, keys, at)
        r.read(name, blocks, keys)
        r.tiers.release(name, blocks, used=r.streams.record())
    r.settle()
    assert [] == r.wrong
    assert 1 == r.tiers.stats()["checksum_failures"]
    assert 4 == r.tiers.stats()["device"]["used"]


def test_a_disk_that_cannot_read_is_a_miss(disk):
    """Every block is computed again; nobody waits for ever."""
    r = disk()
    on_disk(r, "a")
    r.slab.fail_reads = True
    lease = r.turn_of("a", r.keys("a", 4))
    r.settle()
    assert 0 == lease.ticket.failed_from
    assert [] == r.wrong
    assert 0 == r.tiers.stats()["disk"]["used"]


def test_a_disk_that_cannot_write_leaves_the_blocks_where_they_were(disk):
    """The receipt says failed; when the disk is well again, the next move works."""
    r = disk()
    r.turn_of("a", r.keys("a", 4))
    r.moved("a", Action.WRITE, Tier.HOST)
    r.slab.fail_writes = True
    assert Outcome.FAILED == r.moved("a", Action.WRITE, Tier.DISK).outcome
    assert (4, 4, 0, 0) == r.where("a")
    assert 0 == r.tiers.stats()["disk"]["used"]
    r.slab.heal()
    assert Outcome.DONE == r.moved("a", Action.WRITE, Tier.DISK).outcome
    assert (4, 4, 4, 0) == r.where("a")


def test_a_disk_that_cannot_write_is_off_and_says_why(tmp_path, rig_class):
    """`stats` and Residency tell; policies see no disk until it is tried again."""
    probe = rig_class()
    slab = FailingDisk(tmp_path, 32 * 4096, probe.tiers.geometry.block_bytes, retry_s=3600)
    probe.close()
    r = rig_class(slab=slab)
    r.turn_of("a", r.keys("a", 4))
    slab.fail_writes = True
    r.moved("a", Action.WRITE, Tier.DISK)
    assert "Input/output error" in r.tiers.stats()["disk"]["off"]
    assert r.tiers.residency("a").has_disk is False
    r.close()


def test_a_dead_disk_does_not_stop_the_host(disk):
    """With writes failing and the host full, blocks are dropped and computed again."""
    r = disk(device=4, host=3)
    r.slab.fail_writes = True
    for _ in range(2):
        for name in ("a", "b", "c"):
            r.turn_of(name, r.keys(name, 4))
            r.move(name, Action.DEMOTE, Tier.DISK)
    r.settle()
    assert [] == r.wrong


def test_a_full_slab_keeps_the_sessions_that_are_back_sooner(disk):
    """What is on the host too goes first, then whoever is back last."""
    r = disk(device=40, host=40)
    for i, name in enumerate("abcdefgh"):
        r.turn_of(name, r.keys(name, 4))
        r.tiers.expect(name, r.clock.now_s() + 1000 * (8 - i))
        r.moved(name, Action.WRITE, Tier.DISK)
        r.evict(name, Tier.HOST)
    assert 0 == r.tiers.stats()["disk"]["free"]
    r.turn_of("z", r.keys("z", 4))
    r.tiers.expect("z", r.clock.now_s() + 10)
    assert Outcome.DONE == r.moved("z", Action.WRITE, Tier.DISK).outcome
    assert (0, 4) == (r.where("a")[2], r.where("h")[2])


def test_a_full_slab_gives_up_what_the_host_has_too(disk):
    """Before it gives up anybody's only copy."""
    r = disk(device=40, host=40)
    for name in "abcdefgh":
        r.turn_of(name, r.keys(name, 4))
        r.tiers.expect(name, r.clock.now_s() + (500 if name == "b" else 1000))
        r.moved(name, Action.WRITE, Tier.DISK)
        if name != "b":
            r.evict(name, Tier.HOST)
    r.turn_of("z", r.keys("z", 4))
    r.tiers.expect("z", r.clock.now_s() + 10)
    assert Outcome.DONE == r.moved("z", Action.WRITE, Tier.DISK).outcome
    assert [4, 0, 4] == [r.where(name)[2] for name in "abc"]


@pytest.mark.parametrize("threads", [False, True])
def test_a_load_that_raises_fails_its_ticket(rig, threads):
    """The host copy stays; the sequence goes on with what it computes, and a later lease loads well."""
    streams = FailingStreams()
    r = rig(streams=streams, threads=threads)
    keys = r.keys("a", 4)
    r.turn_of("a", keys)
    r.park("a")
    streams.failing = "h2d"
    lease = r.until(lambda: r.tiers.acquire("a", keys))
    r.until(lambda: lease.ticket.done or None)
    assert 0 == lease.ticket.failed_from
    assert (0, 4, 0, 0) == r.where("a")
    r.tiers.release("a", lease.blocks, used=r.streams.record())
    assert 0 == r.tiers.stats()["device"]["used"]
    streams.failing = None
    r.turn_of("a", keys)
    r.settle()
    assert [] == r.wrong


def test_a_write_back_that_raises_makes_room_by_dropping(rig):
    """Allocation goes on, the blocks are missing, their session computes them again."""
    streams = FailingStreams()
    r = rig(device=4, streams=streams)
    keys = r.keys("a", 4)
    r.turn_of("a", keys)
    streams.failing = "d2h"
    blocks = r.until(lambda: r.tiers.allocate(2))
    assert (2, 0, 0, 2) == r.where("a")
    r.tiers.release("b", blocks, used=r.streams.record())
    r.turn_of("a", keys)
    assert [] == r.wrong


def test_many_threads_at_once_leave_the_books_right(rig):
    """Engine, planner and mover threads all at work: no error, no wrong byte, nothing left over (E23)."""
    r = rig(device=12, host=10, disk=24, streams=CpuStreams(), threads=True)
    errors = []
    names = ("a", "b", "c")
    stop = threading.Event()

    def plan():
        turn = 0
        while not stop.is_set():
            name = names[turn % 3]
            action = (Action.WRITE, Action.DEMOTE, Action.PREFETCH, Action.DROP)[turn % 4]
            r.tiers.apply(_move(name, action, (Tier.HOST, Tier.DISK, Tier.DEVICE)[turn % 3]))
            r.tiers.residency(name)
            r.tiers.check()
            turn += 1

    def call(name):
        try:
            for blocks in (3, 4, 2, 4) * 10:
                r.turn_of(name, r.keys(name, blocks))
        except BaseException as error:
            errors.append(error)

    planner = threading.Thread(target=plan)
    callers = [threading.Thread(target=call, args=(name,)) for name in names]
    for thread in (planner, *callers):
        thread.start()
    for thread in callers:
        thread.join()
    stop.set()
    planner.join()
    r.settle()
    assert [] == errors
    assert [] == r.wrong
    for name in names:
        r.tiers.drop(name)
    r.settle()
    r.tiers.release("-", r.until(lambda: r.tiers.allocate(12)), used=r.streams.record())
    r.tiers.check()
    stats = r.tiers.stats()
    assert (0, 0, 0) == tuple(stats[tier]["used"] for tier in ("device", "host", "disk"))


def _move(session, action, to):
    from agentkv.core.residency import Move

    return Move(session=session, action=action, to=to, reason="test")
