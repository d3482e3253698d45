"""Budget and Account: what a task may spend, and the counting that keeps to it under concurrency.

Covers limits on tokens, model calls, tool calls and seconds, in this process. Every model call reserves its worst
case first and settles what it really used, so that calls in parallel can never overspend together. Does not cover
money (prices come later), nor the record of what was spent (`ledger.py`).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, fields
from typing import Self

from agentkv.clock import Clock, SystemClock
from agentkv.core.usage import Usage
from agentkv.errors import BudgetExceeded, ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What a task may spend. None is no limit; 0 is a limit that stops the first step.

    `tokens` counts input and output of every model call, cached or not; `seconds` is wall time since the task began.
    """

    tokens: int | None = None
    model_calls: int | None = None
    tool_calls: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            kinds = (int, float) if field.name == "seconds" else (int,)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, kinds) or not value >= 0:
                raise ConfigError(f"Budget({field.name}={value!r}): a number >= 0 is needed, or None for no limit")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Amounts against a Budget: spent, or set aside by calls on their way."""

    tokens: int = 0
    model_calls: int = 0
    tool_calls: int = 0
    seconds: float = 0.0


class Account:
    """One task's budget and what it has used. Thread-safe; nothing here waits for anything.

    `budget` may be replaced at any time (a person grants more); what is used stays.
    """

    def __init__(self, task: str, budget: Budget | None = None, clock: Clock | None = None) -> None:
        self.task = task
        self.budget = Budget() if budget is None else budget
        self._clock = clock or SystemClock()
        self._started_s = self._clock.now_s()
        self._lock = threading.Lock()
        self._used_tokens = self._used_calls = self._used_tools = 0
        self._reserved_tokens = self._reserved_calls = 0
        self._open: set[Reservation] = set()

    @property
    def used(self) -> Spent:
        """What is spent; `seconds` is the task's age."""
        with self._lock:
            return Spent(
                tokens=self._used_tokens,
                model_calls=self._used_calls,
                tool_calls=self._used_tools,
                seconds=self._clock.now_s() - self._started_s,
            )

    @property
    def reserved(self) -> Spent:
        """What calls on their way have set aside."""
        with self._lock:
            return Spent(tokens=self._reserved_tokens, model_calls=self._reserved_calls)

    @property
    def left_tokens(self) -> int | None:
        """Tokens that a new call may still reserve; None without a limit."""
        budget = self.budget
        with self._lock:
            if budget.tokens is None:
                return None
            return max(0, budget.tokens - self._used_tokens - self._reserved_tokens)

    def reserve(self, tokens: int, calls: int = 1) -> Reservation:
        """Set aside the worst case of `calls` model calls (input plus the most output).

        Raises BudgetExceeded, with nothing set aside, if it does not fit beside what is used and reserved. A call
        needs at least one token, so a token budget of 0 refuses every call.
        """
        if tokens < 0 or calls < 1:
            raise ConfigError(f"reserve(tokens={tokens}, calls={calls}): tokens >= 0 and calls >= 1 are needed")
        budget = self.budget
        with self._lock:
            self._check_time(budget)
            self._fit("tokens", budget.tokens, self._used_tokens + self._reserved_tokens, max(tokens, 1))
            self._fit("model_calls", budget.model_calls, self._used_calls + self._reserved_calls, calls)
            reservation = Reservation(self, tokens, calls)
            self._open.add(reservation)
            self._reserved_tokens += tokens
            self._reserved_calls += calls
            return reservation

    def reserve_rest(self, least: int, most: int | None = None) -> Reservation:
        """Set aside, for one call that names no limit of its own, what is left of the token budget: at least `least`
        tokens, at most `most`. Without a token budget this is `reserve(least)`.

        Raises BudgetExceeded, with nothing set aside, if less than `least` is left. Two such calls at once do not fit
        into one budget: the first has it all until it settles.
        """
        left = self.left_tokens
        tokens = least if left is None else max(least, left if most is None else min(left, most))
        try:
            return self.reserve(tokens)
        except BudgetExceeded:
            if tokens == least:
                raise
        return self.reserve(least)  # somebody else took some of what was left a moment ago

    def spend(self, usage: Usage) -> None:
        """Count a call that has happened without a reservation (somebody else's client made it). Never raises: the
        next reservation sees it.
        """
        with self._lock:
            self._used_tokens += usage.total_tokens
            self._used_calls += usage.calls

    def tool_call(self, calls: int = 1) -> None:
        """Count tool calls that start now. Raises BudgetExceeded, with nothing counted, if they are too many."""
        budget = self.budget
        with self._lock:
            self._check_time(budget)
            self._fit("tool_calls", budget.tool_calls, self._used_tools, calls)
            self._used_tools += calls

    def check(self) -> None:
        """Recompute what is reserved from the open reservations, and assert that it agrees."""
        with self._lock:
            assert self._reserved_tokens == sum(reservation.tokens for reservation in self._open)
            assert self._reserved_calls == sum(reservation.calls for reservation in self._open)
            assert min(self._used_tokens, self._used_calls, self._used_tools) >= 0

    def _check_time(self, budget: Budget) -> None:
        age_s = self._clock.now_s() - self._started_s
        if budget.seconds is not None and age_s >= budget.seconds:
            raise self._exceeded("seconds", budget.seconds, round(age_s, 3), 0)

    def _fit(self, limit: str, allowed: int | None, used: int, asked: int) -> None:
        if allowed is not None and used + asked > allowed:
            raise self._exceeded(limit, allowed, used, asked)

    def _exceeded(self, limit: str, allowed: float, used: float, asked: float) -> BudgetExceeded:
        step = f", the next step asks for {asked:,}" if asked else ""
        return BudgetExceeded(
            f"task {self.task!r} may spend {allowed:,} {limit}: {used:,} are used or reserved{step}. "
            f"Give it a larger Budget({limit}=...){', or ask for less (max_tokens)' if limit == 'tokens' else ''}.",
            task=self.task, limit=limit, allowed=allowed, used=used, asked=asked,
        )  # fmt: skip

    def _close(self, reservation: Reservation, used_tokens: int, used_calls: int) -> None:
        with self._lock:
            if reservation not in self._open:
                return
            self._open.remove(reservation)
            self._reserved_tokens -= reservation.tokens
            self._reserved_calls -= reservation.calls
            self._used_tokens += used_tokens
            self._used_calls += used_calls


class Reservation:
    """Tokens and calls set aside in an Account, until settled or released; only the first of these counts.

    Leaving a `with` block releases what was not settled.
    """

    __slots__ = ("_account", "calls", "tokens")

    def __init__(self, account: Account, tokens: int, calls: int) -> None:
        self._account = account
        self.tokens = tokens
        self.calls = calls

    def settle(self, usage: Usage) -> None:
        """Replace the reservation by what was really used (which may be more: an engine's own count is the truth)."""
        self._account._close(self, usage.total_tokens, max(self.calls, usage.calls))

    def release(self) -> None:
        """Nothing was spent: give everything back."""
        self._account._close(self, 0, 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
