"""The rules of the data plane, each with the proof that its test would notice if the wait were missing.

Every scenario runs on the adversary's streams under many seeds. It must be clean under all of them, and spoilt under
at least one as soon as the rule is taken out by hand.
"""

from __future__ import annotations

import pytest

from agentkv.core.residency import Action, Tier
from agentkv.kv.block import Block
from agentkv.kv.streams.adversarial import AdversarialStreams
from agentkv.kv.transfers import Transfers

SEEDS = range(25)


class Impatient(AdversarialStreams):
    """Copies of one direction do not wait for what they should wait for."""

    def __init__(self, seed, direction):
        super().__init__(seed)
        self._impatient = direction

    def copy(self, direction, runs, after):
        return super().copy(direction, runs, () if direction == self._impatient else after)


def spoilt(scenario, make, seeds=SEEDS):
    """The seeds under which a wrong byte was read, or the books did not add up."""
    bad = []
    for seed in seeds:
        r = make(seed)
        try:
            scenario(r)
            r.settle()
        except (AssertionError, ValueError) as error:
            bad.append((seed, repr(error)))
        else:
            if r.wrong:
                bad.append((seed, "wrong bytes"))
        finally:
            if r.slab is not None:
                r.slab.close()
    return bad


def moved(r, lane):
    """The scenario is not vacuous: bytes went that way."""
    assert r.tiers.stats()["bytes"][lane] > 0


def write_at_once(r):
    """A block is written down in the very moment its computation was launched, and comes back (K1)."""
    keys = r.keys("a", 4)
    r.turn_of("a", keys)
    r.park("a")
    r.turn_of("a", keys)
    r.settle()
    moved(r, "d2h")
    moved(r, "h2d")


def load_over_a_late_reader(r):
    """Blocks are evicted while their last read is still queued, and others are loaded into them."""
    ours, theirs = r.keys("a", 4), r.keys("b", 4)
    r.turn_of("b", theirs)
    r.park("b")
    r.turn_of("a", ours)
    r.moved("a", Action.WRITE, Tier.HOST)
    r.turn_of("a", ours)
    r.turn_of("b", theirs)
    r.settle()
    moved(r, "h2d")


def reuse_while_written(r):
    """Somebody wants device blocks that count as clean (they are on disk) while they are written to the host."""
    ours = r.keys("a", 4)
    r.turn_of("a", ours)
    r.moved("a", Action.WRITE, Tier.DISK)
    r.evict("a", Tier.HOST)
    assert (4, 0, 4, 0) == r.where("a")
    assert r.move("a", Action.WRITE, Tier.HOST)
    r.tiers.pump()  # planned; no byte has moved
    r.turn_of("c", r.keys("c", 5))
    r.settle()
    lease = r.turn_of("a", ours)
    r.settle()
    assert lease.from_host


def reuse_of_a_host_slot(r):
    """The host tier is full of blocks that are being loaded when others want to be written there."""
    ours = r.keys("a", 4)
    r.turn_of("a", ours)
    r.park("a")
    r.turn_of("b", r.keys("b", 4))
    r.settle()
    lease = r.start("a", ours)
    r.tiers.pump()
    r.tiers.expect("a", r.clock.now_s() + 100)
    assert r.move("b", Action.WRITE, Tier.HOST)
    r.settle()
    assert 4 == r.where("b")[1]
    r.tiers.release("a", lease.blocks, used=r.streams.record())


def compute_on_restored(r, *, wait=True):
    """A restored session computes as soon as its compute stream waits on its ticket."""
    keys = r.keys("a", 4)
    r.turn_of("a", keys)
    r.park("a")
    lease = r.start("a", keys, wait=wait)
    r.settle()
    assert 4 == lease.loaded_blocks
    r.tiers.release("a", lease.blocks, used=r.streams.record())


def crowd_a_running_session(r):
    """A sequence reads its blocks again and again while others want room on the device."""
    others = ("x", "y", "z")
    for name in others:
        r.turn_of(name, r.keys(name, 1))
        r.moved(name, Action.WRITE, Tier.HOST)
    ours = r.keys("a", 3)
    r.turn_of("a", ours)
    r.moved("a", Action.WRITE, Tier.HOST)
    lease = r.start("a", ours)
    r.tiers.expect("a", r.clock.now_s() + 100)
    for name in others:
        r.turn_of(name, r.keys(name, 1))
        r.read("a", lease.blocks, ours, lease.ticket)
    r.settle()
    r.tiers.release("a", lease.blocks, used=r.streams.record())


@pytest.mark.parametrize(
    ("scenario", "sizes"),
    [
        (write_at_once, {"device": 5}),
        (load_over_a_late_reader, {"device": 5}),
        (reuse_while_written, {"device": 5, "disk": 16}),
        (reuse_of_a_host_slot, {"device": 9, "host": 4}),
        (compute_on_restored, {}),
        (crowd_a_running_session, {"device": 4}),
    ],
)
def test_every_scenario_is_clean_under_every_seed(rig_class, tmp_path, scenario, sizes):
    """With all rules in force no legal order of events spoils a byte."""
    assert [] == spoilt(scenario, lambda seed: rig_class(streams=AdversarialStreams(seed), directory=tmp_path, **sizes))


def test_r1_without_waiting_for_the_last_write_is_noticed(rig_class):
    """Device->host waits on the last write of those blocks by compute."""
    assert spoilt(write_at_once, lambda seed: rig_class(device=5, streams=Impatient(seed, "d2h")))


