"""Bounds: what could be had by somebody who knows the future. Not policies: nobody can run them.

`belady` knows how long every wait lasts; infinite memory is the simulator's (`infinite`).
"""

from __future__ import annotations

from dataclasses import replace

from agentkv.core.forecast import Forecast
from agentkv.core.residency import Action, Decision, Residency, Tier
from agentkv.policy.evict import next_use
from agentkv.policy.lazy import lazy
from agentkv.policy.moves import away_blocks, later, move, way_back_s, written
from agentkv.policy.rules import Rules
from agentkv.policy.schedule import program_order

MARGIN = 1.5
"""A copy starts this many times its own length before the wait ends: links have queues."""


def belady() -> Rules:
    """True durations; whoever is used last gives way, and what is away is back just in time, in program order."""
    return Rules(
        name="belady", decide=just_in_time, evict_key=next_use, turn_key=program_order, sight="oracle",
        elsewhere_first=True, prefetch_evicts=True,
    )  # fmt: skip


def lazy_oracle() -> Rules:
    """`lazy` with true durations: what better forecasts could still give it."""
    return replace(lazy(), name="lazy-oracle", sight="oracle")


def just_in_time(residency: Residency, forecast: Forecast, started_s: float, now_s: float) -> Decision:
    """Write through, and start the way back so that it ends when the wait does."""
    moves, away = written(residency, now_s), away_blocks(residency)
    left_s = forecast.after(max(0.0, now_s - started_s)).quantile_s(0.5)
    start_s = left_s - MARGIN * (way_back_s(residency) if away else residency.restore_host_s)
    if start_s > 0:
        return Decision(moves=moves, ask_again_s=later(now_s, start_s), reason=f"needed in {left_s:.2f} s")
    if not away:
        return Decision(moves=moves, reason="on the device when it is needed")
    back = move(residency, Action.PREFETCH, Tier.DEVICE, now_s, f"needed in {left_s:.2f} s")
    return Decision(moves=(*moves, back), reason=back.reason)
