"""Counts of one key: how many calls were at risk in each bin of the grid, and how many ended there.

Covers counting with right-censoring, forgetting, adding up, shrinking a chain of keys towards a prior, and the rows
of the state file. Which keys a call has is `forecaster.py`'s. 46 bins of two float64: 736 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from agentkv.core.curve import BINS, EDGES_S, LEVELS, MAX_WAIT_S

Hazards = npt.NDArray[np.float64]
"""[46]: P(ends in this bin | reached it)."""

Table = npt.NDArray[np.float64]
"""[2, 46]: at risk, ended."""
Factor = npt.NDArray[np.float64]
"""A number as an array without axes: numpy takes half as long with it as with a float."""

_DECIMALS = 5
_ROUNDING = 1e-4
_MOST = 1e12
_DECLARED_SHAPE = math.log(81) / math.log(4)
"""Log-logistic with P10 and P90 at half and at twice the declared time."""
_LOG_EDGES = np.log(np.asarray(EDGES_S))
_LEVELS = np.asarray(LEVELS)
_ONES = np.ones(BINS)
_SURVIVED: list[Table] = list(np.stack([np.tri(BINS + 1, BINS, -1), np.zeros((BINS + 1, BINS))], axis=1))
"""47 of [2, 46]: what a call adds that survived bins 0..last-1 and was lost sight of."""
_ENDED: list[Table] = list(np.stack([np.tri(BINS), np.eye(BINS)], axis=1))
"""46 of [2, 46]: what a call adds that ended in bin `last`."""


class Counts:
    """One key. `calls` were begun; `table[0]` at risk, `table[1]` ended, both [46] and forgotten exponentially."""

    __slots__ = ("at_risk", "calls", "ended", "table")

    def __init__(self) -> None:
        self.calls = 0
        self.table = np.zeros((2, BINS))
        self.at_risk, self.ended = self.table  # views

    def learn(self, step: Table, keep: Factor | None) -> None:
        """Count a `step_of` a call; what was known counts `keep`. None: it is the rest of a call that was told earlier."""
        table = self.table
        if keep is not None:
            self.calls += 1
            np.multiply(table, keep, table)
        np.add(table, step, table)

    def add(self, other: Counts) -> None:
        """Count what another process counted as well."""
        self.calls += other.calls
        self.table += other.table

    def copy(self) -> Self:
        """The same counts, on their own."""
        copied = type(self)()
        copied.add(self)
        return copied

    def row(self) -> list[Any]:
        """[calls, at risk, ended] without the empty end, rounded to 5 decimals."""
        reached = int(np.count_nonzero(self.at_risk))
        return [self.calls, *(side[:reached].round(_DECIMALS).tolist() for side in self.table)]

    @classmethod
    def from_row(cls, row: Sequence[Any]) -> Self:
        """Raises ValueError or TypeError for what `row` cannot have written."""
        calls, at_risk, ended = row
        if type(calls) is not int or calls < 0 or len(at_risk) != len(ended) or len(at_risk) > BINS:
            raise ValueError("not a row of counts")
        if not all(type(x) in (int, float) and 0 <= x <= _MOST for x in (*at_risk, *ended)):
            raise ValueError("counts must be numbers >= 0")
        counts = cls()
        counts.calls = calls
        counts.at_risk[: len(at_risk)] = at_risk
        counts.ended[: len(ended)] = ended
        if (counts.ended > counts.at_risk + _ROUNDING).any() or (np.diff(counts.at_risk) > _ROUNDING).any():
            raise ValueError("more calls ended, or went on, than were running")
        np.minimum(counts.at_risk, counts.ended, out=counts.ended)
        return counts


def as_hazards(values: Sequence[float]) -> Hazards:
    """A row of 46 probabilities."""
    return np.asarray(values, dtype=np.float64)


def as_factor(value: float) -> Factor:
    """A number to multiply counts with."""
    return np.asarray(value, dtype=np.float64)


def step_of(first: int, last: int, *, ended: bool) -> Table:
    """What a call adds that survived the bins [first, last), and ended in bin `last` if `ended`."""
    step = _ENDED[last] if ended else _SURVIVED[last]
    return step - _SURVIVED[first] if first else step


def shrink(prior: Hazards, chain: Iterable[tuple[Counts, Hazards]]) -> Hazards:
    """The hazards of the last key of `chain`, each drawn to the one before as if by `kappa` [46] calls of that.

    h = (ended + kappa h_before) / (at risk + kappa), bin by bin: where few got that far, the broader key speaks.
    """
    hazards = prior
    for counts, kappa in chain:
        drawn = hazards * kappa
        drawn += counts.ended
        weight = counts.at_risk + kappa
        if kappa[0] > 0:
            drawn /= weight
        else:
            drawn = np.divide(drawn, weight, out=hazards.copy(), where=weight > 0)
        hazards = drawn
    return hazards


def survival_of(hazards: Hazards) -> Hazards:
    """[47]: P(T > edge)."""
    survival = np.empty(BINS + 1)
    survival[0] = 1.0
    (1.0 - hazards).cumprod(out=survival[1:])
    return survival


class Shrinker:
    """`survival_of(shrink(...))` in a third of the time: at this size numpy's time is the number of its calls.

    Works in rows of its own, so one call at a time; whoever owns it holds a lock.
    """

    __slots__ = ("_hazards", "_over", "_pair", "_rows", "_survival", "_tail", "_under")

    def __init__(self) -> None:
        self._pair = np.ones((2, BINS))  # ones, over the hazards so far: with kappa, what a table is added to
        self._hazards = self._pair[1]
        self._rows = np.empty((2, BINS))
        self._under, self._over = self._rows
        self._survival = np.ones(BINS + 1)
        self._tail = self._survival[1:]

    def survival(self, prior: Hazards, chain: Iterable[tuple[Counts, Hazards]]) -> Hazards:
        """[47]: P(T > edge) of the last key of `chain`. Each kappa is above zero; else use `shrink`."""
        pair, hazards, rows, under, over = self._pair, self._hazards, self._rows, self._under, self._over
        hazards[:] = prior
        for counts, kappa in chain:
            np.multiply(pair, kappa, rows)
            np.add(rows, counts.table, rows)
            np.divide(over, under, hazards)
        np.subtract(_ONES, hazards, over)
        np.multiply.accumulate(over, 0, None, self._tail)
        return self._survival.copy()


def declared_survival(declared_s: float) -> Hazards:
    """[47]: P(T > edge) of a call that is said to take `declared_s`: half of that to twice that in 80 %."""
    log_odds = _DECLARED_SHAPE * (_LOG_EDGES - math.log(max(declared_s, EDGES_S[0])))
    survival: Hazards = 1.0 / (1.0 + np.exp(log_odds))
    survival /= survival[0]
    return survival


def points_of(survival: Hazards, latest_s: float) -> tuple[float, ...]:
    """`Curve.points` of a wait that starts now, in one stroke."""
    ended = 1.0 - survival
    points = np.exp(np.interp(_LEVELS, ended, _LOG_EDGES))
    if ended[-1] < LEVELS[-1]:
        points[ended[-1] < _LEVELS] = MAX_WAIT_S
    if latest_s < MAX_WAIT_S:
        np.minimum(points, latest_s, out=points)
    return tuple(points.tolist())
