"""Database: a ledger in SQLite or PostgreSQL, over SQLAlchemy Core.

Covers opening, creating and bringing up to date, writing a batch exactly once, and reading. A database that is newer
than this program, or no ledger at all, is refused before a byte of it changes. Batching and patience are `store.py`'s,
the tables `schema.py`'s, the file `sqlite.py`'s, forgetting `prune.py`'s.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.dialects import sqlite as sqlite_dialect
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, OperationalError, ProgrammingError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from agentkv.budget import sqlite
from agentkv.budget.migrations import migrate
from agentkv.budget.schema import VERSION, digest_of, fact_table, metadata, name_of, schema_table, task_table, text_of
from agentkv.errors import ExtraMissing, LedgerError

ALL_RUNS = "*"
_CONNECT_S = 5
_MIGRATION_S = 60  # so long a program waits for another one that brings the ledger up to date
_SCHEMA_LOCK = 0x61676B76  # one number that all our programs lock in PostgreSQL while they make or change the schema
_NAMES_PER_QUERY = 500
_PAGE = 2000
_NEVER_MS = -(2**62)  # before all facts, whatever their clocks said


@dataclass(frozen=True, slots=True)
class Row:
    """A fact as it is written: which task, the writer's number, kind, time, and its short JSON."""

    task: str
    seq: int
    kind: str
    at_ms: int
    body: str


@dataclass(frozen=True, slots=True)
class SavedFact:
    """A fact as it is read."""

    task: str
    run: str
    kind: str
    at_ms: int
    body: str


@dataclass(frozen=True, slots=True)
class Run:
    """A task in one run of a program: its row's number, its name, how many facts there are, when the last was saved."""

    number: int
    task: str
    facts: int
    saved_ms: int


def sqlite_url(path: Path) -> str:
    """The URL of a SQLite file."""
    return sa.URL.create("sqlite", database=str(path.absolute())).render_as_string(hide_password=False)


