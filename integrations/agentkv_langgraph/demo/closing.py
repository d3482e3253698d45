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


def closing_table(run: Outcome, replay: Outcome | None) -> Table:
    """The closing table, narrow enough for 80 columns; with `replay` also what each task's resumes cost without tiers."""
    table = Table(
        title="Closing table: stalls of resuming after a tool",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("task")
    table.add_column("tools", justify="right")
    table.add_column("stall ms\nmed/max", justify="right")
    if replay is not None:
        table.add_column("recompute\nms med/max", justify="right")
    table.add_column("MiB moved to\nhost/disk/up", justify="right")
    table.add_column("seconds: tools/\nprefill/decode/stall", justify="right")
    everyone = list(run.bills.values())
    for title, bill in run.bills.items():
        again = None if replay is None else replay.bills[title].resume_stalls_s
        table.add_row(*_cells(title, [bill], bill.resume_stalls_s, again))
    table.add_section()
    table.add_row(*_cells("all", everyone, run.stalls_s, None if replay is None else replay.stalls_s))
    return table


def _cells(title: str, bills: Sequence[Bill], stalls_s: Sequence[float], again_s: Sequence[float] | None) -> list[str]:
    tools = str(sum(len(bill.tools) for bill in bills))
    recomputed = [] if again_s is None else [_stalls(again_s)]
    return [title, tools, _stalls(stalls_s), *recomputed, _moved(bills), _times(bills)]


def comparison(run: Outcome, replay: Outcome) -> str:
    """One sentence: the same work with offload on and off."""
    on_s, off_s = sum(run.stalls_s), sum(replay.stalls_s)
    factor = f" ({off_s / on_s:.1f}x)" if on_s > 0 else ""
    return (
        f"Waiting for their own old context cost the tasks {format_seconds(on_s)} with offload and "
        f"{format_seconds(off_s)} with recompute{factor}; the whole run took {format_seconds(run.wall_s)} and "
        f"{format_seconds(replay.wall_s)}."
    )


def to_json(run: Outcome, replay: Outcome | None) -> dict[str, Any]:
    """Both outcomes as plain JSON values."""
    return {"run": _outcome_json(run), "replay": None if replay is None else _outcome_json(replay)}


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
