"""Database: the SQLite file of the memories, or a database in RAM.

Covers the file (0600, write-ahead log, several processes), its schema and version, and a file that is damaged: it is
kept aside with one line in the log, and a fresh one begins. Does not cover what the rows mean: that is `table.py`.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from agentkv.errors import Closed, ConfigError
from agentkv.log import failed

VERSION = 1
LOCK_WAIT_S = 5.0

_SCHEMA = """
CREATE TABLE meta(key TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE passages(
    id INTEGER PRIMARY KEY AUTOINCREMENT, namespace TEXT NOT NULL, kind TEXT NOT NULL, digest BLOB NOT NULL,
    text TEXT NOT NULL, at_ms INTEGER NOT NULL, embedder TEXT NOT NULL, vector BLOB,
    UNIQUE(namespace, kind, digest));
CREATE INDEX passages_by_time ON passages(at_ms);
CREATE TABLE origins(
    passage INTEGER NOT NULL REFERENCES passages(id) ON DELETE CASCADE, source TEXT NOT NULL, task TEXT NOT NULL,
    tags TEXT NOT NULL, at_ms INTEGER NOT NULL, PRIMARY KEY(passage, source, task)) WITHOUT ROWID;
CREATE INDEX origins_by_source ON origins(source);
CREATE VIRTUAL TABLE words USING fts5(space, terms, tokenize='ascii');
CREATE VIRTUAL TABLE spread USING fts5vocab(words, 'row');
"""


class Database:
    """Two connections: one for the writing thread, one for readers, each behind a lock. Thread-safe.

    Raises ConfigError for a folder that cannot hold the file and for a file of a newer version, which stays as it is.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.aside: Path | None = None
        """Where a damaged file was moved to, the last time that happened."""
        self._write_lock = threading.RLock()
        self._read_lock = threading.RLock() if path is not None else self._write_lock
        self._open = True
        self._replaced = 0
        self._connect()

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """A transaction: all of it is kept or, with an exception, none. A damaged file is replaced, then it raises."""
        with self._guarded(), self._write_lock:
            connection = self._opened(self._writer)
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):
                    connection.execute("ROLLBACK")
                raise

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """A connection to read from. A damaged file is replaced, then it raises."""
        with self._guarded(), self._read_lock:
            yield self._opened(self._reader)

    def state(self, connection: sqlite3.Connection) -> tuple[int, int]:
        """A value that differs when anything was written since, by whatever process. Two ticks of a clock, no query."""
        return connection.execute("PRAGMA data_version").fetchone()[0], connection.total_changes

    def close(self) -> None:
        """Close both connections. Idempotent."""
        with self._write_lock, self._read_lock:
            if self._open:
                self._open = False
                self._disconnect()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Stands around the locks, not inside: replacing takes both, and two threads may find the damage at once."""
        seen = self._replaced
        try:
            yield
        except sqlite3.DatabaseError as error:
            if _is_damage(error):
                self._replace(error, seen)
            raise

    def _opened(self, connection: sqlite3.Connection) -> sqlite3.Connection:
        if not self._open:
            raise Closed("this memory is closed")
        return connection

    def _connect(self) -> None:
        try:
            self._writer, self._reader = self._connections()
        except sqlite3.DatabaseError as error:
            if not _is_damage(error):
                raise ConfigError(f"the memory {self.path} cannot be opened: {error}") from error
            self._keep(os.replace, error)
            self._writer, self._reader = self._connections()
        except OSError as error:
            raise ConfigError(f"the memory {self.path} cannot be made: {error.strerror or error}") from error

    def _connections(self) -> tuple[sqlite3.Connection, sqlite3.Connection]:
        if self.path is None:
            only = _connection(":memory:")
            _prepare(only, None)
            return only, only
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600))
        writer = _connection(str(self.path))
        try:
            _prepare(writer, self.path)
            return writer, _connection(str(self.path))
        except BaseException:
            writer.close()
            raise

    def _disconnect(self) -> None:
        for connection in {id(c): c for c in (self._reader, self._writer)}.values():
            with suppress(sqlite3.Error):
                connection.close()

    def _replace(self, error: sqlite3.DatabaseError, seen: int) -> None:
        """Keep the damaged file aside and begin afresh, unless another thread did; all go on with that."""
        with self._write_lock, self._read_lock:
            if self._replaced != seen or not self._open:
                return
            self._replaced += 1
            try:
                if _is_damaged(self._writer):
                    self._keep(shutil.copyfile, error)
                    _begin_afresh(self._writer)
            except sqlite3.Error:  # not even that: it is no database any more
                self._disconnect()
                self._keep(os.replace, error)
                self._writer, self._reader = self._connections()

    def _keep(self, take: Callable[[Path, Path], object], error: sqlite3.DatabaseError) -> None:
        """Copy or move the file, and what belongs to it, to a name of its own."""
        if self.path is None:
            return
        mark = f".aside-{uuid.uuid4().hex[:8]}"
        self.aside = self.path.with_name(self.path.name + mark)
        for ending in ("", "-wal", "-shm"):
            there = self.path.with_name(self.path.name + ending)
            kept = self.path.with_name(self.path.name + mark + ending)
            with suppress(FileNotFoundError):
                if there.exists():
                    os.close(os.open(kept, os.O_CREAT | os.O_RDWR, 0o600))
                    take(there, kept)
        failed(
            "memory_damaged",
            path=str(self.path),
            error=str(error),
            kept_as=str(self.aside),
            advice="a fresh one begins",
        )


def _is_damaged(connection: sqlite3.Connection) -> bool:
    """False where another process has begun afresh meanwhile. Raises sqlite3.Error for what is no database."""
    try:
        if connection.execute("PRAGMA quick_check(1)").fetchone()[0] != "ok":
            return True
        connection.execute("INSERT INTO words(words) VALUES ('integrity-check')")
    except sqlite3.DatabaseError as error:
        if getattr(error, "sqlite_errorname", "").startswith("SQLITE_CORRUPT"):
            return True
        raise
    return False


def _begin_afresh(connection: sqlite3.Connection) -> None:
    """Overwrite the whole database with an empty one, page by page under SQLite's own locks.

    In place, since other processes may have the file open: one that closes it deletes the write-ahead log by name,
    and so that of whatever file has come to stand there.
    """
    empty = sqlite3.connect(":memory:", isolation_level=None)
    try:
        _prepare(empty, None)
        empty.backup(connection)
    finally:
        empty.close()


def _is_damage(error: sqlite3.DatabaseError) -> bool:
    """True for a file that is no database or holds a broken one; locks, full disks and wrong queries are not."""
    name = getattr(error, "sqlite_errorname", "") or ""
    return name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB"))


def _connection(target: str) -> sqlite3.Connection:
    connection = sqlite3.connect(target, timeout=LOCK_WAIT_S, isolation_level=None, check_same_thread=False)
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON", "secure_delete=ON"):
        connection.execute(f"PRAGMA {pragma}")
    return connection


def _prepare(connection: sqlite3.Connection, path: Path | None) -> None:
    """Make the tables, once, if several processes come together; refuse a newer version."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        _refuse_newer(version, path)
        if version == 0:
            for statement in _SCHEMA.split(";\n"):
                connection.execute(statement)
            # not 0: who holds vectors of a database that began afresh has to see that it is another one
            connection.execute("INSERT INTO meta VALUES ('removals', abs(random()) >> 2)")
            connection.execute(f"PRAGMA user_version = {VERSION}")
        connection.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        raise


def _refuse_newer(version: int, path: Path | None) -> None:
    if version > VERSION:
        raise ConfigError(
            f"the memory {path} has schema version {version}, this program knows {VERSION}: update agentkv-sdk or use "
            "another file. The file is unchanged."
        )
