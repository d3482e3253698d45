"""Reservations: what a model call has set aside in an account, until it is settled or given back.

Does not cover the account (`account.py`).
"""

from __future__ import annotations

import threading
from decimal import Decimal
from typing import Protocol, Self

from agentkv.budget.limits import ZERO, Spent
from agentkv.core.usage import Usage
from agentkv.errors import BudgetExceeded

_BEFORE_ALL = 1 << 30
"""The priority of a call that has begun over those that wait to."""


class Settles(Protocol):
    """The account that a reservation is in."""

    def settle(self, key: str, used: Spent) -> None: ...
    def reserve(self, tokens: int, calls: int = 1, *, usd: Decimal = ZERO, priority: int = 0) -> Reservation: ...


class Both:
    """Reservations of one call in two accounts, which end together."""

    __slots__ = ("_parts", "tokens")

    def __init__(self, *parts: Reservation) -> None:
        self._parts = parts
        self.tokens = parts[0].tokens

    def settle(self, usage: Usage, *, usd: Decimal | None = None, device_seconds: float = 0.0) -> None:
        """See Reservation."""
        for part in self._parts:
            part.settle(usage, usd=usd, device_seconds=device_seconds)

    def double(self) -> None:
        """See Reservation."""
        for part in self._parts:
            part.double()

    def release(self) -> None:
        """See Reservation."""
        for part in self._parts:
            part.release()


class Reservation:
    """Amounts set aside in an Account, until settled or released; only the first of these counts.

    Leaving a `with` block releases what was not settled.
    """

    __slots__ = ("_account", "_key", "_lock", "_more", "calls", "tokens", "usd")

    def __init__(self, account: Settles, key: str, amount: Spent) -> None:
        self._account = account
        self._key: str | None = key
        self._lock = threading.Lock()
        self._more: tuple[Reservation, ...] = ()
        self.tokens = amount.tokens
        self.calls = amount.model_calls
        self.usd = amount.usd

    def settle(self, usage: Usage, *, usd: Decimal | None = None, device_seconds: float = 0.0) -> None:
        """Replace the reservation by what was really used (which may be more: an engine's own count is the truth).

        `usd` None: nobody knows the price, so no money is counted. Never raises.
        """
        self._end(spent_of(usage, max(self.calls, usage.calls), usd, device_seconds))

    def double(self) -> None:
        """Set as much aside once more: the call is made again, and what was sent before may be spent.

        Raises BudgetExceeded, with nothing more set aside, if that does not fit.
        """
        more = self._account.reserve(self.tokens, self.calls, usd=self.usd, priority=_BEFORE_ALL)
        with self._lock:
            if self._key is not None:
                self._more = (*self._more, more)
                return
        more.release()

    def release(self) -> None:
        """Nothing was spent: give everything back. Never raises."""
        self._end(Spent())

    def _end(self, used: Spent) -> None:
        with self._lock:
            key, self._key = self._key, None
        if key is not None:
            self._account.settle(key, used)
            for more in self._more:
                more.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def again(refused: BudgetExceeded, more: str = "") -> BudgetExceeded:
    """The same refusal, to be raised once more."""
    return BudgetExceeded(
        f"{refused}{more}",
        task=refused.task,
        limit=refused.limit,
        allowed=refused.allowed,
        used=refused.used,
        asked=refused.asked,
    )


def spent_of(usage: Usage, calls: int, usd: Decimal | None, device_seconds: float) -> Spent:
    """What a call that used so much spent."""
    return Spent(
        tokens=usage.total_tokens,
        model_calls=calls,
        usd=ZERO if usd is None else usd,
        device_seconds=max(0.0, device_seconds),
    )
