"""Two things at once: trips of one block that cross, a disk that hangs while others plan, write notes or close.

Covers what each end leaves: right bytes, a receipt, nothing under way. A hung read or write by itself is `test_stall.py`.
"""

from __future__ import annotations

import errno
import shutil
import threading

import pytest

from agentkv.core.residency import Action, Move, Outcome, Tier
from agentkv.kv import moves, transfers
from agentkv.kv.streams.adversarial import AdversarialStreams
from agentkv.kv.streams.cpu import CpuStreams

from .conftest import GEOMETRY, content
from .disk_fakes import FaultyDisk
from .hanging_disk import HangingSlab

OVERDUE_S = 11.0
"""Longer than a disk copy may take."""


class GatedStreams(CpuStreams):
    """While `gated`, copies down wait for `go`; `began` is set by the first."""

    def __init__(self):
        super().__init__()
        self.gated = False
        self.began, self.go = threading.Event(), threading.Event()

    def copy(self, direction, runs, after):
        if direction == "d2h" and self.gated:
            self.began.set()
            assert self.go.wait(30)
        return super().copy(direction, runs, after)


class LateFailure:
    """The event of a copy that raises once `gate` is set."""

    def __init__(self, gate):
        self._gate = gate

    def query(self):
        return self._gate.is_set()

    def wait(self):
        assert self._gate.wait(30)
        raise RuntimeError("the copy failed")


class LateFailingStreams(CpuStreams):
    """While there is a `gate`, copies up are issued and fail when it is set."""

    gate = None

    def copy(self, direction, runs, after):
        event = super().copy(direction, runs, after)
        return event if direction == "d2h" or self.gate is None else LateFailure(self.gate)


@pytest.fixture
def hung(rig, tmp_path):
    """Makes rigs with real threads over a disk that can hang; lets them go at the end."""
    made = []

    def make(*, device=8, host=12, streams=None, **options):
        made.append(HangingSlab(tmp_path / f"hung{len(made)}", **options))
        return rig(device=device, host=host, slab=made[-1], streams=streams, threads=True)

    yield make
    for slab in made:
        slab.go.set()


@pytest.fixture
def small_jobs(monkeypatch):
    """Each disk copy is a job of its own, and each slice of a plan has eight blocks."""
    monkeypatch.setattr(transfers, "_DISK_JOB_BYTES", GEOMETRY.block_bytes)
    monkeypatch.setattr(moves, "_SLICE_BLOCKS", 8)


def _wait_for(r, ask):
    """Time passes until `ask()` is true; somebody who waits ticks meanwhile."""

    def tried():
        r.tiers.tick()
        return ask() or None

    r.until(tried, turns=4000)


def _moved(r, session, action, to):
    """Like the rig's own, with threads: the receipt comes a moment after all is quiet."""
    before = len(r.receipts)
    r.move(session, action, to)
    _wait_for(r, lambda: len(r.receipts) > before)
    r.settle()
    return r.receipts[-1]


def _returns(fn, within_s=3.0):
    """True if `fn` comes back in time, on a thread of its own."""
    thread = threading.Thread(target=fn, daemon=True)
    thread.start()
    thread.join(within_s)
    return not thread.is_alive()


def _computed_again(r, name, keys):
    """The session computes all of its context, as after a miss of its first block."""
    assert [] == r.tiers.acquire(name, keys).blocks
    blocks = []
    for at in range(len(keys)):
        r.write(name, blocks, keys, at)
    r.tiers.hold(name, name, keys, 16 * len(keys))
    r.tiers.release(name, blocks, used=r.streams.record())


def _headless_on_disk(r, name, blocks):
    """A session on disk that has lost its first block."""
    keys = r.keys(name, blocks)
    r.turn_of(name, keys)
    _moved(r, name, Action.WRITE, Tier.DISK)
    for tier in (Tier.DEVICE, Tier.HOST):
        r.evict(name, tier)
    with r.tiers._locked():
        r.tiers._transfers.evict(r.tiers._book.holdings[name].chain[0], Tier.DISK)
    assert (0, 0, blocks - 1, 1) == r.where(name)
    return keys


def _wrong_on_host(r, name):
    """Blocks of the session whose readable host copy does not hold what it must."""
    with r.tiers._locked():
        chain = r.tiers._book.holdings[name].chain
        views = {block.key: r.tiers._host.view(block.where[Tier.HOST]) for block in chain if block.has(Tier.HOST)}
        return [
            key for key, view in views.items()
            if bytes(view[: GEOMETRY.block_bytes]) != content(key).numpy().tobytes()
        ]  # fmt: skip