class Database:
    """The tables of one database. Every failure is a LedgerError that names the database, never its password.

    A place that cannot be used leaves the cause in `__cause__`; a newer schema is a LedgerError without one.
    `create=False`: to read; what is not there is not made, but an older ledger is brought up to date.
    """

    def __init__(self, url: str, *, create: bool) -> None:
        try:
            parsed = make_url(url)
            if parsed.drivername in ("postgres", "postgresql"):
                parsed = parsed.set(drivername="postgresql+psycopg")
            self.name = parsed.render_as_string(hide_password=True)
            self.path = _file_of(parsed) if parsed.get_backend_name() == "sqlite" else None
            self.engine = self._connect_to(parsed, create=create)
        except ModuleNotFoundError as error:
            if error.name == "psycopg":
                raise ExtraMissing(
                    f"a ledger in PostgreSQL needs psycopg: pip install 'agentkv-sdk[postgres]' ({error})"
                ) from error
            raise LedgerError(f"ledger {url.rpartition('@')[2]!r} cannot be used: {error}") from error
        except (ArgumentError, NoSuchModuleError, ImportError, ValueError) as error:
            raise LedgerError(f"ledger {url.rpartition('@')[2]!r} cannot be used: {error}") from error
        self._insert = postgresql.insert if self.engine.dialect.name == "postgresql" else sqlite_dialect.insert
        try:
            self._ensure(create=create)
        except BaseException:
            self.engine.dispose()
            raise

    def _connect_to(self, url: sa.URL, *, create: bool) -> sa.Engine:
        if self.path is not None:
            writable = create or _writable(self.path)
            connect = sqlite.connector(self.path, mode="rw" if writable else "ro")
            plain = not url.query and url.drivername in ("sqlite", "sqlite+pysqlite")
            options: dict[str, Any] = {"creator": connect} if plain else {}
            engine = sa.create_engine(url, poolclass=NullPool, **options)
            if writable:
                sa.event.listen(engine, "connect", sqlite.prepare)
            return engine
        if url.get_backend_name() != "postgresql":
            raise ValueError(f"{url.get_backend_name()} is neither sqlite nor postgresql")
        defaults = {"connect_timeout": _CONNECT_S, "application_name": "agentkv"}
        defaults["options"] = "-c lock_timeout=5s -c statement_timeout=120s"
        own = {name: value for name, value in defaults.items() if name not in url.query}
        return sa.create_engine(url, pool_pre_ping=True, pool_size=1, max_overflow=4, connect_args=own)

    # -- opening

    def _ensure(self, *, create: bool) -> bool:
        """Make what is missing; True if anything was made. Nothing of a newer or a foreign database is touched."""
        made = self.path is not None and self._look_at(self.path, create=create)
        try:
            with self.engine.connect() as connection:
                version = self._version(connection)
            self._check(version)
            if version == VERSION:
                return made
            if version is None and not create:
                raise LedgerError(f"{self.name} holds no ledger")
            with self.writing(wait_s=_MIGRATION_S) as connection:  # a second program waits here, and finds all done
                self._lock_schema(connection)
                version = self._version(connection)
                self._check(version)
                if version is None:
                    metadata.create_all(connection)
                    connection.execute(sa.insert(schema_table).values(id=1, version=VERSION))
                elif version < VERSION:
                    migrate(connection, version=version, to=VERSION)
        except SQLAlchemyError as error:
            raise self.error("opened", error) from error
        return True

    def _look_at(self, path: Path, *, create: bool) -> bool:
        if path.exists():
            self._check(sqlite.version_of(path))
            return False
        if not create:
            raise LedgerError(f"there is no ledger at {path}; it is made by the first run that saves one")
        sqlite.make(path)
        return True

    def _version(self, connection: sa.Connection) -> int | None:
        if not sa.inspect(connection).has_table(schema_table.name):
            return None
        version: int | None = connection.execute(sa.select(schema_table.c.version)).scalar()
        return version

    def _check(self, version: int | None) -> None:
        if version is not None and version > VERSION:
            raise LedgerError(
                f"ledger {self.name} has schema version {version}, this program knows {VERSION}: "
                'update agentkv-sdk, or use ledger="memory" or another file. The ledger is unchanged.'
            )

    def _lock_schema(self, connection: sa.Connection) -> None:
        if self.path is None:
            connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{_MIGRATION_S}s'")
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_SCHEMA_LOCK)))

    # -- writing

    @contextmanager
    def writing(self, *, wait_s: float = sqlite.LOCK_WAIT_S) -> Iterator[sa.Connection]:
        """A transaction that will write. SQLite's waits for others at its start: later it would fail at once."""
        with self.engine.begin() as connection:
            if self.path is not None:
                connection.exec_driver_sql(f"PRAGMA busy_timeout={round(wait_s * 1000)}")
                connection.exec_driver_sql("BEGIN IMMEDIATE")
            yield connection

    def insert(self, run: str, rows: Sequence[Row]) -> None:
        """Add the rows that are not there yet, all of them or, with a LedgerError, none.

        A database that vanished is made anew where its folder, or its server, is still there.
        """
        try:
            try:
                self._insert_all(run, rows)
            except (OperationalError, ProgrammingError) as error:
                if self._is_there(error) or not self._ensure(create=True):
                    raise
                self._insert_all(run, rows)
        except SQLAlchemyError as error:
            raise self.error("written", error) from error

    def _is_there(self, error: SQLAlchemyError) -> bool:
        if self.path is not None:
            lost = not self.path.exists() or "no such table" in str(error)
            return not (lost and self.path.parent.exists())
        return not isinstance(error, ProgrammingError)

    def _insert_all(self, run: str, rows: Sequence[Row]) -> None:
        digests = {task: digest_of(task) for task in {row.task: None for row in rows}}
        with self.writing() as connection:
            self._check(connection.execute(sa.select(schema_table.c.version)).scalar())
            upsert = self._insert(task_table)
            later = sa.func.max if self.path is not None else sa.func.greatest
            saved_ms = later(task_table.c.saved_ms, upsert.excluded.saved_ms)
            known = upsert.on_conflict_do_update(index_elements=["digest", "run"], set_={"saved_ms": saved_ms})
            now_ms = self.now_ms(connection)
            connection.execute(
                known,
                [
                    {"digest": digest, "run": run, "task": text_of(task), "saved_ms": now_ms}
                    for task, digest in digests.items()
                ],
            )
            ids = self._ids(connection, run, list(digests.values()))
            connection.execute(
                self._insert(fact_table).on_conflict_do_nothing(index_elements=["task_id", "seq"]),
                [
                    {
                        "task_id": ids[digests[row.task]], "seq": row.seq, "kind": row.kind, "at_ms": row.at_ms,
                        "body": row.body,
                    }
                    for row in rows
                ],
            )  # fmt: skip

    def _ids(self, connection: sa.Connection, run: str, digests: list[str]) -> dict[str, int]:
        ids: dict[str, int] = {}
        for start in range(0, len(digests), _NAMES_PER_QUERY):
            some = digests[start : start + _NAMES_PER_QUERY]
            query = sa.select(task_table.c.digest, task_table.c.id).where(
                task_table.c.run == run, task_table.c.digest.in_(some)
            )
            ids.update((digest, number) for digest, number in connection.execute(query))
        return ids

    def now_ms(self, connection: sa.Connection) -> int:
        """The database's time: a PostgreSQL server's, so that machines with skewed clocks agree; else this machine's."""
        if self.path is not None:
            return time.time_ns() // 1_000_000
        return int(connection.execute(sa.select(sa.func.extract("epoch", sa.func.now()) * 1000)).scalar_one())

    # -- reading

    def time_ms(self) -> int:
        """The moment, by the clock that `saved_ms` goes by."""
        try:
            with self.engine.connect() as connection:
                return self.now_ms(connection)
        except SQLAlchemyError as error:
            raise self.error("read", error) from error

    def rows(self, task: str, run: str | None = None) -> list[tuple[str, int, str]]:
        """(kind, at_ms, body) of the task's facts in order: of `run`, of ALL_RUNS, or of the run that spoke last."""
        mine = _called(task)
        query = sa.select(fact_table.c.kind, fact_table.c.at_ms, fact_table.c.body)
        query = query.join_from(task_table, fact_table, task_table.c.id == fact_table.c.task_id).where(mine)
        if run == ALL_RUNS:
            return self._read(query.order_by(fact_table.c.id))
        if run is None:
            latest = sa.select(task_table.c.id).where(mine).order_by(_last_fact().desc().nulls_last()).limit(1)
            query = query.where(task_table.c.id == latest.scalar_subquery())
        else:
            query = query.where(task_table.c.run == run)
        return self._read(query.order_by(fact_table.c.seq))

    def tasks(self) -> list[str]:
        """Tasks, the one that spoke last first; those of which only a bill is left at the end."""
        last = _last_fact().label("last")
        query = sa.select(task_table.c.task, last).order_by(last.desc().nulls_last(), task_table.c.saved_ms.desc())
        return list(dict.fromkeys(name_of(text) for text, _ in self._read(query)))

    def runs(self, task: str, since_ms: int | None = None) -> list[str]:
        """The runs in which the task has facts (from then on)."""
        spoke = sa.exists().where(
            fact_table.c.task_id == task_table.c.id, fact_table.c.at_ms >= (_NEVER_MS if since_ms is None else since_ms)
        )
        return [run for (run,) in self._read(sa.select(task_table.c.run).where(_called(task), spoke))]

    def spoken(self, since_ms: int | None = None) -> list[list[Run]]:
        """Tasks with facts (from then on), the one that spoke last first, each as its runs in the order of their start."""
        mine = sa.select(
            fact_table.c.task_id, sa.func.count().label("facts"), sa.func.max(fact_table.c.id).label("last")
        )
        if since_ms is not None:
            mine = mine.where(fact_table.c.at_ms >= since_ms)
        sums = mine.group_by(fact_table.c.task_id).subquery()
        query = sa.select(task_table.c.id, task_table.c.task, task_table.c.saved_ms, sums.c.facts, sums.c.last)
        query = query.join(sums, sums.c.task_id == task_table.c.id).order_by(task_table.c.id)
        tasks: dict[str, list[Run]] = {}
        last: dict[str, int] = {}
        for number, text, saved_ms, facts, latest in self._read(query):
            tasks.setdefault(text, []).append(Run(number, name_of(text), facts, saved_ms))
            last[text] = max(latest, last.get(text, 0))
        return [tasks[text] for text in sorted(tasks, key=lambda text: -last[text])]

    def bodies(self, runs: Sequence[Run], since_ms: int | None = None) -> dict[int, list[tuple[str, int, str]]]:
        """(kind, at_ms, body) of the facts of all these runs in order, by the run's number."""
        query = sa.select(fact_table.c.task_id, fact_table.c.kind, fact_table.c.at_ms, fact_table.c.body)
        query = query.where(fact_table.c.task_id.in_([run.number for run in runs]))
        if since_ms is not None:
            query = query.where(fact_table.c.at_ms >= since_ms)
        found: dict[int, list[tuple[str, int, str]]] = {}
        for number, *row in self._read(query.order_by(fact_table.c.task_id, fact_table.c.seq)):
            found.setdefault(number, []).append(tuple(row))
        return found

    def pages(self, task: str | None, since_ms: int | None) -> Iterator[list[SavedFact]]:
        """All facts in the order of writing, or a task's run by run, a page at a time.

        Every page is a short read of its own, so that a long export does not hold up SQLite's log.
        """
        place = fact_table.c.id if task is None else fact_table.c.seq
        query = sa.select(place, fact_table.c.task_id, fact_table.c.kind, fact_table.c.at_ms, fact_table.c.body)
        if since_ms is not None:
            query = query.where(fact_table.c.at_ms >= since_ms)
        query = query.order_by(place).limit(_PAGE)
        if task is None:
            yield from self._pages(query, place)
            return
        for (number,) in self._read(sa.select(task_table.c.id).where(_called(task)).order_by(task_table.c.id)):
            yield from self._pages(query.where(fact_table.c.task_id == number), place)

    def _pages(self, query: sa.Select[Any], place: sa.Column[int]) -> Iterator[list[SavedFact]]:
        last = -1
        while page := self._read(query.where(place > last)):
            last = page[-1][0]
            numbers = {row[1] for row in page}
            whose = sa.select(task_table.c.id, task_table.c.task, task_table.c.run).where(task_table.c.id.in_(numbers))
            names = {number: (name_of(text), run) for number, text, run in self._read(whose)}
            yield [SavedFact(*names[number], *rest) for _, number, *rest in page if number in names]

    def has(self, task: str) -> bool:
        """True if anything of the task is here."""
        return bool(self._read(sa.select(task_table.c.id).where(_called(task)).limit(1)))

    def kept(self, task: str | None, since_ms: int | None) -> list[tuple[str, str, int, Any]]:
        """(task, run, saved_ms, totals) of tasks of which only a bill is left."""
        query = sa.select(task_table.c.task, task_table.c.run, task_table.c.saved_ms, task_table.c.totals)
        query = query.where(task_table.c.totals.is_not(None), task_table.c.saved_ms >= (since_ms or 0))
        if task is not None:
            query = query.where(_called(task))
        rows = self._read(query.order_by(task_table.c.id))
        return [(name_of(text), run, saved_ms, json.loads(totals)) for text, run, saved_ms, totals in rows]

    def _read(self, query: sa.Select[Any]) -> list[Any]:
        try:
            with self.engine.connect() as connection:
                return list(connection.execute(query))
        except SQLAlchemyError as error:
            raise self.error("read", error) from error

    def close(self) -> None:
        """Let go of the database. Idempotent."""
        self.engine.dispose()

    def error(self, deed: str, error: SQLAlchemyError) -> LedgerError:
        """What to raise for `error`, in one line."""
        cause = getattr(error, "orig", None) or error
        return LedgerError(f"the ledger {self.name} could not be {deed}: {' '.join(str(cause).split())}")


def _called(task: str) -> sa.ColumnElement[bool]:
    return task_table.c.digest == digest_of(task)


def _last_fact() -> sa.ScalarSelect[Any]:
    """The number of the last fact of the task row at hand, by a look into the index."""
    mine = sa.select(fact_table.c.id).where(fact_table.c.task_id == task_table.c.id).correlate(task_table)
    return mine.order_by(fact_table.c.seq.desc()).limit(1).scalar_subquery()


def _file_of(url: sa.URL) -> Path:
    """SQLite's file; a program that changes its folder later still means the same one."""
    if not url.database or url.database.startswith(("file:", ":memory:")):
        raise ValueError(f"{url.database!r} is not the path of a file")
    return Path(url.database).absolute()


def _writable(path: Path) -> bool:
    return os.access(path.parent, os.W_OK) and os.access(path, os.W_OK)
