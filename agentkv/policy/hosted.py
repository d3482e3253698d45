"""Hosted prompt caches: how long a prefix should be kept that one pays for, and when a keep-alive pays.

Covers the choice between a short mark (5 minutes), a long one (1 hour) and none, and the decision to read a prefix once
more just before it expires. Pure: prices are plain numbers (`budget/prices.py` has the list), waits are forecasts. Does
not cover requests (`adapters/`). A read renews the prefix for its own time. By the provider's published rule a request
pays for reading what it hits, whatever its mark, and for writing only what lies beyond: so another mark costs nothing
for the old prefix. `CachePrices(rewrites=True)` is for a provider that writes it anew.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from agentkv.core.forecast import Forecast
from agentkv.errors import ConfigError

Mark = Literal["none", "short", "long"]
MARKS: tuple[Mark, ...] = ("none", "short", "long")
KeepAlive = Literal["none", "renew", "lengthen"]
"""What to do just before a prefix expires: let it, read it once more, or read it and write a little more under the long mark."""
MOST_WINDOWS = 24
"""A prefix is not kept alive more often than this in a row."""
LENGTHEN_SHARE = 0.003
"""What a lengthening writes (the answer and a full stop), as a share of the prefix: some hundred tokens of a hundred thousand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePrices:
    """Dollars per million tokens, or any other unit; and how long each mark lasts."""

    input: float
    read: float
    write_short: float
    write_long: float
    short_s: float = 300.0
    long_s: float = 3600.0
    rewrites: bool = False

    def __post_init__(self) -> None:
        prices = (self.input, self.read, self.write_short, self.write_long)
        if not all(0 <= price < math.inf for price in prices) or not 0 < self.short_s < self.long_s < math.inf:
            raise ConfigError(f"{self}: prices must be numbers >= 0, and the long mark must last longer than the short")

    def write(self, mark: Mark) -> float:
        """What a token costs that is read for the first time, under this mark."""
        return {"none": self.input, "short": self.write_short, "long": self.write_long}[mark]

    def lasts_s(self, mark: Mark) -> float:
        """How long a prefix under this mark lives after its last use."""
        return {"none": 0.0, "short": self.short_s, "long": self.long_s}[mark]


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkChoice:
    """A mark, what it is expected to cost until the next call has been read, and why."""

    mark: Mark
    expected_cost: float
    reason: str


def choose_mark(
    waits: Sequence[tuple[float, Forecast]],
    prices: CachePrices,
    *,
    live_tokens: int,
    new_tokens: int,
    live_mark: Mark = "none",
    growth_tokens: float = 0.0,
    calls_left: float = 1.0,
    keeps: bool = True,
    lengthens: bool = False,
) -> MarkChoice:
    """The mark for a request: `live_tokens` of its prompt are cached under `live_mark`, `new_tokens` are not.

    `waits`: what may follow this call (a tool, a person), each with its weight and forecast: which of them it will be is
    not known when the mark is chosen, and is when a keep-alive is. Each mark costs its writing now, and at the next call
    a read, or writing everything again where it is gone, and the keep-alives that pay (none without `keeps`; `lengthens`:
    of both kinds).
    Where everything is written now, or another mark than the live one would do that (`prices.rewrites`), the choice is one
    for the `calls_left` calls that are expected, each of which writes `growth_tokens`; else it can be another at the next.
    """
    tokens = live_tokens + new_tokens
    total = sum(weight for weight, _ in waits)
    if not total > 0:
        raise ConfigError("choose_mark needs a forecast with a weight > 0")
    costs: dict[Mark, float] = {}
    for mark in MARKS:
        costs_later = (
            weight * wait_cost(forecast, prices, mark, keeps=keeps, lengthens=lengthens) for weight, forecast in waits
        )
        later = sum(costs_later) / total
        kept = live_tokens if mark == live_mark or not prices.rewrites else 0
        now = kept * prices.read + (tokens - kept) * prices.write(mark)
        after = tokens * later
        if prices.rewrites or not live_tokens:
            after = calls_left * (after + growth_tokens * prices.write(mark))
        costs[mark] = (now + after) / 1e6
    best = min(MARKS, key=lambda mark: costs[mark])
    p90_s = max(forecast.quantile_s(0.9) for _, forecast in waits)
    told = ", ".join(f"{mark} {cost:.4g}" for mark, cost in costs.items())
    return MarkChoice(
        mark=best, expected_cost=costs[best], reason=f"90 % of the longest waits end within {p90_s:.0f} s: {told}"
    )


def wait_cost(
    forecast: Forecast, prices: CachePrices, mark: Mark, *, keeps: bool = True, lengthens: bool = False
) -> float:
    """Expected price of one prefix token from now until the next call has read it, with keep-alives where they pay."""
    if mark == "none":
        return prices.input * (1.0 - forecast.never)
    within = forecast.probability_within(prices.lasts_s(mark))
    if not keeps:
        return within * prices.read + max(0.0, 1.0 - within - forecast.never) * prices.write_short
    return within * prices.read + (1.0 - within) * _expired(forecast, prices, mark, lengthens=lengthens)[1]


def keep_alive(
    forecast: Forecast, prices: CachePrices, mark: Mark, *, elapsed_s: float, lengthens: bool = False
) -> KeepAlive:
    """What to do with the prefix now, just before it expires; the wait has lasted `elapsed_s`.

    A read pays where the prefix is likely enough to be used before it expires again (or after further keep-alives that pay):
    what is saved is writing it again instead of reading it. With `lengthens` one that ends in something new under the long
    mark may pay instead: it lasts as long as that.
    """
    if mark == "none":
        return "none"
    return _expired(forecast.after(elapsed_s), prices, mark, first=0, lengthens=lengthens)[0]


def keeps_alive(forecast: Forecast, prices: CachePrices, mark: Mark, *, elapsed_s: float) -> bool:
    """Whether to read the prefix once more now; see `keep_alive`."""
    return keep_alive(forecast, prices, mark, elapsed_s=elapsed_s) != "none"


def _expired(
    forecast: Forecast, prices: CachePrices, mark: Mark, *, first: int = 1, lengthens: bool = False
) -> tuple[KeepAlive, float]:
    """At the end of window `first` of a wait that goes on: what pays best, and the cost from there."""
    lasts_s = prices.lasts_s(mark)
    jumps: dict[KeepAlive, int] = {"renew": 1}
    if lengthens and mark == "short":
        jumps["lengthen"] = max(1, int(prices.long_s / lasts_s))
    windows = MOST_WINDOWS + max(jumps.values())
    alive = [1.0 - forecast.probability_within(lasts_s * k) for k in range(first, first + windows + 1)]
    costs: list[float] = [0.0] * (windows + 1)
    chosen: KeepAlive = "none"
    for k in range(windows, -1, -1):
        left, chosen = alive[k], "none"
        if left <= 0:
            continue
        costs[k] = prices.write_short * max(0.0, (left - forecast.never) / left)
        for deed, jump in jumps.items() if k < MOST_WINDOWS else ():
            ends = (left - alive[k + jump]) / left
            extra = LENGTHEN_SHARE * prices.write_long if deed == "lengthen" else 0.0
            cost = prices.read + extra + ends * prices.read + (1.0 - ends) * costs[k + jump]
            if cost < costs[k]:
                costs[k], chosen = cost, deed
    return chosen, costs[0]
