"""Is a ledger sound: the file as SQLite sees it, every row as a fact, every fact with its task."""

from __future__ import annotations

import json
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from agentkv.budget import sqlite
from agentkv.budget.codec import facts_from_rows
from agentkv.budget.database import Database
from agentkv.budget.schema import VERSION, digest_of, fact_table, name_of, task_table


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What is in a ledger, and what is wrong with it, in words. `unknown` facts are a newer program's: no fault."""

    version: int = VERSION
    tasks: int
    facts: int
    unknown: int
    problems: tuple[str, ...] = ()


def check(database: Database) -> Checked:
    """Read every row. Raises LedgerError where even that is impossible."""
    problems = sqlite.problems(database.path) if database.path is not None else []
    tasks = facts = unknown = damaged = 0
    try:
        with database.engine.connect() as connection:
            for digest, text in connection.execute(sa.select(task_table.c.digest, task_table.c.task)):
                tasks += 1
                if not _is_name(digest, text):
                    problems.append(f"task {text[:60]!r} does not match its digest: it cannot be found by name")
            lost = ~sa.exists().where(task_table.c.id == fact_table.c.task_id)
            orphans = connection.execute(sa.select(sa.func.count()).select_from(fact_table).where(lost)).scalar_one()
    except SQLAlchemyError as error:
        raise database.error("read", error) from error
    for page in database.pages(None, None):
        facts += len(page)
        _, strange, bad = facts_from_rows("", ((one.kind, one.at_ms, one.body) for one in page))
        unknown, damaged = unknown + strange, damaged + bad
    if damaged:
        problems.append(f"{damaged} of {facts} facts cannot be read and are missing in bills")
    if orphans:
        problems.append(f"{orphans} facts belong to no task and are missing in bills")
    return Checked(tasks=tasks, facts=facts + orphans, unknown=unknown, problems=tuple(problems))


def _is_name(digest: str, text: str) -> bool:
    try:
        return digest == digest_of(name_of(text))
    except json.JSONDecodeError:
        return False
