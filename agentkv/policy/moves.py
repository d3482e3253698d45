"""Decisions that several policies share: write through, demote, bring back. Pure, for one session at a time."""

from __future__ import annotations

import math

from agentkv.core.forecast import Forecast
from agentkv.core.residency import Action, Decision, Move, Residency, Tier

SOONEST_S = 0.05
"""No question sooner than this after the last."""


def nothing(residency: Residency, forecast: Forecast, started_s: float, now_s: float) -> Decision:  # noqa: ARG001
    """Nothing moves by plan."""
    return Decision(reason="nothing moves by plan")


def write_through(residency: Residency, forecast: Forecast, started_s: float, now_s: float) -> Decision:  # noqa: ARG001
    """What the host does not have is copied there when the wait starts."""
    return Decision(moves=written(residency, now_s), reason="written through")


def written(residency: Residency, now_s: float) -> tuple[Move, ...]:
    """The move that copies to host what only the device has; none if there is nothing to copy or no host."""
    if residency.unwritten_blocks <= 0 or not residency.has_host:
        return ()
    reason = f"{residency.unwritten_blocks} blocks are on the device only: written while the link is idle"
    return (move(residency, Action.WRITE, Tier.HOST, now_s, reason),)


def away_blocks(residency: Residency) -> int:
    """Blocks that are somewhere, but not on the device."""
    return max(0, residency.total_blocks - residency.missing_blocks - residency.device_blocks)


def way_back_s(residency: Residency) -> float:
    """Seconds to bring back what is away, by the slowest tier that it has to come from."""
    total, away = residency.total_blocks, away_blocks(residency)
    if total <= 0 or away == 0:
        return 0.0
    from_disk = min(
        away, max(0, total - residency.missing_blocks - max(residency.host_blocks, residency.device_blocks))
    )
    share_s = (away - from_disk) * residency.restore_host_s + from_disk * residency.restore_disk_s
    return share_s / total


def later(now_s: float, seconds: float) -> float:
    """A moment `seconds` from now, and certainly later."""
    return max(now_s + max(seconds, SOONEST_S), math.nextafter(now_s, math.inf))


def move(residency: Residency, action: Action, to: Tier | None, now_s: float, reason: str) -> Move:
    """A move for this session that is due now."""
    return Move(session=residency.session, action=action, to=to, not_before_s=now_s, reason=reason)
