"""Accounts of tasks: in this process, or in the ledger's database where a budget is shared over processes."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from agentkv.budget.account import Account
from agentkv.budget.ledger import Ledger
from agentkv.budget.limits import Budget
from agentkv.clock import Clock
from agentkv.errors import ConfigError, LedgerError
from agentkv.log import failed

if TYPE_CHECKING:
    from agentkv.budget.resumed import Earlier, Resumed
    from agentkv.budget.shared import SharedPurses


class Accounts:
    """Opens accounts. Thread-safe; `close()` is idempotent."""

    def __init__(self, ledger: Ledger, clock: Clock) -> None:
        self._ledger = ledger
        self._clock = clock
        self._lock = threading.Lock()
        self._purses: SharedPurses | None = None
        self._earlier: Earlier | None = None

    def open(self, task: str, budget: Budget | None) -> Account:
        """An account. One of a task that earlier programs left unfinished goes on with what they spent.

        Raises ConfigError for a shared budget without a database to share it in.
        """
        if budget is None or not budget.shared:
            is_new = not self._ledger.rows(task)
            return Account(task, budget, clock=self._clock, before=partial(self._before, task) if is_new else None)
        return Account(task, budget, clock=self._clock, purse=self._shared().of(task, budget))

    def lasting(self, name: str, budget: Budget) -> Account:
        """An account of many tasks together. Where the ledger is in a database it outlives this process, and other
        processes with that ledger share it.
        """
        if getattr(self._ledger.store, "database", None) is None:
            return Account(name, budget, clock=self._clock)
        return Account(name, budget, clock=self._clock, purse=self._shared().of(name, replace(budget, shared=True)))

    def _before(self, task: str) -> Resumed | None:
        store = self._ledger.store
        database, run = getattr(store, "database", None), getattr(store, "run", None)
        if database is None or run is None:
            return None
        with self._lock:
            if self._earlier is None:
                from agentkv.budget.resumed import Earlier

                self._earlier = Earlier(database)
        try:
            return self._earlier.spent(task, but_run=run)
        except LedgerError as error:
            failed("budget_not_resumed", error=str(error))
            return None

    def _shared(self) -> SharedPurses:
        with self._lock:
            if self._purses is None:
                database = getattr(self._ledger.store, "database", None)
                if database is None:
                    raise ConfigError(
                        'Budget(shared=True) needs a ledger that the processes share: ledger="sqlite:////..." or a '
                        "PostgreSQL URL"
                    )
                from agentkv.budget.shared import SharedPurses

                self._purses = SharedPurses(database)
            return self._purses

    def close(self) -> None:
        """Settle what is left over; before the ledger is closed."""
        if self._purses is not None:
            self._purses.close()
        if self._earlier is not None:
            self._earlier.close()
