"""What earlier runs of a program spent of a task that nobody finished: its budget goes on where it was.

Read from the ledger, so a killed program's last half second may be missing, and so are rounds of loops and grants.
Does not cover budgets that processes share (`shared.py`), which are in the database all the time.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentkv.budget.amounts import spent
from agentkv.budget.codec import facts_from_rows
from agentkv.budget.facts import Fact, ModelCall, TaskFact, ToolCallFact
from agentkv.budget.limits import ZERO, Spent
from agentkv.budget.schema import digest_of
from agentkv.budget.sqlite import connector
from agentkv.budget.tally import Sums
from agentkv.errors import LedgerError

if TYPE_CHECKING:
    from agentkv.budget.database import Database


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """Amounts spent, and for how many seconds programs had the task; the time in between does not count."""

    spent: Spent
    age_s: float


class Earlier:
    """Earlier runs in a database. Thread-safe; `close()` is idempotent."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._pid = 0

    def spent(self, task: str, *, but_run: str) -> Resumed | None:
        """What all runs but `but_run` spent of the task since it was finished last; None for nothing.

        Raises LedgerError.
        """
        return _spent_before(self._database, task, but_run) if self._has(task) else None

    def _has(self, task: str) -> bool:
        """Whether there is anything: most tasks are new, and a connection of SQLAlchemy's takes 2 ms."""
        path = self._database.path
        if path is None:
            return self._database.has(task)
        query = "SELECT 1 FROM agentkv_task WHERE digest = ?"
        try:
            with self._lock:
                if self._connection is None or self._pid != os.getpid():
                    self._connection, self._pid = connector(path, mode="ro")(), os.getpid()
                return self._connection.execute(query, (digest_of(task),)).fetchone() is not None
        except sqlite3.Error as error:
            raise LedgerError(f"the ledger {self._database.name} could not be read: {error}") from error

    def close(self) -> None:
        """Let go of the database."""
        with self._lock:
            connection, self._connection = self._connection, None
            if connection is not None and self._pid == os.getpid():
                connection.close()


def _spent_before(database: Database, task: str, but_run: str) -> Resumed | None:
    runs: dict[str, list[Fact]] = {}
    for page in database.pages(task, None):
        rows = [fact for fact in page if fact.run != but_run]
        for run in dict.fromkeys(fact.run for fact in rows):
            facts, _, _ = facts_from_rows(task, ((one.kind, one.at_ms, one.body) for one in rows if one.run == run))
            runs.setdefault(run, []).extend(facts)
    sums, age_s = Sums(), 0.0
    for facts in runs.values():
        start, over = 0, False
        for number, fact in enumerate(facts, 1):
            if isinstance(fact, TaskFact):
                over = fact.event == "finished"
            if over:  # what comes late, such as a call that was just cancelled, belongs to what was finished
                start = number
            if over and isinstance(fact, TaskFact):
                sums, age_s = Sums(), 0.0
        for fact in facts[start:]:
            sums.add(_spent(fact))
        times = [fact.at_ms for fact in facts[start:]]
        age_s += (max(times) - min(times)) / 1000 if times else 0.0
    return Resumed(spent=spent(sums), age_s=age_s) if age_s or spent(sums) != Spent() else None


def _spent(fact: Fact) -> Spent:
    if isinstance(fact, ToolCallFact):
        return Spent(tool_calls=0 if fact.status == "paused" else 1)
    if not isinstance(fact, ModelCall):
        return Spent()
    usage = fact.usage
    return Spent(
        tokens=usage.total_tokens,
        model_calls=usage.calls,
        usd=fact.cost_usd or ZERO,
        device_seconds=max(0.0, fact.device_s),
    )
