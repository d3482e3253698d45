"""The arithmetic of a wait that goes on: when may it end next, and when will it look longer than before?

Covers next times on the sorted points of a Forecast (seconds since the wait began), so that a policy can name the
moment at which it wants to be asked again and nobody polls. Decides nothing: that is `wait.py`.

The next possible end is the 10 % quantile at first, and once that has passed the next duration known. The 10 %
quantile of what is left would not do: each time a duration passes without an end it jumps ahead, always just out of
reach, and a tool with a broad history would never be met.
"""

from __future__ import annotations

from bisect import bisect_right

LOW = 0.1
"""One wait in ten may end earlier than we are prepared for."""
MEDIAN = 0.5

Points = tuple[float, ...]


def quantile(points: Points, first: int, q: float) -> float:
    """The `q` quantile of `points[first:]` (type 7), as an absolute time since the wait began."""
    position = q * (len(points) - 1 - first)
    low = first + int(position)
    high = min(low + 1, len(points) - 1)
    return points[low] + (position - int(position)) * (points[high] - points[low])


def ends_of(points: Points) -> Points:
    """The times at which the wait may end: the 10 % quantile, then every later point."""
    early = quantile(points, 0, LOW)
    return (early, *points[bisect_right(points, early) :])


def next_end(ends: Points, elapsed_s: float) -> float | None:
    """The first of `ends` after `elapsed_s`; None if all have passed."""
    index = bisect_right(ends, elapsed_s)
    return ends[index] if index < len(ends) else None


def outlived_at(points: Points, ends: Points, elapsed_s: float, wait_s: float, gap_s: float) -> float | None:
    """The first time > `elapsed_s` at which a point has passed and what is left is long.

    Long: median of the remaining wait at least `wait_s` and the next end more than `gap_s` away. Between two points
    both only fall, so the moments at which a point or the early end passes are the candidates. None: the wait
    outlives every point first.
    """
    passed = elapsed_s
    while True:
        first = bisect_right(points, passed)
        if first == len(points):
            return None
        passed = points[first] if passed >= ends[0] else min(points[first], ends[0])
        first = bisect_right(points, passed)
        end = next_end(ends, passed)
        if first == len(points) or end is None:
            return None
        if quantile(points, first, MEDIAN) - passed >= wait_s and end - passed > gap_s:
            return passed
