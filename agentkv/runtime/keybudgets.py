"""What API keys may spend: an account for each that has a budget, of all its tasks together, for ever, a day or a month.

With a ledger in a database the accounts are kept there: they go on after a restart, and servers with one ledger share
them. Does not cover reading keys (`server/keys.py`) nor counting (`budget/account.py`).
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from agentkv.budget.days import period_of, zone_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from agentkv.budget.account import Account
    from agentkv.budget.limits import Budget
    from agentkv.runtime.budgets import Budgets
    from agentkv.server.keys import Key, Keys


class KeyBudgets:
    """The accounts of a server's keys. Thread-safe."""

    def __init__(
        self,
        keys: Keys | None,
        *,
        budgets: Budgets,
        account: Callable[[str, Budget], Account],
        wall_ms: Callable[[], int],
    ) -> None:
        self._budgets = budgets
        self._account = account
        self._wall_ms = wall_ms
        self._lock = threading.Lock()
        self._periods: dict[str, str] = {}
        self._keys = {type_of(key): key for key in (() if keys is None else keys.all)}
        for key in self._keys.values():
            self.enter(key)

    def enter_type(self, task_type: str) -> None:
        """A tool call of a task of this type begins; nothing where that is no key's."""
        key = self._keys.get(task_type)
        if key is not None:
            self.enter(key)

    def enter(self, key: Key) -> None:
        """A call of this key begins: it counts in the day or month that it is now, also if it ends in the next.

        A wall clock that is set back begins no period anew.
        """
        if key.budget is None:
            return
        period = period_of(self._wall_ms(), key.per, key.zone)
        with self._lock:
            before = self._periods.get(key.name)
            if before is not None and period <= before:
                return
            self._periods[key.name] = period
            name = type_of(key) + (f" in {period} ({zone_name(key.zone)})" if period else "")
            self._budgets.hold_to(type_of(key), self._account(name, key.budget))


def type_of(key: Key) -> str:
    """The type of a key's tasks."""
    return f"key:{key.name}"
