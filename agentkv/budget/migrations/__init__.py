"""Steps from older schemas to this program's, by alembic's operations, for SQLite and PostgreSQL alike.

A step is a module `vN` with `upgrade(op)`, which takes a database from N - 1 to N and never changes afterwards: it
names its tables itself instead of importing today's. All steps run in the caller's transaction, so that a program
killed in the middle leaves the old ledger. The version is one number in `agentkv_schema` instead of alembic's own
table of revisions: an older program has to see that a ledger is newer, and revisions have no order.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import sqlalchemy as sa


def migrate(connection: sa.Connection, *, version: int, to: int) -> None:
    """Take the ledger behind `connection` from `version` to version `to`. Raises SQLAlchemyError, all undone."""
    from alembic.migration import MigrationContext  # 0.3 s, and only an old ledger needs it
    from alembic.operations import Operations

    logging.getLogger("alembic").setLevel(logging.WARNING)  # it tells the dialect on every start
    op = Operations(MigrationContext.configure(connection))
    for step in range(version + 1, to + 1):
        import_module(f"{__name__}.v{step}").upgrade(op)
    import sqlalchemy as sa

    connection.execute(sa.text("UPDATE agentkv_schema SET version = :to"), {"to": to})
