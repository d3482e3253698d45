"""Forecaster: how long a tool call will take, learnt from the calls that ended.

Covers the first form: per tool and first command word the last 64 durations, falling back to the tool, then to all
tools with a prior, then to the prior alone. Does not cover hazards, forgetting and shrinkage (later), nor
conditioning on elapsed time, which is `Forecast.after`. Cancelled and paused calls are censored: all that is known is
that they would have run longer, so they are not learnt as durations (a bias towards short calls that we accept here).
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, Self

from agentkv.core.forecast import Forecast
from agentkv.core.hint import ToolStatus
from agentkv.log import count, failed

KEPT_CALLS = 64
"""Durations kept per key."""
MAX_POINTS = 21
"""Points of a forecast."""
MAX_KEYS = 4096
"""Keys kept; the one that was learnt least recently leaves first (models invent commands)."""
MAX_WAIT_S = 30 * 86_400.0
"""Longer waits count as thirty days."""
FEW_CALLS = 5
"""Below this many calls each one is spread, so that one sample does not look like certainty."""
VERSION = "agentkv.forecaster/1"

PRIOR_S: tuple[float, ...] = tuple(0.05 * 8000 ** (i / (MAX_POINTS - 1)) for i in range(MAX_POINTS))
"""Nothing known: log-uniform from 50 ms to 400 s, median 4.5 s."""
DECLARED_SPREAD = (0.5, 0.75, 1.0, 1.5, 2.0)
"""A declared time is believed within a factor of two."""
PROGRESS_SPREAD = (0.7, 0.85, 1.0, 1.2, 1.5)

_Key = tuple[str | None, str | None]
_ALL: _Key = (None, None)  # (tool, command); command None = the tool as a whole, tool None as well = all tools


class Forecaster:
    """Learns durations and forecasts waits. Thread-safe; a forecast costs tens of microseconds."""

    def __init__(self) -> None:
        self._calls: OrderedDict[_Key, deque[float]] = OrderedDict()
        self._lock = threading.Lock()

    def learn(self, tool: str, command: str, duration_s: float, status: ToolStatus = ToolStatus.SUCCEEDED) -> None:
        """A call of `tool` ended after `duration_s` with `status`.

        A failed call ended the wait like any other and is learnt. Cancelled, paused and running calls are not. A
        duration that is no number, negative or infinite is ignored and counted.
        """
        if status not in (ToolStatus.SUCCEEDED, ToolStatus.FAILED):
            return
        seconds = _seconds(duration_s)
        if seconds is None:
            count("forecast_bad_duration")
            return
        with self._lock:
            for key in ((tool, command), (tool, None), _ALL):
                self._learn(key, seconds)
            while len(self._calls) > MAX_KEYS:
                self._calls.popitem(last=False)

    def _learn(self, key: _Key, seconds: float) -> None:
        calls = self._calls.get(key)
        if calls is None:
            calls = self._calls[key] = deque(maxlen=KEPT_CALLS)
        calls.append(seconds)
        self._calls.move_to_end(key)

    def forecast(self, tool: str, command: str = "", expect_s: float | None = None) -> Forecast:
        """The wait for a call of `tool` that starts now.

        History of (tool, command), else of the tool; else that of all tools together with the prior; else the prior.
        `expect_s` (declared by the caller, who knows this very call) makes half of the distribution, what is known
        of the tool the other half; a value that is no number, negative or infinite is ignored and counted.
        """
        declared = None if expect_s is None else _seconds(expect_s)
        if expect_s is not None and declared is None:
            count("forecast_bad_expect")
        with self._lock:
            own = tuple(self._calls.get((tool, command)) or self._calls.get((tool, None)) or ())
            everybody = tuple(self._calls.get(_ALL, ()))
        if declared is not None:
            points = tuple(min(declared * factor, MAX_WAIT_S) for factor in DECLARED_SPREAD)
            if own:
                points += _thin(_spread(own), len(points))
            return Forecast(remaining_s=tuple(sorted(points)), n=len(own), source="declared")
        if own:
            return Forecast(remaining_s=_thin(_spread(own), MAX_POINTS), n=len(own), source="history")
        if everybody:
            mixed = _thin((*everybody, *PRIOR_S), MAX_POINTS)
            return Forecast(remaining_s=mixed, n=len(everybody), source="history")
        return Forecast(remaining_s=PRIOR_S, n=0, source="prior")

    def to_json(self) -> dict[str, Any]:
        """What was learnt, as plain JSON; holds tool names and command words, never arguments."""
        with self._lock:
            calls = [[tool, command, list(seconds)] for (tool, command), seconds in self._calls.items()]
        return {"v": VERSION, "calls": calls}

    @classmethod
    def from_json(cls, state: Any) -> Self:
        """The forecaster that `to_json` described. What cannot be read is left out and counted: never an error."""
        forecaster = cls()
        if not isinstance(state, Mapping) or state.get("v") != VERSION or not isinstance(state.get("calls"), list):
            failed("forecast_state_unreadable", expected=VERSION)
            return forecaster
        for row in state["calls"]:
            match row:
                case [(str() | None) as tool, (str() | None) as command, list() as durations]:
                    known = [s for s in map(_seconds, durations) if s is not None]
                    for seconds in known[-KEPT_CALLS:]:
                        forecaster._learn((tool, command), seconds)
                case _:
                    count("forecast_state_bad_row")
        return forecaster


def progress_forecast(elapsed_s: float, progress: float, *, n: int = 0) -> Forecast | None:
    """The whole duration (from the start) of a call that did `progress` (0..1] of its work in `elapsed_s`.

    None where the report says nothing: not a number, <= 0, or no time has passed. Like every forecast at the start
    of a wait it is to be conditioned with `.after(elapsed_s)`.
    """
    share, elapsed = _seconds(progress), _seconds(elapsed_s)
    if not share or not elapsed:
        return None
    total_s = elapsed / min(share, 1.0)
    rest_s = total_s - elapsed
    points = tuple(min(elapsed + rest_s * factor, MAX_WAIT_S) for factor in PROGRESS_SPREAD)
    return Forecast(remaining_s=points, n=n, source="declared")


def _seconds(value: object) -> float | None:
    """`value` as seconds in [0, MAX_WAIT_S]; None for what is no duration."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        seconds = float(value)
    except OverflowError:
        return None
    return min(seconds, MAX_WAIT_S) if 0 <= seconds < math.inf else None  # NaN compares false


def _spread(calls: Sequence[float]) -> tuple[float, ...]:
    """`calls` as points; fewer than FEW_CALLS count as thirds around themselves: n = 1 gives x/2, x, 2x."""
    n = len(calls)
    if n >= FEW_CALLS:
        return tuple(calls)
    factor = 1 + 1 / n
    return tuple(min(s * f, MAX_WAIT_S) for s in calls for f in (1 / factor, 1.0, factor))


def _thin(points: Iterable[float], limit: int) -> tuple[float, ...]:
    """`points` sorted; where there are more than `limit`, evenly spaced quantiles (first and last stay)."""
    ordered = tuple(sorted(points))
    if len(ordered) <= limit:
        return ordered
    whole = Forecast(remaining_s=ordered, n=len(ordered), source="history")
    return tuple(whole.quantile_s(i / (limit - 1)) for i in range(limit))
