import random
from itertools import permutations

import pytest
from parcel.routes import length, nearest_first, shortest


def points(n, seed):
    rng = random.Random(seed)
    return [(rng.random() * 100, rng.random() * 100) for _ in range(n)]


@pytest.mark.parametrize("seed", range(3))
def test_the_exact_tour_is_the_best_of_all_orders(seed):
    stops = points(7, seed)
    best = min(length([0, *rest], stops) for rest in permutations(range(1, 7)))
    assert length(shortest(stops), stops) == pytest.approx(best)


@pytest.mark.parametrize("seed", range(4))
def test_the_fast_guess_is_never_shorter_than_the_exact_tour(seed):
    stops = points(15, seed)
    assert length(shortest(stops), stops) <= length(nearest_first(stops), stops) + 1e-9


@pytest.mark.parametrize("n", [1, 2, 3])
def test_tiny_tours_visit_every_stop(n):
    assert sorted(shortest(points(n, 1))) == list(range(n))
