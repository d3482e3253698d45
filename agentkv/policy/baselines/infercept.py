"""InferCept's min-waste rule."""

from __future__ import annotations

from typing import Literal

from agentkv.core.forecast import Forecast
from agentkv.core.residency import Action, Decision, Residency, Tier
from agentkv.policy.evict import Held, remaining_s
from agentkv.policy.moves import later, move
from agentkv.policy.rules import Rules


def infercept(*, sight: Literal["elapsed", "oracle"] = "elapsed") -> Rules:
    """Preserve, discard or swap, whichever wastes least memory x time.

    Source: InferCept (ICML 2024), min-waste. Waste of preserving = T_int x C, of discarding = T_pre(C) x C (and as much
    of the others'), of swapping = 2 x T_swap(C) x C, zero inside a budget hidden under compute. The paused are sorted
    by min(preserve, discard), the most wasteful are swapped. T_int is the elapsed time, or known (its released code).
    """
    key = _known if sight == "oracle" else _elapsed
    return Rules(name=f"infercept-{sight}", decide=_swap, evict_key=key, sight=sight)


def _elapsed(held: Held, now_s: float) -> tuple[float, ...]:
    return (_waste(held, now_s - held.wait_started_s),)


def _known(held: Held, now_s: float) -> tuple[float, ...]:
    return (_waste(held, remaining_s(held, now_s)),)


def _waste(held: Held, wait_s: float) -> float:
    preserve = wait_s * held.tokens
    discard = 2 * held.recompute_s * held.tokens
    return min(preserve, discard)


def _swap(residency: Residency, forecast: Forecast, started_s: float, now_s: float) -> Decision:
    elapsed_s = max(0.0, now_s - started_s)
    wait_s = elapsed_s if forecast.overdue else forecast.after(elapsed_s).quantile_s(0.5)
    swap_s = 2 * residency.restore_host_s
    if not residency.has_host or residency.unwritten_blocks <= 0:
        return Decision(reason="nothing to swap")
    if min(wait_s, 2 * residency.recompute_s) > swap_s:
        reason = f"preserving wastes {wait_s:.2f} s of its memory, swapping {swap_s:.2f} s"
        return Decision(moves=(move(residency, Action.DEMOTE, Tier.HOST, now_s, reason),), reason=reason)
    return Decision(ask_again_s=later(now_s, swap_s - elapsed_s), reason="preserving wastes least so far")
