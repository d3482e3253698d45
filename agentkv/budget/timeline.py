"""The timeline of a bill: for each session what it was doing, in which tier its KV was, and how long its context was.

Covers data only, in milliseconds since the task's start; `svg.py` draws it. Phases of one call are laid one after the
other in the order in which an engine goes through them; what the engine's timing does not explain is "model".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from agentkv.budget.bill import Bill
from agentkv.budget.branches import place_of
from agentkv.budget.facts import ModelCall, ToolCallFact

PHASES = ("queue", "restore", "recompute", "prefill", "decode", "model", "tool", "failed")
TIERS = {"device": "KV on the device", "host": "KV in host memory", "disk": "KV on disk", "lost": "KV dropped"}
MAX_LANES = 12
_KINDS = ("calls", "tools", "moves", "events")


@dataclass(frozen=True, slots=True)
class Bar:
    """Something that lasted, from `begin_ms` to `end_ms`; `kind` is one of PHASES or TIERS."""

    kind: str
    begin_ms: float
    end_ms: float
    title: str = ""


@dataclass(slots=True)
class Lane:
    """One session: its bars in order of time, where its KV was, and (ms, tokens) of its context after each call."""

    name: str
    bars: list[Bar] = field(default_factory=list)
    tiers: list[Bar] = field(default_factory=list)
    context: list[tuple[float, int]] = field(default_factory=list)
    marks: list[tuple[float, str]] = field(default_factory=list)
    """(ms, "fold" or "break")."""
    tokens: int = 0


@dataclass(slots=True)
class Timeline:
    """`lanes` holds those with most tokens, in order of their start; `hidden` counts the others."""

    length_ms: float
    lanes: list[Lane]
    hidden: int = 0


def timeline(bill: Bill) -> Timeline:
    """The timeline; without lanes where nothing has a time. What a clock that was not set yet stamped is left out."""
    start_ms = bill.started_ms or 0
    if start_ms > 0:
        timed: dict[str, Any] = {kind: tuple(fact for fact in getattr(bill, kind) if fact.at_ms) for kind in _KINDS}
        bill = replace(bill, **timed)
    lanes: dict[str, Lane] = {}
    for call in bill.calls:
        lane = lanes.setdefault(call.session or place_of(call.branch, call.node), Lane(""))
        lane.name = lane.name or _lane_name(call)
        lane.tokens += call.usage.total_tokens
        lane.bars += _phases(call, start_ms)
        if call.status == "ok" and call.purpose == "answer":
            lane.context.append((call.at_ms - start_ms + call.timing.total_s * 1000, call.usage.total_tokens))
    _others(bill, lanes, start_ms)
    end_ms = max((bar.end_ms for lane in lanes.values() for bar in lane.bars), default=0.0)
    for lane in lanes.values():
        lane.bars.sort(key=lambda bar: bar.begin_ms)
        lane.context.sort()
    for session, changes in _changes(bill, start_ms).items():
        if session in lanes:
            lanes[session].tiers = _strip(changes, end_ms)
    kept = sorted(lanes.values(), key=lambda lane: -lane.tokens)[:MAX_LANES]
    kept.sort(key=lambda lane: lane.bars[0].begin_ms if lane.bars else 0.0)
    return Timeline(length_ms=end_ms, lanes=kept, hidden=len(lanes) - len(kept))


def _others(bill: Bill, lanes: dict[str, Lane], start_ms: int) -> None:
    """Tools stand with the session that waited for them, else with the first; folds and breaks with theirs."""
    if bill.tools and not lanes:
        lanes[""] = Lane("tools")
    main = next(iter(lanes.values()), None)
    for tool in bill.tools:
        if main is not None:
            lanes.get(tool.session, main).bars.append(_tool(tool, start_ms))
    for event in bill.events:
        if main is not None and event.event in ("fold", "break"):
            lanes.get(event.session, main).marks.append((event.at_ms - start_ms, event.event))


def _lane_name(call: ModelCall) -> str:
    if call.branch:
        return place_of(call.branch, "")
    task, number, session = call.session.partition(f"{call.task}#")  # the embedded engine numbers a task's sessions
    return f"session {session}" if number and not task else call.session or call.node or "calls"


def _phases(call: ModelCall, start_ms: int) -> Iterable[Bar]:
    timing = call.timing
    begin_ms = float(call.at_ms - start_ms)
    end_ms = begin_ms + timing.total_s * 1000
    usage = call.usage
    title = f"{call.node or 'call'}: {usage.input_tokens:,} in ({usage.cached_tokens:,} cached), {usage.output_tokens:,} out"
    if call.status != "ok":
        yield Bar("failed", begin_ms, end_ms, f"{title}, {call.status}")
        return
    parts = (
        ("queue", timing.queued_s), ("restore", timing.restore_s), ("recompute", timing.recompute_s),
        ("prefill", timing.prefill_s), ("decode", timing.decode_s),
    )  # fmt: skip
    for kind, seconds in parts:
        if seconds > 0:
            yield Bar(kind, begin_ms, begin_ms + seconds * 1000, f"{title}; {kind} {seconds:.3g} s")
            begin_ms += seconds * 1000
    if begin_ms < end_ms:
        yield Bar("model", begin_ms, end_ms, title)


def _tool(tool: ToolCallFact, start_ms: int) -> Bar:
    end_ms = float(tool.at_ms - start_ms)
    failed = "" if tool.status == "succeeded" else f", {tool.status}"
    return Bar("tool", end_ms - tool.actual_s * 1000, end_ms, f"{tool.tool or 'tool'}: {tool.actual_s:.3g} s{failed}")


def _changes(bill: Bill, start_ms: int) -> dict[str, list[tuple[float, str]]]:
    """For each session whose KV was moved, when its dearest tier changed, as its calls and moves tell.

    A copy written ahead changes nothing.
    """
    changes: dict[str, list[tuple[float, str]]] = {move.session: [] for move in bill.moves}
    for call in bill.calls:
        if call.session in changes:
            changes[call.session].append((float(call.at_ms - start_ms), "device"))
    for move in bill.moves:
        if move.outcome not in ("done", "partial"):
            continue
        if move.action == "drop":
            changes[move.session].append((float(move.at_ms - start_ms), "lost"))
        elif move.action in ("demote", "prefetch", "load") and move.to in TIERS:
            changes[move.session].append((float(move.at_ms - start_ms), move.to))
    return changes


def _strip(changes: list[tuple[float, str]], end_ms: float) -> list[Bar]:
    changes.sort(key=lambda change: change[0])
    bars: list[Bar] = []
    for (begin_ms, tier), (until_ms, _) in zip(changes, [*changes[1:], (end_ms, "")], strict=True):
        if bars and bars[-1].kind == tier and bars[-1].end_ms >= begin_ms:
            bars[-1] = Bar(tier, bars[-1].begin_ms, max(begin_ms, until_ms), TIERS[tier])
        elif until_ms > begin_ms:
            bars.append(Bar(tier, begin_ms, until_ms, TIERS[tier]))
    return bars
