"""Tokens are chosen from one's own logits and one's own random numbers."""

import pytest
import torch

from agentkv.engine.base import Sampling
from agentkv.engine.local.sampler import Chooser, Want, choose
from agentkv.errors import ModelError


def _logits(rows=1, vocabulary=50, seed=0):
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


def _draws(sampling, logits, count=200):
    chooser = Chooser(sampling)
    return [chooser.pick(logits).token for _ in range(count)]


def _chosen(logits, choosers):
    """One token for each row."""
    told = choose(logits, [Want(chooser, row) for row, chooser in enumerate(choosers)])
    return [one if isinstance(one, ModelError) else one[0].token for one in told]


def test_temperature_zero_takes_the_best():
    """Greedy needs no generator."""
    logits = _logits(3)
    assert logits.argmax(-1).tolist() == _chosen(logits, [Chooser(Sampling())] * 3)


def test_a_seed_gives_the_same_tokens_and_none_gives_others():
    """Seeded draws repeat; unseeded ones do not."""
    logits = _logits()[0]
    warm = Sampling(temperature=1.0, seed=3)
    assert _draws(warm, logits) == _draws(warm, logits)
    assert _draws(Sampling(temperature=1.0), logits) != _draws(Sampling(temperature=1.0), logits)


@pytest.mark.parametrize("seed", [-(2**63), -1, 0, 2**63 - 1])
def test_any_whole_number_is_a_seed(seed):
    """Clients send what they like."""
    assert 0 <= Chooser(Sampling(temperature=1, seed=seed)).pick(_logits()[0]).token < 50


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    """Chances 0.5, 0.3, 0.2: p=0.4 leaves one token, p=0.7 two, p=1 all."""
    logits = torch.tensor([0.2, 0.5, 0.3]).log()
    kept = {p: set(_draws(Sampling(temperature=1, top_p=p, seed=1), logits)) for p in (0.01, 0.4, 0.7, 1.0)}
    assert {0.01: {1}, 0.4: {1}, 0.7: {1, 2}, 1.0: {0, 1, 2}} == kept


def test_draws_follow_the_chances():
    """10,000 draws at temperature 1 come within 2 % of the softmax, and a low temperature sharpens it."""
    logits = torch.tensor([0.2, 0.5, 0.3]).log()
    draws = torch.tensor(_draws(Sampling(temperature=1, seed=5), logits, 10_000))
    shares = [(draws == token).float().mean().item() for token in range(3)]
    assert [0.2, 0.5, 0.3] == pytest.approx(shares, abs=0.02)
    assert {1} == set(_draws(Sampling(temperature=0.01, seed=5), logits))


def test_neighbours_do_not_matter():
    """The same row among others, in another place, gives the same tokens."""
    logits = _logits(4)
    warm = Sampling(temperature=1.2, top_p=0.9, seed=11)
    alone, crowded = Chooser(warm), Chooser(warm)
    others = [Chooser(Sampling(temperature=2.0)) for _ in range(3)]
    for _ in range(20):
        assert _chosen(logits[2:3], [alone])[0] == _chosen(logits, [others[0], others[1], crowded, others[2]])[2]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_scores_that_are_not_finite_choose_no_token(bad):
    """That row gets an error, its neighbours their tokens."""
    logits = _logits(2)
    logits[0, 3] = bad
    first, second = _chosen(logits, [Chooser(Sampling())] * 2)
    assert isinstance(first, ModelError)
    assert int(logits[1].argmax()) == second


@pytest.mark.parametrize("temperature", [1e-5, 1e-6, 1e-50, 5e-324])
@pytest.mark.parametrize("top_p", [0.5, 1.0])
def test_a_temperature_near_zero_takes_the_best(temperature, top_p):
    """Also where scores divided by it are beyond any float."""
    logits = _logits(20) / 3
    choosers = [Chooser(Sampling(temperature=temperature, top_p=top_p, seed=row)) for row in range(20)]
    assert logits.argmax(-1).tolist() == _chosen(logits, choosers)


