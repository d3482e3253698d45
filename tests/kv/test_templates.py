"""The template of an ended task stays for a short window: the next task that begins the same way finds it (B11)."""

from __future__ import annotations

from agentkv.core.residency import Action
from agentkv.kv.geometry import BLOCK_TOKENS


def _ended(r, *, template=2):
    keys = r.keys("a", 4)
    r.turn_of("a", keys)
    r.tiers.hold("a", "a", keys, 4 * BLOCK_TOKENS, template_tokens=template * BLOCK_TOKENS + 5)
    r.settle()
    r.tiers.drop_task("a")
    r.settle()
    return keys


def test_the_template_of_an_ended_task_is_found_by_the_next(rig):
    """Its full blocks only; the rest of the task is gone."""
    r = rig()
    keys = _ended(r)
    assert 2 == r.tiers.match(keys)
    assert 2 == r.tiers.stats()["template_blocks"]
    lease = r.tiers.acquire("b", keys)
    assert 2 == len(lease.blocks)
    r.read("b", lease.blocks, keys)
    r.tiers.release("b", lease.blocks, used=r.streams.record())
    r.settle()
    assert [] == r.wrong


def test_after_the_window_it_is_gone(rig):
    """Nothing of an ended task is kept for ever."""
    r = rig()
    keys = _ended(r)
    r.clock.advance(121)
    r.tiers.tick()
    assert 0 == r.tiers.match(keys)
    assert r.tiers.num_blocks == r.tiers.stats()["device"]["free"]


def test_a_task_that_took_it_over_keeps_it(rig):
    """Held again within the window, it is an ordinary block of its new session."""
    r = rig()
    keys = _ended(r)
    r.turn_of("b", keys[:3])
    assert 0 == r.tiers.stats()["template_blocks"]
    r.clock.advance(500)
    r.tiers.tick()
    assert (3, 0, 0, 0) == r.where("b")


def test_it_is_the_first_to_make_room(rig):
    """A template that nobody uses never costs a living session anything, nor a byte moved."""
    r = rig(device=6)
    keys = _ended(r)
    r.turn_of("b", r.keys("b", 6))
    assert 0 == r.tiers.match(keys)
    assert 0 == r.tiers.stats()["bytes"]["d2h"]


def test_one_that_was_evicted_and_computed_again_is_not_forgotten_with_the_old(rig):
    """The window of a template that is gone already says nothing about a new block with its key."""
    r = rig(device=6)
    keys = _ended(r)
    r.turn_of("b", r.keys("b", 6))
    r.moved("b", Action.WRITE)
    r.turn_of("c", keys)
    r.clock.advance(121)
    r.tiers.tick()
    r.settle()
    assert (4, 0, 0, 0) == r.where("c")


def test_a_dropped_session_leaves_no_template(rig):
    """A session that is forgotten alone is forgotten whole (A6)."""
    r = rig()
    keys = r.keys("a", 4)
    r.turn_of("a", keys)
    r.tiers.hold("a", "a", keys, 4 * BLOCK_TOKENS, template_tokens=2 * BLOCK_TOKENS)
    r.move("a", Action.DROP)
    r.settle()
    assert 0 == r.tiers.match(keys)


def test_a_template_still_in_use_at_its_end_is_gone_after_it(rig):
    """A sequence may read it past the window."""
    r = rig()
    keys = _ended(r)
    lease = r.tiers.acquire("b", keys)
    r.clock.advance(121)
    r.tiers.tick()
    assert 2 == r.tiers.match(keys)
    r.tiers.release("b", lease.blocks, used=r.streams.record())
    r.settle()
    assert 0 == r.tiers.match(keys)
    assert r.tiers.num_blocks == r.tiers.stats()["device"]["free"]
