"""Several devices over one host arena and one slab: a session wakes on another one, and no slot is freed under anybody."""

from __future__ import annotations

import random
import threading

import pytest

from agentkv.core.residency import Action, Tier
from agentkv.kv.family import make_family
from agentkv.kv.slab import Slab
from agentkv.kv.streams.adversarial import AdversarialStreams
from agentkv.kv.streams.cpu import CpuStreams

from .conftest import GEOMETRY


@pytest.fixture
def family(rig_class, tmp_path):
    """Makes rigs that share their lower tiers; closes them."""
    made = []

    def make(count=2, *, host=16, disk=32, device=8, seed=0, threads=False):
        slab = Slab(tmp_path / "disk", disk * GEOMETRY.slot_bytes, GEOMETRY.block_bytes) if disk else None
        shared = make_family(GEOMETRY, device="cpu", host_bytes=host * GEOMETRY.slot_bytes, slab=slab)
        for number in range(count):
            streams = CpuStreams() if threads else AdversarialStreams(seed + number)
            made.append(rig_class(device=device, family=shared, streams=streams, threads=threads))
            made[-1].slab = slab
        return list(made)

    yield make
    for one in made:
        one.close()


def _free(r, tier="host"):
    return r.tiers.stats()[tier]["free"]


@pytest.mark.parametrize("to", [Tier.HOST, Tier.DISK])
@pytest.mark.parametrize("seed", range(5))
def test_a_session_wakes_on_another_device(family, to, seed):
    """Its blocks are read there from the very slots that the first device wrote: no byte is copied between hosts."""
    a, b = family(seed=seed)
    keys = a.keys("s", 4)
    a.turn_of("s", keys)
    a.moved("s", Action.WRITE, to)
    if to == Tier.DISK:
        a.evict("s", Tier.HOST)
    free = _free(a)
    lease = b.turn_of("s", keys)
    b.settle()
    assert (4, 0) == (lease.from_host + lease.from_disk, b.tiers.stats()["bytes"]["d2h"])
    assert to != Tier.HOST or free == _free(b)
    assert [] == a.wrong + b.wrong


def test_what_the_first_device_forgets_the_second_still_has(family):
    """A slot is free when its last owner has given it up."""
    a, b = family()
    keys = a.keys("s", 4)
    a.turn_of("s", keys)
    a.moved("s", Action.WRITE, Tier.HOST)
    b.turn_of("s", keys)
    a.tiers.drop("s")
    assert 12 == _free(a)
    b.evict("s", Tier.DEVICE)
    b.turn_of("s", keys)
    b.settle()
    b.tiers.drop("s")
    assert 16 == _free(b)
    assert [] == b.wrong
    a.tiers.check()


def test_blocks_that_only_the_first_device_has_are_no_hit_on_the_second(family):
    """What was never written down is computed again there."""
    a, b = family()
    keys = a.keys("s", 4)
    a.turn_of("s", keys[:2])
    a.moved("s", Action.WRITE, Tier.HOST)
    a.turn_of("s", keys)
    assert 2 == b.tiers.match(keys)


def test_one_device_may_close_while_the_others_go_on(family, tmp_path):
    """Files and memory go with the last."""
    a, b = family()
    keys = a.keys("s", 4)
    a.turn_of("s", keys)
    a.moved("s", Action.WRITE, Tier.DISK)
    b.turn_of("s", keys)
    a.close()
    b.tiers.check()
    b.evict("s", Tier.DEVICE)
    b.turn_of("s", keys)
    b.settle()
    assert [] == b.wrong
    b.close()
    assert [] == list((tmp_path / "disk").rglob("segment-*"))


def test_a_rotten_block_is_a_miss_for_both(family):
    """Each gives up its share when it sees the checksum; nobody is served the wrong bytes."""
    a, b = family()
    keys = a.keys("s", 4)
    a.turn_of("s", keys)
    a.moved("s", Action.WRITE, Tier.DISK)
    for tier in (Tier.DEVICE, Tier.HOST):
        a.evict("s", tier)
    assert 4 == b.tiers.match(keys)
    path = min(a.slab.path.iterdir())
    path.write_bytes(bytes(path.stat().st_size))
    for one in (a, b):
        one.turn_of("s", keys)
        one.settle()
    assert [] == a.wrong + b.wrong
    assert 0 == a.slab.used


@pytest.mark.parametrize("seed", [*range(25), *(pytest.param(n, marks=pytest.mark.slow) for n in range(25, 250))])
def test_no_life_of_two_devices_spoils_a_byte(family, seed):
    """Turns, moves and drops on both under pressure, in any order: every read sees its block's own bytes."""
    chance = random.Random(seed)
    rigs = family(host=chance.choice([3, 6, 16]), disk=chance.choice([0, 3, 32]), device=5, seed=seed)
    names = "abcd"
    for _ in range(30):
        r, name = chance.choice(rigs), chance.choice(names)
        keys = r.keys(name, chance.randrange(1, 5))
        deed = chance.choice(["turn", "turn", "turn", "move", "drop", "time"])
        if deed == "turn":
            r.turn_of(name, keys)
        elif deed == "move":
            r.move(name, chance.choice([Action.WRITE, Action.DEMOTE, Action.PREFETCH]), chance.choice([None, *Tier]))
        elif deed == "drop":
            r.tiers.drop(name)
        else:
            for _ in range(chance.randrange(10)):
                r.turn()
        for one in rigs:
            one.tiers.check()
    for one in rigs:
        one.settle()
        assert [] == one.wrong
        for name in names:
            one.tiers.drop(name)
        one.settle()
        one.until(lambda one=one: one.tiers.allocate(5))
    for one in rigs:
        one.tiers.check()


def test_two_devices_at_once_leave_the_books_right(family):
    """Real threads on both, the same sessions, memory for half of them."""
    rigs = family(host=12, disk=24, device=10, threads=True)
    errors = []

    def live(number):
        chance = random.Random(number)
        r = rigs[number % 2]
        try:
            for _ in range(40):
                name = chance.choice("abcdef")
                r.turn_of(f"{name}{number}", r.keys(name, 4))
                r.move(
                    f"{name}{number}",
                    chance.choice([Action.WRITE, Action.DEMOTE]),
                    chance.choice([Tier.HOST, Tier.DISK]),
                )
                if chance.random() < 0.2:
                    r.tiers.drop(f"{name}{number}")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=live, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for r in rigs:
        r.tiers.quiesce(10)
    rigs[0].tiers.check()
    rigs[1].tiers.check()
    assert [] == errors + rigs[0].wrong + rigs[1].wrong
