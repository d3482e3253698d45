"""Many bills at a glance: a line for each task, what a completed one of each type costs, what each day cost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from decimal import Decimal
from itertools import groupby
from typing import Any

from agentkv.budget.bill import Bill
from agentkv.budget.console import percent, table
from agentkv.budget.days import Day, days, zone_name
from agentkv.budget.facts import ModelCall
from agentkv.budget.money import format_cost, format_usd
from agentkv.budget.names import clean, shortened
from agentkv.budget.outcomes import Outcomes, outcomes
from agentkv.units import format_seconds

VERSION = "agentkv.bills/1"
_NAME = 28
_TASKS_SHOWN = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One task, all its runs; `outcome` is the last that was told, `wall` that of the last run."""

    task: str
    task_type: str
    started_ms: int | None
    outcome: str
    runs: int
    calls: int
    total_tokens: int
    cost_usd: Decimal | None
    unpriced_calls: int
    hit_rate: float | None
    device_s: float
    used_s: float
    wall: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """Tasks of which only totals are left; they are in no other sum."""

    tasks: int = 0
    total_tokens: int = 0
    cost_usd: Decimal = Decimal(0)
    unpriced_calls: int = 0

    def plus(self, totals: Mapping[str, Any]) -> Pruned:
        """With one more."""
        return Pruned(
            tasks=self.tasks + 1,
            total_tokens=self.total_tokens + int(totals.get("total_tokens") or 0),
            cost_usd=self.cost_usd + Decimal(totals.get("cost_usd") or 0),
            unpriced_calls=self.unpriced_calls + int(totals.get("unpriced_calls") or 0),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """The lines in the order of the bills, and their sums."""

    lines: tuple[Line, ...]
    types: tuple[Outcomes, ...]
    days: dict[Any, Day]
    zone: tzinfo | None
    pruned: Pruned = Pruned()

    def __str__(self) -> str:
        return render(self)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; money is text."""
        return {
            "v": VERSION,
            "zone": zone_name(self.zone),
            "tasks": [_line_json(line) for line in self.lines],
            "types": [_type_json(one) for one in self.types],
            "days": [
                {
                    "day": str(day), "calls": one.calls, "total_tokens": one.total_tokens,
                    "cost_usd": f"{one.cost_usd:f}", "unpriced_calls": one.unpriced_calls,
                }
                for day, one in self.days.items()
            ],
            "pruned": {
                "tasks": self.pruned.tasks, "total_tokens": self.pruned.total_tokens,
                "cost_usd": f"{self.pruned.cost_usd:f}", "unpriced_calls": self.pruned.unpriced_calls,
            },
        }  # fmt: skip


def overview(
    bills: Iterable[Bill], *, now_ms: int, zone: tzinfo | None = None, pruned: Iterable[Mapping[str, Any]] = ()
) -> Overview:
    """Read the bills one after the other; only what is shown of them is kept.

    Neighbouring bills of one task are its runs: one line. `pruned` are the totals of tasks whose facts are gone.
    """
    lines: list[Line] = []
    calls: list[ModelCall] = []

    def each() -> Iterator[Bill]:
        for _, same in groupby(bills, key=lambda bill: bill.task):
            runs = list(same)
            lines.append(_line(runs))
            for bill in runs:
                calls.extend(bill.calls)
            yield from runs

    types = tuple(outcomes(each(), now_ms=now_ms))
    kept = Pruned()
    for totals in pruned:
        kept = kept.plus(totals)
    return Overview(lines=tuple(lines), types=types, days=days(calls, zone), zone=zone, pruned=kept)


def _line(runs: Sequence[Bill]) -> Line:
    last = runs[-1]
    told = {True: "completed", False: "failed", None: "finished" if last.finished_ms is not None else "open"}
    outcome = next((bill.completed for bill in reversed(runs) if bill.completed is not None), None)
    known = [bill.cost_usd for bill in runs if bill.cost_usd is not None]
    read = sum(bill.usage.input_tokens for bill in runs)
    return Line(
        task=last.task,
        task_type=next((bill.task_type for bill in reversed(runs) if bill.task_type), ""),
        started_ms=min((bill.started_ms for bill in runs if bill.started_ms is not None), default=None),
        outcome=told[outcome],
        runs=len(runs),
        calls=sum(len(bill.calls) for bill in runs),
        total_tokens=sum(bill.usage.total_tokens for bill in runs),
        cost_usd=sum(known, Decimal(0)) if known else None,
        unpriced_calls=sum(bill.unpriced_calls for bill in runs),
        hit_rate=sum(bill.usage.cached_tokens for bill in runs) / read if read else None,
        device_s=sum(bill.work.device_s for bill in runs),
        used_s=sum(bill.work.used_s for bill in runs),
        wall=last.diagnosis.wall,
    )


def render(seen: Overview) -> str:
    """The overview for a console of 80 columns or more."""
    tokens = sum(line.total_tokens for line in seen.lines)
    cost_usd = sum((line.cost_usd for line in seen.lines if line.cost_usd is not None), Decimal(0))
    unpriced = sum(line.unpriced_calls for line in seen.lines)
    calls = sum(line.calls for line in seen.lines)
    known = cost_usd if unpriced < calls or not calls else None
    many = f"{len(seen.lines):,} task{'' if len(seen.lines) == 1 else 's'}"
    head = f"{many}, {calls:,} model calls, {tokens:,} tokens, {format_cost(known, unpriced)}"
    device_s, used_s = sum(line.device_s for line in seen.lines), sum(line.used_s for line in seen.lines)
    busy = [f"{format_seconds(device_s)} of device time, {percent(used_s / device_s)} of it used"] if device_s else []
    parts = [head, *busy, "", *_tasks(seen.lines, seen.zone)]
    if any(one.task_type or one.completed for one in seen.types):
        parts += ["", "What a completed task costs (failed and abandoned ones are charged to it)", *_types(seen.types)]
    if seen.days:
        parts += ["", f"Per day ({clean(zone_name(seen.zone))})", *_days(seen.days)]
    gone = seen.pruned
    if gone.tasks:
        names = f"{gone.tasks:,} task{'' if gone.tasks == 1 else 's'}"
        cost = format_cost(gone.cost_usd, gone.unpriced_calls)
        parts += ["", f"Not in these sums: {names} whose events were pruned, {gone.total_tokens:,} tokens, {cost}"]
    return "\n".join(parts)


def _tasks(lines: Sequence[Line], zone: tzinfo | None) -> list[str]:
    rows = [
        [
            shortened(line.task, _NAME), _moment(line.started_ms, zone), f"{line.calls:,}", f"{line.total_tokens:,}",
            _short_cost(line), percent(line.hit_rate), line.outcome,
        ]
        for line in lines[:_TASKS_SHOWN]
    ]  # fmt: skip
    shown = table(["task", "started", "calls", "tokens", "cost", "KV hits", ""], rows, left=(0, 1, 6))
    rest = len(lines) - _TASKS_SHOWN
    return [*shown, f"  ... {rest:,} more tasks"] if rest > 0 else shown


def _short_cost(line: Line) -> str:
    if line.cost_usd is None:
        return "?"
    return format_usd(line.cost_usd) + ("+?" if line.unpriced_calls else "")


def _moment(at_ms: int | None, zone: tzinfo | None) -> str:
    if at_ms is None:
        return "-"
    try:
        return (datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=at_ms)).astimezone(zone).strftime("%m-%d %H:%M")
    except (OverflowError, ValueError, OSError):
        return "?"


def _types(types: Sequence[Outcomes]) -> list[str]:
    rows = [
        [
            shortened(one.task_type or "-", _NAME), f"{one.completed:,}", f"{one.failed:,}", f"{one.abandoned:,}",
            f"{one.running:,}", format_usd(one.cost_per_completed_usd) if one.completed else "-",
            "-" if one.tokens_per_completed is None else f"{one.tokens_per_completed:,.0f}",
        ]
        for one in types
    ]  # fmt: skip
    heads = ["type", "completed", "failed", "abandoned", "open", "cost each", "tokens each"]
    return table(heads, rows, left=(0,))


def _days(found: dict[Any, Day]) -> list[str]:
    rows = [
        [
            str(day), f"{one.calls:,}", f"{one.total_tokens:,}",
            format_cost(one.cost_usd if one.unpriced_calls < one.calls else None, one.unpriced_calls),
        ]
        for day, one in found.items()
    ]  # fmt: skip
    return table(["day", "calls", "tokens", "cost"], rows, left=(0, 3))


def _line_json(line: Line) -> dict[str, Any]:
    return {
        "task": line.task, "task_type": line.task_type, "started_ms": line.started_ms, "outcome": line.outcome,
        "runs": line.runs,
        "model_calls": line.calls, "total_tokens": line.total_tokens,
        "cost_usd": None if line.cost_usd is None else f"{line.cost_usd:f}", "unpriced_calls": line.unpriced_calls,
        "kv_hit_rate": line.hit_rate, "device_s": line.device_s, "used_s": line.used_s, "wall": line.wall,
    }  # fmt: skip


def _type_json(one: Outcomes) -> dict[str, Any]:
    each = one.cost_per_completed_usd
    return {
        "task_type": one.task_type, "completed": one.completed, "failed": one.failed, "abandoned": one.abandoned,
        "running": one.running, "total_tokens": one.total_tokens, "cost_usd": f"{one.cost_usd:f}",
        "unpriced_calls": one.unpriced_calls, "cost_per_completed_usd": None if each is None else f"{each:f}",
        "tokens_per_completed": one.tokens_per_completed,
    }  # fmt: skip
