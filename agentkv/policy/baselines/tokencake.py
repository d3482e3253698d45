"""TokenCake's offload by predicted duration."""

from __future__ import annotations

from agentkv.core.forecast import Forecast
from agentkv.core.residency import Action, Decision, Move, Residency, Tier
from agentkv.policy.evict import least_recently_used
from agentkv.policy.moves import away_blocks, later, move, way_back_s
from agentkv.policy.rules import Rules

MARGIN = 1.2


def tokencake() -> Rules:
    """Offload when the predicted wait exceeds the round trip with margin and memory is pressed; upload predictively.

    Source: TokenCake (arXiv 2510.18586). d = the mean of the caller's estimate and an average of the history, 1 s where
    nothing is known; here the forecast's mean stands for it. Its score of waiting demand and host room is the pressure.
    """
    return Rules(name="tokencake", decide=_decide, evict_key=least_recently_used)


def _decide(residency: Residency, forecast: Forecast, started_s: float, now_s: float) -> Decision:
    expected_s = sum(forecast.remaining_s) / len(forecast.remaining_s) if forecast.n else 1.0
    elapsed_s = max(0.0, now_s - started_s)
    back_s = way_back_s(residency)
    moves: tuple[Move, ...] = ()
    if away_blocks(residency) and elapsed_s + back_s >= expected_s:
        moves = (move(residency, Action.PREFETCH, Tier.DEVICE, now_s, f"expected after {expected_s:.1f} s"),)
        return Decision(moves=moves, reason=moves[0].reason)
    round_trip_s = 2 * MARGIN * residency.restore_host_s
    if residency.has_host and residency.unwritten_blocks > 0 and residency.pressed and expected_s > round_trip_s:
        reason = f"expected {expected_s:.1f} s, round trip {round_trip_s:.2f} s"
        moves = (move(residency, Action.DEMOTE, Tier.HOST, now_s, reason),)
    soon_s = expected_s - back_s - elapsed_s
    again_s = later(now_s, min(soon_s, 2.0) if soon_s > 0 else max(1.0, elapsed_s / 4))
    return Decision(moves=moves, ask_again_s=again_s, reason="uploaded when expected, offloaded when pressed")
