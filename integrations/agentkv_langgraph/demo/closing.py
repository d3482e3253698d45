"""The end of a run: one row per task with its stalls, what recompute cost, bytes moved and where the time went."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table

from agentkv.budget.bill import Bill
from agentkv.units import MIB, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one run of all tasks gave: its bills by task title, its wall time, and the engine's own counters."""

    bills: Mapping[str, Bill]
    wall_s: float
    stats: Mapping[str, Any]

    @property
    def stalls_s(self) -> list[float]:
        """Every resume stall of every task."""
        return [stall for bill in self.bills.values() for stall in bill.resume_stalls_s]

    def reached(self, tier: str) -> bool:
        """Whether any block came to this tier: by the engine's own count (disk blocks pass through host), else by moves."""
        counted = bytes_written(self.stats)
        return self.blocks_to(tier) > 0 if counted is None else counted[tier] > 0

    def blocks_to(self, tier: str) -> int:
        """Blocks that moves of all tasks brought to this tier."""
        return sum(bill.moved[tier].blocks for bill in self.bills.values())


def bytes_written(stats: Mapping[str, Any]) -> Mapping[str, int] | None:
    """What the tiers themselves counted: bytes that came to host and to disk; None for an engine that has no tiers."""
    counted = stats.get("engine", {}).get("kv", {}).get("bytes")
    return None if counted is None else {"host": counted["d2h"], "disk": counted["write"]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The recorded work twice more, with offload on and off and nothing else changed: the same calls with the same
    tokens, and sleeps where tools ran, so that both sides have the whole machine for themselves.
    """

    on: Outcome
    off: Outcome

    def sentence(self) -> str:
        """Both sides in one sentence."""
        on_s, off_s = sum(self.on.stalls_s), sum(self.off.stalls_s)
        factor = f" ({off_s / on_s:.1f}x)" if on_s > 0 else ""
        return (
            f"The same work again, tools as sleeps: waiting for their own old context cost the tasks "
            f"{format_seconds(on_s)} with offload and {format_seconds(off_s)} with recompute{factor}; all of it took "
            f"{format_seconds(self.on.wall_s)} and {format_seconds(self.off.wall_s)}."
        )


def closing_table(run: Outcome, again: Comparison | None) -> Table:
    """The closing table, narrow enough for 80 columns; with `again` also what each task's resumes cost both ways."""
    table = Table(
        title="Closing table: stalls of resuming after a tool",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("task")
    table.add_column("stall ms\nmed/max", justify="right")
    if again is not None:
        table.add_column("again, with\noffload", justify="right")
        table.add_column("again, with\nrecompute", justify="right")
    table.add_column("MiB to host/\ndisk/device", justify="right")
    table.add_column("seconds: tool/pre-\nfill/decode/stall", justify="right")
    for title, bill in run.bills.items():
        both = [] if again is None else [side.bills[title].resume_stalls_s for side in (again.on, again.off)]
        table.add_row(*_cells(title, [bill], [bill.resume_stalls_s, *both]))
    table.add_section()
    both_all = [] if again is None else [again.on.stalls_s, again.off.stalls_s]
    table.add_row(*_cells("all", list(run.bills.values()), [run.stalls_s, *both_all]))
    return table


def _cells(title: str, bills: Sequence[Bill], stalls_s: Sequence[Sequence[float]]) -> list[str]:
    return [title, *map(_stalls, stalls_s), _moved(bills), _times(bills)]


def to_json(run: Outcome, again: Comparison | None) -> dict[str, Any]:
    """All outcomes as plain JSON values."""
    return {
        "run": _outcome_json(run),
        "again_with_offload": None if again is None else _outcome_json(again.on),
        "again_with_recompute": None if again is None else _outcome_json(again.off),
    }


def _outcome_json(outcome: Outcome) -> dict[str, Any]:
    stalls = outcome.stalls_s
    return {
        "wall_s": outcome.wall_s,
        "resume_stall_median_s": statistics.median(stalls) if stalls else None,
        "resume_stall_max_s": max(stalls, default=None),
        "resume_stall_sum_s": sum(stalls),
        "blocks_to_host": outcome.blocks_to("host"),
        "blocks_to_disk": outcome.blocks_to("disk"),
        "blocks_to_device": outcome.blocks_to("device"),
        "stats": dict(outcome.stats),
        "tasks": {title: bill.to_json() for title, bill in outcome.bills.items()},
    }


def _stalls(stalls_s: Sequence[float]) -> str:
    if not stalls_s:
        return "-"
    return f"{statistics.median(stalls_s) * 1000:.0f}/{max(stalls_s) * 1000:.0f}"


def _moved(bills: Sequence[Bill]) -> str:
    sizes = [sum(bill.moved[tier].size_bytes for bill in bills) for tier in ("host", "disk", "device")]
    return "/".join(f"{size / MIB:.0f}" for size in sizes)


def _times(bills: Sequence[Bill]) -> str:
    spans = [bill.spans for bill in bills]
    parts = (
        sum(span.tools_s for span in spans),
        sum(span.prefill_s for span in spans),
        sum(span.decode_s for span in spans),
        sum(span.queued_s + span.restore_s + span.recompute_s for span in spans),
    )
    return "/".join(f"{part:.1f}" for part in parts)
