"""Forgetting the accounts of shared budgets, which outlive their tasks: those of which the ledger knows nothing any more.

Called by `prune.py`, after it has deleted the facts. An account in which something is set aside, for which somebody
waits, or that was used a short while ago, stays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import sqlalchemy as sa

from agentkv.budget.links import since_boot_ms

if TYPE_CHECKING:
    from agentkv.budget.database import Database

_FORGET = """
    DELETE FROM agentkv_budget WHERE (seen_ms <= :before OR seen_ms > :now)
    AND NOT EXISTS (SELECT 1 FROM agentkv_budget_hold h WHERE h.digest = agentkv_budget.digest)
    AND NOT EXISTS (SELECT 1 FROM agentkv_budget_wait w WHERE w.digest = agentkv_budget.digest)
    AND NOT EXISTS (SELECT 1 FROM agentkv_task t JOIN agentkv_fact f ON f.task_id = t.id
                    WHERE t.digest = agentkv_budget.digest)
    AND task NOT LIKE 'key:%'
"""
"""An API key's accounts (`runtime/keybudgets.py`) stay: what it has spent is spent. A row for each day of use is little."""


def forget_accounts(database: Database, *, older_than_s: float) -> int:
    """Delete accounts of tasks without facts that were not used for so long; how many. Raises SQLAlchemyError.

    On SQLite one that was seen "later than now" was used before the machine was started.
    """
    with database.writing() as connection:
        if not sa.inspect(connection).has_table("agentkv_budget_wait"):
            return 0  # made by the first shared budget
        now_ms = since_boot_ms() if database.path is not None else database.now_ms(connection)
        gone = connection.execute(
            sa.text(_FORGET), {"before": now_ms - round(older_than_s * 1000), "now": now_ms}
        ).rowcount
    return int(gone)
