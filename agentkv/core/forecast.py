"""Forecast: a distribution of the time that is still to wait.

Covers the value and its arithmetic (quantiles, conditioning on elapsed time). How it is learnt is
`hints/forecaster.py`; what is done with it is `policy/`.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Source = Literal["history", "declared", "prior"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Equally likely remaining waits in seconds, sorted; `n` is the number of calls behind them.

    An empirical distribution over at most a few dozen points: quantiles interpolate between order statistics.
    `overdue` says that the call outlived every point known, and what is left is a guess (the Lindy rule:
    remaining ~ elapsed).
    """

    remaining_s: tuple[float, ...]
    n: int
    source: Source
    overdue: bool = False

    def __post_init__(self) -> None:
        if not self.remaining_s:
            raise ValueError("a forecast needs at least one point")
        if any(not 0 <= value < float("inf") for value in self.remaining_s):
            raise ValueError(f"waits must be finite and >= 0: {self.remaining_s}")
        if any(a > b for a, b in zip(self.remaining_s, self.remaining_s[1:], strict=False)):
            raise ValueError("waits must be sorted")

    def quantile_s(self, q: float) -> float:
        """The wait that is not exceeded with probability `q` in [0, 1] (type 7, linear interpolation)."""
        if not 0.0 <= q <= 1.0:
            raise ValueError(f"q={q} is not in [0, 1]")
        position = q * (len(self.remaining_s) - 1)
        low = int(position)
        high = min(low + 1, len(self.remaining_s) - 1)
        return self.remaining_s[low] + (position - low) * (self.remaining_s[high] - self.remaining_s[low])

    def probability_within(self, horizon_s: float) -> float:
        """P(the wait ends within `horizon_s`)."""
        return bisect.bisect_right(self.remaining_s, horizon_s) / len(self.remaining_s)

    def after(self, elapsed_s: float) -> Forecast:
        """The forecast given that the call has run `elapsed_s` more and has not ended.

        Points that have passed are dropped, the others shortened. If all have passed the call is overdue, and
        the remaining time is guessed to be about as long as it ran: half, one and two times `elapsed_s`.
        """
        if elapsed_s <= 0:
            return self
        left = tuple(value - elapsed_s for value in self.remaining_s if value > elapsed_s)
        if left:
            return Forecast(remaining_s=left, n=self.n, source=self.source, overdue=self.overdue)
        guess = (0.5 * elapsed_s, elapsed_s, 2 * elapsed_s)
        return Forecast(remaining_s=guess, n=self.n, source=self.source, overdue=True)


def last_of(forecasts: Sequence[Forecast]) -> Forecast:
    """The wait for the last of several independent calls: P(all ended within x) = product of their P(within x).

    Each forecast counts from the same moment. The answer holds at most 21 points.
    """
    if len(forecasts) == 1:
        return forecasts[0]
    grid = sorted({value for forecast in forecasts for value in forecast.remaining_s})
    within = [math.prod(f.probability_within(x) for f in forecasts) for x in grid]
    points = []
    position = 0
    for step in range(21):
        while position < len(grid) - 1 and within[position] < step / 20:
            position += 1
        points.append(grid[position])
    first_possible = max(forecast.remaining_s[0] for forecast in forecasts)
    return Forecast(
        remaining_s=tuple(max(point, first_possible) for point in points),
        n=min(forecast.n for forecast in forecasts),
        source=max((f.source for f in forecasts), key=("history", "declared", "prior").index),
        overdue=any(forecast.overdue for forecast in forecasts),
    )
