"""A disk that does not answer holds nobody up: over its deadline a copy is given up, and the slots it may still touch
stay taken until it comes back (K16).
"""

from __future__ import annotations

import time

import pytest

from agentkv.core.residency import Action, Outcome, Tier

from .conftest import content
from .hanging_disk import HangingSlab

DEADLINE_S = 10.0


@pytest.fixture
def hung(rig, tmp_path):
    """A rig with real threads over a disk that can hang; let go at the end."""
    slab = HangingSlab(tmp_path / "disk")
    yield rig(device=8, host=12, slab=slab, threads=True)
    slab.go.set()


def _on_disk(r, name, blocks=4):
    keys = r.keys(name, blocks)
    r.turn_of(name, keys)
    r.moved(name, Action.WRITE, Tier.DISK)
    for tier in (Tier.DEVICE, Tier.HOST):
        r.evict(name, tier)
    return keys


def _late(r):
    r.clock.advance(DEADLINE_S + 1)
    r.tiers.tick()


def test_whoever_waits_for_a_hung_read_computes_again(hung):
    """The ticket ends as failed; the disk counts as off, so that the next lease does not wait for it too."""
    r = hung
    keys = _on_disk(r, "a")
    r.slab.hang.add("read")
    lease = r.tiers.acquire("a", keys)
    assert r.slab.hanging.acquire(timeout=10)
    assert not lease.ticket.done
    _late(r)
    assert (True, 0) == (lease.ticket.done, lease.ticket.failed_from)
    r.tiers.release("a", lease.blocks, used=r.streams.record())
    r.tiers.check()
    assert "answered" in r.tiers.stats()["disk"]["off"]
    assert not r.tiers.residency("a").has_disk
    assert 0 == r.tiers.match(keys)
    r.turn_of("a", keys)
    assert [] == r.wrong


def test_the_slots_of_a_hung_read_are_taken_until_it_comes_back(hung):
    """Then the disk is trusted again, and what it had is found (R4)."""
    r = hung
    keys = _on_disk(r, "a")
    free = r.tiers.stats()["host"]["free"]
    r.slab.hang.add("read")
    lease = r.tiers.acquire("a", keys)
    assert r.slab.hanging.acquire(timeout=10)
    _late(r)
    r.tiers.release("a", lease.blocks, used=r.streams.record())
    assert free - 4 == r.tiers.stats()["host"]["free"]
    r.slab.hang.clear()
    r.slab.go.set()
    r.until(lambda: (r.tiers.stats()["host"]["free"] == free) or None)
    r.tiers.check()
    assert r.tiers.stats()["disk"]["off"] is None
    assert 4 == r.tiers.match(keys)
    assert 4 == r.turn_of("a", keys).from_disk
    assert [] == r.wrong


def test_a_late_answer_spoils_nobody(hung):
    """The slots that the hung read writes to at last belong to nobody else."""
    r = hung
    keys = _on_disk(r, "a")
    r.slab.hang.add("read")
    lease = r.tiers.acquire("a", keys)
    assert r.slab.hanging.acquire(timeout=10)
    _late(r)
    r.tiers.release("a", lease.blocks, used=r.streams.record())
    others = r.keys("b", 8)
    r.turn_of("b", others)
    r.moved("b", Action.WRITE, Tier.HOST)
    r.slab.go.set()
    r.evict("b", Tier.DEVICE)
    time.sleep(0.05)
    r.turn_of("b", others)
    r.settle()
    assert [] == r.wrong
    assert 8 == r.where("b")[0]
    assert content(others[0]) is not None


def test_what_stands_in_line_behind_a_hung_read_is_given_up_too(rig, tmp_path):
    """Eight readers hang; the ninth read has not even begun."""
    slab = HangingSlab(tmp_path / "disk")
    r = rig(device=12, host=24, slab=slab, threads=True)
    chains = {name: _on_disk(r, name, 1) for name in "abcdefghij"}
    slab.hang.add("read")
    leases = {name: r.tiers.acquire(name, keys) for name, keys in chains.items()}
    for _ in range(8):
        assert slab.hanging.acquire(timeout=10)
    _late(r)
    assert all(lease.ticket.done for lease in leases.values())
    for name, lease in leases.items():
        r.tiers.release(name, lease.blocks, used=r.streams.record())
    r.tiers.check()
    slab.go.set()
    r.until(lambda: (r.tiers.stats()["disk"]["off"] is None) or None)
    assert 1 == r.tiers.match(chains["j"])


def test_a_hung_write_leaves_the_blocks_where_they_were(hung):
    """Its move fails, the host copies can be given up, and the slot on disk is free when it comes back."""
    r = hung
    keys = r.keys("a", 4)
    r.turn_of("a", keys)
    r.slab.hang.add("write")
    r.move("a", Action.DEMOTE, Tier.DISK)
    assert r.slab.hanging.acquire(timeout=10)
    _late(r)
    assert Outcome.FAILED == r.receipts[-1].outcome
    assert (4, 4, 0, 0) == r.where("a")
    r.tiers.check()
    r.move("a", Action.WRITE, Tier.DISK)
    assert Outcome.NOTHING == r.receipts[-1].outcome
    r.slab.go.set()
    r.until(lambda: (r.tiers.stats()["disk"]["off"] is None) or None)
    r.tiers.check()
    assert 0 == r.slab.used


@pytest.mark.parametrize("known", [True, False])
def test_close_returns_while_a_read_hangs(rig_class, tmp_path, known):
    """Given up already or not: memory and files that it may still touch are left to it."""
    slab = HangingSlab(tmp_path / "disk")
    r = rig_class(device=8, host=12, slab=slab, threads=True)
    keys = _on_disk(r, "a")
    slab.hang.add("read")
    r.tiers.acquire("a", keys)
    assert slab.hanging.acquire(timeout=10)
    if known:
        _late(r)
    else:
        r.tiers._carrier._io_deadline_s = 0.2
    began_s = time.monotonic()
    r.tiers.close()
    assert time.monotonic() - began_s < 20
    slab.go.set()
    time.sleep(0.05)
    slab.close()


def test_a_job_that_was_called_off_whole_does_not_count_as_hung(rig, tmp_path):
    """Nothing of it runs: a healthy disk stays on however late it gets."""
    r = rig(device=8, host=12, disk=64)
    keys = r.keys("a", 4)
    r.turn_of("a", keys)
    r.moved("a", Action.WRITE, Tier.HOST)
    r.move("a", Action.WRITE, Tier.DISK)
    r.tiers._transfers.lanes["d2h"].turn()  # planned; the write has not begun
    r.tiers.drop("a")
    r.settle()
    _late(r)
    assert r.tiers.stats()["disk"]["off"] is None
    assert 0 == len(r.tiers._carrier._on_disk)
