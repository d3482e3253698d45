"""Lazy: pressure-gated lazy tiering, the default. A move needs a reason.

Written ahead to host when a wait starts (the link is idle then) if that pushes nobody out, evicted only under pressure
and by `evict_key`, loaded on demand, resumed and kept in program order; whole tasks wait outside rather than that contexts
are lost and computed again. Does not cover who may be evicted at all, nor the copies: those are the data plane's. Measured in
docs/policies.md.
"""

from __future__ import annotations

import functools

from agentkv.core.forecast import Forecast
from agentkv.core.residency import Decision, Residency
from agentkv.errors import ConfigError
from agentkv.policy.evict import Held, remaining_s
from agentkv.policy.moves import written
from agentkv.policy.rules import Rules
from agentkv.policy.schedule import program_order, without_loss

LONG_S = 30.0
"""A wait that is expected to last longer makes its session the first to give way."""


def lazy(*, long_s: float = LONG_S) -> Rules:
    """The default. Sessions whose wait is expected to last more than `long_s` give way first, the last one back in
    front; among the others the latest task. Raises ConfigError on a `long_s` that is no number >= 0.
    """
    if isinstance(long_s, bool) or not isinstance(long_s, int | float) or not long_s >= 0:
        raise ConfigError(f"lazy(long_s={long_s!r}): a number >= 0 is needed")
    return Rules(
        name="lazy",
        decide=decide,
        evict_key=functools.partial(gives_way, long_s),
        turn_key=program_order,
        admit=without_loss,
    )


def gives_way(long_s: float, held: Held, now_s: float) -> tuple[float, ...]:
    """Side branches first, lower classes before higher ones; then long waits, the last one back in front; then the
    latest task. Program order keeps the same few contexts in the fast tiers: ordered by next use alone, more sessions
    than fit push each other out in a circle, and nobody finds its context.
    """
    left_s = remaining_s(held, now_s)
    long = left_s > long_s
    return (held.background, -held.priority, long, left_s if long else held.order)


def decide(residency: Residency, forecast: Forecast, started_s: float, now_s: float) -> Decision:  # noqa: ARG001
    """Write ahead what only the device has, if somebody will soon need the device and nobody needs the host's room.

    A full host with a disk behind it takes the copy: what must leave it for that is written to disk, while links idle.

    Nothing else moves by plan: what is away comes back on demand. Measured: bringing it back into free room ahead moves
    more bytes and spares no stall worth the name, because room is free only where few are away.
    """
    if residency.unwritten_blocks <= 0 or not residency.has_host:
        return Decision(reason="nothing to write")
    if residency.free_blocks is not None and residency.free_blocks >= residency.total_blocks:
        return Decision(reason="the device has room for another context like this: stays, unwritten")
    full = residency.host_free_blocks is not None and residency.host_free_blocks < residency.unwritten_blocks
    if full and not residency.has_disk:
        return Decision(reason="the host is full: written only if it must give way, so that it pushes nobody out")
    return Decision(moves=written(residency, now_s), reason="written ahead, so that it can give way at once")