def test_r2_without_waiting_for_the_last_read_is_noticed(rig_class):
    """Host->device waits on the last read by the slot's previous owner."""
    assert spoilt(load_over_a_late_reader, lambda seed: rig_class(device=5, streams=Impatient(seed, "h2d")))


def _heedless_of(monkeypatch, tier):
    careful = Block.evictable

    def evictable(block, asked):
        if asked == tier:
            return block.has(tier) and (tier != Tier.DEVICE or block.pins == 0)
        return careful(block, asked)

    monkeypatch.setattr(Block, "evictable", evictable)


def test_r3_reusing_a_device_slot_before_its_copy_ended_is_noticed(rig_class, tmp_path, monkeypatch):
    """A device slot is reused only after its device->host end."""
    _heedless_of(monkeypatch, Tier.DEVICE)
    assert spoilt(
        reuse_while_written,
        lambda seed: rig_class(device=5, disk=16, directory=tmp_path, streams=AdversarialStreams(seed)),
    )


def test_r4_reusing_a_host_slot_before_its_copy_ended_is_noticed(rig_class, monkeypatch):
    """A host slot is reused only after its copy or write end."""
    _heedless_of(monkeypatch, Tier.HOST)
    assert spoilt(reuse_of_a_host_slot, lambda seed: rig_class(device=9, host=4, streams=AdversarialStreams(seed)))


def test_r7_computing_before_the_ticket_is_noticed(rig_class):
    """A restored session is schedulable only once compute waits on its ticket."""
    assert spoilt(
        lambda r: compute_on_restored(r, wait=False), lambda seed: rig_class(streams=AdversarialStreams(seed))
    )


def test_r8_evicting_pinned_blocks_is_noticed(rig_class, monkeypatch):
    """Every block is pinned from plan to ticket end, and while a sequence runs."""
    monkeypatch.setattr(Block, "evictable", lambda block, tier: block.has(tier) and block.users[tier] == 0)
    assert spoilt(crowd_a_running_session, lambda seed: rig_class(device=4, streams=AdversarialStreams(seed)))


def share_one_load(r):
    """Two sessions miss on one prefix; both get it and it is loaded once."""
    keys = r.keys("a", 4)
    r.turn_of("a", keys)
    r.park("a")
    before = r.tiers.stats()["bytes"]["h2d"]
    first, second = r.start("a", keys), r.start("b", keys)
    assert first.blocks == second.blocks
    r.settle()
    assert first.ticket.done
    assert second.ticket.done
    assert 4 * r.tiers.geometry.block_bytes == r.tiers.stats()["bytes"]["h2d"] - before
    for session, lease in (("a", first), ("b", second)):
        r.tiers.release(session, lease.blocks, used=r.streams.record())


def test_r9_two_sessions_that_miss_on_one_prefix_share_one_load(rig_class):
    """From the host and, with a prefetch under way, joined and made urgent."""
    assert [] == spoilt(share_one_load, lambda seed: rig_class(streams=AdversarialStreams(seed)))


def test_r9_a_load_for_each_is_noticed(rig_class, monkeypatch):
    """A second trip for the same block breaks the books or the count."""
    shared = Transfers.up

    def up(transfers, blocks, to, **options):
        for block in blocks:
            block.up = None
        shared(transfers, blocks, to, **options)

    monkeypatch.setattr(Transfers, "up", up)
    assert spoilt(share_one_load, lambda seed: rig_class(streams=AdversarialStreams(seed)), range(3))


def test_r9_a_lease_joins_a_prefetch_under_way(rig):
    """What is on its way is waited for, not sent again."""
    r = rig()
    keys = r.keys("a", 4)
    r.turn_of("a", keys)
    r.park("a")
    r.move("a", Action.PREFETCH, Tier.DEVICE)
    r.tiers.pump()  # planned; no byte has moved
    lease = r.start("a", keys)
    assert (4, 0, 0) == (lease.loaded_blocks, lease.from_host, lease.from_disk)
    r.settle()
    assert 4 * r.tiers.geometry.block_bytes == r.tiers.stats()["bytes"]["h2d"]
    r.tiers.release("a", lease.blocks, used=r.streams.record())
    assert [] == r.wrong


def test_r10_a_finished_prefetch_is_usable_at_once(rig):
    """The next lease finds the blocks on the device, with nothing to load."""
    r = rig()
    keys = r.keys("a", 4)
    r.turn_of("a", keys)
    r.park("a")
    r.moved("a", Action.PREFETCH, Tier.DEVICE)
    lease = r.start("a", keys)
    assert lease.ticket.done
    assert 0 == lease.loaded_blocks
    r.tiers.release("a", lease.blocks, used=r.streams.record())


@pytest.mark.parametrize("host", [0, 3, 20])
@pytest.mark.parametrize("disk", [0, 4, 40])
@pytest.mark.parametrize("seed", range(3))
def test_r11_with_all_memory_full_and_everybody_waiting_something_progresses(rig, host, disk, seed):
    """Four sessions that each need most of the device take turns for ever, whatever the lower tiers hold."""
    if disk and not host:
        pytest.skip("a disk tier needs a host tier")
    r = rig(device=6, host=host, disk=disk, streams=AdversarialStreams(seed))
    for turn in range(3):
        for name in ("a", "b", "c", "d"):
            r.turn_of(name, r.keys(name, 3 + turn))
            r.move(name, (Action.WRITE, Action.DEMOTE, Action.PREFETCH)[turn], Tier.HOST)
    r.settle()
    assert [] == r.wrong
