"""Whole tasks wait outside while the contexts before them fill the memory, and never for ever."""

import dataclasses
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentkv.clock import ManualClock
from agentkv.core.forecast import Forecast
from agentkv.core.residency import Tier
from agentkv.engine.local.admission import ANSWERED_S, Admission
from agentkv.engine.local.sequence import blocks_for
from agentkv.policy.schedule import ROOM_SHARE, SOON_S, always


@dataclasses.dataclass
class Context:
    """What admission looks at of a session."""

    key: str
    computed_tokens: int = 0


class Call:
    """What admission looks at of a sequence: `blocks` full ones and its place."""

    def __init__(self, order, blocks, *, priority=0):
        self.session = Context(f"task-{order}#1")
        self.rank = (-priority, order, order)
        self.ids = [0] * (16 * blocks - 1)
        self.computed = 16 * blocks


def wait_of(seconds):
    return Forecast(remaining_s=(seconds,), n=9, source="history")


@pytest.fixture
def clock():
    return ManualClock(0.0)


@pytest.fixture
def admission(clock):
    """100 blocks on the device, 60 on host: 85 are given away."""
    return Admission({Tier.DEVICE: 100, Tier.HOST: 60, Tier.DISK: 0}, block_bytes=1, clock=clock)


def away(admission, call, seconds):
    admission.note(call)
    admission.expect(call.session.key, wait_of(seconds), 0.0)


def test_a_call_waits_outside_while_tasks_before_it_fill_the_memory(admission):
    """60 blocks that are soon back and 30 of its own are more than 85; an earlier task's call is let in."""
    away(admission, Call(1, 60), 10.0)
    late, early = Call(2, 30), Call(0, 30)
    admitted = admission.gate([late, early])
    assert not admitted(late, True)
    assert admitted(early, True)


def test_nobody_waits_outside_while_nobody_computes(admission):
    """Or nothing would ever go on."""
    away(admission, Call(1, 90), 10.0)
    assert admission.gate([])(Call(2, 90), False)


def test_who_is_away_for_long_does_not_count(admission, clock):
    """A context that is back in an hour may as well be away; when half of a minute is left it counts."""
    away(admission, Call(1, 60), 3600.0)
    assert admission.gate([])(Call(2, 30), True)
    clock.advance(3570.0)
    assert not admission.gate([])(Call(2, 30), True)


def test_a_session_of_which_nothing_is_known_counts_while_it_has_just_answered(admission, clock):
    """Its tool starts in a moment; later it is taken for one that has ended, and holds nobody back."""
    admission.note(Call(1, 60))
    assert not admission.gate([])(Call(2, 30), True)
    clock.advance(ANSWERED_S + 0.1)
    assert admission.gate([])(Call(2, 30), True)


def test_a_session_that_is_over_claims_nothing(admission):
    """Its blocks are free."""
    away(admission, Call(1, 60), 10.0)
    away(admission, Call(1, 70), 10.0)
    admission.forget("task-1#1")
    admission.forget("task-1#1")
    assert admission.gate([])(Call(2, 30), True)
    assert 0 == admission._total


def test_a_session_that_moves_to_another_device_claims_room_there(admission, clock):
    """And none here any more."""
    there = Admission({Tier.DEVICE: 100, Tier.HOST: 0, Tier.DISK: 0}, block_bytes=1, clock=clock)
    away(admission, Call(1, 60), 10.0)
    admission.hand_over("task-1#1", there)
    admission.hand_over("nobody", there)
    assert admission.gate([])(Call(2, 30), True)
    assert not there.gate([])(Call(2, 30), True)
    assert (0, 60) == (admission._total, there._total)


def test_a_rule_that_admits_everybody_is_asked_for_nobody(admission):
    """And one that is told decides."""
    away(admission, Call(1, 60), 10.0)
    admission.admit = always
    assert admission.gate([])(Call(2, 90), True)
    admission.admit = lambda demand: not demand.busy
    assert not admission.gate([])(Call(0, 1), True)


calls = st.builds(Call, st.integers(0, 9), st.integers(1, 90), priority=st.integers(-1, 1))


@settings(max_examples=100, deadline=None)
@given(st.lists(calls, max_size=8), st.lists(st.tuples(calls, st.floats(0, 200)), max_size=8), st.data())
def test_who_is_let_in_leaves_room_for_all_before_it(here, elsewhere, data):
    """Against a count from scratch: all calls that are here and all that are soon back, of tasks before it."""
    admission = Admission({Tier.DEVICE: 100, Tier.HOST: 60, Tier.DISK: 0}, block_bytes=1, clock=ManualClock(0.0))
    for call, seconds in elsewhere:
        away(admission, call, seconds)
    told = {call.session.key: (call, seconds) for call, seconds in elsewhere}
    present = {call.session.key: call for call in here}
    if not present:
        return
    asked = data.draw(st.sampled_from(list(present.values())))
    claims = [(call.rank[:2], blocks_for(len(call.ids) + 1)) for call in present.values()]
    claims += [
        (call.rank[:2], blocks_for(call.computed))
        for key, (call, seconds) in told.items()
        if key not in present and seconds <= SOON_S
    ]
    ahead = sum(size for place, size in claims if place < asked.rank[:2])
    fits = ahead + blocks_for(len(asked.ids) + 1) <= ROOM_SHARE * 100
    assert sum(claim.blocks for claim in admission._claims.values()) == admission._total
    gate = admission.gate(here)
    assert fits == gate(asked, True)
    assert gate(asked, False)


def test_an_engine_holds_a_later_task_back_and_lets_it_in_when_the_earlier_ones_are_over(start, ask, tiny):
    """One task waits for its tool with most of the memory, one computes, a third one has to wait; then it is answered."""
    engine = start(blocks=40, host=16)
    text = "An agent that waits. " * 20
    first = engine.submit(ask(text, 4, task="first")).result(30)
    engine.expect(first.session, 0.0, wait_of(50.0), time.monotonic())
    forward = engine._runner.forward
    engine._runner.forward = lambda spans: time.sleep(0.02) or forward(spans)  # slow enough to be watched
    second = engine.submit(ask("Counts: one", 64, task="second"))
    assert next(iter(second)).token_ids
    third = engine.submit(ask("Another agent. " * 9, 4, task="third"))
    steps_outside = set()
    while not second.ended:
        stats = engine.stats()
        if (stats["waiting"], stats["running"]) == (1, 1):
            steps_outside.add(stats["steps"])
    assert len(steps_outside) > 10
    assert tiny.greedy("Another agent. " * 9, 4) == list(third.result(30).token_ids)
    assert tiny.greedy("Counts: one", 64) == list(second.result(30).token_ids)


def test_tasks_that_are_held_back_all_finish(start, ask, tiny):
    """Eight tasks of three turns over a device for two and a host for one: rule R11 with tasks outside."""
    engine = start(blocks=26, host=13)
    wrong = []

    def agent(number):
        text = f"{number} is an agent. " * 4
        for turn in range(3):
            generation = engine.submit(ask(text, 6, task=f"agent-{number}")).result(60)
            if tiny.greedy(text, 6) != list(generation.token_ids):
                wrong.append((number, turn))
            engine.expect(generation.session, 0.0, wait_of(0.01), time.monotonic())
            text += generation.text + " and goes on"

    agents = [threading.Thread(target=agent, args=(number,)) for number in range(8)]
    for thread in agents:
        thread.start()
    for thread in agents:
        thread.join()
    assert [] == wrong
    assert engine.stats()["waiting"] == 0