# -- one block, two trips


@pytest.mark.parametrize("seed", range(4))
def test_a_block_on_its_way_up_from_disk_is_not_written_down_to_the_host_as_well(rig, seed):
    """It was computed again meanwhile, so a move may ask for that: every trip ends, every byte is right (R9)."""
    r = rig(disk=32, streams=AdversarialStreams(seed))
    keys = _headless_on_disk(r, "a", 3)
    chain = r.tiers._book.holdings["a"].chain
    r.move("a", Action.PREFETCH, Tier.HOST)
    r.until(lambda: r.tiers._transfers.lanes["h2d"].turn() or None)
    assert all(block.coming[Tier.HOST] >= 0 for block in chain[1:])
    _computed_again(r, "a", keys)
    r.move("a", Action.WRITE, Tier.HOST)
    r.settle()
    assert [Outcome.DONE] * 3 == [receipt.outcome for receipt in r.receipts]
    assert 0 == r.tiers.stats()["moving_blocks"]
    assert (3, 3, 2, 0) == r.where("a")
    r.evict("a", Tier.DEVICE)
    assert 3 == r.turn_of("a", keys).from_host
    r.settle()
    assert [] == r.wrong


def test_a_host_copy_that_a_slow_read_makes_readable_is_right(hung):
    """Also while a copy down of the same session has begun and not ended."""
    streams = GatedStreams()
    r = hung(streams=streams)
    keys = _headless_on_disk(r, "a", 3)
    r.slab.hang.add("read")
    r.move("a", Action.PREFETCH, Tier.HOST)
    assert r.slab.hanging.acquire(timeout=5)
    _computed_again(r, "a", keys)
    streams.gated = True
    r.move("a", Action.WRITE, Tier.HOST)
    assert streams.began.wait(5)
    r.slab.go.set()
    _wait_for(r, lambda: r.where("a")[1] >= 2)
    assert [] == _wrong_on_host(r, "a")
    streams.go.set()
    r.settle()
    assert (3, 3, 2, 0) == r.where("a")
    assert [] == _wrong_on_host(r, "a")
    r.tiers.check()


@pytest.mark.parametrize("disk", [0, 32])
def test_two_device_blocks_are_found_though_the_host_has_one_free_slot(rig, disk):
    """No write takes the host slot of the one before it, for ever (R11)."""
    r = rig(device=4, host=4, disk=disk)
    r.turn_of("c", r.keys("c", 3))
    r.park("c", Tier.HOST)
    r.turn_of("b", r.keys("b", 4))
    r.clock.advance(5)
    r.tiers.expect("c", r.clock.now_s())
    r.tiers.expect("b", r.clock.now_s() + 100)
    assert 1 == r.tiers.stats()["host"]["free"]
    blocks = r.until(lambda: r.tiers.allocate(2), turns=2000)
    assert 2 == len(blocks)
    r.tiers.release("-", blocks, used=r.streams.record())


def test_a_load_that_fails_after_its_lease_was_ready_is_left_to_whoever_confirms(rig):
    """`reopen` gives the spare block, as if somebody else read the leased one; both can be released."""
    streams = LateFailingStreams()
    r = rig(threads=True, streams=streams)
    keys = r.keys("a", 2)
    r.turn_of("a", keys)
    _moved(r, "a", Action.WRITE, Tier.HOST)
    r.evict("a", Tier.DEVICE)
    streams.gate = threading.Event()
    lease = r.tiers.acquire("a", keys)
    r.until(lambda: lease.ticket.ready or None)
    assert lease.ticket.failed_from is None
    (spare,) = r.tiers.allocate(1)
    streams.gate.set()
    lease.ticket.wait()
    assert 0 == lease.ticket.failed_from
    assert spare == r.tiers.reopen("a", lease.blocks[1], spare)
    r.tiers.release("a", [lease.blocks[0], spare], used=r.streams.record())
    r.tiers.check()
    assert 0 == r.tiers.stats()["device"]["used"]


# -- a write that was given up


