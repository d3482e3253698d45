"""The arithmetic of a wait that goes on: when will a forecast, conditioned on still waiting, say something else?

Covers next times on the sorted points of a Forecast (seconds since the wait began), so that a policy can name the
moment at which it wants to be asked again and nobody polls. Agrees with `Forecast.after` and `quantile_s`, without
building a value per candidate: a decision runs inside the agent's own call. Decides nothing: that is `wait.py`.
"""

from __future__ import annotations

from bisect import bisect_right

LOW = 0.1
"""The quantile that stands for "it may come back as early as this"."""
MEDIAN = 0.5

Points = tuple[float, ...]


def quantile(points: Points, first: int, q: float) -> float:
    """The `q` quantile of `points[first:]` (type 7), as an absolute time since the wait began."""
    position = q * (len(points) - 1 - first)
    low = first + int(position)
    high = min(low + 1, len(points) - 1)
    return points[low] + (position - int(position)) * (points[high] - points[low])


def due_at(points: Points, elapsed_s: float, lead_s: float) -> float | None:
    """The first time >= `elapsed_s` at which the low quantile of the remaining wait is at most `lead_s`.

    None if the wait outlives every point before that: overdue.
    """
    first = bisect_right(points, elapsed_s)
    while first < len(points):
        due = quantile(points, first, LOW) - lead_s
        if due <= elapsed_s:
            return elapsed_s
        if due < points[first]:
            return due
        elapsed_s = points[first]
        first = bisect_right(points, elapsed_s, first)
    return None


def outlived_at(points: Points, elapsed_s: float, wait_s: float, lead_s: float) -> float | None:
    """The first time > `elapsed_s` at which a point has passed and what is left is long.

    Long: median of the remaining wait at least `wait_s` and its low quantile above `lead_s`. Between two points both
    only fall, so the moments at which a point passes are the candidates. None: overdue comes first.
    """
    first = bisect_right(points, elapsed_s)
    while first < len(points):
        passed = points[first]
        first = bisect_right(points, passed, first)
        if first == len(points):
            return None
        if quantile(points, first, MEDIAN) - passed >= wait_s and quantile(points, first, LOW) - passed > lead_s:
            return passed
    return None
