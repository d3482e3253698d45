"""What to do with a session's blocks while it waits: the ladder of requirement A4, and keeping everything.

Covers `ladder`, `keep`, and `make_policy` by name. A policy is a pure function (`core.residency.Policy`): no clock,
no I/O, no memory of what it said before; what it needs to know is in the Residency. Does not cover prices and the
hazard rule (later), nor who is evicted under pressure (the tiers).
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from agentkv.core.forecast import Forecast
from agentkv.core.residency import Action, Decision, Move, Policy, Residency, Tier
from agentkv.errors import ConfigError
from agentkv.policy.waiting import LOW, MEDIAN, ends_of, next_end, outlived_at

MIN_AHEAD_S = 0.05
"""No question sooner than this after the last; what falls due within it is due now."""
JUST_BEGUN_S = 1e-3
"""A wait that began less than this ago is what was forecast: conditioning it would cost more than it tells."""
BACKOFF = 1.5
"""Overdue: the next question when the wait is this many times as long."""
WORTH = 4.0
"""Once waits of this kind have begun to end, a context leaves again only for this many times its way back."""
OVERDUE_GRACE = 0.25
"""A wait is given up as overdue only once it is late by this share of the longest wait known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rungs:
    keep_s: float
    host_s: float
    drop_tokens: int
    margin_s: float

    def __post_init__(self) -> None:
        for name in ("keep_s", "host_s", "drop_tokens", "margin_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
                raise ConfigError(f"ladder({name}={value!r}): a number >= 0 is needed")
        if self.keep_s > self.host_s:
            raise ConfigError(f"ladder(keep_s={self.keep_s}, host_s={self.host_s}): keep_s must not exceed host_s")
        if math.isinf(self.margin_s):
            raise ConfigError("ladder(margin_s=inf): a finite number is needed")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wait:
    """One wait as the ladder sees it: since when, how long it may still take, and for whom."""

    residency: Residency
    points: tuple[float, ...]
    ends: tuple[float, ...]
    started_s: float
    now_s: float
    elapsed_s: float
    median_s: float
    soon_s: float
    overdue: bool

    @property
    def held_blocks(self) -> int:
        return self.residency.total_blocks - self.residency.missing_blocks

    @property
    def way_back_s(self) -> float:
        """Restore time from the slowest tier that a block may have to come from."""
        where = self.residency
        if where.disk_blocks > 0 and where.host_blocks < self.held_blocks:
            return where.restore_disk_s
        return where.restore_host_s if where.host_blocks > 0 else 0.0


def ladder(*, keep_s: float = 5.0, host_s: float = 120.0, drop_tokens: int = 8192, margin_s: float = 0.3) -> Policy:
    """The waiting ladder: expected wait below `keep_s` stay on the device, up to `host_s` host, longer disk.

    Expected = the median of the forecast, given that the wait goes on. Contexts below `drop_tokens` are dropped and
    recomputed instead of demoted; a background branch goes to disk at once and is not prefetched. Where a tier is
    missing the other one serves. Blocks are called back when the wait may end (first at its 10 % quantile, then at
    each later duration known) within their restore time plus `margin_s`; nothing is sent away that would be called
    back at once: where the expected wait is long but might end at once, the context is copied to host and stays.
    Each decision names the moment at which another answer becomes possible. Raises ConfigError for numbers that
    are negative or out of order.
    """
    rungs = _Rungs(keep_s=keep_s, host_s=host_s, drop_tokens=drop_tokens, margin_s=margin_s)
    return functools.partial(_climb, rungs)


def keep() -> Policy:
    """Nothing ever moves by plan: the baseline. Eviction under pressure is the tiers' own."""
    return _keep


POLICIES: Mapping[str, Callable[..., Policy]] = MappingProxyType({"keep": keep, "ladder": ladder})
"""Policies by name, for `make_policy`."""


def make_policy(name: str, **options: float) -> Policy:
    """The policy called `name` with `options`; ConfigError says what is allowed."""
    factory = POLICIES.get(name)
    if factory is None:
        raise ConfigError(f"policy={name!r} is unknown; there are {', '.join(sorted(POLICIES))}")
    allowed = list(inspect.signature(factory).parameters)
    unknown = sorted(set(options) - set(allowed))
    if unknown:
        raise ConfigError(
            f"policy {name!r} has no option {', '.join(unknown)}; it has {', '.join(allowed) or 'no options'}"
        )
    return factory(**options)


def _keep(residency: Residency, forecast: Forecast, started_s: float, now_s: float) -> Decision:  # noqa: ARG001  the protocol's arguments
    return Decision(reason="keep: blocks stay where they are")


def _climb(rungs: _Rungs, residency: Residency, forecast: Forecast, started_s: float, now_s: float) -> Decision:
    wait = _wait(residency, forecast, started_s, now_s)
    if wait.held_blocks <= 0:
        return Decision(reason="no block is held: nothing to move")
    if _is_called_back(rungs, wait):
        return _prefetch(rungs, wait)
    target = _target(rungs, wait)
    if target is None:
        return _stay(rungs, wait)
    return _send_down(rungs, wait, *target)


def _wait(residency: Residency, forecast: Forecast, started_s: float, now_s: float) -> _Wait:
    elapsed_s = max(0.0, now_s - started_s)
    left = forecast if elapsed_s < JUST_BEGUN_S else forecast.after(elapsed_s)
    ends = ends_of(forecast.remaining_s)
    end_s = next_end(ends, elapsed_s)
    return _Wait(
        residency=residency, points=forecast.remaining_s, ends=ends, started_s=started_s, now_s=now_s,
        elapsed_s=elapsed_s, median_s=left.quantile_s(MEDIAN),
        soon_s=left.quantile_s(LOW) if end_s is None else end_s - elapsed_s, overdue=end_s is None,
    )  # fmt: skip


def _is_called_back(rungs: _Rungs, wait: _Wait) -> bool:
    """Some blocks are off the device, somebody waits for them, and the wait may end within their way back."""
    away = wait.held_blocks - wait.residency.device_blocks
    near = wait.soon_s <= wait.way_back_s + rungs.margin_s + MIN_AHEAD_S
    return away > 0 and near and not wait.residency.background


def _target(rungs: _Rungs, wait: _Wait) -> tuple[Action, Tier | None, float] | None:
    """Where the context belongs now, with its way back in seconds; None = where it is.

    Hysteresis: a place counts only if the next possible end is farther than the way back from there and from where
    blocks come from today, and once ends were possible WORTH times as far: what was just called back stays.
    """
    where = wait.residency
    if not where.background and wait.median_s < rungs.keep_s:
        return None
    late_s = wait.elapsed_s - wait.points[-1]
    if wait.overdue and late_s < OVERDUE_GRACE * wait.points[-1]:
        return None
    if where.tokens < rungs.drop_tokens:
        places: list[tuple[Action, Tier | None, float]] = [(Action.DROP, None, where.recompute_s)]
    else:
        deep = where.background or wait.median_s > rungs.host_s
        places = []
        if where.has_host:
            places.append((Action.DEMOTE, Tier.HOST, where.restore_host_s))
        if where.has_disk:
            places.insert(0 if deep else len(places), (Action.DEMOTE, Tier.DISK, where.restore_disk_s))
    for action, tier, back_s in places:
        factor = 1.0 if wait.overdue or wait.elapsed_s < wait.ends[0] else WORTH
        if wait.soon_s > factor * (max(back_s, wait.way_back_s) + rungs.margin_s + MIN_AHEAD_S):
            return action, tier, back_s
    return None


def _prefetch(rungs: _Rungs, wait: _Wait) -> Decision:
    back_s = wait.way_back_s
    reason = f"may end in {wait.soon_s:.2f} s, restore takes {back_s:.2f} s + {rungs.margin_s:g} s margin"
    needed_by_s = wait.now_s + wait.soon_s
    move = _move(wait, Action.PREFETCH, Tier.DEVICE, reason, needed_by_s=needed_by_s)
    again_s = _next_demotion(rungs, wait)
    return _decision(wait, (move,), max(again_s, wait.elapsed_s + back_s + rungs.margin_s), reason)


def _stay(rungs: _Rungs, wait: _Wait) -> Decision:
    reason = f"stays: expected wait {wait.median_s:.2f} s, may end in {wait.soon_s:.2f} s"
    moves = _written_ahead(rungs, wait)
    if wait.held_blocks > wait.residency.device_blocks:
        return _decision(wait, moves, _next_change(rungs, wait, wait.way_back_s), reason)
    if not _can_leave(rungs, wait):
        return Decision(reason=reason + "; there is nowhere else")
    return _decision(wait, moves, _next_demotion(rungs, wait), reason)


def _written_ahead(rungs: _Rungs, wait: _Wait) -> tuple[Move, ...]:
    """A wait that is expected to be long but may end at once: the blocks stay, and are copied while the link is idle,
    so that they can be evicted without a wait if somebody needs the room.
    """
    where = wait.residency
    if wait.median_s < rungs.keep_s or where.tokens < rungs.drop_tokens or not where.has_host:
        return ()
    if where.unwritten_blocks == 0:
        return ()
    reason = f"expected wait {wait.median_s:.2f} s, may end in {wait.soon_s:.2f} s: written ahead, stays"
    return (_move(wait, Action.WRITE, Tier.HOST, reason),)


def _send_down(rungs: _Rungs, wait: _Wait, action: Action, tier: Tier | None, back_s: float) -> Decision:
    where = wait.residency
    if tier is None:
        if where.device_blocks == 0:  # small, but already written: a copy is there, so it stays
            return _decision(wait, (), _next_change(rungs, wait, wait.way_back_s), "small context is off the device")
        reason = f"expected wait {wait.median_s:.2f} s and {where.tokens} tokens < {rungs.drop_tokens}: recompute"
        return Decision(moves=(_move(wait, action, None, reason),), reason=reason)
    why = "background branch" if where.background else f"expected wait {wait.median_s:.2f} s"
    reason = f"{why}: {tier.name.lower()}, {back_s:.2f} s to restore"
    again_s = _next_change(rungs, wait, max(back_s, wait.way_back_s))
    sinks = tier is Tier.DISK and where.disk_blocks < wait.held_blocks
    if where.device_blocks == 0 and not sinks:
        return _decision(wait, (), again_s, f"{reason}: already there")
    return _decision(wait, (_move(wait, action, tier, reason),), again_s, reason)


def _can_leave(rungs: _Rungs, wait: _Wait) -> bool:
    where = wait.residency
    return where.has_host or where.has_disk or where.tokens < rungs.drop_tokens


def _next_demotion(rungs: _Rungs, wait: _Wait) -> float:
    """For blocks on the device: when (elapsed) the wait may turn out to be a long one."""
    where = wait.residency
    if where.tokens < rungs.drop_tokens:
        nearest_s = where.recompute_s
    else:
        nearest_s = where.restore_host_s if where.has_host else where.restore_disk_s
    keep_s = 0.0 if where.background else rungs.keep_s
    outlived = _outlived(rungs, wait, keep_s, max(nearest_s, wait.way_back_s))
    return outlived if outlived is not None else _next_overdue(wait, keep_s)


def _next_change(rungs: _Rungs, wait: _Wait, back_s: float) -> float:
    """For blocks off the device: when (elapsed) they are to be called back, or belong deeper."""
    times: list[float | None] = []
    if not wait.residency.background and not wait.overdue:
        times.append(wait.elapsed_s + wait.soon_s - back_s - rungs.margin_s)
    if wait.residency.has_disk and wait.residency.disk_blocks < wait.held_blocks:
        times.append(_outlived(rungs, wait, rungs.host_s, wait.residency.restore_disk_s))
    known = [time for time in times if time is not None]
    return min(known) if known else _next_overdue(wait, rungs.host_s)


def _outlived(rungs: _Rungs, wait: _Wait, wait_s: float, back_s: float) -> float | None:
    """When a passing point makes the wait `wait_s` long; before the early end a smaller gap would do, see _target."""
    lead_s = back_s + rungs.margin_s + MIN_AHEAD_S
    early = outlived_at(wait.points, wait.ends, wait.elapsed_s, wait_s, lead_s)
    if early is None or early < wait.ends[0]:
        return early
    return outlived_at(wait.points, wait.ends, wait.elapsed_s, wait_s, WORTH * lead_s)


def _next_overdue(wait: _Wait, wait_s: float) -> float:
    """When (elapsed) the wait has outlived every point, by the grace and so long that its guess reaches `wait_s`."""
    overdue_s = max(wait.points[-1] * (1 + OVERDUE_GRACE), wait_s)
    return overdue_s if wait.elapsed_s < overdue_s < math.inf else wait.elapsed_s * BACKOFF


def _move(wait: _Wait, action: Action, to: Tier | None, reason: str, *, needed_by_s: float | None = None) -> Move:
    return Move(
        session=wait.residency.session, action=action, to=to, not_before_s=wait.now_s, needed_by_s=needed_by_s,
        reason=reason,
    )  # fmt: skip


def _decision(wait: _Wait, moves: tuple[Move, ...], again_elapsed_s: float, reason: str) -> Decision:
    """A decision that asks again when `again_elapsed_s` have passed since the wait began, never sooner than allowed."""
    soonest_s = max(wait.now_s + MIN_AHEAD_S, math.nextafter(wait.now_s, math.inf))
    return Decision(moves=moves, ask_again_s=max(wait.started_s + again_elapsed_s, soonest_s), reason=reason)
