"""Store: facts in a SQL database, written in batches by a thread of its own, so that no agent waits for a disk.

Covers the default place (SQLite in the user's data folder), any SQLAlchemy URL, and reading back for reports. A disk
that is full or locked keeps facts in memory until it recovers. The file and its schema are `schema.py`'s. Does not
cover several processes sharing one budget (later): each process writes facts under its own run id.
"""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
import uuid
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from agentkv.budget.ledger import Fact, Ledger, fact_from_json, fact_to_json, is_known
from agentkv.errors import ConfigError, LedgerError
from agentkv.log import count, failed, get_logger, warn_once

if TYPE_CHECKING:
    from agentkv.budget.schema import Database

INTERVAL_S = 0.25
"""A fact is on its way to the disk at most this long after it was appended."""
MAX_RETRY_S = 5.0
MEMORY = "memory"


def default_path() -> Path:
    """Where the ledger is unless told otherwise: AGENTKV_DATA, else the user's data folder."""
    folder = os.environ.get("AGENTKV_DATA")
    if folder:
        return Path(folder) / "ledger.sqlite"
    import platformdirs

    return Path(platformdirs.user_data_dir("agentkv")) / "ledger.sqlite"


def open_ledger(ledger: str | None) -> Ledger:
    """The ledger for `ledger`: None (the default file), "memory" (nothing is saved) or a database URL.

    Raises LedgerError for a database that cannot be used or is newer than this program, ConfigError for a text that
    is neither. The default file is a convenience: where it cannot be used, facts stay in memory with one warning.
    """
    if ledger == MEMORY:
        return Ledger()
    if ledger is not None:
        return Ledger(Store(_checked_url(ledger)))
    from agentkv.budget.schema import sqlite_url

    try:
        return Ledger(Store(sqlite_url(default_path())))
    except LedgerError as error:
        if error.__cause__ is None:  # newer than this program: a person has to decide
            raise
        warn_once("ledger_default_unusable", error=str(error), advice='facts stay in memory, as with ledger="memory"')
        return Ledger()


def read_ledger(ledger: str | None) -> Store:
    """A saved ledger, to read; nothing is created. Raises LedgerError if there is none or it cannot be read."""
    from agentkv.budget.schema import sqlite_url

    url = sqlite_url(default_path()) if ledger is None else _checked_url(ledger)
    return Store(url, create=False)


def _checked_url(ledger: str) -> str:
    if "://" not in ledger:
        raise ConfigError(
            f'ledger={ledger!r} is neither None, "memory" nor a database URL such as "sqlite:////home/me/ledger.sqlite"'
        )
    if ledger in ("sqlite://", "sqlite:///:memory:"):
        raise ConfigError(f'ledger={ledger!r} would be lost at once; write ledger="memory"')
    return ledger


class Store:
    """Facts on their way to a database and back. Thread-safe; `close()` is idempotent and saves what is left."""

    def __init__(self, url: str, *, create: bool = True, interval_s: float = INTERVAL_S) -> None:
        from agentkv.budget.schema import Database

        self._database: Database = Database(url, create=create)
        self.run = uuid.uuid4().hex
        self._interval_s = interval_s
        self._pending: deque[Fact] = deque()
        self._saving = 0
        self._state = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def unsaved(self) -> int:
        """Facts that are not in the database yet."""
        with self._state:
            return len(self._pending) + self._saving

    def put(self, fact: Fact) -> None:
        """Save `fact` soon. Returns at once; after `close()` it is counted as unsaved."""
        with self._state:
            if self._closed:
                count("ledger_closed")
                return
            self._pending.append(fact)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="agentkv-ledger", daemon=True)
                self._thread.start()
                atexit.register(self.close)  # a program that forgets to close, or crashes, keeps its bill
            elif len(self._pending) == 1:
                self._state.notify_all()

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Wait until everything put so far is saved; False if that did not happen in time."""
        deadline_s = time.monotonic() + timeout_s
        with self._state:
            return self._state.wait_for(
                lambda: not self._pending and not self._saving, max(0.0, deadline_s - time.monotonic())
            )

    def load(self, task: str, *, run: str | None = None) -> list[Fact]:
        """The saved facts of `task` in order, of the run given or of the latest that has any; [] if there are none.

        Raises LedgerError if the database cannot be read. A row that is no fact, or of a kind that only a newer
        program knows, is left out and counted.
        """
        facts: list[Fact] = []
        for kind, body in self._database.rows(task, run):
            if not is_known(kind):
                count("ledger_kind_unknown")
                continue
            try:
                facts.append(fact_from_json(kind, json.loads(body)))
            except (KeyError, TypeError, ValueError):
                count("ledger_row_unreadable")
        return facts

    def tasks(self) -> list[str]:
        """Saved tasks, the latest first. Raises LedgerError if the database cannot be read."""
        return self._database.tasks()

    def close(self, timeout_s: float = 10.0) -> None:
        """Save what is left, for at most `timeout_s`, and stop the thread. What cannot be saved is told in a warning."""
        with self._state:
            self._closed = True
            self._state.notify_all()
            thread = self._thread
        atexit.unregister(self.close)
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)
        if self.unsaved:
            get_logger().warning("ledger_unsaved", facts=self.unsaved, database=self._database.name)
        self._database.close()

    def _run(self) -> None:
        retry_s = self._interval_s
        while True:
            with self._state:
                self._state.wait_for(lambda: self._pending or self._closed)
                last = self._state.wait_for(lambda: self._closed, retry_s)  # let a batch gather, or a disk recover
                batch = list(self._pending)
                self._pending.clear()
                self._saving = len(batch)
            saved = self._save(batch)
            with self._state:
                if not saved:
                    self._pending.extendleft(reversed(batch))
                self._saving = 0
                self._state.notify_all()
                if last or (self._closed and not self._pending):
                    return
            retry_s = self._interval_s if saved else min(max(retry_s, 0.1) * 2, MAX_RETRY_S)

    def _save(self, batch: list[Fact]) -> bool:
        if not batch:
            return True
        try:
            rows = [
                {
                    "run": self.run, "task": fact.task, "kind": fact.kind, "at_ms": fact.at_ms,
                    "body": json.dumps(fact_to_json(fact), separators=(",", ":")),
                }
                for fact in batch
            ]  # fmt: skip
            self._database.insert(rows)
        except LedgerError as error:
            warn_once("ledger_not_saved", error=str(error), advice="facts are kept in memory and saved later")
            return False
        except Exception as error:
            failed("ledger_batch_lost", facts=len(batch), error=repr(error))
        return True