def test_a_write_that_was_given_up_leaves_no_record_for_the_next_process(hung, tmp_path):
    """Its host slot has belonged to others since: under its key nothing may be found (R4)."""
    r = hung(host=4, store="s")
    keys = r.keys("a", 1)
    r.turn_of("a", keys)
    _moved(r, "a", Action.WRITE, Tier.HOST)
    settle, hanging = r.slab._journal.settle, threading.Event()

    def slow():
        hanging.set()
        assert r.slab.go.wait(30)
        settle()

    r.slab._journal.settle = slow
    r.move("a", Action.WRITE, Tier.DISK)
    assert hanging.wait(5)
    r.clock.advance(OVERDUE_S)
    r.tiers.tick()
    assert 1 == r.tiers.stats()["stalled_jobs"]
    r.evict("a", Tier.HOST)
    others = r.keys("b", 4)
    r.turn_of("b", others)
    assert Outcome.DONE == _moved(r, "b", Action.WRITE, Tier.HOST).outcome
    r.slab.go.set()
    _wait_for(r, lambda: r.tiers.stats()["disk"]["off"] is None)
    shutil.copytree(r.slab.path, tmp_path / "next" / r.slab.path.name)  # what a kill would leave now
    with HangingSlab(tmp_path / "next", store="s") as after:
        assert after.lasting
        assert [] == after.kept


def test_a_write_whose_slots_were_long_in_coming_does_not_give_itself_up(rig):
    """Making a new file takes time; the deadline is that of the write, and its source stays in use until it ends."""
    r = rig(host=4, disk=64)
    r.turn_of("a", r.keys("a", 1))
    r.moved("a", Action.WRITE, Tier.HOST)
    (block,) = r.tiers._book.holdings["a"].chain
    reserve, write, seen = r.slab.reserve, r.slab.write, []

    def slow_reserve(n):
        r.clock.advance(OVERDUE_S)
        return reserve(n)

    def watched_write(images, **options):
        seen.append(block.evictable(Tier.HOST))
        write(images, **options)

    r.slab.reserve, r.slab.write = slow_reserve, watched_write
    assert Outcome.DONE == r.moved("a", Action.WRITE, Tier.DISK).outcome
    assert [False] == seen
    assert 0 == r.tiers.stats()["stalled_jobs"]


def test_a_write_of_nothing_does_not_count_as_a_success(rig, small_jobs, monkeypatch):
    """Jobs that got no slot, because the first one failed, leave the failing disk off."""
    r = rig(device=16, host=16, disk=64)
    disk = FaultyDisk(monkeypatch)
    disk.fail["write"] = errno.EIO
    r.turn_of("a", r.keys("a", 8))
    r.moved("a", Action.WRITE, Tier.DISK)
    assert "Input/output error" in r.slab.off
    assert {"EIO": 1} == dict(r.slab.errors)


# -- plans made while the disk stalls


def test_a_write_planned_in_the_moment_of_the_stall_goes_home(hung):
    """Four writers hang; the section that sends a block on from the host is the one that finds it out."""
    r = hung()
    _four_hung_writes(r)
    r.turn_of("e", r.keys("e", 1))
    settle = r.tiers._transfers.settle

    def slow_settle(lane, block, **options):
        if lane == "d2h":
            r.clock.advance(OVERDUE_S)
        settle(lane, block, **options)

    r.tiers._transfers.settle = slow_settle
    r.move("e", Action.WRITE, Tier.DISK)
    _wait_for(r, lambda: len(r.receipts) == 5)
    assert [Outcome.FAILED] * 5 == [receipt.outcome for receipt in r.receipts]
    assert 0 == r.tiers.stats()["moving_blocks"]
    assert 1 == r.where("e")[1]


def test_a_write_planned_by_a_section_that_outlasts_the_deadline_goes_home(hung):
    """It is queued after the others were withdrawn."""
    r = hung()
    _four_hung_writes(r)
    r.turn_of("e", r.keys("e", 1))
    r.move("e", Action.WRITE, Tier.HOST)
    _wait_for(r, lambda: len(r.receipts) == 1)
    down = r.tiers._transfers.down

    def slow_down(*args, **options):
        r.clock.advance(OVERDUE_S)
        down(*args, **options)

    r.tiers._transfers.down = slow_down
    r.receipts.clear()
    r.move("e", Action.WRITE, Tier.DISK)
    _wait_for(r, lambda: len(r.receipts) == 5)
    assert [Outcome.FAILED] * 5 == [receipt.outcome for receipt in r.receipts]
    assert 0 == r.tiers.stats()["moving_blocks"]


def _four_hung_writes(r):
    """Every writer hangs in a move of its own."""
    r.slab.hang.add("write")
    for name in "abcd":
        r.turn_of(name, r.keys(name, 1))
        r.move(name, Action.WRITE, Tier.DISK)
    for _ in range(4):
        assert r.slab.hanging.acquire(timeout=5)


