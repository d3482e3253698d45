"""Database: the one table of facts and its version, over SQLAlchemy Core.

Covers creating, checking and reading the schema and SQLite's file (WAL, mode 0600). A database that is newer than
this program, or no database at all, is refused before a byte of it changes. Batching and retries are `store.py`'s.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, IntegrityError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from agentkv.errors import LedgerError

VERSION = 1
LOCK_WAIT_S = 5.0
"""How long a write waits for another process."""

_metadata = sa.MetaData()
_schema = sa.Table(
    "agentkv_schema",
    _metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),  # always 1: a second row cannot exist
    sa.Column("version", sa.Integer, nullable=False),
)
_fact = sa.Table(
    "agentkv_fact",
    _metadata,
    sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
    sa.Column("run", sa.String(32), nullable=False),
    sa.Column("task", sa.Text, nullable=False),
    sa.Column("kind", sa.String(32), nullable=False),
    sa.Column("at_ms", sa.BigInteger, nullable=False),
    sa.Column("body", sa.Text, nullable=False),
    sa.Index("agentkv_fact_task", "task", "id"),
)


def sqlite_url(path: Path) -> str:
    """The URL of a SQLite file."""
    return sa.URL.create("sqlite", database=str(path.absolute())).render_as_string(hide_password=False)


class Database:
    """The facts table of one database. Every failure is a LedgerError that names the database, never its password.

    A place that cannot be used leaves the cause in `__cause__`; a newer schema is a LedgerError without one.
    """

    def __init__(self, url: str, *, create: bool) -> None:
        try:
            parsed = make_url(url)
            self.name = parsed.render_as_string(hide_password=True)
            is_sqlite = parsed.get_backend_name() == "sqlite"
            if is_sqlite:
                self._prepare_file(Path(parsed.database or ""), create=create)
            options: dict[str, Any] = (
                {"connect_args": {"timeout": LOCK_WAIT_S}} if is_sqlite else {"pool_pre_ping": True}
            )
            self._engine = sa.create_engine(parsed, **options, **({"poolclass": NullPool} if is_sqlite else {}))
        except (ArgumentError, NoSuchModuleError, ImportError, ValueError) as error:
            raise LedgerError(f"ledger {url.rpartition('@')[2]!r} cannot be used: {error}") from error
        if is_sqlite:
            sa.event.listen(self._engine, "connect", _set_pragmas)
        try:
            with self._engine.begin() as connection:
                self._check_or_create(connection, create=create, is_sqlite=is_sqlite)
        except IntegrityError:
            pass  # another process created the same schema at the same moment
        except SQLAlchemyError as error:
            self._engine.dispose()
            raise self._error("opened", error) from error
        except LedgerError:
            self._engine.dispose()
            raise

    def _prepare_file(self, path: Path, *, create: bool) -> None:
        """Make the file (mode 0600) or, if it exists, look at its version through a read-only connection."""
        if path.exists():
            self._refuse_newer_file(path)
            return
        if not create:
            raise LedgerError(f"there is no ledger at {path}; it is made by the first run that saves one")
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        except OSError as error:
            raise LedgerError(f"the ledger {path} cannot be made: {error.strerror or error}") from error

    def _refuse_newer_file(self, path: Path) -> None:
        try:
            connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=LOCK_WAIT_S)
            try:
                known = connection.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (_schema.name,)).fetchone()
                row = connection.execute("SELECT version FROM agentkv_schema").fetchone() if known else None
            finally:
                connection.close()
        except sqlite3.OperationalError as error:
            raise LedgerError(f"the ledger {path} cannot be opened: {error}") from error
        except sqlite3.DatabaseError as error:
            raise LedgerError(f"{path} is no ledger ({error}); it is left as it is") from error
        self._check_version(row[0] if row else None)

    def _check_or_create(self, connection: sa.Connection, *, create: bool, is_sqlite: bool) -> None:
        if not sa.inspect(connection).has_table(_schema.name):
            if not create:
                raise LedgerError(f"{self.name} holds no ledger")
            if is_sqlite:  # two processes may come here together: the second waits, then finds the tables
                connection.exec_driver_sql("BEGIN IMMEDIATE")
            _metadata.create_all(connection)
            if connection.execute(sa.select(_schema.c.version)).scalar() is None:
                connection.execute(sa.insert(_schema).values(id=1, version=VERSION))
        self._check_version(connection.execute(sa.select(_schema.c.version)).scalar())

    def _check_version(self, version: int | None) -> None:
        if version is not None and version > VERSION:
            raise LedgerError(
                f"ledger {self.name} has schema version {version}, this program knows {VERSION}: "
                'update agentkv-sdk, or use ledger="memory" or another file. The ledger is unchanged.'
            )

    def insert(self, rows: Sequence[dict[str, Any]]) -> None:
        """Add rows in one transaction: all of them or, with a LedgerError, none."""
        try:
            with self._engine.begin() as connection:
                connection.execute(sa.insert(_fact), list(rows))
        except SQLAlchemyError as error:
            raise self._error("written", error) from error

    def rows(self, task: str, run: str | None) -> list[tuple[str, str]]:
        """(kind, body) of the task's facts in order, of `run` or of the latest run that has any."""
        mine = _fact.c.task == task
        latest = sa.select(_fact.c.run).where(mine).order_by(_fact.c.id.desc()).limit(1).scalar_subquery()
        query = sa.select(_fact.c.kind, _fact.c.body).where(mine, _fact.c.run == (run or latest)).order_by(_fact.c.id)
        return [(row.kind, row.body) for row in self._read(query)]

    def tasks(self) -> list[str]:
        """Tasks, the latest first."""
        query = sa.select(_fact.c.task).group_by(_fact.c.task).order_by(sa.func.max(_fact.c.id).desc())
        return [row.task for row in self._read(query)]

    def _read(self, query: sa.Select[Any]) -> Sequence[sa.Row[Any]]:
        try:
            with self._engine.connect() as connection:
                return connection.execute(query).all()
        except SQLAlchemyError as error:
            raise self._error("read", error) from error

    def close(self) -> None:
        """Let go of the database. Idempotent."""
        self._engine.dispose()

    def _error(self, deed: str, error: SQLAlchemyError) -> LedgerError:
        cause = getattr(error, "orig", None) or error
        return LedgerError(f"the ledger {self.name} could not be {deed}: {cause}")


def _set_pragmas(connection: Any, _record: object) -> None:
    """WAL where the file system allows it (a network mount may not: then SQLite keeps its own mode)."""
    cursor = connection.cursor()
    try:
        cursor.execute("PRAGMA journal_mode=WAL")
        cursor.execute("PRAGMA synchronous=NORMAL")
    except sqlite3.OperationalError:
        pass
    finally:
        cursor.close()
