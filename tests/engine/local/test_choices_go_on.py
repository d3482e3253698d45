"""Several choices of one request, and the client goes on with one of them: the KV of whichever it was is there."""

from __future__ import annotations

import pytest

from agentkv.core.message import Message
from agentkv.core.residency import Action, Move, Tier
from agentkv.core.task import Caller
from agentkv.engine.base import Request, Sampling

QUESTION = Message(role="user", content="The tool ran for a while and then it failed. What can be the reason for that?")
MORE = Message(role="user", content="Go on.")
NEVER_ENDS = ((257, -100.0),)
LETTERS = tuple((ord(letter) - 33, 60.0) for letter in "abcdefghijklmnop")  # so that the text has one spelling only


def _three(engine):
    """Three different answers of 70 tokens."""
    sampling = Sampling(max_tokens=70, temperature=1.0, seed=5, logit_bias=LETTERS)
    told = engine.submit(Request(messages=(QUESTION,), n=3, caller=Caller(task="t"), sampling=sampling)).result(60)
    assert 3 == len({choice.text for choice in told.choices})
    return told


def _next(engine, said, *, n=1):
    turns = (QUESTION, Message(role="assistant", content=said.raw), MORE)
    sampling = Sampling(max_tokens=4, logit_bias=NEVER_ENDS)
    return engine.submit(Request(messages=turns, n=n, caller=Caller(task="t"), sampling=sampling)).result(60)


def _held(engine):
    """Under how many names blocks are held."""
    return len(engine.tiers._book.holdings)


@pytest.mark.parametrize("picked", [0, 1, 2])
def test_whichever_choice_is_sent_back_its_kv_is_reused(start, picked):
    """All of it, to the last token that was computed, in the same session; the tokens are those of a cold run."""
    engine = start(blocks=128)
    first = _three(engine)
    said = first.choices[picked]
    second = _next(engine, said)
    assert first.session == second.session
    assert first.usage.input_tokens + len(said.token_ids) - 1 == second.usage.cached_tokens
    assert list(_next(start(blocks=128), said).token_ids) == list(second.token_ids)


@pytest.mark.parametrize("picked", [0, 2])
def test_a_conversation_of_choices_goes_on_with_choices(start, picked):
    """Turn after turn, whichever is picked; what was not picked is held no longer than the next turn takes."""
    engine = start(blocks=128)
    first = _three(engine)
    assert 3 == _held(engine)
    second = _next(engine, first.choices[picked], n=2)
    assert 2 == _held(engine)
    turns = (QUESTION, Message(role="assistant", content=first.choices[picked].raw), MORE)
    turns = (*turns, Message(role="assistant", content=second.choices[1].raw), MORE)
    third = engine.submit(Request(messages=turns, caller=Caller(task="t"), sampling=Sampling(max_tokens=2))).result(60)
    assert second.usage.input_tokens + len(second.choices[1].token_ids) - 1 == third.usage.cached_tokens
    assert 1 == _held(engine)


def test_a_move_and_a_forecast_are_about_all_choices(start, until):
    """The next turn goes on with any of them: what leaves the device leaves with all of its context, and comes back so."""
    engine = start(blocks=128, host=128)
    first = _three(engine)
    names = [first.session, *engine._sessions.beside(first.session)]
    told = []

    def all_in(tier):
        return all(getattr(engine.residency(name), tier) == engine.residency(name).total_blocks for name in names)

    engine.apply(Move(session=first.session, action=Action.DEMOTE, to=Tier.HOST, reason="test"), told.append)
    until(lambda: all_in("host_blocks"))
    for name in names:
        engine.tiers.vacate(name, Tier.DEVICE)
    assert not any(engine.residency(name).device_blocks for name in names)
    engine.apply(Move(session=first.session, action=Action.PREFETCH, to=Tier.DEVICE, reason="test"), told.append)
    until(lambda: all_in("device_blocks"))
    until(lambda: len(told) == 2)
    assert {first.session} == {receipt.move.session for receipt in told}
    engine.expect(first.session, 1e9)
    assert [1e9] * 3 == [engine.tiers._book.holdings[name].expected_s for name in names]
    second = _next(engine, first.choices[2])
    assert first.usage.input_tokens + 70 - 1 == second.usage.cached_tokens
    assert 0 == engine.stats()["restored"]["short"]


@pytest.mark.parametrize("ends", [lambda e, _: e.finish_task("t"), lambda e, told: e.finish_sessions([told.session])])
def test_choices_end_with_their_session(start, ends):
    """No block of any of them is left."""
    engine = start(blocks=128)
    ends(engine, _three(engine))
    assert 0 == _held(engine)
    assert 0 == engine.stats()["sessions"]


def test_choices_that_nobody_picked_are_not_kept_for_tomorrow(start, tmp_path):
    """A session on disk is the first of them, and goes on there."""
    options = {"blocks": 128, "host": 128, "disk": tmp_path, "disk_memory": 32 << 20, "persist": True}
    engine = start(**options)
    first = _three(engine)
    engine.close()
    again = start(**options)
    assert 1 == _held(again)
    second = _next(again, first.choices[0])
    assert first.session == second.session
    assert first.usage.input_tokens + 70 - 1 == second.usage.cached_tokens


def test_a_choice_that_is_cancelled_in_the_queue_leaves_no_blocks_behind(start, monkeypatch):
    """It was sent back to make room and has nothing computed: what was held under its name goes with it."""
    engine = start(blocks=128)
    honest, sent_back = engine._deliver, []

    def deliver(fresh):
        honest(fresh)
        for one in [one for one in engine._batch.running if one.choice == 1 and one.answer.token_ids]:
            engine._batch.send_back(one)
            sent_back.append(one.holder)
            one.stream.cancel()

    monkeypatch.setattr(engine, "_deliver", deliver)
    sampling = Sampling(max_tokens=70, logit_bias=NEVER_ENDS)
    stream = engine.submit(Request(messages=(QUESTION,), n=2, caller=Caller(task="t"), sampling=sampling))
    assert stream.wait_settled(30)
    assert 1 == len(sent_back)
    assert [engine.last_session(Caller(task="t"))] == list(engine.tiers._book.holdings)
    engine.tiers.check()
