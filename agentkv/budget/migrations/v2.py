"""From 1 to 2: a task of a run gets a row of its own, and its facts a number instead of its name.

Version 1 held the name and the run in every fact. Its bodies stay as they are: they hold their task and time once
more, and reading does not mind.
"""

from __future__ import annotations

import hashlib
import json

import sqlalchemy as sa
from alembic.operations import Operations

_Number = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade(op: Operations) -> None:
    """Version 1 becomes version 2."""
    tasks = op.create_table(
        "agentkv_task",
        sa.Column("id", _Number, primary_key=True, autoincrement=True),
        sa.Column("digest", sa.String(32), nullable=False),
        sa.Column("run", sa.String(32), nullable=False),
        sa.Column("task", sa.Text, nullable=False),
        sa.Column("saved_ms", sa.BigInteger, nullable=False),
        sa.Column("totals", sa.Text),
    )
    op.add_column("agentkv_fact", sa.Column("task_id", sa.BigInteger))
    op.add_column("agentkv_fact", sa.Column("seq", sa.BigInteger))
    _number(op.get_bind(), tasks)
    with op.batch_alter_table("agentkv_fact") as batch:
        batch.drop_index("agentkv_fact_task")
        batch.drop_column("task")
        batch.drop_column("run")
        batch.alter_column("task_id", existing_type=sa.BigInteger, nullable=False)
        batch.alter_column("seq", existing_type=sa.BigInteger, nullable=False)
    op.create_index("agentkv_fact_seq", "agentkv_fact", ["task_id", "seq"], unique=True)
    op.create_index("agentkv_task_digest", "agentkv_task", ["digest", "run"], unique=True)


def _number(connection: sa.Connection, tasks: sa.Table) -> None:
    facts = sa.table("agentkv_fact", *(sa.column(name) for name in ("id", "task", "run", "at_ms", "task_id", "seq")))
    groups = sa.select(facts.c.task, facts.c.run, sa.func.max(facts.c.at_ms)).group_by(facts.c.task, facts.c.run)
    for number, (task, run, at_ms) in enumerate(connection.execute(groups).all(), 1):
        row = {"id": number, "digest": _digest(task), "run": run, "task": _text(task), "saved_ms": at_ms}
        connection.execute(sa.insert(tasks).values(row))
        mine = (facts.c.task == task) & (facts.c.run == run)
        connection.execute(sa.update(facts).where(mine).values(task_id=number, seq=facts.c.id))
    if connection.dialect.name == "postgresql":  # it does not notice numbers that were given by hand
        next_id = "SELECT setval(pg_get_serial_sequence('agentkv_task', 'id'), max(id)) FROM agentkv_task"
        connection.execute(sa.text(next_id))


def _text(task: str) -> str:
    return json.dumps(task, ensure_ascii=False)[1:-1]  # no surrogates: no database took them


def _digest(task: str) -> str:
    return hashlib.blake2b(json.dumps(task).encode(), digest_size=16).hexdigest()
