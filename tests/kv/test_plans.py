"""A move costs its caller nothing that grows with the context: the lane's thread plans it, slice by slice."""

from __future__ import annotations

from agentkv.core.residency import Action, Outcome, Tier
from agentkv.kv import moves
from agentkv.kv.index import chain_keys, root_key
from agentkv.kv.tiers import Tiers

from .conftest import GEOMETRY

ROOT = root_key(fingerprint=b"test", salt="")


def _held(r, session, keys):
    """A session with all its blocks on the device, without computing them."""
    blocks = r.tiers.allocate(len(keys))
    used = [r.tiers.commit(session, b, k, None, r.streams.record()) for b, k in zip(blocks, keys, strict=True)]
    r.tiers.hold(session, session, keys, 16 * len(keys))
    r.tiers.release(session, used, used=r.streams.record())


def test_applying_a_move_touches_no_block(rig):
    """Before the lane's first turn nothing is under way, whatever the size; then it is one slice at a time."""
    r = rig(device=600, host=600)
    keys = chain_keys(ROOT, range(16 * 500))
    _held(r, "a", keys)
    assert r.move("a", Action.WRITE, Tier.HOST)
    assert 0 == r.tiers.stats()["moving_blocks"]
    r.tiers.pump()
    assert moves._SLICE_BLOCKS == r.tiers.stats()["moving_blocks"]
    r.settle()
    assert (Outcome.DONE, 500) == (r.receipts[-1].outcome, r.receipts[-1].blocks)


def test_an_urgent_load_overtakes_the_rest_of_a_plan(rig):
    """A session that is back does not wait until a big move of another one is planned."""
    r = rig(device=700, host=700)
    ours = r.keys("b", 4)
    r.turn_of("b", ours)
    r.park("b")
    keys = chain_keys(ROOT, range(16 * 600))
    _held(r, "a", keys)
    r.moved("a", Action.WRITE, Tier.HOST)
    r.evict("a", Tier.DEVICE)
    assert r.move("a", Action.PREFETCH, Tier.DEVICE)
    lease = r.tiers.acquire("b", ours)
    r.until(lambda: lease.ticket.done or None)
    assert r.tiers.residency("a").device_blocks < 600
    r.tiers.release("b", lease.blocks, used=r.streams.record())


def test_a_move_of_a_session_that_is_dropped_meanwhile_is_cancelled(rig):
    """Its receipt says so, and no byte of it moves."""
    r = rig(device=600, host=600)
    _held(r, "a", chain_keys(ROOT, range(16 * 500)))
    assert r.move("a", Action.WRITE, Tier.HOST)
    r.tiers.drop("a")
    r.settle()
    assert Outcome.CANCELLED == r.receipts[-1].outcome
    assert 0 == r.tiers.stats()["bytes"]["d2h"]


def test_a_move_with_nothing_to_do_is_answered_at_once(rig):
    """Its receipt has come when `apply` returns."""
    r = rig()
    r.turn_of("a", r.keys("a", 3))
    r.moved("a", Action.WRITE, Tier.HOST)
    assert not r.move("a", Action.WRITE, Tier.HOST)
    assert Outcome.NOTHING == r.receipts[-1].outcome


def test_a_move_that_became_needless_before_it_was_planned_has_nothing_to_do(rig):
    """Two of the same: the second finds its blocks on their way or there."""
    r = rig()
    r.turn_of("a", r.keys("a", 3))
    assert r.move("a", Action.WRITE, Tier.HOST)
    assert r.move("a", Action.WRITE, Tier.HOST)
    r.settle()
    assert [Outcome.DONE, Outcome.DONE] == [receipt.outcome for receipt in r.receipts]
    assert 3 * GEOMETRY.block_bytes == r.tiers.stats()["bytes"]["d2h"]


def test_quiet_means_that_nothing_is_planned_either():
    """`quiesce` waits for moves that no lane has looked at yet."""
    with Tiers(geometry=GEOMETRY, device_bytes=40 * GEOMETRY.block_bytes, host_bytes=40 * GEOMETRY.slot_bytes) as tiers:
        keys = chain_keys(ROOT, range(16 * 20))
        blocks = tiers.allocate(20)
        used = [tiers.commit("a", b, k, None, tiers.streams.record()) for b, k in zip(blocks, keys, strict=True)]
        tiers.hold("a", "a", keys, 320)
        tiers.release("a", used, used=tiers.streams.record())
        from agentkv.core.residency import Move

        tiers.apply(Move(session="a", action=Action.WRITE, to=Tier.HOST, reason="test"))
        tiers.quiesce(10)
        assert 20 == tiers.residency("a").host_blocks


# -- what is counted


def test_a_prefetch_that_nobody_used_is_counted(rig):
    """Blocks fetched ahead and then evicted unused were moved in vain."""
    r = rig(device=8)
    for name in ("a", "b"):
        r.turn_of(name, r.keys(name, 4))
        r.park(name)
    r.moved("a", Action.PREFETCH, Tier.DEVICE)
    r.moved("b", Action.PREFETCH, Tier.DEVICE)
    r.turn_of("b", r.keys("b", 4))
    r.turn_of("c", r.keys("c", 4))
    r.evict("a", Tier.DEVICE)
    assert {"blocks": 8, "used": 4, "wasted": 4, "wasted_bytes": 4 * GEOMETRY.block_bytes} == r.tiers.stats()[
        "prefetched"
    ]


def test_a_restore_of_neighbours_is_one_descriptor(rig):
    """Host slots and device blocks are taken in runs, so that a context is one copy."""
    r = rig(device=16, host=16)
    keys = r.keys("a", 8)
    r.turn_of("a", keys)
    r.park("a")
    r.turn_of("a", keys)
    r.settle()
    stats = r.tiers.stats()
    assert (1, 1.0) == (stats["restores"], stats["descriptors_per_restore"])
    assert 0 == stats["duplicate_loads"]
