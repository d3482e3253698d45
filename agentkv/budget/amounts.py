"""Arithmetic on a tally's amounts: what counts as near a limit, what money buys, which caps a loop has.

Does not cover the account that uses it (`account.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from typing import Any

from agentkv.budget.limits import Spent
from agentkv.budget.tally import Sums, Tally
from agentkv.errors import BudgetExceeded

OTHERS = "others wait in front of it: "
RETRY = "retry"
"""The kind of loop that a budget's `retries` caps."""


def exceeded(task: str, limit: str, allowed: Any, used: Any, asked: Any, *, first: str = "") -> BudgetExceeded:
    """The refusal of a step, with the numbers and what to do; `first` is why it would not be its turn."""
    step = f", the next step asks for {asked:,}" if asked else ""
    return BudgetExceeded(
        f"{first}task {task!r:.200} may spend {allowed:,} {limit}: {used:,} are used or reserved{step}. "
        f"Give it a larger Budget({limit}=...){', or ask for less (max_tokens)' if limit in ('tokens', 'usd') else ''}.",
        task=task, limit=limit, allowed=allowed, used=used, asked=asked,
    )  # fmt: skip


def caps_of(tally: Tally, kind: str, limit: int | None) -> list[tuple[str, int]]:
    """The caps of a loop of this `kind` (`limit` is the loop's own), by the name under which they are exceeded."""
    more = tally.grants.get(kind, 0)
    caps = [] if limit is None else [(kind, limit + more)]
    retries = tally.limits.plus(tally.grants).retries
    return [*caps, ("retries", retries + more)] if kind == RETRY and retries is not None else caps


def spent(sums: Sums) -> Spent:
    """The sums as a value."""
    return Spent(
        tokens=sums.tokens,
        model_calls=sums.model_calls,
        tool_calls=sums.tool_calls,
        usd=sums.usd,
        device_seconds=sums.device_seconds,
    )


def rounded(sums: Sums) -> Sums:
    """The sums without what rounding may change."""
    return replace(sums, device_seconds=round(sums.device_seconds, 6))


def is_near(name: str, used: Any, allowed: Any, soft: float) -> bool:
    """Whether the soft mark is reached, or the next model call is the last one."""
    return float(used) >= soft * float(allowed) or (name == "model_calls" and used + 1 >= allowed)


def affordable(left_usd: Decimal, least: int, most: int, cost: Callable[[int], Decimal]) -> int:
    """The most tokens from `least` to `most` that cost no more than is left; `least` if not even these do."""
    if most <= least or cost(most) <= left_usd:
        return max(least, most)
    low, high = least, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cost(middle) <= left_usd else (low, middle)
    return low