def test_the_rest_of_a_prefetch_does_not_queue_behind_a_stalled_disk(hung, small_jobs):
    """Eight readers hang in its first slice; the second is planned after the stall and keeps no device block."""
    r = hung(device=40, host=40)
    keys = r.keys("a", 12)
    r.turn_of("a", keys)
    _moved(r, "a", Action.WRITE, Tier.DISK)
    r.evict("a", Tier.DEVICE)
    r.evict("a", Tier.HOST)
    lane, gate = r.tiers._transfers.lanes["h2d"], threading.Event()
    put = lane.put

    def slow_put(jobs, *, urgent):
        if threading.current_thread().name.startswith("agentkv-h2d"):
            assert gate.wait(30)
        put(jobs, urgent=urgent)

    lane.put = slow_put
    r.slab.hang.add("read")
    r.receipts.clear()
    r.move("a", Action.PREFETCH, Tier.DEVICE)
    for _ in range(8):
        assert r.slab.hanging.acquire(timeout=5)
    r.clock.advance(OVERDUE_S)
    r.tiers.tick()
    gate.set()
    _wait_for(r, lambda: len(r.receipts) == 1)
    assert (Outcome.FAILED, 0) == (r.receipts[0].outcome, r.receipts[0].blocks)
    assert r.receipts[0].detail.startswith("8 of 8 blocks")
    stats = r.tiers.stats()
    assert (0, 40) == (stats["moving_blocks"], stats["device"]["free"])


# -- notes for a store that hangs


def test_a_tick_does_not_wait_for_the_note_of_a_move_that_it_gives_up(hung, small_jobs):
    """The move had got some blocks to disk, so its session is to be noted, by whoever delivers the receipt."""
    r = hung(store="s")
    r.turn_of("a", r.keys("a", 3))
    write, first = r.slab.write, threading.Lock()

    def write_one(images, **options):
        if not first.acquire(blocking=False):
            r.slab.hang.update(("write", "note"))
        write(images, **options)

    r.slab.write = write_one
    r.move("a", Action.WRITE, Tier.DISK)
    for _ in range(2):
        assert r.slab.hanging.acquire(timeout=5)
    _wait_for(r, lambda: r.where("a")[2] == 1)
    r.clock.advance(OVERDUE_S)
    assert _returns(r.tiers.tick)
    _wait_for(r, lambda: len(r.receipts) == 1)
    assert (Outcome.PARTIAL, 1) == (r.receipts[0].outcome, r.receipts[0].blocks)


def test_a_session_is_dropped_while_the_note_of_another_hangs(hung):
    """The notes are written in order when the disk answers again: nobody's is lost, and none comes back."""
    r = hung(store="s")
    for name in "ab":
        r.turn_of(name, r.keys(name, 1))
        _moved(r, name, Action.WRITE, Tier.DISK)
    assert r.tiers._keep.flush(5)
    assert {"a", "b"} == set(r.slab.notes)
    r.turn_of("a", r.keys("a", 2))
    r.slab.hang.add("note")
    r.move("a", Action.WRITE, Tier.DISK)
    assert r.slab.hanging.acquire(timeout=5)
    assert _returns(lambda: r.tiers.drop("b"))
    assert not r.tiers._keep.flush(0)
    r.slab.go.set()
    assert r.tiers._keep.flush(5)
    assert {"a"} == set(r.slab.notes)


def test_saving_to_a_disk_that_is_known_to_hang_returns_at_once(hung):
    """As `close` does it; nothing is noted of a session that is not on disk."""
    r = hung(store="s")
    for name in "ab":
        r.turn_of(name, r.keys(name, 1))
    r.slab.hang.update(("write", "note"))
    r.move("a", Action.WRITE, Tier.DISK)
    assert r.slab.hanging.acquire(timeout=5)
    r.clock.advance(OVERDUE_S)
    r.tiers.tick()
    assert not r.tiers.residency("a").has_disk
    assert _returns(lambda: r.tiers.save(1.0))
    r.slab.go.set()
    assert r.tiers._keep.flush(5)
    assert {} == r.slab.notes


def test_saving_waits_for_notes_no_longer_than_it_was_told_to(hung):
    """The blocks are on disk; that the notes are not is what it says."""
    r = hung(store="s")
    r.turn_of("a", r.keys("a", 1))
    r.slab.hang.add("note")
    _moved(r, "a", Action.WRITE, Tier.DISK)
    assert r.slab.hanging.acquire(timeout=5)
    saved = []
    assert _returns(lambda: saved.append(r.tiers.save(0.1)))
    assert [False] == saved
    r.slab.go.set()
    assert r.tiers.save(5)
    assert {"a"} == set(r.slab.notes)


