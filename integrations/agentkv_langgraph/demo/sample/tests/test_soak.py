"""Random operations against a plain model of the warehouse, for a fixed time."""

import random
import time

from parcel.stock import OutOfStock, Stock

SOAK_S = 4.0


def test_counts_stay_consistent_under_random_operations():
    rng, stock, rounds = random.Random(11), Stock(), 0
    articles = [f"article-{n}" for n in range(40)]
    ends = time.monotonic() + SOAK_S
    while time.monotonic() < ends:
        article, count = rng.choice(articles), rng.randint(1, 9)
        deed = rng.choice((stock.receive, stock.reserve, stock.cancel, stock.ship))
        try:
            deed(article, count)
        except OutOfStock:
            pass
        rounds += 1
        if rounds % 50 == 0:
            assert all(0 <= stock.reserved.get(a, 0) <= stock.on_hand.get(a, 0) for a in articles)
    assert rounds > 100
