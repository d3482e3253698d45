"""The hosted caches' part of benchmarks/engines.py: real or made-up waits, paid by the price list, learnt as they pass.

One pass in the order of the trace: nothing is known of a wait before it begins, and what is learnt of it comes after. The
bound knows every wait: the cheapest sequence of marks and keep-alives, by dynamic programming over the live mark.
What a request pays follows the provider's published rule: reading up to the highest hit, writing beyond it; `rewrites` is
the harsher one, that another mark writes the whole prefix anew. An entry lives for its own time after its last use.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentkv.budget.prices import load_prices
from agentkv.core.hint import ToolStatus
from agentkv.hints.forecaster import Forecaster
from agentkv.policy.hosted import MARKS, CachePrices, Mark, choose_mark, keep_alive
from agentkv.sim.synthetic import synthetic
from agentkv.sim.trace import load

MODEL = "claude-sonnet-4-5"
CALLS_LEFT = 10.0
"""A session is expected to make as many calls as it has made, and at least these."""
LENGTHENED = 300
"""Tokens that a keep-alive writes under the long mark: the answer, which the next call then need not write (not counted)."""
USUAL = 10.0
"""The share of people's waits in a session is drawn to everybody's as by this many waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A model call, and the wait before it: None before a session's first."""

    tokens: int
    reused: int
    wait_s: float | None
    person: bool


def sessions_of(path: str) -> list[list[Call]]:
    """The sessions of a trace file, or of a made-up trace where there is none."""
    trace = load(Path(path)) if path else synthetic(seed=7, sessions=150)
    found = []
    for waits in trace.sessions:
        calls = [Call(tokens=waits[0].prompt_tokens, reused=0, wait_s=None, person=False)]
        calls += [
            Call(
                tokens=wait.next_prompt_tokens, reused=min(wait.reuse_tokens, wait.next_prompt_tokens),
                wait_s=wait.duration_s, person=wait.kind != "tool",
            )
            for wait in waits if wait.next_prompt_tokens > 0
        ]  # fmt: skip
        found.append(calls)
    return found


def prices_of(model: str, *, rewrites: bool = False) -> CachePrices:
    """The list's prices in dollars per million tokens."""
    rates = load_prices(None).find(model).rates
    return CachePrices(
        input=float(rates.input), read=float(rates.cached_read), write_short=float(rates.cache_write),
        write_long=float(rates.cache_write_long), rewrites=rewrites,
    )  # fmt: skip


def fixed(calls: Iterable[Call], prices: CachePrices, mark: Mark) -> float:
    """Dollars (times a million) with one mark and no keep-alives."""
    cost = 0.0
    for call in calls:
        live = call.reused if call.wait_s is not None and call.wait_s <= prices.lasts_s(mark) else 0
        cost += live * prices.read + (call.tokens - live) * prices.write(mark)
    return cost


def bound(calls: Sequence[Call], prices: CachePrices, *, lengthens: bool = False) -> float:
    """The least that it can cost when every wait is known."""
    costs: dict[Mark, float] = {"none": 0.0}
    before = 0
    for call in calls:
        after: dict[Mark, float] = {}
        for mark in MARKS:
            best = min(costs.values()) + call.tokens * prices.write(mark)
            for live, cost in costs.items():
                if call.wait_s is None or live == "none" or (prices.rewrites and live != mark):
                    continue
                kept = _kept(call.wait_s, before, live, prices, lengthens=lengthens) + call.reused * prices.read
                best = min(best, cost + kept + (call.tokens - call.reused) * prices.write(mark))
            after[mark] = best
        costs, before = after, call.tokens
    return min(costs.values())


def _kept(wait_s: float, tokens: int, mark: Mark, prices: CachePrices, *, lengthens: bool) -> float:
    """The least that a prefix costs to live through a wait that is known."""
    pings = max(0, math.ceil(wait_s / prices.lasts_s(mark)) - 1)
    least = pings * tokens * prices.read
    if lengthens and mark == "short" and pings:
        longer = 1 + max(0, math.ceil((wait_s - prices.short_s) / prices.long_s) - 1)
        least = min(least, longer * (tokens * prices.read + LENGTHENED * prices.write_long))
    return least


