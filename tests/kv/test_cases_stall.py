"""Pressure that the lower tiers cannot take: a disk that never answers, a host full of what is elsewhere too."""

from __future__ import annotations

import threading
import time

import pytest

from agentkv.core.residency import Action, Outcome, Tier
from agentkv.kv.book import Book
from agentkv.kv.geometry import Geometry
from agentkv.kv.slab import Slab

GEOMETRY = Geometry(layers=2, kv_heads=1, head_dim=8, dtype="float32")


class DeadDisk(Slab):
    """Every write hangs until `go`."""

    def __init__(self, directory):
        super().__init__(directory, 64 * GEOMETRY.slot_bytes, GEOMETRY.block_bytes)
        self.go = threading.Event()

    def write(self, images, **options):
        assert self.go.wait(60)
        super().write(images, **options)


@pytest.mark.timeout(300)
def test_a_disk_that_never_answers_again_stops_nobody(rig, tmp_path):
    """With device and host full, one deadline is waited for; from then on what cannot be kept is dropped (R11, K16)."""
    slab = DeadDisk(tmp_path / "disk")
    r = rig(device=4, host=4, slab=slab, threads=True)
    try:
        for name in "abcdefghijkl":
            keys = r.keys(name, 4)
            blocks = []
            for at in range(4):
                for _ in range(100):
                    if (got := r.tiers.allocate(1)) is not None:
                        break
                    r.clock.advance(11)
                    r.tiers.tick()
                    time.sleep(0.01)
                assert got is not None, f"no progress for {name}"
                blocks.append(r.compute(name, got[0], keys, at))
            r.tiers.hold(name, name, keys, 64)
            r.tiers.release(name, blocks, used=r.streams.record())
        assert r.tiers.stats()["stalled_jobs"] >= 1
        assert [] == r.wrong
    finally:
        slab.go.set()


@pytest.mark.parametrize("action", [Action.WRITE, Action.DEMOTE])
def test_a_host_full_of_what_is_on_disk_too_lets_others_through_to_the_disk(rig, action):
    """Copies that nobody would miss make way, whoever holds them."""
    r = rig(device=16, host=4, disk=32)
    keys = r.keys("a", 4)
    r.turn_of("a", keys)
    r.moved("a", Action.DEMOTE, Tier.DISK)
    for tier in (Tier.DEVICE, Tier.HOST):
        r.tiers.vacate("a", tier)
    r.turn_of("a", keys)
    r.settle()
    assert (4, 4, 4, 0) == r.where("a")
    r.turn_of("b", r.keys("b", 4))
    assert Outcome.DONE == r.moved("b", action, Tier.DISK).outcome
    assert (4, 0) == (r.where("b")[2], r.where("a")[3])


def test_a_host_full_of_others_lets_a_demoted_session_through_to_the_disk(rig):
    """What only passes through the host needs a few slots for a moment, not a place of its own."""
    r = rig(device=16, host=4, disk=32)
    r.turn_of("a", r.keys("a", 4))
    r.moved("a", Action.WRITE, Tier.HOST)
    r.tiers.vacate("a", Tier.DEVICE)
    assert (0, 4, 0, 0) == r.where("a")
    r.turn_of("b", r.keys("b", 4))
    assert Outcome.DONE == r.moved("b", Action.DEMOTE, Tier.DISK).outcome
    assert 4 == r.where("b")[2]
    assert 0 == r.where("a")[3]


def test_who_waits_for_the_host_does_not_make_every_lock_release_search_it(rig, monkeypatch):
    """Nothing has changed since the last search, so there is nothing to find: the lock is held for microseconds."""
    r = rig(device=96, host=64, disk=256)
    for name in ("a", "b", "c", "d"):
        r.turn_of(name, r.keys(name, 16))
        r.moved(name, Action.WRITE, Tier.HOST)
        r.tiers.vacate(name, Tier.DEVICE)
    r.turn_of("z", r.keys("z", 16))
    r.tiers.expect("z", r.clock.now_s() + 1)
    r.move("z", Action.WRITE, Tier.HOST)
    r.tiers.pump()
    searched, victims = [], Book.victims
    monkeypatch.setattr(Book, "victims", lambda *args, **options: (searched.append(1), victims(*args, **options))[1])
    for _ in range(50):
        r.tiers.drop("nobody")
    assert len(searched) <= 5


def test_what_the_host_has_no_room_for_goes_to_the_disk_and_is_not_lost(rig):
    """The host is full of a session that is back sooner; a write ahead failed for lack of room; then the device fills."""
    r = rig(device=8, host=4, disk=64)
    r.turn_of("a", r.keys("a", 4))
    r.moved("a", Action.WRITE, Tier.HOST)
    r.tiers.vacate("a", Tier.DEVICE)
    r.turn_of("b", r.keys("b", 4))
    r.tiers.expect("a", r.clock.now_s() + 1)
    r.tiers.expect("b", r.clock.now_s() + 1000)
    assert Outcome.DONE != r.moved("b", Action.WRITE, Tier.HOST).outcome
    r.turn_of("c", r.keys("c", 8))
    r.settle()
    assert 0 == r.where("b")[3] == r.where("a")[3]
    assert 0 == r.tiers.stats()["drops"]
    r.turn_of("b", r.keys("b", 4))
    r.settle()
    assert [] == r.wrong
