"""Account: the counting that keeps a task to its budget under concurrency.

Every model call reserves its worst case first and settles what it really used, so that calls in parallel can never
overspend together. Does not cover what happens at a limit (`runtime/gate.py`), nor the record of what was spent
(`ledger.py`). Device seconds are known only afterwards: a call sets aside as much as the longest one so far took.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import partial
from typing import TYPE_CHECKING, Any

from agentkv.budget.amounts import OTHERS, RETRY, affordable, caps_of, exceeded, is_near, rounded, spent
from agentkv.budget.limits import LIMITS, ZERO, Budget, Spent, added, granted, without
from agentkv.budget.line import Line
from agentkv.budget.reservation import Both, Reservation, again, spent_of
from agentkv.budget.tally import LocalPurse, Purse, Sums, Tally
from agentkv.clock import Clock, SystemClock
from agentkv.core.usage import Usage
from agentkv.errors import BudgetExceeded, ConfigError, LedgerError
from agentkv.log import failed

if TYPE_CHECKING:
    from agentkv.budget.resumed import Resumed

__all__ = ["Account", "Both", "Reservation", "again"]

UNNAMED_OUTPUT = 16_384
"""Most output tokens of a call that names no limit, where neither budget nor context says less."""
CALLS, TOOLS, ROUNDS = "calls", "tools", "rounds"
"""The lines in which steps wait."""
_MAX_BRANCHES = 4096


class Account:
    """One task's budget and what it has used. Thread-safe.

    `budget` may be replaced at any time; what is used stays, and so does what was granted on top of it. Reading it tells
    the limits with the grants in them. On a shared purse every method waits for the database, and raises LedgerError
    where that cannot be used.
    """

    def __init__(
        self,
        task: str,
        budget: Budget | None = None,
        clock: Clock | None = None,
        purse: Purse | None = None,
        before: Callable[[], Resumed | None] | None = None,
    ) -> None:
        """`before` tells what was spent before; it is asked once, as soon as there is a limit."""
        self.task = task
        self.shared = purse is not None
        self._purse = LocalPurse(budget or Budget()) if purse is None else purse
        self._clock = clock or SystemClock()
        self._started_s = self._clock.now_s()
        self._lock = threading.Lock()
        self._attempts: dict[tuple[str, str], int] = {}
        self._told: dict[str, None] = {}
        self._lines: dict[str, Line] = {}
        self._longest_s = 0.0
        self.longest_output_tokens = 0
        """Of the calls that were counted without a limit of their own."""
        self._tools_ended_at: int | None = None
        self.stopped: BudgetExceeded | None = None
        """Set by whoever decides that the task is over; every step raises it until there is more to spend."""
        self._before = before
        self._go_on(budget)

    # -- what there is

    @property
    def budget(self) -> Budget:
        """The limits, with what was granted."""
        with self._purse as tally:
            return tally.limits.plus(tally.grants)

    @budget.setter
    def budget(self, budget: Budget) -> None:
        with self._purse as tally:
            tally.limits = budget
        self.stopped = self._tools_ended_at = None
        self._go_on(budget)

    def _go_on(self, budget: Budget | None) -> None:
        if self._before is None or budget is None or all(budget.limit(name) is None for name in LIMITS):
            return
        before, self._before = self._before(), None
        if before is not None:
            self._started_s -= before.age_s
            self.settle("", before.spent)

    def grant(self, amounts: Mapping[str, Any]) -> None:
        """So much more of these limits, or of these loops' caps. Raises ConfigError for what is no amount."""
        more = granted(amounts)
        with self._purse as tally:
            for name, amount in more.items():
                tally.grants[name] = added(tally.grants.get(name, 0), amount)
        self.stopped = self._tools_ended_at = None

    @property
    def used(self) -> Spent:
        """What is spent; `seconds` is the task's age."""
        with self._purse as tally:
            sums = tally.used
            return Spent(
                tokens=sums.tokens,
                model_calls=sums.model_calls,
                tool_calls=sums.tool_calls,
                seconds=self._age_s(tally),
                usd=sums.usd,
                device_seconds=sums.device_seconds,
                retries=tally.loops.get(RETRY, 0),
            )

    @property
    def reserved(self) -> Spent:
        """What calls on their way have set aside."""
        with self._purse as tally:
            return spent(tally.held)

    def left(self) -> dict[str, Any]:
        """What is left of each limit that there is, by name; money as a Decimal."""
        with self._purse as tally:
            limits = tally.limits.plus(tally.grants)
            return {
                name: max(type(allowed)(0), without(allowed, self._taken(tally, name)))
                for name in LIMITS
                if (allowed := limits.limit(name)) is not None
            }

    @property
    def longest_device_s(self) -> float:
        """Device seconds of the longest call so far."""
        return self._longest_s

    # -- model calls

    def reserve(
        self, tokens: int, calls: int = 1, *, usd: Decimal = ZERO, priority: int = 0, on_device: bool = True
    ) -> Reservation:
        """Set aside the worst case of `calls` model calls (input plus the most output, and what that costs).

        Raises BudgetExceeded, with nothing set aside, if it does not fit beside what is used and reserved, or others of
        at least this `priority` wait. A call needs one token; money and device seconds (`on_device`) only if it costs any.
        """
        if tokens < 0 or calls < 1 or usd < 0:
            raise ConfigError(f"reserve(tokens={tokens}, calls={calls}, usd={usd}): at least 0, 1 and 0 are needed")
        self._check_stopped()
        asked = Spent(tokens=tokens, model_calls=calls, usd=usd, device_seconds=self._longest_s if on_device else 0.0)
        with self._purse as tally:
            self._check_line(tally, CALLS, priority)
            try:
                self._fit(tally, asked, on_device)
            except BudgetExceeded:
                if not self._purse.free_lapsed():
                    raise
                self._fit(tally, asked, on_device)
            return Reservation(self, self._purse.hold(asked), asked)

    def reserve_rest(
        self,
        least: int,
        most: int | None = None,
        *,
        cost: Callable[[int], Decimal] | None = None,
        priority: int = 0,
    ) -> Reservation:
        """Set aside, for one call that names no limit of its own, what is left of the budget: at least `least` tokens, at
        most `most`. `cost` tells what so many tokens come to. Without a limit on either this is `reserve(least)`.

        Raises BudgetExceeded, with nothing set aside, if less than `least` is left. Two such calls at once do not fit
        into one budget: the first has it all until it settles.
        """
        left = self.left()
        tokens = least
        if "tokens" in left:
            tokens = left["tokens"] if most is None else min(left["tokens"], most)
        elif "usd" in left and cost is not None:
            tokens = least + UNNAMED_OUTPUT if most is None else most
        if "usd" in left and cost is not None:
            tokens = affordable(left["usd"], least, tokens, cost)
        price = cost or (lambda _tokens: ZERO)
        if tokens > least:
            try:
                return self.reserve(tokens, usd=price(tokens), priority=priority)
            except BudgetExceeded:
                pass  # somebody else took some of what was left a moment ago
        return self.reserve(least, usd=price(least), priority=priority)

    def wait(
        self,
        step: Callable[[], Any],
        *,
        timeout_s: float,
        gone: Callable[[], bool] = lambda: False,
        refused: BudgetExceeded | None = None,
        line: str = CALLS,
        priority: int = 0,
        flow: str = "",
    ) -> Any:
        """What `step` (a reservation, tool call or round of this account) brings, when it is its turn and fits. Blocks.

        Those that wait in one `line` go by priority, then flows take turns, then by arrival: nobody overtakes. Raises the
        step's BudgetExceeded once `timeout_s` have passed; returns None as soon as `gone()`.
        """
        if refused is None:
            try:
                return step()
            except BudgetExceeded as error:
                refused = error
        return self._line(line).wait(
            step, refused, pause=self._purse.wait, timeout_s=timeout_s, gone=gone, priority=priority, flow=flow
        )

    def _line(self, name: str) -> Line:
        with self._lock:
            line = self._lines.get(name)
            if line is None:
                line = self._lines[name] = Line(partial(self._purse.join, name), self._purse.left)
            return line

    def _check_line(self, tally: Tally, name: str, priority: int = 0) -> None:
        """A newcomer waits behind those that wait already, here or in another process, even if it would fit."""
        if tally.limits.on_exceeded != "queue":
            return
        line = self._lines.get(name)
        if line and (refused := line.ahead_of(priority)) is not None:
            raise again(refused, f" {len(line):,} wait for that already.")
        if self._purse.is_behind(name, priority, line.key if line is not None else ""):
            limit = next(one for one in LIMITS if tally.limits.limit(one) is not None or one == LIMITS[-1])
            raise exceeded(self.task, limit, tally.limits.limit(limit) or 0, self._taken(tally, limit), 0, first=OTHERS)

    def spend(self, usage: Usage, *, usd: Decimal | None = None, device_seconds: float = 0.0) -> None:
        """Count a call that has happened without a reservation (somebody else's client made it). Never raises: the
        next reservation sees it.
        """
        self.longest_output_tokens = max(self.longest_output_tokens, usage.output_tokens)
        self.settle("", spent_of(usage, usage.calls, usd, device_seconds))

    # -- other steps

    def tool_call(self, calls: int = 1) -> None:
        """Count tool calls that start now. Raises BudgetExceeded, with nothing counted, if they are too many."""
        self._check_stopped()
        asked = Spent(tool_calls=calls)
        with self._purse as tally:
            self._check_line(tally, TOOLS)
            self._fit(tally, asked)
            tally.used.add(asked)

    def tool_paused(self) -> None:
        """A tool call that was counted waits for a person: it is counted when it goes on, and not twice."""
        with self._purse as tally:
            tally.used.take(Spent(tool_calls=1))

    def tool_refused(self, refused: BudgetExceeded) -> None:
        """A tool call was refused. The model is told so and asked once more; if it calls tools again, the task is over."""
        calls = self.used.model_calls
        if self._tools_ended_at is None:
            self._tools_ended_at = calls
        elif calls > self._tools_ended_at:
            self.stopped = again(refused)

    def loop(self, kind: str, limit: int | None = None, rounds: int = 1) -> int:
        """Count rounds of a loop that start now, over the whole task; how many there were.

        Raises BudgetExceeded, with nothing counted, beyond `limit` or, for "retry", beyond the budget's `retries`.
        """
        self._check_stopped()
        with self._purse as tally:
            self._check_line(tally, ROUNDS + kind)
            used = tally.loops.get(kind, 0)
            for name, allowed in caps_of(tally, kind, limit):
                if used + rounds > allowed:
                    raise exceeded(self.task, name, allowed, used, rounds)
            tally.loops[kind] = used + rounds
            return used + rounds

    def round_given_up(self, kind: str) -> None:
        """A round that was counted did not start."""
        with self._purse as tally:
            tally.loops[kind] = max(0, tally.loops.get(kind, 0) - 1)

    def rounds_left(self, kind: str, limit: int | None = None) -> int | None:
        """How many rounds of the loop are left; None without a cap."""
        with self._purse as tally:
            caps = [allowed for _, allowed in caps_of(tally, kind, limit)]
            return max(0, min(caps) - tally.loops.get(kind, 0)) if caps else None

    def attempt(self, branch: str, node: str, number: int) -> None:
        """A model call is made in a node's attempt `number`: what is above the last one there counts as retries.

        Raises BudgetExceeded, with nothing counted, if they are too many.
        """
        with self._lock:  # a node's own threads come here together
            known = self._attempts.get((branch, node), 1)
            if number > known:
                self.loop(RETRY, rounds=number - known)
            if number != known:
                self._attempts.pop((branch, node), None)
                self._attempts[branch, node] = number
                while len(self._attempts) > _MAX_BRANCHES:
                    del self._attempts[next(iter(self._attempts))]

    def nearing(self, branch: str) -> tuple[str, Any, Any] | None:
        """(limit, allowed, used) once for each branch, when the first limit is used up to its soft share; else None."""
        with self._purse as tally:
            limits = tally.limits.plus(tally.grants)
            if limits.soft is None or branch in self._told:
                return None
            near = [
                (name, allowed, used)
                for name in LIMITS
                if (allowed := limits.limit(name)) and (used := self._gone(tally, name)) and is_near(name, used, allowed, limits.soft)
            ]  # fmt: skip
            if not near:
                return None
            self._told[branch] = None
            while len(self._told) > _MAX_BRANCHES:
                del self._told[next(iter(self._told))]
            return max(near, key=lambda one: one[2] / one[1])

    def check(self) -> None:
        """Recompute what is reserved from the open reservations, and assert that it agrees."""
        with self._purse as tally:
            held = Sums()
            for amount in self._purse.amounts().values():
                held.add(amount)
            assert rounded(held) == rounded(tally.held)
            for sums in (tally.used, tally.held):
                assert min(sums.tokens, sums.model_calls, sums.tool_calls) >= 0 <= sums.usd

    # -- arithmetic

    def _check_stopped(self) -> None:
        if self.stopped is not None:
            raise again(self.stopped)

    def _age_s(self, tally: Tally) -> float:
        return tally.age_s or self._clock.now_s() - self._started_s

    def _gone(self, tally: Tally, name: str) -> Any:
        """What is used of a limit."""
        if name == "seconds":
            return self._age_s(tally)
        if name == "retries":
            return tally.loops.get(RETRY, 0)
        return getattr(tally.used, name)

    def _taken(self, tally: Tally, name: str) -> Any:
        """What is used or set aside."""
        held = 0 if name in ("seconds", "retries") else getattr(tally.held, name)
        return added(self._gone(tally, name), held)

    def _fit(self, tally: Tally, asked: Spent, on_device: bool = True) -> None:
        limits = tally.limits.plus(tally.grants) if tally.grants else tally.limits
        if limits.seconds is not None and self._age_s(tally) >= limits.seconds:
            raise exceeded(self.task, "seconds", limits.seconds, round(self._age_s(tally), 3), 0)
        if asked.model_calls:
            if limits.tokens is not None:
                self._fits(tally, "tokens", limits.tokens, max(asked.tokens, 1))
            if limits.model_calls is not None:
                self._fits(tally, "model_calls", limits.model_calls, asked.model_calls)
            if limits.usd is not None and asked.usd:
                self._fits(tally, "usd", limits.usd, asked.usd)
            if limits.device_seconds is not None and on_device:
                taken = self._taken(tally, "device_seconds")
                if taken >= limits.device_seconds or taken + asked.device_seconds > limits.device_seconds:
                    raise exceeded(
                        self.task,
                        "device_seconds",
                        limits.device_seconds,
                        round(taken, 3),
                        round(asked.device_seconds, 3),
                    )
        if asked.tool_calls and limits.tool_calls is not None:
            self._fits(tally, "tool_calls", limits.tool_calls, asked.tool_calls)

    def _fits(self, tally: Tally, name: str, allowed: Any, asked: Any) -> None:
        taken = self._taken(tally, name)
        if added(taken, asked) > allowed:
            raise exceeded(self.task, name, allowed, taken, asked)

    def settle(self, key: str, used: Spent) -> None:
        """`key` is no longer set aside, and `used` is spent; never raises. With a key that is gone nothing is spent
        twice, unless it lapsed: then somebody has it already, and what was spent counts all the same.
        """
        self._longest_s = max(self._longest_s, used.device_seconds)
        try:
            with self._purse as tally:
                if key:
                    self._purse.take(key)
                tally.used.add(used)
        except LedgerError as error:
            failed("budget_settled_later", error=str(error))
            self._purse.later(key, used)
