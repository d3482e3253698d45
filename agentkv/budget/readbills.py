"""All bills of a saved ledger, one for each run of each task, read some thousand facts at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from agentkv.budget.bill import Bill
from agentkv.budget.codec import facts_from_rows
from agentkv.budget.database import Database, Run

_FACTS_AT_ONCE = 20_000
_RUNS_AT_ONCE = 500


def bills(database: Database, *, since_ms: int | None = None) -> Iterator[Bill]:
    """The task that spoke last first; the runs of a task one behind the other, in the order of their start.

    `since_ms` leaves out what happened before. Facts that cannot be read are left out, as in every bill.
    """
    batch: list[Run] = []
    facts = 0
    for runs in database.spoken(since_ms):
        for run in runs:
            if batch and (facts + run.facts > _FACTS_AT_ONCE or len(batch) == _RUNS_AT_ONCE):
                yield from _bills_of(database, batch, since_ms)
                batch, facts = [], 0
            batch.append(run)
            facts += run.facts
    yield from _bills_of(database, batch, since_ms)


def _bills_of(database: Database, runs: list[Run], since_ms: int | None) -> Iterator[Bill]:
    rows = database.bodies(runs, since_ms) if runs else {}
    for run in runs:
        facts, _, _ = facts_from_rows(run.task, rows.get(run.number, ()))
        if facts:
            yield replace(Bill.from_facts(run.task, facts), saved_ms=run.saved_ms)