class Ours:
    """What the policy pays, learning as it goes."""

    def __init__(self, prices: CachePrices, *, keeps: bool = True, lengthens: bool = False) -> None:
        self.prices = prices
        self.keeps = keeps
        self.lengthens = lengthens
        self.pings = 0
        self.marks: Counter[str] = Counter()
        self._forecaster = Forecaster()
        self._kinds = Counter({"tool": 8, "person": 2})
        self._growth, self._grown = 1500.0, 1

    def cost(self, name: str, calls: Sequence[Call]) -> float:
        """One session's cost."""
        prices, mark, before, cost = self.prices, "none", 0, 0.0
        kinds: Counter[str] = Counter()
        for number, call in enumerate(calls):
            live = 0
            if call.wait_s is not None:
                kind = "person" if call.person else "tool"
                forecast = self._forecaster.forecast(kind, "", session=name)
                alive_s = prices.lasts_s(mark)
                while self.keeps and mark != "none" and call.wait_s > alive_s:
                    deed = keep_alive(forecast, prices, mark, elapsed_s=alive_s, lengthens=self.lengthens)
                    if deed == "none":
                        break
                    long = deed == "lengthen"
                    cost += before * prices.read + (LENGTHENED * prices.write_long if long else 0.0)
                    alive_s += prices.long_s if long else prices.lasts_s(mark)
                    self.pings += 1
                live = call.reused if call.wait_s <= alive_s else 0
                self._learn(name, kind, call, kinds)
            chosen = mark
            if not prices.rewrites or not live or number % 5 == 0:
                chosen = self._chosen(name, call, live=live, mark=mark, number=number, kinds=kinds)
            kept = live if chosen == mark or not prices.rewrites else 0
            cost += kept * prices.read + (call.tokens - kept) * prices.write(chosen)
            self.marks[chosen] += 1
            mark, before = chosen, call.tokens
        return cost

    def _learn(self, name: str, kind: str, call: Call, kinds: Counter[str]) -> None:
        self._forecaster.learn(kind, "", call.wait_s, ToolStatus.SUCCEEDED, session=name)
        self._kinds[kind] += 1
        kinds[kind] += 1
        self._grown = min(self._grown + 1, 2000)
        self._growth += (call.tokens - call.reused - self._growth) / self._grown

    def _chosen(self, name: str, call: Call, *, live: int, mark: Mark, number: int, kinds: Counter[str]) -> Mark:
        usual = self._kinds["person"] / self._kinds.total()
        person = (kinds["person"] + USUAL * usual) / (kinds.total() + USUAL)
        waits = [
            (weight, self._forecaster.forecast(kind, "", session=name))
            for kind, weight in (("tool", 1.0 - person), ("person", person))
        ]
        return choose_mark(
            waits, self.prices, live_tokens=live, new_tokens=call.tokens - live, live_mark=mark if live else "none",
            growth_tokens=self._growth, calls_left=max(CALLS_LEFT, number), lengthens=self.lengthens, keeps=self.keeps,
        ).mark  # fmt: skip


def replay(path: str) -> dict[str, object]:
    """The section's figures."""
    sessions = sessions_of(path)
    prices = prices_of(MODEL)
    sums = {mark: sum(fixed(calls, prices, mark) for calls in sessions) for mark in MARKS}
    better = min(sums["short"], sums["long"])
    ours, paid, least = _paid(sessions, prices)
    longer, longer_paid, longer_least = _paid(sessions, prices, lengthens=True)
    _, unkept_paid, _ = _paid(sessions, prices, keeps=False)
    _, anew_paid, anew_least = _paid(sessions, prices_of(MODEL, rewrites=True))
    return {
        "ttl_cost_ratio": paid / better,
        "ttl_oracle_gap": paid / least - 1,
        "ttl_oracle_ratio": least / better,
        "ttl_cost_ratio_lengthened": longer_paid / better,
        "ttl_oracle_gap_lengthened": longer_paid / longer_least - 1,
        "ttl_cost_ratio_unkept": unkept_paid / better,
        "ttl_cost_ratio_rewritten": anew_paid / better,
        "ttl_oracle_gap_rewritten": anew_paid / anew_least - 1,
        "ttl_oracle_ratio_rewritten": anew_least / better,
        "ttl_vs_always_5m": paid / sums["short"],
        "ttl_vs_always_1h": paid / sums["long"],
        "ttl_vs_none": paid / sums["none"],
        "ttl_calls": sum(map(len, sessions)),
        "ttl_keep_alives": ours.pings,
        "ttl_keep_alives_lengthened": longer.pings,
        "ttl_marks": dict(ours.marks),
        "ttl_trace": Path(path).name if path else "synthetic",
    }


def _paid(
    sessions: Sequence[Sequence[Call]], prices: CachePrices, *, keeps: bool = True, lengthens: bool = False
) -> tuple[Ours, float, float]:
    """Who chose, what was paid, and the least that could have been."""
    ours = Ours(prices, keeps=keeps, lengthens=lengthens)
    paid = sum(ours.cost(f"s{number}", calls) for number, calls in enumerate(sessions))
    return ours, paid, sum(bound(calls, prices, lengthens=lengthens) for calls in sessions)
