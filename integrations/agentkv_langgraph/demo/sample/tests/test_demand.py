import random

import pytest
from parcel.demand import order_size, simulate


@pytest.mark.parametrize("mean", [3.0, 12.0])
def test_the_mean_of_many_simulations_is_right(mean):
    rng = random.Random(1)
    totals = [simulate(mean, 10, rng) for _ in range(6_000)]
    assert sum(totals) / len(totals) == pytest.approx(mean * 10, rel=0.05)


def test_more_service_needs_more_stock():
    sizes = [order_size(8.0, 14, service=share, rounds=20_000) for share in (0.5, 0.9, 0.99)]
    assert sizes == sorted(sizes)


def test_the_same_seed_gives_the_same_order():
    assert order_size(5.0, 7) == order_size(5.0, 7)
