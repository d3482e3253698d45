"""Continuum's time-to-live: how long a finished turn's context is pinned."""

from __future__ import annotations

import functools

from agentkv.core.forecast import Forecast
from agentkv.policy.evict import EvictKey, Held
from agentkv.policy.moves import write_through
from agentkv.policy.rules import Rules
from agentkv.policy.schedule import program_order

FEW = 100
"""Calls of a tool below which its distribution is not used."""
SHORT_S = 2.0
"""The pin where nothing is known, and the preview's threshold."""


def continuum(*, queue_s: float = 2.0) -> Rules:
    """Pin until tau* = argmax over tau in {0} and samples of P(D <= tau) x (queue_s + reload) - tau, then LRU.

    Source: Continuum (arXiv 2511.02230), eta = 1 and the mean queueing delay as a constant; programs first come first
    served; below 100 samples 2 s. With host offload, as in its evaluation with LMCache.
    """
    return Rules(name="continuum", decide=write_through, evict_key=_key(_best_pin, queue_s), turn_key=program_order)


def continuum_preview() -> Rules:
    """Pin 2 s if the tool's mean is at most 2 s, else not. Source: Continuum's public preview code."""
    return Rules(name="continuum-2s", decide=write_through, evict_key=_key(_preview_pin, 0.0), turn_key=program_order)


def _key(pin: object, queue_s: float) -> EvictKey:
    return functools.partial(_pinned_last, pin, queue_s)


def _pinned_last(pin: object, queue_s: float, held: Held, now_s: float) -> tuple[float, ...]:
    forecast = held.forecast
    pinned = forecast is not None and now_s - held.wait_started_s < pin(forecast, queue_s + held.recompute_s)  # type: ignore[operator]
    return (not pinned, now_s - held.used_s)


@functools.lru_cache(maxsize=4096)
def _best_pin(forecast: Forecast, worth_s: float) -> float:
    if forecast.n < FEW:
        return SHORT_S
    points = forecast.remaining_s
    gains = [(0.0, 0.0)] + [((i + 1) / len(points) * worth_s - tau, tau) for i, tau in enumerate(points)]
    return max(gains)[1]


def _preview_pin(forecast: Forecast, worth_s: float) -> float:  # noqa: ARG001
    points = forecast.remaining_s
    return SHORT_S if sum(points) / len(points) <= SHORT_S else 0.0
