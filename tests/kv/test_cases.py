"""Users' reports on the tiers themselves: many sessions on one prefix, hostile names, holes, pressure on real threads.

Each test shows that blocks really moved. Through the whole engine: `engine/local/test_kv_cases*.py`.
"""

from __future__ import annotations

import random
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentkv.core.residency import Action, Move, Tier
from agentkv.kv.index import chain_keys, root_key
from agentkv.kv.streams import DONE
from agentkv.kv.streams.adversarial import AdversarialStreams
from agentkv.kv.streams.cpu import CpuStreams

HOSTILE = ["../..", "/etc/passwd", "a\0b", "\ud800", "%s{}", "-" * 4096, "é" * 2048, "a\nb", "", " ", ".", "agentkv-1"]


# -- a thousand sessions on one prefix


def _lease(r, session, keys):
    """Lease with real threads: the lease, once its blocks are there."""
    lease = r.until(lambda: r.tiers.acquire(session, keys))
    assert lease.ticket.wait(20)
    assert lease.ticket.failed_from is None
    return lease


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK])
def test_a_thousand_sessions_on_one_prefix_load_it_once_and_half_of_them_may_go(rig, tier):
    """Real threads: 1,000 sessions of 16 shared blocks, all missing at once: one load, and counts that stay right."""
    r = rig(device=64, host=64, disk=64, streams=CpuStreams(), threads=True)
    keys = r.keys("prefix", 16)
    names = [f"s{i}" for i in range(1000)]
    r.turn_of("s0", keys)
    for name in names[1:]:
        r.tiers.hold(name, f"task-{name}", keys, 256)
    assert {16} == {r.tiers.residency(name).device_blocks for name in names}
    r.tiers.apply(Move(session="s7", action=Action.DEMOTE, to=tier, reason="test"))
    r.settle()
    for above in range(tier):
        assert 16 == r.tiers.vacate("s500", Tier(above))
    expected = (0, 16, 0, 0) if tier == Tier.HOST else (0, 0, 16, 0)
    assert {expected} == {r.where(name) for name in names}
    before = r.tiers.stats()
    leases, errors = {}, []

    def ask(some):
        try:
            for name in some:
                leases[name] = _lease(r, name, keys)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=ask, args=(names[i::8],)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [] == errors
    after = r.tiers.stats()
    size = 16 * r.tiers.geometry.block_bytes
    assert size == after["bytes"]["h2d"] - before["bytes"]["h2d"]
    assert (size if tier == Tier.DISK else 0) == after["bytes"]["read"] - before["bytes"]["read"]
    assert 16 == after["loads"] - before["loads"]
    assert 1 == len({tuple(lease.blocks) for lease in leases.values()})
    r.tiers.check()
    for name in names[::2]:
        r.tiers.drop(name)
    r.tiers.check()
    assert 500 == r.tiers.stats()["sessions"]
    assert all(r.tiers.residency(name) is None for name in names[::2])
    for name, lease in leases.items():
        r.read(name, lease.blocks, keys)
        r.tiers.release(name, lease.blocks, used=DONE)
    r.settle()
    assert {16} == {r.where(name)[0] for name in names[1::2]}
    assert [] == r.wrong
    for name in names[1::2]:
        r.tiers.drop(name)
    r.settle()
    r.tiers.check()
    stats = r.tiers.stats()
    assert (0, 0, 0, 0) == (stats["sessions"], *(stats[tier]["used"] for tier in ("device", "host", "disk")))


# -- pressure


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("host", "disk"), [(0, 0), (4, 0), (6, 6), (24, 64)])
@pytest.mark.parametrize("streams", [CpuStreams, AdversarialStreams])
def test_with_memory_full_and_every_session_waiting_somebody_always_gets_on(rig, host, disk, streams):
    """Six threads, each of which needs most of the device for every turn, and a planner that moves them (R11)."""
    r = rig(device=8, host=host, disk=disk, streams=streams(), threads=True)
    turns, errors, stop = dict.fromkeys("abcdef", 0), [], threading.Event()

    def agent(name):
        try:
            dice = random.Random(name)
            for _ in range(40):
                keys = r.keys(name, dice.randrange(4, 7))
                _whole_turn(r, name, keys)
                turns[name] += 1
        except BaseException as error:
            errors.append(error)

    def plan():
        dice = random.Random(host + disk)
        while not stop.is_set():
            action, to = dice.choice([(Action.WRITE, Tier.HOST), (Action.DEMOTE, Tier.DISK), (Action.PREFETCH, None)])
            r.tiers.apply(Move(session=dice.choice("abcdef"), action=action, to=to, reason="test"))
            time.sleep(0.001)

    threads = [threading.Thread(target=agent, args=(name,)) for name in turns]
    planner = threading.Thread(target=plan)
    for thread in (*threads, planner):
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    planner.join()
    assert [] == errors
    assert dict.fromkeys("abcdef", 40) == turns
    assert [] == r.wrong
    r.settle()
    assert (host > 0) == (r.tiers.stats()["bytes"]["d2h"] > 0)


