"""A SQLite file as a ledger: making it (mode 0600), looking at it without touching it, connecting, giving space back.

A connection never makes the file: one that vanished while a program runs would come back empty and readable for all.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from agentkv.errors import LedgerError
from agentkv.log import warn_once

LOCK_WAIT_S = 5.0
"""How long a write waits for another process."""
_WAL_KEPT_BYTES = 16 << 20
_CACHE_KIB = 16_384  # the pages of a large index that one batch touches
_IN_STEPS = 2  # SQLite's number for auto_vacuum = INCREMENTAL
_PAGES_A_STEP = 1000


def make(path: Path) -> None:
    """Make an empty file, and its folder (0700), if they are not there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    except OSError as error:
        raise LedgerError(f"the ledger {path} cannot be made: {error.strerror or error}") from error
    with suppress(sqlite3.Error), closing(connector(path)()) as connection:  # if not, a prune does it the slow way
        _allow_shrinking(connection)


def version_of(path: Path) -> int | None:
    """The schema version of a file, None if it holds no ledger yet; not a byte of it changes.

    But for what a program that was killed in a write without WAL left behind: SQLite takes that back before it reads.
    """
    try:
        try:
            return _read_version(path, mode="ro")
        except sqlite3.OperationalError:
            if not path.with_name(f"{path.name}-journal").exists():
                raise
            return _read_version(path, mode="rw")
    except sqlite3.OperationalError as error:
        raise LedgerError(f"the ledger {path} cannot be opened: {error}") from error
    except sqlite3.DatabaseError as error:
        raise LedgerError(f"{path} is no ledger ({error}); it is left as it is") from error


def _read_version(path: Path, *, mode: str) -> int | None:
    with closing(connector(path, mode=mode)()) as connection:
        known = connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'agentkv_schema'").fetchone()
        row = connection.execute("SELECT version FROM agentkv_schema").fetchone() if known else None
    return row[0] if row else None


def connector(path: Path, *, mode: str = "rw") -> Callable[[], sqlite3.Connection]:
    """What connects to the file, which must exist; in mode "ro", a folder that cannot be written is read as it is."""
    uri = f"{path.absolute().as_uri()}?mode={mode}"

    def connect() -> sqlite3.Connection:
        still = mode == "ro" and not os.access(path.parent, os.W_OK) and not path.with_name(f"{path.name}-wal").exists()
        return sqlite3.connect(
            f"{uri}&immutable=1" if still else uri, uri=True, timeout=LOCK_WAIT_S, check_same_thread=False
        )

    return connect


def prepare(connection: Any, _record: object = None) -> None:
    """Ready a connection: WAL where the file system allows it; elsewhere SQLite's own mode, made safe."""
    cursor = connection.cursor()
    try:
        mode = cursor.execute("PRAGMA journal_mode=WAL").fetchone()[0]
        cursor.execute(f"PRAGMA synchronous={'NORMAL' if mode == 'wal' else 'FULL'}")
        cursor.execute(f"PRAGMA journal_size_limit={_WAL_KEPT_BYTES}")
        cursor.execute(f"PRAGMA cache_size=-{_CACHE_KIB}")
        if mode != "wal":
            _warn_of_mode(mode, Path(cursor.execute("PRAGMA database_list").fetchone()[2]))
    except sqlite3.OperationalError:  # locked or gone: what comes next will say so
        return
    finally:
        cursor.close()


def _warn_of_mode(mode: str, path: Path) -> None:
    if os.access(path, os.W_OK) and os.access(path.parent, os.W_OK):
        advice = "readers and writers wait for each other; a local disk is faster"  # a network mount, mostly
        warn_once("ledger_without_wal", mode=mode, path=str(path), advice=advice)


def give_back(path: Path) -> str | None:
    """Shrink the file to what it holds; None, or in words why that was not possible.

    In small steps, between which others write. A file that an older program made is written anew once. Steps go into
    the log first, and the log cannot become smaller while somebody reads: then the rest is left for the next time.
    """
    log = path.with_name(f"{path.name}-wal")
    try:
        with closing(connector(path)()) as connection:
            if not _has_room(connection) and not log.exists():
                return None
            if connection.execute("PRAGMA auto_vacuum").fetchone() != (_IN_STEPS,):
                _allow_shrinking(connection)
            while _has_room(connection):
                if log.exists() and log.stat().st_size > _WAL_KEPT_BYTES and not _emptied(connection):
                    return _READ
                connection.execute(f"PRAGMA incremental_vacuum({_PAGES_A_STEP})").fetchall()
            return None if _emptied(connection) else _READ
    except (sqlite3.Error, OSError) as error:
        return str(error)


_READ = "another program is reading it"


def _has_room(connection: sqlite3.Connection) -> bool:
    return bool(connection.execute("PRAGMA freelist_count").fetchone() > (0,))


def _emptied(connection: sqlite3.Connection) -> bool:
    """Put the log into the file, and make it empty; False while somebody reads what stands in it."""
    busy, _, _ = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    return not busy


def _allow_shrinking(connection: sqlite3.Connection) -> None:
    connection.isolation_level = None  # VACUUM wants no transaction
    connection.execute(f"PRAGMA auto_vacuum={_IN_STEPS}")
    connection.execute("VACUUM")


def problems(path: Path) -> list[str]:
    """What SQLite itself finds wrong with the file; nothing for a sound one."""
    try:
        with closing(connector(path, mode="ro")()) as connection:
            found = [row[0] for row in connection.execute("PRAGMA integrity_check(20)")]
    except sqlite3.Error as error:
        return [str(error)]
    return [] if found == ["ok"] else found
