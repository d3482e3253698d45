"""Curve: a wait as survival probabilities on a fixed logarithmic grid, conditional on the time already waited.

Covers the grid that every forecast from history shares (46 bins, each 1.5 times as long as the one before, 2 ms to
70 h) and the arithmetic on it: survival, quantiles, conditioning. Within a bin the probability is spread evenly in
log time. Mass that is left after the last edge never ends. Plain Python: 46 numbers are too few for numpy to pay.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from math import log
from operator import neg

BINS = 46
FACTOR = 1.5
FIRST_EDGE_S = 0.002
EDGES_S: tuple[float, ...] = tuple(FIRST_EDGE_S * FACTOR**i for i in range(BINS + 1))
"""Bin j is (EDGES_S[j], EDGES_S[j + 1]]; what is shorter counts as 2 ms."""
MAX_WAIT_S = 30 * 86_400.0
"""Longer waits, and the quantiles of those that never end, are told as thirty days."""
POINTS = 21
LEVELS: tuple[float, ...] = tuple((i + 0.5) / POINTS for i in range(POINTS))
"""The probabilities of the equally likely points that abbreviate a curve."""
OVERDUE = 0.5 / POINTS
"""Whoever outlives this share of all calls has outlived the last point."""
_LOG_FACTOR = log(FACTOR)
_NOTHING_LEFT = 1e-12


def bin_of(duration_s: float) -> int:
    """The bin of a duration; the first and the last one are open-ended."""
    return min(max(bisect_left(EDGES_S, duration_s) - 1, 0), BINS - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """P(duration > EDGES_S[j]) for j = 0..46, falling from 1; `elapsed_s` of the wait have passed.

    `end_s`: the wait ends by then at the latest (a declared time-out), counted from its start like the edges.
    """

    survival: tuple[float, ...]
    elapsed_s: float = 0.0
    end_s: float | None = None

    def __post_init__(self) -> None:
        if len(self.survival) != BINS + 1:
            raise ValueError(f"a curve has {BINS + 1} values, not {len(self.survival)}")
        if not self.elapsed_s >= 0 or (self.end_s is not None and not self.end_s >= 0):
            raise ValueError(f"elapsed_s={self.elapsed_s} and end_s={self.end_s} must be >= 0")

    @property
    def never(self) -> float:
        """P(the wait never ends), given that it has not ended yet."""
        left = self.outlives(self.elapsed_s)
        return 0.0 if self.end_s is not None else min(1.0, self.survival[-1] / left) if left > 0 else 0.0

    @property
    def is_spent(self) -> bool:
        """The wait outlived all that the curve tells."""
        return self.elapsed_s >= EDGES_S[-1] or self.outlives(self.elapsed_s) <= _NOTHING_LEFT

    def outlives(self, duration_s: float) -> float:
        """P(duration > `duration_s`), counted from the start of the wait and not conditioned."""
        index = bisect_right(EDGES_S, duration_s)
        if index == 0:
            return 1.0
        if index > BINS:
            return self.survival[-1]
        before, after = self.survival[index - 1], self.survival[index]
        return before + (after - before) * log(duration_s / EDGES_S[index - 1]) / _LOG_FACTOR

    def within(self, horizon_s: float) -> float:
        """P(the wait ends within the next `horizon_s`, given that it has not ended yet)."""
        if horizon_s < 0:
            return 0.0
        if self.end_s is not None and self.elapsed_s + horizon_s >= self.end_s:
            return 1.0
        if self.is_spent:
            return horizon_s / (self.elapsed_s + horizon_s) if horizon_s > 0 else 0.0
        return min(1.0, max(0.0, 1.0 - self.outlives(self.elapsed_s + horizon_s) / self.outlives(self.elapsed_s)))

    def within_edges(self) -> list[float]:
        """`within` of all edges but the first, a good deal faster than one by one."""
        elapsed_s, end_s = self.elapsed_s, self.end_s
        if self.is_spent:
            return [self.within(edge_s) for edge_s in EDGES_S[1:]]
        if elapsed_s == 0:
            within = [1.0 - still for still in self.survival[1:]]
        else:
            left, outlives = self.outlives(elapsed_s), self.outlives
            within = [min(1.0, max(0.0, 1.0 - outlives(elapsed_s + edge_s) / left)) for edge_s in EDGES_S[1:]]
        if end_s is not None:
            passed = bisect_left(EDGES_S, end_s - elapsed_s, 1)
            within[passed - 1 :] = [1.0] * (BINS + 1 - passed)
        return within

    def quantile_s(self, q: float) -> float:
        """The remaining wait that is not exceeded with probability `q`; at most MAX_WAIT_S."""
        survival, elapsed_s = self.survival, self.elapsed_s
        latest_s = MAX_WAIT_S if self.end_s is None else max(0.0, self.end_s - elapsed_s)
        target = 1 - q
        if elapsed_s > 0:
            if self.is_spent:  # the Lindy rule: P(twice as long) = 1/2
                return min(latest_s, MAX_WAIT_S if q >= 1 else elapsed_s * q / (1 - q))
            target *= self.outlives(elapsed_s)
        if target < survival[-1]:
            return latest_s
        index = bisect_left(survival, -target, key=neg)
        if index == 0:
            return 0.0
        before, after = survival[index - 1], survival[index]
        at_s: float = EDGES_S[index - 1] * FACTOR ** ((before - target) / (before - after))
        return min(latest_s, max(0.0, at_s - elapsed_s))

    def points(self) -> tuple[float, ...]:
        """POINTS equally likely remaining waits, sorted."""
        points = [self.quantile_s(level) for level in LEVELS]
        for index in range(1, POINTS):  # rounding must not unsort them
            points[index] = max(points[index], points[index - 1])
        return tuple(points)

    def after(self, elapsed_s: float) -> Curve:
        """The curve when `elapsed_s` more have passed; a time-out that has passed without an end was none."""
        total_s = min(self.elapsed_s + elapsed_s, MAX_WAIT_S)
        end_s = self.end_s if self.end_s is not None and total_s < self.end_s else None
        return replace(self, elapsed_s=total_s, end_s=end_s)
