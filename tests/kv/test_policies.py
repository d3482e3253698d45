"""Every policy on real tiers: whatever it decides and whoever it would have give way, what a running call uses stays."""

import random

import pytest

from agentkv.core.forecast import Forecast
from agentkv.kv.block import Block
from agentkv.kv.geometry import BLOCK_TOKENS
from agentkv.policy import RULES, make_rules

SESSIONS = ("a", "b", "c", "d")


def waits(dice):
    """A forecast of a short wait, a long one, or a surprise."""
    points = sorted(dice.choice((0.01, 1.0, 30.0, 3600.0)) * (1 + dice.random()) for _ in range(5))
    return Forecast(remaining_s=tuple(points), n=5, source="history")


def play(rig, name, seed):
    """Sixty random steps of waits, questions, moves and pressure beside one session that computes all the time."""
    dice, rules = random.Random(seed), make_rules(name)
    r = rig(device=16, host=8)
    r.tiers.rank_by(rules.evict_key)
    keys = {session: r.keys(session, dice.randint(2, 4)) for session in (*SESSIONS, "running")}
    for session, of in keys.items():
        r.turn_of(session, of)
    lease = r.start("running", keys["running"])
    r.settle()
    started, pinned, moves = {}, list(lease.blocks), 0
    for _ in range(60):
        session = dice.choice((*SESSIONS, "running"))
        now_s = r.clock.now_s()
        if session not in started or dice.random() < 0.2:
            started[session] = (now_s, waits(dice))
            r.tiers.expect(session, now_s + 1.0, started[session][1], now_s)
        residency = r.tiers.residency(session)
        if residency is not None:
            r.tiers.set_pressed(dice.random() < 0.5)
            for move in rules.decide(residency, started[session][1], started[session][0], now_s).moves:
                moves += r.tiers.apply(move, r.receipts.append)
        if dice.random() < 0.3:
            blocks = r.tiers.allocate(dice.randint(1, 12))
            if blocks is not None:
                assert not set(pinned) & set(blocks), "a pinned block was given to somebody else"
                r.tiers.release("-", blocks, used=r.streams.record())
        for _ in range(dice.randint(0, 5)):
            r.turn()
        r.clock.advance(dice.choice((0.01, 1.0, 100.0)))
        r.read("running", pinned, keys["running"])
        facts = r.tiers.residency("running")
        assert facts is None or facts.device_blocks >= len(pinned)
    r.tiers.release("running", pinned, used=r.streams.record())
    r.settle()
    assert [] == r.wrong
    assert len(keys["running"]) * BLOCK_TOKENS >= len(pinned)
    return moves


@pytest.mark.parametrize("name", sorted(RULES))
def test_no_policy_moves_what_a_running_call_uses(rig, name):
    """Its blocks keep their places and their bytes, though the policy is asked about its session as well."""
    for seed in range(3):
        play(rig, name, seed)


def test_the_steps_move_something(rig):
    """Copies go down in them, or the test above would prove nothing."""
    assert sum(play(rig, "lru", seed) for seed in range(3)) > 0
    assert sum(play(rig, "hazard", seed) for seed in range(3)) > 0


def test_a_pin_that_does_not_hold_is_noticed(rig, monkeypatch):
    """With the pins ignored the same steps end in a wrong read, or in a block that two have."""
    monkeypatch.setattr(Block, "evictable", lambda block, tier: block.has(tier) and block.users[tier] == 0)
    with pytest.raises(AssertionError):
        for seed in range(20):
            play(rig, "hazard", seed)
