"""What a finished piece of work costs: the spend on all tasks of a type over those that were completed.

Failed and abandoned tasks are charged to the completed ones of their type. A task is *abandoned* when nobody told its
outcome and it is finished, or has been silent for `ABANDONED_AFTER_S`. Tasks that still run are counted apart.
What several runs of a program did on one task counts run by run; a run that a later one went on from is over.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from itertools import groupby

from agentkv.budget.bill import Bill

ABANDONED_AFTER_S = 86_400.0
_PLACES = Decimal("1e-12")


@dataclass(slots=True)
class Outcomes:
    """The tasks (run by run) of one type. Money counts the calls whose price is known; `unpriced_calls` the others."""

    task_type: str
    completed: int = 0
    failed: int = 0
    abandoned: int = 0
    running: int = 0
    total_tokens: int = 0
    cost_usd: Decimal = Decimal(0)
    unpriced_calls: int = 0

    @property
    def cost_per_completed_usd(self) -> Decimal | None:
        """None without a completed task, or while some price is unknown."""
        if not self.completed or self.unpriced_calls:
            return None
        return (self.cost_usd / self.completed).quantize(_PLACES).normalize()

    @property
    def tokens_per_completed(self) -> float | None:
        """None without a completed task."""
        return self.total_tokens / self.completed if self.completed else None


def outcomes(bills: Iterable[Bill], *, now_ms: int) -> list[Outcomes]:
    """One entry for each type of task, in the order of their names; what running tasks spent is not in it.

    Neighbouring bills of one task are its runs, in the order of their start. `now_ms` is a moment of the clock that
    their `saved_ms` are from, else of that of their facts.
    """
    types: dict[str, Outcomes] = {}
    for _, same in groupby(bills, key=lambda bill: bill.task):
        runs = list(same)
        told = next((bill.task_type for bill in reversed(runs) if bill.task_type), "")
        for bill in runs:
            kind = bill.task_type or told
            _add(types.setdefault(kind, Outcomes(kind)), bill, over=bill is not runs[-1] or not _runs(bill, now_ms))
    return [types[name] for name in sorted(types)]


def _add(one: Outcomes, bill: Bill, *, over: bool) -> None:
    if bill.completed is None and not over:
        one.running += 1
        return
    if bill.completed is None:
        one.abandoned += 1
    elif bill.completed:
        one.completed += 1
    else:
        one.failed += 1
    one.total_tokens += bill.usage.total_tokens
    one.cost_usd += bill.cost_usd or 0
    one.unpriced_calls += bill.unpriced_calls


def _runs(bill: Bill, now_ms: int) -> bool:
    spoke_ms = (bill.last_ms or 0) if bill.saved_ms is None else bill.saved_ms
    return bill.finished_ms is None and now_ms - spoke_ms < ABANDONED_AFTER_S * 1000
