"""Store: facts on their way to a database, in batches and by a thread of its own, so that no agent waits for a disk.

Covers the default place (SQLite in the user's data folder), any database URL, and reading back for reports. A
database that is full, locked or gone keeps facts in memory, within bounds, until it is back; then all are written, in
order and once. SQL is `database.py`'s. Each process, also a forked one, writes under a run id of its own.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import uuid
import weakref
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentkv.budget.codec import fact_to_text, facts_from_rows
from agentkv.budget.facts import Fact
from agentkv.budget.ledger import Ledger
from agentkv.errors import ConfigError, LedgerError
from agentkv.log import count, failed, get_logger, warn_once

if TYPE_CHECKING:
    from agentkv.budget.database import Database, Row

INTERVAL_S = 0.25
"""A fact is on its way to the disk at most this long after it was appended."""
MAX_RETRY_S = 5.0
MAX_UNSAVED = 200_000
"""Facts that wait for a database which does not take them; what comes beyond is counted and not saved."""
_BATCH = 20_000  # in one transaction: a large ledger's index has the same pages written for fewer events
_PRUNE_EVERY_S = 86_400.0
MEMORY = "memory"


def default_path() -> Path:
    """Where the ledger is unless told otherwise: AGENTKV_DATA, else the user's data folder."""
    folder = os.environ.get("AGENTKV_DATA")
    if folder:
        return Path(folder) / "ledger.sqlite"
    import platformdirs

    return Path(platformdirs.user_data_dir("agentkv")) / "ledger.sqlite"


def open_ledger(ledger: str | None, *, keep_s: float | None = None) -> Ledger:
    """The ledger for `ledger`: None (the default file), "memory" (nothing is saved) or a database URL.

    `keep_s`: tasks last saved longer ago are forgotten but for their totals, once a day.

    Raises LedgerError for a database that cannot be used or is newer than this program, ConfigError for a text that
    is neither. The default file is a convenience: where it cannot be used, facts stay in memory with one warning.
    """
    if ledger == MEMORY:
        return Ledger()
    if ledger is not None:
        return Ledger(Store(_checked_url(ledger), keep_s=keep_s))
    from agentkv.budget.database import sqlite_url

    try:
        return Ledger(Store(sqlite_url(default_path()), keep_s=keep_s))
    except LedgerError as error:
        if error.__cause__ is None:  # newer than this program: a person has to decide
            raise
        warn_once("ledger_default_unusable", error=str(error), advice='facts stay in memory, as with ledger="memory"')
        return Ledger()


def read_ledger(ledger: str | None) -> Store:
    """A saved ledger, to read; nothing is created. Raises LedgerError if there is none or it cannot be read."""
    return Store(ledger_url(ledger), create=False)


def ledger_url(ledger: str | None) -> str:
    """The URL behind `ledger`: the default file's for None. Raises ConfigError for a text that is no URL."""
    if ledger is not None:
        return _checked_url(ledger)
    from agentkv.budget.database import sqlite_url

    return sqlite_url(default_path())


def _checked_url(ledger: str) -> str:
    if "://" not in ledger:
        raise ConfigError(
            f'ledger={ledger!r} is neither None, "memory" nor a database URL such as "sqlite:////home/me/ledger.sqlite" '
            'or "postgresql://me@host/agents"'
        )
    if ledger in ("sqlite://", "sqlite:///:memory:"):
        raise ConfigError(f'ledger={ledger!r} would be lost at once; write ledger="memory"')
    return ledger


