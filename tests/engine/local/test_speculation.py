"""Guessing ahead changes how many steps an answer takes, and nothing else."""

import random

import pytest

from agentkv.engine.base import Sampling
from agentkv.kv.streams.adversarial import AdversarialStreams

FEW = tuple((ord(letter) - 33, 60.0) for letter in "abc")
"""A bias to three letters: a model without sense repeats itself now and then, and not for ever."""
LOG = "FAILED test_a - got 1\nFAILED test_b - got 2\nFAILED test_c - got 3\nFAILED test_d - "


def _few(count, **more):
    return Sampling(max_tokens=count, logit_bias=FEW, **more)


def _both(start, **options):
    return start(speculate=True, **options), start(speculate=False, **options)


def test_greedy_answers_are_those_of_one_token_at_a_time(any_tiny, start, ask):
    """Twelve prompts, 60 tokens each, on three families; many tokens were guessed, right and wrong."""
    eager, plain = _both(start, model=any_tiny, blocks=128)
    drafted = accepted = 0
    for number in range(12):
        prompt = f"{number} " + LOG * (1 + number % 3)
        told = [one.submit(ask(prompt, sampling=_few(60))).result(60) for one in (eager, plain)]
        assert told[0].token_ids == told[1].token_ids
        drafted += told[0].drafted_tokens
        accepted += told[0].accepted_tokens
    assert 60 < accepted < drafted
    stats = eager.stats()
    assert (drafted, accepted) == (stats["drafted_tokens"], stats["accepted_tokens"])
    assert stats["steps"] < plain.stats()["steps"] - accepted // 2


def test_greedy_answers_are_transformers_own(tiny, start, ask):
    """Where guesses are wrong, too."""
    engine, drafted = start(blocks=128), 0
    for number in range(12):
        prompt = f"{number} " + LOG * 3
        answer = engine.submit(ask(prompt, 60)).result(60)
        assert tiny.greedy(prompt, 60) == list(answer.token_ids)
        drafted += answer.drafted_tokens
    assert drafted


def test_drawn_answers_are_the_same_with_a_seed(start, ask):
    """At several temperatures; each token takes one random number whether it was guessed or not."""
    eager, plain = _both(start)
    accepted = 0
    for seed in range(10):
        sampling = _few(40, temperature=(0.3, 0.7, 1.2)[seed % 3], top_p=0.9, seed=seed)
        told = [one.submit(ask(LOG, sampling=sampling)).result(60) for one in (eager, plain)]
        assert told[0].token_ids == told[1].token_ids
        assert told[0].text == told[1].text
        accepted += told[0].accepted_tokens
    assert accepted


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 17, 33])
def test_max_tokens_is_kept_to_the_token(start, ask, limit):
    """Guesses never run past the end."""
    eager, plain = _both(start)
    told = [one.submit(ask("abababababab", sampling=_few(limit))).result(60) for one in (eager, plain)]
    assert told[0].token_ids == told[1].token_ids
    assert len(told[0].token_ids) <= limit
    assert told[0].drafted_tokens < limit


def test_a_stop_text_inside_of_accepted_guesses_ends_there(start, ask):
    """What comes behind it in the same step is never said, and the next turn finds the context as it should be."""
    eager, plain = _both(start)
    whole = plain.submit(ask(LOG, sampling=_few(48))).result(60)
    accepted = 0
    for at in range(1, len(whole.text) - 9):
        stop = whole.text[at : at + 8]
        sampling = _few(48, stop=(stop,))
        told = [one.submit(ask(LOG, sampling=sampling, task=f"t{at}")).result(60) for one in (eager, plain)]
        assert told[0].text == told[1].text
        assert told[0].token_ids == told[1].token_ids
        accepted += told[0].accepted_tokens
        if at % 7:
            continue
        longer = LOG + told[0].text + " and now"
        after = [one.submit(ask(longer, 12, task=f"t{at}")).result(60) for one in (eager, plain)]
        assert after[0].token_ids == after[1].token_ids
    assert accepted


def test_a_pool_without_room_for_guesses_still_serves_everybody(start, ask):
    """Four calls over a pool for little more than two: they wait, give way and write what they would have alone."""
    engine, plain = start(blocks=24, host=64), start(speculate=False)
    prompts = [f"{number} {LOG}" for number in range(4)]
    streams = [engine.submit(ask(prompt, sampling=_few(60))) for prompt in prompts]
    for prompt, stream in zip(prompts, streams, strict=True):
        assert plain.submit(ask(prompt, sampling=_few(60))).result(60).token_ids == stream.result(60).token_ids
    assert engine.stats()["accepted_tokens"]


@pytest.mark.parametrize("seed", range(3))
def test_what_was_guessed_wrong_is_never_found_again(start, ask, park, seed):
    """Turn after turn, sent to the host in between, on streams without any order: every turn as from a cold start."""
    dice = random.Random(seed)
    engine, plain = start(blocks=40, host=96, streams=AdversarialStreams(seed)), start(speculate=False)
    text, drafted = LOG, 0
    for turn in range(5):
        answer = engine.submit(ask(text, sampling=_few(24), task="one")).result(60)
        assert plain.submit(ask(text, sampling=_few(24))).result(60).token_ids == answer.token_ids, turn
        drafted += answer.drafted_tokens - answer.accepted_tokens
        if dice.random() < 0.7:
            park(engine, answer.session)
        text += answer.text + dice.choice([" FAILED test_b", " got 1\n", " a"])
    assert drafted  # some guesses were wrong, or this shows nothing


def test_it_can_be_switched_off(start, ask):
    """Then nothing is guessed."""
    _, plain = _both(start)
    assert 0 == plain.submit(ask(LOG, sampling=_few(40))).result(60).drafted_tokens
