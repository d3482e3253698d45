"""Hazard: be on the device exactly while the wait's end is near enough to be worth the room.

P(the tool returns within the next R | it still runs) >= h / a, with R the time to bring the context back, a the price of
one second of the agent's stall (1 here), h the price of holding the context one second on the device. h is a shadow
price: nothing while nobody waits for memory, else the stall that this context's room would spare: of `queued` calls
that lack `demand_blocks`, as many as it could serve. Does not cover the boundary between host and disk: there pressure
decides, by the same order.
"""

from __future__ import annotations

import functools

from agentkv.core.forecast import Forecast
from agentkv.core.residency import Action, Decision, Residency, Tier
from agentkv.errors import ConfigError
from agentkv.policy.evict import Held, remaining_s
from agentkv.policy.moves import away_blocks, later, move, way_back_s, written
from agentkv.policy.rules import Rules
from agentkv.policy.schedule import program_order

STEPS = 8
"""Asks again after R / 2 at first, and when the wait is this part longer, whichever is later."""


def hazard(*, stall_price: float = 1.0) -> Rules:
    """The full rule; `stall_price` is a. Raises ConfigError on a price that is no number > 0."""
    if isinstance(stall_price, bool) or not isinstance(stall_price, int | float) or not stall_price > 0:
        raise ConfigError(f"hazard(stall_price={stall_price!r}): a number > 0 is needed")
    return Rules(
        name="hazard", decide=functools.partial(_decide, float(stall_price)), evict_key=stall_rate,
        turn_key=program_order, prefetch_evicts=True,
    )  # fmt: skip


def stall_rate(held: Held, now_s: float) -> tuple[float, ...]:
    """The lowest expected stall rate per byte goes first: the longest expected wait where the way back is a copy."""
    return (held.background, -held.priority, remaining_s(held, now_s))


def holding_price(residency: Residency) -> float:
    """h: seconds of other calls' stall that one second of this context on the device costs."""
    if residency.queued <= 0 or residency.demand_blocks <= 0:
        return 0.0
    return residency.queued * min(1.0, residency.total_blocks / residency.demand_blocks)


def _decide(stall_price: float, residency: Residency, forecast: Forecast, started_s: float, now_s: float) -> Decision:
    elapsed_s = max(0.0, now_s - started_s)
    left = forecast.after(elapsed_s)
    moves = written(residency, now_s)
    away = away_blocks(residency)
    back_s = way_back_s(residency) if away else residency.restore_host_s
    likely = left.probability_within(back_s)
    price = holding_price(residency) / stall_price
    words = f"P(back within {back_s:.2f} s) = {likely:.2f}, h/a = {price:.2f}"
    again_s = later(now_s, max(back_s / 2, elapsed_s / STEPS, left.quantile_s(0.5) / STEPS))
    if away and not residency.background and likely >= price and (likely > 0 or away <= (residency.free_blocks or 0)):
        back = move(residency, Action.PREFETCH, Tier.DEVICE, now_s, f"{words}: brought back")
        return Decision(moves=(*moves, back), ask_again_s=again_s, reason=back.reason)
    if residency.has_host and residency.device_blocks > 0 and likely < price:
        down = move(residency, Action.DEMOTE, Tier.HOST, now_s, f"{words}: makes room")
        return Decision(moves=(down,), ask_again_s=again_s, reason=down.reason)
    return Decision(moves=moves, ask_again_s=again_s, reason=f"{words}: stays")