class Store:
    """Facts on their way to a database and back. Thread-safe; `close()` is idempotent and saves what is left."""

    def __init__(
        self, url: str, *, create: bool = True, interval_s: float = INTERVAL_S, keep_s: float | None = None
    ) -> None:
        from agentkv.budget.database import Database

        self.database: Database = Database(url, create=create)
        self._interval_s = interval_s
        self._keep_s = keep_s
        self._prune_at_s = 0.0
        self._closed = False
        self._begin()
        _stores.add(self)

    def _begin(self) -> None:
        """Nothing is on its way, in this process."""
        self.run = uuid.uuid4().hex
        self._state = threading.Condition()
        self._pending: deque[Fact] = deque()
        self._batch: list[Row] = []  # what the thread is saving, or will try again
        self._numbered = 0  # facts of this run that were given a number
        self._thread: threading.Thread | None = None

    @property
    def unsaved(self) -> int:
        """Facts that are not in the database yet."""
        with self._state:
            return len(self._pending) + len(self._batch)

    def put(self, fact: Fact) -> None:
        """Save `fact` soon. Returns at once; after `close()`, or when too many wait, it is counted as not saved."""
        with self._state:
            waiting = len(self._pending)
            if self._closed or waiting >= MAX_UNSAVED:
                self._refuse()
                return
            self._pending.append(fact)
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="agentkv-ledger", daemon=True)
                thread.start()  # raises while the interpreter ends; then `close` saves
                self._thread = thread
                atexit.register(self.close)  # a program that forgets to close, or crashes, keeps its bill
            elif not waiting:
                self._state.notify_all()

    def _refuse(self) -> None:
        if self._closed:
            count("ledger_closed")
            return
        advice = "the database does not take facts, and memory has no more room for them: bills will be too low"
        count("ledger_fact_lost")
        warn_once("ledger_overflow", waiting=MAX_UNSAVED, database=self.database.name, advice=advice)

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Wait until everything put so far is saved; False if that did not happen in time."""
        with self._state:
            return self._state.wait_for(lambda: not self._pending and not self._batch, timeout_s)

    def load(self, task: str, *, run: str | None = None) -> list[Fact]:
        """The saved facts of `task` in order, of the run given, of ALL_RUNS ("*"), or of the run that spoke last.

        Raises LedgerError if the database cannot be read. A row that is no fact, or of a kind that only a newer
        program knows, is left out and counted.
        """
        facts, unknown, damaged = facts_from_rows(task, self.database.rows(task, run))
        for _ in range(unknown):
            count("ledger_kind_unknown")
        for _ in range(damaged):
            count("ledger_row_unreadable")
        return facts

    def saved(self, task: str) -> list[Fact]:
        """All facts of `task` from this run, those still on their way too. Raises LedgerError."""
        if not self.flush():
            raise LedgerError(f"{self.unsaved} facts are not in {self.database.name} yet")
        return self.load(task, run=self.run)

    def kept_bill(self, task: str) -> dict[str, Any] | None:
        """The totals of a task whose facts were pruned, as `Bill.to_json` gave them; None if there are none."""
        from agentkv.budget.prune import kept_bill

        return kept_bill(self.database, task)

    def tasks(self) -> list[str]:
        """Saved tasks, the latest first. Raises LedgerError if the database cannot be read."""
        return self.database.tasks()

    def close(self, timeout_s: float = 10.0) -> None:
        """Save what is left, for at most `timeout_s`, and stop the thread. What cannot be saved is told in a warning."""
        with self._state:
            self._closed = True
            self._state.notify_all()
            thread = self._thread
        atexit.unregister(self.close)
        if thread is None:
            self._save_all()
        elif thread is not threading.current_thread():
            thread.join(timeout_s)
        if self.unsaved:
            get_logger().warning("ledger_unsaved", facts=self.unsaved, database=self.database.name)
        self.database.close()

    # -- the thread

    def _run(self) -> None:
        retry_s = self._interval_s
        behind = False
        while True:
            with self._state:
                self._state.wait_for(lambda: self._pending or self._batch or self._closed)
                self._state.wait_for(lambda: self._closed, retry_s)  # let a batch gather, or a disk recover
            saved = self._save_all()
            if saved and behind:
                get_logger().info("ledger_caught_up", database=self.database.name)
            behind = not saved
            with self._state:
                if self._closed and (not saved or not self._pending):
                    return
            if saved:
                self._prune_sometimes()
            retry_s = self._interval_s if saved else min(max(retry_s, 0.1) * 2, MAX_RETRY_S)

    def _save_all(self) -> bool:
        """Save batch after batch; False if the database did not take one, which then waits for the next time."""
        while self._batch or self._pending:
            if not self._batch:
                self._take()
            if not self._save(self._batch):
                return False
            with self._state:
                self._batch = []
                self._state.notify_all()
        return True

    def _take(self) -> None:
        """The next facts become rows. Their numbers stay theirs, however often they are sent."""
        from agentkv.budget.database import Row

        with self._state:
            if len(self._pending) <= _BATCH:
                facts, self._pending = self._pending, deque()
            else:
                facts = deque(self._pending.popleft() for _ in range(_BATCH))
            self._batch = [Row("", 0, "", 0, "")] * len(facts)  # so that `unsaved` counts them
        rows = []
        for fact in facts:
            self._numbered += 1
            try:
                rows.append(Row(fact.task, self._numbered, fact.kind, int(fact.at_ms), fact_to_text(fact)))
            except Exception as error:
                failed("ledger_fact_lost", kind=getattr(fact, "kind", ""), error=repr(error))
        with self._state:
            self._batch = rows
            self._state.notify_all()

    def _save(self, rows: list[Row]) -> bool:
        if not rows:
            return True
        try:
            self.database.insert(self.run, rows)
        except LedgerError as error:
            if not _is_about_the_rows(error):
                warn_once("ledger_not_saved", error=str(error), advice="facts are kept in memory and saved later")
                return False
            return self._save_singly(rows, error)
        except Exception as error:
            return self._save_singly(rows, error)
        return True

    def _save_singly(self, rows: list[Row], error: Exception) -> bool:
        """A row that no database would take must not hold up the others for ever."""
        if len(rows) == 1:
            failed("ledger_fact_lost", kind=rows[0].kind, error=repr(error))
            return True
        half = len(rows) // 2
        return self._save(rows[:half]) and self._save(rows[half:])

    def _prune_sometimes(self) -> None:
        if self._keep_s is None or time.monotonic() < self._prune_at_s:
            return
        from agentkv.budget.prune import prune

        self._prune_at_s = time.monotonic() + _PRUNE_EVERY_S
        try:
            prune(self.database, older_than_s=self._keep_s, keep_bills=True)
        except Exception as error:
            failed("ledger_prune_failed", error=str(error))

    def _forked(self) -> None:
        """What is on its way is the parent's to save; a child has neither its thread nor its numbers."""
        self._begin()
        self.database.engine.dispose(close=False)


def _is_about_the_rows(error: LedgerError) -> bool:
    from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, StatementError

    cause = error.__cause__
    return isinstance(cause, DataError | IntegrityError) or (
        isinstance(cause, StatementError) and not isinstance(cause, DBAPIError)
    )


_stores: weakref.WeakSet[Store] = weakref.WeakSet()


def _after_fork() -> None:
    for store in list(_stores):
        store._forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
