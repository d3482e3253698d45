"""Forgetting: what was saved too long ago leaves the ledger, a task at a time and never half of one.

A task of a run goes when its last fact was *saved* before the limit, by the database's clock: facts carry the clocks
of the machines that they come from, and one of those may be wrong by years. Deleting is done in short transactions,
so that programs that write in the meantime wait little, and a prune that is killed leaves whole tasks behind.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from agentkv.budget import sqlite
from agentkv.budget.accounts import forget_accounts
from agentkv.budget.bill import Bill
from agentkv.budget.codec import facts_from_rows
from agentkv.budget.database import Database
from agentkv.budget.schema import digest_of, fact_table, name_of, task_table

_TASKS_AT_ONCE = 50
_LONG_LIST = 20  # what is kept of a bill has no lists of calls and tools


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """What a prune took away, or would take.

    `tasks` counts a task once for each run. `before_bytes` and `after_bytes` are the size of SQLite's file, None for
    PostgreSQL, which gives space back by itself. `not_shrunk` says why the file could not be made smaller.
    """

    tasks: int = 0
    facts: int = 0
    before_bytes: int | None = None
    after_bytes: int | None = None
    not_shrunk: str | None = None


def prune(database: Database, *, older_than_s: float, keep_bills: bool = False, dry_run: bool = False) -> Pruned:
    """Delete the facts of tasks that were last saved more than `older_than_s` ago.

    `keep_bills` keeps each such task's totals (`kept_bill` reads them); without it, totals that were kept before go
    too. `dry_run` only counts. Raises LedgerError; what was deleted until then stays deleted.
    """
    before = _size(database)
    try:
        with database.engine.connect() as connection:
            before_ms = database.now_ms(connection) - round(older_than_s * 1000)
            old = sa.select(task_table.c.id).where(task_table.c.saved_ms < before_ms)
            if keep_bills:
                old = old.where(sa.exists().where(fact_table.c.task_id == task_table.c.id))
            ids = list(connection.execute(old.order_by(task_table.c.id)).scalars())
            if dry_run:
                return Pruned(tasks=len(ids), facts=_facts_of(connection, ids), before_bytes=before, after_bytes=before)
        tasks = facts = 0
        for start in range(0, len(ids), _TASKS_AT_ONCE):
            some = ids[start : start + _TASKS_AT_ONCE]
            gone_tasks, gone_facts = _forget(database, some, before_ms=before_ms, keep_bills=keep_bills)
            tasks, facts = tasks + gone_tasks, facts + gone_facts
        forget_accounts(database, older_than_s=older_than_s)
    except SQLAlchemyError as error:
        raise database.error("pruned", error) from error
    not_shrunk = None if database.path is None else sqlite.give_back(database.path)
    return Pruned(
        tasks=tasks, facts=facts, before_bytes=before, after_bytes=_size(database), not_shrunk=not_shrunk
    )  # fmt: skip


def kept_bill(database: Database, task: str) -> dict[str, Any] | None:
    """The totals that were kept of the task's last run; None if its facts are there, or nothing was kept."""
    mine = (task_table.c.digest == digest_of(task)) & task_table.c.totals.is_not(None)
    query = sa.select(task_table.c.totals).where(mine).order_by(task_table.c.saved_ms.desc(), task_table.c.id.desc())
    try:
        with database.engine.connect() as connection:
            text = connection.execute(query.limit(1)).scalar()
    except SQLAlchemyError as error:
        raise database.error("read", error) from error
    return None if text is None else json.loads(text)


def _size(database: Database) -> int | None:
    if database.path is None:
        return None
    files = (database.path, database.path.with_name(f"{database.path.name}-wal"))
    return sum(file.stat().st_size for file in files if file.exists())


def _facts_of(connection: sa.Connection, ids: list[int]) -> int:
    total = 0
    for start in range(0, len(ids), _TASKS_AT_ONCE):
        some = ids[start : start + _TASKS_AT_ONCE]
        count = sa.select(sa.func.count()).select_from(fact_table).where(fact_table.c.task_id.in_(some))
        total += connection.execute(count).scalar_one()
    return total


def _forget(database: Database, ids: list[int], *, before_ms: int, keep_bills: bool) -> tuple[int, int]:
    """Tasks and facts that went. A task that has spoken since it was chosen stays."""
    with database.writing() as connection:
        still = sa.select(task_table.c.id, task_table.c.task).where(
            task_table.c.id.in_(ids), task_table.c.saved_ms < before_ms
        )
        chosen = list(connection.execute(still.with_for_update()))
        if keep_bills:
            for number, text in chosen:
                _keep_totals(connection, number, name_of(text))
        numbers = [number for number, _ in chosen]
        facts = connection.execute(sa.delete(fact_table).where(fact_table.c.task_id.in_(numbers))).rowcount
        if not keep_bills:
            connection.execute(sa.delete(task_table).where(task_table.c.id.in_(numbers)))
        return len(numbers), facts


def _keep_totals(connection: sa.Connection, number: int, task: str) -> None:
    columns = (fact_table.c.kind, fact_table.c.at_ms, fact_table.c.body)
    rows = connection.execute(sa.select(*columns).where(fact_table.c.task_id == number).order_by(fact_table.c.seq))
    facts, _, _ = facts_from_rows(task, rows)
    totals = {
        name: value
        for name, value in Bill.from_facts(task, facts).to_json().items()
        if name not in ("calls", "tools") and not (isinstance(value, list) and len(value) > _LONG_LIST)
    }
    text = json.dumps(totals, default=str)
    connection.execute(sa.update(task_table).where(task_table.c.id == number).values(totals=text))
