"""Connections to the tables of shared budgets: one transaction at a time, over SQLite or PostgreSQL.

Covers making the tables, waiting for other processes, and the clock by which leases run. What is in them is `shared.py`'s.
"""

from __future__ import annotations

import random
import sqlite3
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from agentkv.errors import LedgerError

if TYPE_CHECKING:
    from agentkv.budget.database import Database

WAIT_S = 5.0
"""How long a step waits for other processes."""
_RETRY_S = (0.0001, 0.001)
_TABLES = (
    """CREATE TABLE IF NOT EXISTS agentkv_budget (
        digest VARCHAR(32) PRIMARY KEY, task TEXT NOT NULL, limits TEXT NOT NULL, sums TEXT NOT NULL,
        age_ms BIGINT NOT NULL, seen_ms BIGINT NOT NULL)""",
    """CREATE TABLE IF NOT EXISTS agentkv_budget_hold (
        id VARCHAR(64) PRIMARY KEY, digest VARCHAR(32) NOT NULL, owner VARCHAR(32) NOT NULL, until_ms BIGINT NOT NULL,
        amount TEXT NOT NULL)""",
    "CREATE INDEX IF NOT EXISTS agentkv_budget_hold_of ON agentkv_budget_hold (digest, until_ms)",
    "CREATE INDEX IF NOT EXISTS agentkv_budget_hold_by ON agentkv_budget_hold (owner)",
    """CREATE TABLE IF NOT EXISTS agentkv_budget_wait (
        id VARCHAR(64) PRIMARY KEY, digest VARCHAR(32) NOT NULL, line TEXT NOT NULL, owner VARCHAR(32) NOT NULL,
        until_ms BIGINT NOT NULL, priority INTEGER NOT NULL, since_ms BIGINT NOT NULL)""",
    "CREATE INDEX IF NOT EXISTS agentkv_budget_wait_of ON agentkv_budget_wait (digest)",
)


class Link(Protocol):
    """A connection to the tables; one transaction at a time."""

    row_lock: str

    def begin(self, wait_s: float) -> None: ...
    def run(self, sql: str, values: Mapping[str, Any]) -> Sequence[Any]: ...
    def commit(self) -> None: ...
    def rollback(self) -> None: ...
    def now_ms(self) -> int: ...
    def close(self) -> None: ...


class _SqliteLink:
    row_lock = ""

    def __init__(self, database: Database) -> None:
        assert database.path is not None
        uri = f"{database.path.absolute().as_uri()}?mode=rw"
        self._connection = sqlite3.connect(uri, uri=True, timeout=WAIT_S, check_same_thread=False, isolation_level=None)
        self._connection.execute("PRAGMA journal_mode=WAL")
        self._connection.execute("PRAGMA synchronous=NORMAL")
        self._connection.execute("PRAGMA busy_timeout=0")
        self.begin(WAIT_S)
        for table in _TABLES:
            self._connection.execute(table)
        self.commit()

    def begin(self, wait_s: float) -> None:
        """SQLite's own waiting grows to 100 ms between two looks; a step here takes a tenth of a millisecond."""
        deadline_s = time.monotonic() + wait_s
        while True:
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                return  # noqa: TRY300  the way out of the loop
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() >= deadline_s:
                    raise
            time.sleep(random.uniform(*_RETRY_S))  # noqa: S311  so that two do not keep meeting

    def run(self, sql: str, values: Mapping[str, Any]) -> Sequence[Any]:
        return self._connection.execute(sql, values).fetchall()

    def commit(self) -> None:
        self._connection.execute("COMMIT")

    def rollback(self) -> None:
        if self._connection.in_transaction:
            self._connection.execute("ROLLBACK")

    def now_ms(self) -> int:
        return since_boot_ms()

    def close(self) -> None:
        self._connection.close()


class _PostgresLink:
    row_lock = " FOR UPDATE"

    def __init__(self, database: Database) -> None:
        import sqlalchemy as sa

        self._text = sa.text
        self._engine = database.engine
        self._connection: Any = None
        with database.writing() as connection:
            connection.execute(sa.text("SELECT pg_advisory_xact_lock(1634170743)"))  # two that make one table fail
            for table in _TABLES:
                connection.execute(sa.text(table))

    def begin(self, wait_s: float) -> None:
        self._connection = self._engine.connect()
        self.run(f"SET LOCAL lock_timeout = {max(1, round(wait_s * 1000))}", {})

    def run(self, sql: str, values: Mapping[str, Any]) -> Sequence[Any]:
        result = self._connection.execute(self._text(sql), values)
        rows: Sequence[Any] = result.fetchall() if result.returns_rows else ()
        return rows

    def commit(self) -> None:
        self._connection.commit()
        self._let_go()

    def rollback(self) -> None:
        if self._connection is not None:
            self._connection.rollback()
            self._let_go()

    def _let_go(self) -> None:
        connection, self._connection = self._connection, None
        connection.close()

    def now_ms(self) -> int:
        return int(self.run("SELECT CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000 AS BIGINT)", {})[0][0])

    def close(self) -> None:
        """The engine is the ledger's."""


def linked(database: Database) -> Link:
    """A connection to the database, its tables made."""
    return _SqliteLink(database) if database.path is not None else _PostgresLink(database)


def told(error: BaseException, name: str) -> BaseException:
    """The error as the ledger's, if it is the database's."""
    if isinstance(error, sqlite3.Error) or type(error).__module__.startswith(("sqlalchemy", "psycopg")):
        cause = " ".join(str(getattr(error, "orig", None) or error).split())
        return LedgerError(f"the shared budgets in {name} could not be used: {cause}")
    return error


def since_boot_ms() -> int:
    """The time since the machine was started, which nobody moves."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return (time.monotonic_ns() if clock is None else time.clock_gettime_ns(clock)) // 1_000_000
