"""Who gives way when somebody needs room: a policy is one sort key, and the greatest key goes first.

Covers the keys. Does not cover who may be evicted at all (never a running, restoring or pinned block), nor the order
inside a context (from its end), nor that copies which are elsewhere too go before those that would be lost: that is
the data plane's (`kv/room.py`) and the simulator's. Pure: facts and a time in, a number or a tuple out.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Protocol

from agentkv.core.forecast import Forecast
from agentkv.policy.waiting import MEDIAN, quantile

FEW_POINTS = 4
"""With fewer points of a forecast left its curve is asked, which knows the tail and takes longer."""


class Awaited(Protocol):
    """A session that may wait. Monotonic seconds.

    `used_s`: its last use. `wait_started_s`, `forecast`: its wait and what was expected of it at the start (None:
    nothing is known, or its call is queued).
    """

    used_s: float
    wait_started_s: float
    forecast: Forecast | None


class Held(Awaited, Protocol):
    """What a key may look at besides. `order`: its place in program order, lower = earlier. `priority`: higher
    is more important. `background`: a side branch that nobody waits for. `tokens`: how long its context is, `recompute_s`:
    how long it would take to compute it again. `idle_share`: the part of its recent time that it waited for tools.
    """

    order: int
    priority: int
    background: bool
    tokens: int
    recompute_s: float
    idle_share: float


EvictKey = Callable[[Held, float], tuple[float, ...]]
"""key(held, now_s): the greater, the sooner its copies go."""


def remaining_s(held: Awaited, now_s: float, q: float = MEDIAN) -> float:
    """How long the wait will still take, given that it has not ended: the `q` quantile of what is left.

    A wait that outlived every point known, or of which nothing is known, is expected to take as long again as it has.
    """
    forecast = held.forecast
    if forecast is None:
        return max(0.0, now_s - held.used_s)
    elapsed_s = max(0.0, now_s - held.wait_started_s)
    points = forecast.remaining_s
    first = bisect_right(points, elapsed_s) if elapsed_s > 0 else 0
    if forecast.curve is not None and len(points) - first < FEW_POINTS:
        return forecast.curve.after(elapsed_s).quantile_s(q)
    if first >= len(points):
        return elapsed_s
    return quantile(points, first, q) - elapsed_s


def least_recently_used(held: Held, now_s: float) -> tuple[float, ...]:
    """LRU: the longest unused goes first."""
    return (now_s - held.used_s,)


def next_use(held: Held, now_s: float) -> tuple[float, ...]:
    """Whoever is expected back last, given that it still waits; lower classes and side branches before all others.

    With true durations this is Belady's rule.
    """
    return (held.background, -held.priority, remaining_s(held, now_s))