def _whole_turn(r, name, keys):
    """All blocks or none, as the engine does; what was not leased is computed."""
    lease, private = _seated(r, name, keys)
    r.streams.compute_wait(lease.ticket.event)
    r.read(name, lease.blocks, keys)
    blocks = [*lease.blocks, *private]
    for at in range(len(lease.blocks), len(keys)):
        blocks[at] = r.compute(name, blocks[at], keys, at)
    r.read(name, blocks, keys)
    r.streams.record().wait()
    r.tiers.hold(name, name, keys, 16 * len(keys))
    r.tiers.release(name, blocks, used=r.streams.record())


def _seated(r, name, keys):
    """A lease whose loads went well, and private blocks for the rest of `keys`."""
    end_s, known = time.monotonic() + 30, len(keys)
    while True:
        assert time.monotonic() < end_s, "no progress"
        lease = r.tiers.acquire(name, keys[:known])
        if lease is not None:
            private = r.tiers.allocate(len(keys) - len(lease.blocks))
            if private is not None:
                assert lease.ticket.wait(20)
                if lease.ticket.failed_from is None:
                    return lease, private
                known = lease.ticket.failed_from
            r.tiers.release(name, [*lease.blocks, *(private or [])], used=r.streams.record())
        r.turn()


# -- holes


def test_a_hole_at_the_beginning_ends_every_hit_until_it_is_computed_again(rig):
    """Block 0 rotted on disk, the later ones are there: no hit; with block 0 computed, all hit again (K18)."""
    r = rig(disk=16)
    keys = r.keys("a", 4)
    r.turn_of("a", keys)
    r.park("a", Tier.DISK)
    r.tiers.vacate("a", Tier.HOST)
    for path in r.slab.path.glob("segment-*"):
        data = bytearray(path.read_bytes())
        at = next(at for at in range(0, len(data), r.slab.slot_bytes) if any(data[at : at + 64]))
        data[at + 5] ^= 1
        path.write_bytes(data)
    lease = r.start("a", keys)
    r.settle()
    assert 0 == lease.ticket.failed_from
    r.tiers.release("a", lease.blocks, used=r.streams.record())
    r.settle()
    assert 0 == r.tiers.match(keys)
    assert 1 == r.where("a")[3]
    assert [] == r.tiers.acquire("b", keys).blocks
    r.write("a", mine := [], keys, 0)
    r.tiers.release("a", mine, used=r.streams.record())
    assert 4 == r.tiers.match(keys)
    again = r.turn_of("a", keys)
    assert 4 == len(again.blocks)
    r.settle()
    assert [] == r.wrong


# -- tenants and names


TEXTS = st.one_of(st.sampled_from(HOSTILE), st.text(max_size=8), st.text("ab\0/", max_size=4))


@settings(max_examples=100, deadline=None)
@given(a=st.tuples(st.binary(max_size=6), TEXTS), b=st.tuples(st.binary(max_size=6), TEXTS))
def test_near_colliding_models_and_tenants_share_no_key(a, b):
    """("ab", "c") is not ("a", "bc"): the first keys agree exactly where model and salt do (K5)."""
    first, second = (chain_keys(root_key(fingerprint=f, salt=s), range(16)) for f, s in (a, b))
    assert (a == b) == (first == second)


@pytest.mark.parametrize("tier", list(Tier))
def test_tenants_of_one_store_find_only_their_own_blocks_in_every_tier(rig, tier):
    """The same tokens under twelve salts, all hostile, in one store: each finds its own, none another's (K5)."""
    r = rig(device=16, host=16, disk=16)
    keys = {salt: chain_keys(root_key(fingerprint=b"m", salt=salt), range(16)) for salt in HOSTILE}
    half = HOSTILE[::2]
    for salt in half:
        r.turn_of(salt, keys[salt])
        if tier != Tier.DEVICE:
            r.moved(salt, Action.DEMOTE, tier)
            for above in range(tier):
                r.tiers.vacate(salt, Tier(above))
    for salt in HOSTILE:
        assert (salt in half) == bool(r.tiers.match(keys[salt]))
        assert (1 if salt in half else 0) == len(r.turn_of(f"{salt} again", keys[salt]).blocks)
    r.settle()
    assert [] == r.wrong


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_sessions_and_tasks_are_only_names(rig, tmp_path, name):
    """Down to the disk, back, dropped by task: the folder has the files it always has, nothing is left."""
    r = rig(disk=16)
    files = sorted(path.name for path in tmp_path.rglob("*"))
    keys = r.keys("a", 4)
    r.turn_of(name, keys, task=name)
    r.park(name, Tier.DISK)
    r.tiers.vacate(name, Tier.HOST)
    r.tiers.expect(name, r.clock.now_s() + 5)
    assert (0, 0, 4, 0) == r.where(name)
    assert 4 == r.turn_of(name, keys, task=name).from_disk
    assert files == sorted(path.name for path in tmp_path.rglob("*"))
    r.tiers.drop_task(name)
    r.settle()
    assert [] == r.wrong
    stats = r.tiers.stats()
    assert (0, 0, 0, 0) == (stats["sessions"], *(stats[tier]["used"] for tier in ("device", "host", "disk")))