def _after(logits, sampling, draft, **how):
    """What one call with a draft writes; row i of the logits stands behind i tokens of the draft."""
    (told,) = choose(logits, [Want(Chooser(sampling, **how), 0, draft)])
    return [one.token for one in told]


def test_a_draft_is_kept_as_far_as_it_is_what_would_have_been_chosen():
    """The first token that differs ends what the step says, and is the right one."""
    logits = _logits(4)
    best = logits.argmax(-1).tolist()
    wrong = (best[1] + 1) % 50
    assert best == _after(logits, Sampling(), best[:3])
    assert best[:2] == _after(logits, Sampling(), [best[0], wrong, best[2]])
    assert best[:1] == _after(logits, Sampling(), [(best[0] + 1) % 50, best[1], best[2]])


def test_a_seed_draws_the_same_tokens_with_a_draft_and_without():
    """One random number for each token that is said, none for those that are not."""
    logits = _logits(4)
    for seed in range(40):
        warm = Sampling(temperature=1.5, top_p=0.9, seed=seed)
        alone = Chooser(warm)
        single = [alone.pick(row).token for row in logits]
        drafted = _after(logits, warm, [*single[:2], (single[2] + 1) % 50])
        assert single[:3] == drafted
        chooser = Chooser(warm)
        (first,) = choose(logits[:3], [Want(chooser, 0, [single[0], (single[1] + 1) % 50])])
        assert single[:2] == [one.token for one in first]
        assert single[2] == chooser.pick(logits[2]).token


def test_a_bias_lifts_a_token_and_bars_one():
    """100 is as good as a promise, -100 as good as a ban."""
    logits = _logits()[0]
    best = int(logits.argmax())
    assert 7 == Chooser(Sampling(logit_bias=((7, 100.0),))).pick(logits).token
    assert best != Chooser(Sampling(logit_bias=((best, -100.0),))).pick(logits).token


def test_penalties_count_what_was_written():
    """Presence once, frequency for each time: three equal rows, and the best token falls behind when it must."""
    logits = torch.tensor([1.0, 0.4, -5.0])
    presence = Chooser(Sampling(presence_penalty=0.5))
    assert [0, 0, 0] == [presence.pick(torch.tensor([1.0, 0.4, 0.0])).token for _ in range(3)]
    stronger = Chooser(Sampling(presence_penalty=0.7))
    assert [0, 1, 0] == [stronger.pick(logits).token for _ in range(3)]
    frequency = Chooser(Sampling(frequency_penalty=0.4))
    assert [0, 0, 1, 0] == [frequency.pick(logits).token for _ in range(4)]


def test_log_probabilities_are_those_of_the_scores():
    """Before the temperature, after the bias; the likeliest first; the chosen one's own in any case."""
    logits = _logits()[0]
    want = torch.log_softmax(logits, -1)
    picked = Chooser(Sampling(temperature=3.0, seed=2), logprobs=3).pick(logits)
    assert want[picked.token].item() == pytest.approx(picked.logprob)
    best, ids = want.topk(3)
    assert ids.tolist() == [chance.token for chance in picked.top]
    assert best.tolist() == pytest.approx([chance.logprob for chance in picked.top])
    assert () == Chooser(Sampling(), logprobs=0).pick(logits).top
    assert Chooser(Sampling()).pick(logits).logprob is None


def test_a_forced_token_comes_with_what_the_scores_say_of_it():
    """Also the least likely one."""
    logits = _logits()[0]
    worst = int(logits.argmin())
    (told,) = choose(logits[None], [Want(Chooser(Sampling(), logprobs=1), 0, (), worst)])
    assert worst == told[0].token
    assert torch.log_softmax(logits, -1)[worst].item() == pytest.approx(told[0].logprob)
