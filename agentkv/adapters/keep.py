"""Keep: what the policy would have an engine do with a waiting context, where only the engine knows where its KV is.

Covers a policy's decision as the wire's `keep`: a tier, for how long, and how strongly. What the decision needs and nobody
here can see (copy and prefill rates, whether memory is short) is assumed: `Rates` of a large GPU unless others are given,
and that memory is somewhat short. It is advice; the engine knows better.
"""

from __future__ import annotations

from dataclasses import dataclass

from agentkv.core.forecast import Forecast
from agentkv.core.hint import Hint, HintKind
from agentkv.core.residency import Action, Policy, Residency, Tier
from agentkv.hints.wire import WireHint, WireKeep
from agentkv.policy.hazard import hazard

MOST_TTL_S = 86_400.0
_DEMAND = 20
"""Taken for granted: one context is waited for, twenty times as much room as it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Seconds for a token: to bring its KV back from host and from disk, and to compute it anew."""

    host_s: float = 5e-6
    disk_s: float = 50e-6
    compute_s: float = 100e-6


def keep_of(
    forecast: Forecast,
    tokens: int,
    *,
    load_s: float | None = None,
    rates: Rates | None = None,
    policy: Policy | None = None,
) -> WireKeep:
    """What `policy` (hazard unless given) does with a context of `tokens` that waits as `forecast` says.

    `load_s`: how long it takes to compute anew, where a call has shown it. The ttl is how long nine of ten such waits last.
    """
    rates = rates or Rates()
    policy = policy or hazard().decide
    context = Residency(
        session="", tokens=tokens, block_bytes=1, total_blocks=1, device_blocks=1, host_blocks=0, unwritten_blocks=1,
        restore_host_s=tokens * rates.host_s, recompute_s=tokens * rates.compute_s if load_s is None else load_s,
        pressed=True, free_blocks=0, queued=1, demand_blocks=_DEMAND,
    )  # fmt: skip
    moves = {move.action: move for move in policy(context, forecast, 0.0, 0.0).moves}
    ttl_ms = round(1000 * min(MOST_TTL_S, forecast.quantile_s(0.9)))
    if Action.DROP in moves:
        return WireKeep(tier="device", ttl_ms=0, strength="drop")
    if Action.DEMOTE in moves:
        to = moves[Action.DEMOTE].to
        return WireKeep(tier="disk" if to is Tier.DISK else "host", ttl_ms=ttl_ms, strength="demote")
    return WireKeep(tier="device", ttl_ms=ttl_ms, strength="retain")


def wire_hint(hint: Hint, *, rates: Rates | None = None, policy: Policy | None = None) -> WireHint:
    """The hint as it travels, with what the policy says of a wait (and nothing is kept of a session that is over)."""
    about = hint.about
    if hint.kind is HintKind.SESSION_END:
        return WireHint.of(hint, keep=WireKeep(tier="device", ttl_ms=0, strength="drop"))
    if hint.wait is None or about is None:
        return WireHint.of(hint)
    left = hint.wait.after(hint.call.elapsed_s) if hint.call is not None else hint.wait
    return WireHint.of(hint, keep=keep_of(left, about.tokens, load_s=about.load_s, rates=rates, policy=policy))
