"""Forecast: a distribution of the time that is still to wait.

Covers the value and its arithmetic (quantiles, conditioning on elapsed time, the last of several). How it is learnt
is `hints/forecaster.py`; what is done with it is `policy/`; the grid of learnt ones is `core/curve.py`.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from agentkv.core.curve import EDGES_S, MAX_WAIT_S, OVERDUE, Curve

Source = Literal["history", "declared", "prior"]
State = Literal["expected", "unknown", "overdue"]

_ENOUGH_POINTS = 8
"""Fewer points than this that have not passed are replaced by fresh ones from the curve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Equally likely remaining waits in seconds, sorted; `n` is the number of calls behind them.

    With a `curve` quantiles and probabilities are the curve's, in the tail as well, and the points abbreviate it;
    without, the points are all that is known and quantiles interpolate between order statistics. `overdue` says that
    the call outlived every point known, and what is left is a guess (remaining ~ elapsed, or the curve's tail).
    """

    remaining_s: tuple[float, ...]
    n: int
    source: Source
    overdue: bool = False
    curve: Curve | None = None

    def __post_init__(self) -> None:
        points = self.remaining_s
        if not points:
            raise ValueError("a forecast needs at least one point")
        if not (min(points) >= 0 and math.isfinite(math.fsum(points))):  # the sum: NaN hides from min and max
            raise ValueError(f"waits must be finite and >= 0: {points}")
        if points != tuple(sorted(points)):
            raise ValueError("waits must be sorted")

    @classmethod
    def of_curve(cls, curve: Curve, *, n: int, source: Source) -> Forecast:
        """The forecast that a curve tells."""
        overdue = curve.elapsed_s > 0 and curve.outlives(curve.elapsed_s) < OVERDUE
        return cls(remaining_s=curve.points(), n=n, source=source, overdue=overdue, curve=curve)

    @property
    def state(self) -> State:
        """Overdue: it outlived what is known. Unknown: no call and no declaration stands behind it."""
        if self.overdue:
            return "overdue"
        return "unknown" if self.source == "prior" else "expected"

    @property
    def never(self) -> float:
        """P(the wait never ends): the mass at infinity."""
        return 0.0 if self.curve is None else self.curve.never

    def quantile_s(self, q: float) -> float:
        """The wait that is not exceeded with probability `q` in [0, 1]; without a curve type 7 (linear)."""
        if not 0.0 <= q <= 1.0:
            raise ValueError(f"q={q} is not in [0, 1]")
        if self.curve is not None:
            return self.curve.quantile_s(q)
        position = q * (len(self.remaining_s) - 1)
        low = int(position)
        high = min(low + 1, len(self.remaining_s) - 1)
        return self.remaining_s[low] + (position - low) * (self.remaining_s[high] - self.remaining_s[low])

    def probability_within(self, horizon_s: float) -> float:
        """P(the wait ends within `horizon_s`)."""
        if self.curve is not None:
            return self.curve.within(horizon_s)
        return bisect.bisect_right(self.remaining_s, horizon_s) / len(self.remaining_s)

    def after(self, elapsed_s: float) -> Forecast:
        """The forecast given that the call has run `elapsed_s` more and has not ended.

        Points that have passed are dropped, the others shortened; a curve is conditioned, and gives fresh points when
        few are left. If all have passed the call is overdue; without a curve the remaining time is then guessed to
        be about as long as it ran: half, one and two times `elapsed_s`.
        """
        if not elapsed_s > 0:
            return self
        left = tuple(value - elapsed_s for value in self.remaining_s if value > elapsed_s)
        if self.curve is not None:
            curve = self.curve.after(elapsed_s)
            if len(left) < _ENOUGH_POINTS:
                return Forecast.of_curve(curve, n=self.n, source=self.source)
            return Forecast(remaining_s=left, n=self.n, source=self.source, overdue=self.overdue, curve=curve)
        if left:
            return Forecast(remaining_s=left, n=self.n, source=self.source, overdue=self.overdue)
        guess = tuple(min(factor * elapsed_s, MAX_WAIT_S) for factor in (0.5, 1.0, 2.0))
        return Forecast(remaining_s=guess, n=self.n, source=self.source, overdue=True)


def last_of(forecasts: Sequence[Forecast]) -> Forecast:
    """The wait for the last of several independent calls: P(all ended within x) = product of their P(within x).

    Each forecast counts from the same moment. The answer holds at most 21 points, and a curve if any of them does.
    """
    if len(forecasts) == 1:
        return forecasts[0]
    n = min(forecast.n for forecast in forecasts)
    source = max((f.source for f in forecasts), key=("history", "declared", "prior").index)
    overdue = any(forecast.overdue for forecast in forecasts)
    if any(forecast.curve is not None for forecast in forecasts):
        survival = [1.0]
        for shares in zip(*(_within_edges(forecast) for forecast in forecasts), strict=True):
            survival.append(min(survival[-1], max(0.0, 1.0 - math.prod(shares))))
        curve = Curve(survival=tuple(survival), end_s=_last_end_s(forecasts))
        return Forecast(remaining_s=curve.points(), n=n, source=source, overdue=overdue, curve=curve)
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
        remaining_s=tuple(max(point, first_possible) for point in points), n=n, source=source, overdue=overdue
    )


def _within_edges(forecast: Forecast) -> list[float]:
    """P(the wait ends within an edge of the grid), for all but the first."""
    if forecast.curve is not None:
        return forecast.curve.within_edges()
    return [forecast.probability_within(edge_s) for edge_s in EDGES_S[1:]]


def _last_end_s(forecasts: Sequence[Forecast]) -> float | None:
    """By when all have ended for certain, in seconds from now; None where one of them may take for ever."""
    last_s = 0.0
    for forecast in forecasts:
        if forecast.curve is None:
            last_s = max(last_s, forecast.remaining_s[-1])
        elif forecast.curve.end_s is None:
            return None
        else:
            last_s = max(last_s, forecast.curve.end_s - forecast.curve.elapsed_s)
    return last_s
