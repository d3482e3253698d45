"""The shortest round trip through all stops: exact for small tours, a fast guess for large ones."""

from itertools import combinations
from math import dist, inf

Point = tuple[float, float]


def length(tour: list[int], points: list[Point]) -> float:
    """The length of the closed tour."""
    legs = zip(tour, tour[1:] + tour[:1])
    return sum(dist(points[a], points[b]) for a, b in legs)


def shortest(points: list[Point]) -> list[int]:
    """An optimal tour by dynamic programming over subsets: n^2 * 2^n steps."""
    n = len(points)
    if n <= 3:
        return list(range(n))
    away = [[dist(a, b) for b in points] for a in points]
    best = {(1 << k, k): (away[0][k], 0) for k in range(1, n)}
    for size in range(2, n):
        for stops in combinations(range(1, n), size):
            mask = sum(1 << stop for stop in stops)
            for last in stops:
                rest = mask & ~(1 << last)
                cost, via = inf, 0
                for before in stops:
                    if before != last:
                        candidate = best[rest, before][0] + away[before][last]
                        if candidate < cost:
                            cost, via = candidate, before
                best[mask, last] = (cost, via)
    mask = (1 << n) - 2
    last = min(range(1, n), key=lambda k: best[mask, k][0] + away[k][0])
    tour = [last]
    while mask & (mask - 1):
        before = best[mask, last][1]
        mask &= ~(1 << last)
        tour.append(before)
        last = before
    return [0, *reversed(tour)]


def nearest_first(points: list[Point]) -> list[int]:
    """A tour that always drives to the nearest stop left."""
    left = set(range(1, len(points)))
    tour = [0]
    while left:
        here = points[tour[-1]]
        tour.append(min(left, key=lambda k: dist(here, points[k])))
        left.remove(tour[-1])
    return tour