# -- receipts


@pytest.mark.parametrize(
    ("action", "part"),
    [
        (Action.WRITE, "_lacks"),
        (Action.PREFETCH, "_is_below"),
        (Action.WRITE, "down"),
        (Action.PREFETCH, "up"),
    ],
)
def test_a_plan_that_raises_gives_its_receipt(rig, monkeypatch, action, part):
    """Wherever it was: then nothing is under way, and the next move works."""
    r = rig()
    r.turn_of("a", r.keys("a", 4))
    if action == Action.PREFETCH:
        r.park("a")

    def no_memory(*_args, **_options):
        raise MemoryError

    r.receipts.clear()
    monkeypatch.setattr(moves if part.startswith("_") else r.tiers._transfers, part, no_memory)
    r.move("a", action, Tier.DEVICE if action == Action.PREFETCH else Tier.HOST)
    r.until(lambda: not r.turn() or None)
    monkeypatch.undo()
    assert [(Outcome.CANCELLED, 0)] == [(one.outcome, one.blocks) for one in r.receipts]
    assert r.tiers._transfers.idle
    assert 4 == r.moved("a", action, Tier.DEVICE if action == Action.PREFETCH else Tier.HOST).blocks


def test_a_move_to_the_host_is_done_though_the_trip_that_it_joined_ends_at_a_stalled_disk(rig):
    """Each receipt tells of its own target."""
    r = rig(disk=32)
    keys = r.keys("a", 1)
    for name in "ab":
        r.turn_of(name, keys)
    r.move("a", Action.WRITE, Tier.DISK)
    r.move("b", Action.WRITE, Tier.HOST)
    for _ in range(2):
        assert r.tiers._transfers.lanes["d2h"].turn()
    r.tiers._transfers.stall("it does not answer")
    r.settle()
    r.tiers._transfers.stall(None)
    told = {one.move.session: (one.outcome, one.blocks) for one in r.receipts}
    assert {"a": (Outcome.FAILED, 0), "b": (Outcome.DONE, 1)} == told
    assert 1 == r.where("b")[1]


@pytest.mark.parametrize("closed", [False, True])
def test_apply_never_raises_whatever_its_listener_does(rig, closed):
    """What listeners raise is logged."""
    r = rig()
    if closed:
        r.tiers.close()

    def bad(_receipt):
        raise KeyError("x")

    assert not r.tiers.apply(Move(session="a", action=Action.WRITE, to=Tier.HOST, reason="test"), bad)


# -- templates


def test_a_template_that_is_kept_again_hides_no_other_whose_window_is_over(rig):
    """Each goes when its own time has come, in whatever order tasks began and ended."""
    r = rig(device=16, host=4)
    first, second = r.keys("a", 1), r.keys("b", 1)
    _ended_task(r, "c", r.keys("c", 1))  # stands in front of the others until its time has come
    r.clock.advance(1)
    _ended_task(r, "a", first)
    r.clock.advance(1)
    _ended_task(r, "b", second)
    r.clock.advance(100)
    _ended_task(r, "a", first)
    assert (1, 1) == (r.tiers.match(first), r.tiers.match(second))
    r.clock.advance(40)
    r.tiers.tick()
    assert (1, 0) == (r.tiers.match(first), r.tiers.match(second))
    assert 1 == r.tiers.stats()["template_blocks"]
    r.clock.advance(120)
    r.tiers.tick()
    assert (0, 0) == (r.tiers.match(first), r.tiers.stats()["template_blocks"])
    assert 0 == r.tiers.stats()["device"]["used"]


def test_a_template_whose_window_ends_after_close_is_left_alone(rig):
    """There is no disk any more from which it could be freed."""
    r = rig(device=16, host=8, disk=32)
    keys = r.keys("a", 1)
    r.turn_of("a", keys, task="a")
    assert Outcome.DONE == r.moved("a", Action.WRITE, Tier.DISK).outcome
    r.tiers.hold("a", "a", keys, 16, template_tokens=16)
    r.tiers.drop_task("a")
    r.tiers.close()
    r.clock.advance(500)
    r.tiers.tick()


def _ended_task(r, name, keys):
    """A task whose whole context was template comes and goes."""
    r.turn_of(name, keys, task=name)
    r.tiers.hold(name, name, keys, 16, template_tokens=16)
    r.tiers.drop_task(name)
