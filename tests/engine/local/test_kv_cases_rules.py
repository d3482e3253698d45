"""The engine's own guards: taken out by hand, each is noticed by a token that is not a cold run's.

R6: what a call computes in is free only once its step has ended. R7: a restored call computes only once its blocks are
there. What the tiers guard (R1-R5, R8, R9, R11) is `tests/kv/test_rules.py` and `tests/kv/test_mutations.py`.
"""

from __future__ import annotations

import threading

import pytest

from agentkv.core.residency import Action, Move, Tier
from agentkv.engine.local.batch import Batch
from agentkv.engine.local.engine import LocalEngine
from agentkv.engine.local.intake import Intake
from agentkv.errors import AgentKVError
from agentkv.kv.streams import DONE
from agentkv.kv.streams.adversarial import AdversarialStreams

TEXT = "The tool ran for a while. Its output follows: line one, line two, and so on until the end of the file. "
WAIT_S = 20


def _prompt(number, length=120):
    return (f"{number}: " + TEXT * 8)[:length]


def _applied(engine, session, action, to):
    """Apply a move and wait for its end."""
    done = threading.Event()
    engine.apply(Move(session=session, action=action, to=to, reason="test"), lambda _receipt: done.set())
    assert done.wait(WAIT_S)


# -- R6


def cancel_in_flight(tiny, engine, ask, park):
    """A call is cancelled while its step computes; a prefetch wants the room. Does the prefetched context answer well?"""
    parked = engine.submit(ask(_prompt(1, 90), 2, task="parked")).result(60)
    park(engine, parked.session)
    inside, go_on = threading.Event(), threading.Event()
    forward = engine._runner.forward

    def slow(spans):
        inside.set()
        assert go_on.wait(WAIT_S)
        return forward(spans)

    engine._runner.forward = slow
    try:
        stream = engine.submit(ask(_prompt(2, 120), 4, task="running"))
        assert inside.wait(WAIT_S)
        stream.cancel()
        _applied(engine, parked.session, Action.PREFETCH, Tier.DEVICE)
        facts = engine.residency(parked.session)
        all_there = facts.device_blocks == facts.total_blocks
    finally:
        go_on.set()
        engine._runner.forward = forward
    prompt = _prompt(1, 90) + parked.text + " Go on."
    answer = engine.submit(ask(prompt, 12, task="parked")).result(60)
    assert answer.usage.cached_tokens >= 80
    return tiny.greedy(prompt, 12) == list(answer.token_ids), all_there


def test_r6_a_cancelled_calls_blocks_are_nobodys_until_its_step_has_ended(tiny, start, ask, park):
    """The prefetch gets what is free besides; the rest comes later, and every token is right."""
    engine = start(blocks=10)
    right, all_there = cancel_in_flight(tiny, engine, ask, park)
    assert (True, False) == (right, all_there)
    assert engine.stats()["kv"]["hits"]["host"] > 0


def test_r6_freeing_them_at_the_cancel_is_noticed(tiny, start, ask, park, monkeypatch):
    """The step would write into blocks that were restored meanwhile."""
    sequences = Intake.sequences

    def hasty(self, request, *, on_cancel, forget):
        def give_up():
            blocks, made[0].blocks = made[0].blocks, []
            engine.tiers.release(made[0].session.key, blocks, used=DONE)
            on_cancel()

        made = sequences(self, request, on_cancel=give_up, forget=forget)
        return made

    monkeypatch.setattr(Intake, "sequences", hasty)
    engine = start(blocks=10)
    try:
        right, all_there = cancel_in_flight(tiny, engine, ask, park)
    except AgentKVError:
        return
    assert (False, True) == (right, all_there)


# -- R7


def come_back(tiny, engine, ask, park):
    """Parked contexts go on; the calls whose answer is not that of a cold run, or that failed."""
    bad = 0
    for number in range(6):
        first = engine.submit(ask(_prompt(number, 150), 2, task=f"t{number}")).result(60)
        park(engine, first.session)
        prompt = _prompt(number, 150) + first.text + " Go on."
        try:
            answer = engine.submit(ask(prompt, 6, task=f"t{number}")).result(60)
        except AgentKVError:
            bad += 1
            continue
        assert answer.restored_blocks >= 9
        bad += tiny.greedy(prompt, 6) != list(answer.token_ids)
    return bad


@pytest.mark.parametrize("seed", range(4))
def test_r7_a_restored_call_computes_only_once_its_blocks_are_there(tiny, start, ask, park, seed):
    """On the adversary's streams, where copies end as late as may be."""
    assert 0 == come_back(tiny, start(host=90, streams=AdversarialStreams(seed)), ask, park)


def test_r7_computing_before_the_blocks_are_there_is_noticed(tiny, start, ask, park, monkeypatch):
    """A call that is put among the running ones while its loads are under way reads nonsense."""
    seat = Batch._seat

    def hasty(self, sequence):
        seated = seat(self, sequence)
        if sequence in self.loading:
            self.loading.remove(sequence)
            self.running.append(sequence)
        return seated

    monkeypatch.setattr(Batch, "_seat", hasty)
    assert come_back(tiny, start(host=90, streams=AdversarialStreams(0)), ask, park)


def test_the_engine_waits_for_its_own_step_before_it_reads_the_tokens(tiny, start, ask, monkeypatch):
    """Without the wait there is no token to deliver: the call fails instead of making one up."""
    forward = LocalEngine._forward

    def hasty(self, turns):
        record = self.tiers.streams.record
        self.tiers.streams.record = lambda: DONE
        try:
            return forward(self, turns)
        finally:
            self.tiers.streams.record = record

    engine = start(streams=AdversarialStreams(1))
    assert tiny.greedy(_prompt(0), 4) == list(engine.submit(ask(_prompt(0), 4)).result(60).token_ids)
    monkeypatch.setattr(LocalEngine, "_forward", hasty)
    with pytest.raises(AgentKVError):
        engine.submit(ask(_prompt(1), 4)).result(60)
