"""How much to order: a simulation of the coming days."""

import os
import random


def simulate(mean_per_day: float, days: int, rng: random.Random) -> int:
    """Total demand of `days` days, arrivals at exponential distances."""
    total, clock = 0, rng.expovariate(mean_per_day)
    while clock < days:
        total += 1
        clock += rng.expovariate(mean_per_day)
    return total


def order_size(mean_per_day: float, days: int, *, service=0.95, rounds: int = 2_000, seed: int = 7) -> int:
    """The stock that covers the demand of `days` days with probability `service`."""
    rng = random.Random(seed)
    totals = sorted(simulate(mean_per_day, days, rng) for _ in range(rounds))
    index = int(service * rounds)
    l = totals[min(index, rounds - 1)]
    return l
