"""Schema: the tables of a ledger, how a task's name is kept in them, and their version.

One row of `agentkv_task` is one task in one run of a program; its facts hang on it, numbered by the writer. That
number makes writing exact: a batch sent twice, because nobody knew whether the first had arrived, is there once.
Names go in as JSON text without its quotes, so that every name survives (PostgreSQL refuses NUL, and no database takes
a lone surrogate), and are looked up by digest, so that a name of any length has its place in an index.
The tables are opened by `database.py`; steps from older versions are in `migrations/`.
"""

from __future__ import annotations

import hashlib
import json

import sqlalchemy as sa

VERSION = 2
_Number = sa.BigInteger().with_variant(sa.Integer, "sqlite")  # SQLite numbers rows by itself only in an INTEGER

metadata = sa.MetaData()
schema_table = sa.Table(
    "agentkv_schema",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),  # always 1: a second row cannot exist
    sa.Column("version", sa.Integer, nullable=False),
)
task_table = sa.Table(
    "agentkv_task",
    metadata,
    sa.Column("id", _Number, primary_key=True, autoincrement=True),
    sa.Column("digest", sa.String(32), nullable=False),
    sa.Column("run", sa.String(32), nullable=False),
    sa.Column("task", sa.Text, nullable=False),
    sa.Column("saved_ms", sa.BigInteger, nullable=False),  # by the database's clock, not by that of the facts
    sa.Column("totals", sa.Text),  # what is kept of a bill whose facts were pruned
    sa.Index("agentkv_task_digest", "digest", "run", unique=True),
)
fact_table = sa.Table(
    "agentkv_fact",
    metadata,
    sa.Column("id", _Number, primary_key=True, autoincrement=True),
    sa.Column("task_id", sa.BigInteger, nullable=False),  # no foreign key: it would cost a look-up for every fact
    sa.Column("seq", sa.BigInteger, nullable=False),
    sa.Column("kind", sa.String(32), nullable=False),
    sa.Column("at_ms", sa.BigInteger, nullable=False),
    sa.Column("body", sa.Text, nullable=False),
    sa.Index("agentkv_fact_seq", "task_id", "seq", unique=True),
)


def text_of(name: str) -> str:
    """A task's name as it is kept."""
    text = json.dumps(name, ensure_ascii=False)[1:-1]
    return text if text.isascii() or _is_unicode(text) else json.dumps(name)[1:-1]


def name_of(text: str) -> str:
    """The name that was kept so."""
    name: str = json.loads(f'"{text}"')
    return name


def digest_of(name: str) -> str:
    """What a task is looked up by: 128 bits that nobody can make two names collide on."""
    return hashlib.blake2b(json.dumps(name).encode(), digest_size=16).hexdigest()


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
