"""Tally: what one account has used and set aside, and Purse: who keeps it.

Covers the sums, and keeping them in this process. A purse that several processes share is `shared.py`'s; what may be
added to the sums is `account.py`'s.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from types import TracebackType
from typing import Any, Protocol

from agentkv.budget.limits import EXACT, ZERO, Budget, Spent


@dataclass(slots=True)
class Sums:
    """Amounts that grow and shrink; `add` and `take` are exact for counts and money."""

    tokens: int = 0
    usd: Decimal = ZERO
    model_calls: int = 0
    tool_calls: int = 0
    device_seconds: float = 0.0

    def add(self, amount: Spent) -> None:
        """Add what was spent or set aside."""
        self.tokens += amount.tokens
        if amount.usd:
            self.usd = EXACT.add(self.usd, amount.usd)
        self.model_calls += amount.model_calls
        self.tool_calls += amount.tool_calls
        self.device_seconds += amount.device_seconds

    def take(self, amount: Spent) -> None:
        """The opposite. Device seconds are floats: what rounding would leave below zero is zero."""
        self.tokens -= amount.tokens
        if amount.usd:
            self.usd = EXACT.subtract(self.usd, amount.usd)
        self.model_calls -= amount.model_calls
        self.tool_calls -= amount.tool_calls
        self.device_seconds = max(0.0, self.device_seconds - amount.device_seconds)


@dataclass(slots=True)
class Tally:
    """One account's state. `held` is the sum of what is open, `loops` counts rounds by kind, `age_s` is the task's."""

    limits: Budget = field(default_factory=Budget)
    grants: dict[str, Any] = field(default_factory=dict)
    used: Sums = field(default_factory=Sums)
    held: Sums = field(default_factory=Sums)
    loops: dict[str, int] = field(default_factory=dict)
    age_s: float = 0.0


class Purse(Protocol):
    """Keeps a tally. Inside `with purse as tally:` nobody else changes it; what raises there changes nothing."""

    def __enter__(self) -> Tally: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def hold(self, amount: Spent) -> str:
        """Set `amount` aside; its key. Inside only, like the next three."""
        ...

    def take(self, key: str) -> Spent | None:
        """No longer set aside; the amount, None if it was not."""
        ...

    def free_lapsed(self) -> bool:
        """Give back what processes that died had set aside; True if there was any."""
        ...

    def amounts(self) -> Mapping[str, Spent]:
        """What is set aside, by key."""
        ...

    def join(self, line: str, priority: int) -> str:
        """Outside only: tell other processes that one more waits; its key. Raises LedgerError."""
        ...

    def left(self, key: str) -> None:
        """Outside only: it does not wait any more."""
        ...

    def is_behind(self, line: str, priority: int, key: str) -> bool:
        """Inside only: whether somebody in another process is before it (`key` "" for a newcomer)."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Outside only: wait for something to be given back, for about so long at most; may return early."""
        ...

    def later(self, key: str, used: Spent) -> None:
        """Outside only: settle as soon as that is possible; it was not now."""
        ...


class LocalPurse:
    """A tally in this process's memory."""

    def __init__(self, budget: Budget) -> None:
        self._tally = Tally(limits=budget)
        self._open: dict[str, Spent] = {}
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self._freed = threading.Condition(self._lock)

    def __enter__(self) -> Tally:
        self._lock.acquire()
        return self._tally

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._freed.notify_all()
        self._lock.release()

    def hold(self, amount: Spent) -> str:
        key = str(next(self._ids))
        self._open[key] = amount
        self._tally.held.add(amount)
        return key

    def take(self, key: str) -> Spent | None:
        amount = self._open.pop(key, None)
        if amount is not None:
            self._tally.held.take(amount)
        return amount

    def free_lapsed(self) -> bool:
        return False

    def amounts(self) -> Mapping[str, Spent]:
        return self._open

    def join(self, line: str, priority: int) -> str:  # noqa: ARG002  the protocol
        return ""

    def left(self, key: str) -> None:
        """There are no other processes."""

    def is_behind(self, line: str, priority: int, key: str) -> bool:  # noqa: ARG002  the protocol
        return False

    def wait(self, timeout_s: float) -> None:
        with self._freed:
            self._freed.wait(timeout_s)

    def later(self, key: str, used: Spent) -> None:  # noqa: ARG002  the protocol
        raise AssertionError("a tally in memory can always be settled")
