"""Tokens are chosen from one's own logits and one's own random numbers."""

import pytest
import torch

from agentkv.engine.base import Sampling
from agentkv.engine.local.sampler import Chooser, choose
from agentkv.errors import ModelError


def _logits(rows=1, vocabulary=50, seed=0):
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


def _draws(sampling, logits, count=200):
    chooser = Chooser(sampling)
    return [chooser.draw(logits) for _ in range(count)]


def test_temperature_zero_takes_the_best():
    """Greedy needs no generator."""
    logits = _logits(3)
    assert logits.argmax(-1).tolist() == choose(logits, [Chooser(Sampling())] * 3)


def test_a_seed_gives_the_same_tokens_and_none_gives_others():
    """Seeded draws repeat; unseeded ones do not."""
    logits = _logits()[0]
    warm = Sampling(temperature=1.0, seed=3)
    assert _draws(warm, logits) == _draws(warm, logits)
    assert _draws(Sampling(temperature=1.0), logits) != _draws(Sampling(temperature=1.0), logits)


@pytest.mark.parametrize("seed", [-(2**63), -1, 0, 2**63 - 1])
def test_any_whole_number_is_a_seed(seed):
    """Clients send what they like."""
    assert 0 <= Chooser(Sampling(temperature=1, seed=seed)).draw(_logits()[0]) < 50


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
        assert choose(logits[2:3], [alone])[0] == choose(logits, [others[0], others[1], crowded, others[2]])[2]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_scores_that_are_not_finite_choose_no_token(bad):
    """That row gets an error, its neighbours their tokens."""
    logits = _logits(2)
    logits[0, 3] = bad
    first, second = choose(logits, [Chooser(Sampling())] * 2)
    assert isinstance(first, ModelError)
    assert int(logits[1].argmax()) == second


@pytest.mark.parametrize("temperature", [1e-5, 1e-6, 1e-50, 5e-324])
@pytest.mark.parametrize("top_p", [0.5, 1.0])
def test_a_temperature_near_zero_takes_the_best(temperature, top_p):
    """Also where scores divided by it are beyond any float."""
    logits = _logits(20) / 3
    choosers = [Chooser(Sampling(temperature=temperature, top_p=top_p, seed=row)) for row in range(20)]
    assert logits.argmax(-1).tolist() == choose(logits, choosers)
