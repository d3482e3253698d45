"""A bill as text for a console of 80 columns or more: plain characters, no terminal needed.

Covers layout and folding of long lists. The numbers are `bill.py`'s.
"""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Sequence
from decimal import Decimal
from itertools import starmap

from agentkv.budget.bill import Bill
from agentkv.budget.branches import Spender
from agentkv.budget.facts import ModelCall, ToolCallFact
from agentkv.budget.money import format_cost, format_usd
from agentkv.budget.names import clean, shortened
from agentkv.budget.shaping import Shaping
from agentkv.budget.split import CLASSES
from agentkv.units import format_bytes, format_seconds

WIDTH = 80
SHOWN = 12
"""Rows of a list that are shown; of a longer one the first and the last half of that."""
_NAME_WIDTH = 12
_VALUE_AT = 26
_SMALL_PERCENT = 0.1  # what is there is not printed as 0.0


def render(bill: Bill) -> str:
    """The console report of `bill`."""
    lines = [f"Bill of {clean(bill.task)}", "=" * WIDTH, *_summary(bill)]
    if bill.calls:
        lines += ["", "Model calls", *_model_calls(bill.calls)]
    if len(bill.spenders) > 1:
        lines += ["", "Who spent it", *_spenders(bill.spenders)]
    if bill.tools:
        lines += ["", "Tool calls (predicted at their start)", *_tool_calls(bill.tools)]
    moves = _moves(bill)
    if moves:
        lines += ["", "KV moved", *moves]
    if bill.calls or bill.tools:
        lines += ["", "Where the time went", *_time(bill)]
        lines += [
            "",
            "Diagnosis",
            *textwrap.wrap(clean(bill.diagnosis.text), WIDTH - 2, initial_indent="  ", subsequent_indent="  "),
        ]
    return "\n".join(lines)


def _summary(bill: Bill) -> list[str]:
    usage = bill.usage
    if not bill.calls and not bill.tools:
        known = bill.started_ms is not None
        return ["  nothing was spent: no model call and no tool call" if known else "  no such task is known here"]
    counted = ", partly estimated" if bill.estimated else ""
    reasoning = f", {usage.reasoning_tokens:,} reasoning" if usage.reasoning_tokens else ""
    marked = "delivered to" if bill.delivered else "visible to"
    rows = [
        ("cost", format_cost(bill.cost_usd, bill.unpriced_calls)),
        ("tokens", f"{usage.total_tokens:,} in {_times(len(bill.calls), 'model call')}{counted}"),
        ("input", f"{usage.input_tokens:,}, of which {usage.cached_tokens:,} cached"),
        ("output", f"{usage.output_tokens:,}{reasoning}, {bill.visible_tokens:,} {marked} the user"),
        ("KV hit rate", percent(bill.hit_rate) + _tiers(bill)),
        ("context", f"peak {bill.peak_context_tokens:,}, mean {bill.mean_context_tokens:,.0f} tokens"),
        ("effective token ratio", f"{percent(bill.effective_token_ratio)} (reached the user / all tokens)"),
        *_attempts(bill),
        *_guessed(bill),
    ]
    if bill.work.device_s:
        of_all = f"{percent(bill.effective_utilisation)} of {format_seconds(bill.work.device_s)} device time was used"
        of_all += "" if bill.raw_utilisation is None else f" (busy for {percent(bill.raw_utilisation)} of the time)"
        rows.append(("effective utilisation", of_all))
    if bill.resume_stalls_s:
        median, worst = statistics.median(bill.resume_stalls_s), max(bill.resume_stalls_s)
        resumed = _times(len(bill.resume_stalls_s), "resume")
        rows.append(("stall after a tool", f"median {format_seconds(median)}, max {format_seconds(worst)}, {resumed}"))
    if bill.stalls.paid_s or bill.stalls.hidden_s:
        both = f"{format_seconds(bill.stalls.paid_s)} paid, {format_seconds(bill.stalls.hidden_s)} hidden behind tools"
        rows.append(("stall in all", both))
    rows += _context(bill.shaping)
    rows.append(("retrievals, messages", f"{bill.shaping.retrievals}, {bill.agent_messages} between agents"))
    lines = [line for name, value in rows for line in _row(name, value)]
    for name, share in bill.split.shares().items():
        lines.append(
            f"  {CLASSES[name]:<24}{percent(share):>7} of the cost, {bill.split.parts[name].tokens:>12,} tokens"
        )
    return lines


def _row(name: str, value: str) -> list[str]:
    """A line, or more where the value is long."""
    first, *more = textwrap.wrap(value, WIDTH - _VALUE_AT) or [""]
    return [f"  {name:<{_VALUE_AT - 2}}{first}", *(" " * _VALUE_AT + line for line in more)]


def _tiers(bill: Bill) -> str:
    """Where cached tokens came from, as shares of the input."""
    if not bill.cached_by or not bill.usage.input_tokens:
        return ""
    shares = (f"{tier} {percent(n / bill.usage.input_tokens)}" for tier, n in sorted(bill.cached_by.items()) if n)
    return f" ({clean(', '.join(shares))})"


def _guessed(bill: Bill) -> list[tuple[str, str]]:
    """What speculation did."""
    drafted = sum(call.drafted_tokens for call in bill.calls)
    if not drafted:
        return []
    right = sum(call.accepted_tokens for call in bill.calls)
    return [("guessed ahead", f"{right:,} of {drafted:,} tokens were right, {right:,} steps less")]


def _attempts(bill: Bill) -> list[tuple[str, str]]:
    """Calls that were not simply an answer the first time."""
    counts = {
        "repeated": sum(call.attempt > 1 for call in bill.calls),
        "failed": sum(call.status == "failed" for call in bill.calls),
        "aborted": sum(call.status == "aborted" for call in bill.calls),
        "served locally": sum(call.served_locally for call in bill.calls),
    }
    told = ", ".join(f"{number:,} {name}" for name, number in counts.items() if number)
    if bill.work.unused_tokens:
        cost = f" ({format_usd(bill.work.unused_cost_usd)})" if bill.work.unused_cost_usd else ""
        told += f"; {bill.work.unused_tokens:,} tokens{cost} came to nothing"
    loops = ", ".join(f"{shortened(name, 30)} {number:,}x" for name, number in sorted(bill.loops.items()))
    return ([("attempts", told)] if told else []) + ([("loops", loops)] if loops else [])


def _context(shaping: Shaping) -> list[tuple[str, str]]:
    rows = []
    if shaping.slimmed:
        what = f"{_times(shaping.slimmed, 'tool output')}, {shaping.slim_before:,} -> {shaping.slim_after:,} tokens"
        rows.append(("slimmed", what))
    if shaping.folds or shaping.failed_folds:
        failed = f", {shaping.failed_folds} failed" if shaping.failed_folds else ""
        sizes = f", {shaping.fold_before:,} -> {shaping.fold_after:,} tokens of prompt" if shaping.folds else ""
        rows.append(("folds", f"{shaping.folds}{failed}{sizes}, summaries cost {shaping.summary_tokens:,}"))
    if shaping.breaks:
        causes = ", ".join(f"{shortened(cause, 30)} {number}x" for cause, number in sorted(shaping.breaks.items()))
        rows.append(("prefix broken", f"{causes}; {shaping.break_tokens:,} tokens computed again"))
    if shaping.recalled_tokens:
        rows.append(("recalled", f"{shaping.recalled_tokens:,} tokens of memories"))
    return rows


def _model_calls(calls: Sequence[ModelCall]) -> list[str]:
    priced = any(call.cost_usd for call in calls)
    rows = [_model_row(number, call, priced=priced) for number, call in enumerate(calls, 1)]
    heads = ["#", "node", "input", "cached", "output", *(["cost"] if priced else []), "ttft", "stall", ""]
    half = SHOWN // 2
    folded = len(calls) > SHOWN
    lines = table(heads, [*rows[:half], *rows[-half:]] if folded else rows, left=(1, len(heads) - 1))
    if folded:
        hidden = [call.usage for call in calls[half:-half]]
        lines.insert(
            1 + half,
            f"  ... {_times(len(hidden), 'more call')}: {sum(usage.input_tokens for usage in hidden):,} input, "
            f"{sum(usage.cached_tokens for usage in hidden):,} cached, {sum(usage.output_tokens for usage in hidden):,} output",
        )
    return lines


def _model_row(number: int, call: ModelCall, *, priced: bool) -> list[str]:
    notes = [] if call.status == "ok" else [call.status]
    notes += ["no call"] if call.served_locally else []
    notes += ["est."] if call.estimated else []
    notes += [shortened(call.purpose, _NAME_WIDTH)] if call.purpose not in {"answer", call.node} else []
    notes += [shortened(call.loop, _NAME_WIDTH)] if call.loop else []
    notes += [f"try {call.attempt}"] if call.attempt > 1 else []
    ttft_s = call.timing.ttft_s  # 0: nobody told
    times = (format_seconds(ttft_s) if ttft_s else "-", format_seconds(call.timing.stall_s))
    cost = ["?" if call.cost_usd is None and not call.served_locally else format_usd(call.cost_usd or Decimal(0))]
    return [
        str(number), shortened(call.node or "-", _NAME_WIDTH), f"{call.usage.input_tokens:,}", f"{call.usage.cached_tokens:,}",
        f"{call.usage.output_tokens:,}", *(cost if priced else []), *(times if call.status == "ok" else ("-", "-")),
        ", ".join(notes),
    ]  # fmt: skip


def _spenders(places: Sequence[Spender]) -> list[str]:
    """The first places; the others are summed."""
    priced = any(one.cost_usd for one in places)
    rows = [
        [
            shortened(one.place, 30), f"{one.calls:,}", f"{one.total_tokens:,}",
            *([format_cost(one.cost_usd if one.unpriced < one.calls else None, 0) if one.calls else "-"] if priced else []),
            f"{one.tool_calls:,}", f"{len(one.branches):,} branches" if len(one.branches) > 1 else "",
        ]
        for one in places[:SHOWN]
    ]  # fmt: skip
    heads = ["place", "calls", "tokens", *(["cost"] if priced else []), "tools", ""]
    lines = table(heads, rows, left=(0, len(heads) - 1))
    rest = places[SHOWN:]
    if rest:
        lines.append(f"  ... {_times(len(rest), 'more place')}: {sum(one.total_tokens for one in rest):,} tokens")
    return lines


def _tool_calls(tools: Sequence[ToolCallFact]) -> list[str]:
    half = SHOWN // 2
    folded = len(tools) > SHOWN
    shown = [*tools[:half], *tools[-half:]] if folded else tools
    lines = table(["tool", "p10", "p50", "p90", "actual", ""], [_tool_row(tool) for tool in shown], left=(0, 5))
    if folded:
        seconds = sum(tool.actual_s for tool in tools[half:-half])
        lines.insert(1 + half, f"  ... {_times(len(tools) - 2 * half, 'more call')}: {format_seconds(seconds)}")
    told = [tool for tool in tools if tool.predicted_p50_s is not None]
    if len(told) > 1:
        inside = sum((tool.predicted_p10_s or 0) <= tool.actual_s <= (tool.predicted_p90_s or 0) for tool in told)
        lines.append(
            f"  in all: {format_seconds(sum(tool.predicted_p50_s or 0 for tool in told))} predicted, "
            f"{format_seconds(sum(tool.actual_s for tool in told))} actual; {inside} of {len(told)} within p10 to p90"
        )
    return lines


def _tool_row(tool: ToolCallFact) -> list[str]:
    name = f"{tool.tool} ({tool.command})" if tool.command and tool.command != tool.tool else tool.tool
    predicted = [tool.predicted_p10_s, tool.predicted_p50_s, tool.predicted_p90_s]
    return [
        shortened(name, 30),
        *("-" if seconds is None else format_seconds(seconds) for seconds in predicted),
        format_seconds(tool.actual_s),
        "" if tool.status == "succeeded" else tool.status,
    ]


def _moves(bill: Bill) -> list[str]:
    rows = [
        [f"to {direction}", str(moved.moves), f"{moved.blocks:,}", format_bytes(moved.size_bytes), format_seconds(moved.seconds)]
        for direction, moved in bill.moved.items()
        if moved.moves
    ]  # fmt: skip
    lines = table(["", "moves", "blocks", "size", "copying"], rows, left=(0,)) if rows else []
    stalls = bill.stalls
    if stalls.wasted_bytes or stalls.unread_bytes:
        wasted = (
            f"{format_bytes(stalls.wasted_bytes)} wasted, {format_bytes(stalls.unread_bytes)} written and not read back"
        )
        lines.append(f"  of {format_bytes(stalls.moved_bytes)} moved: {wasted}")
    if bill.drops:
        lines.append(f"  dropped without writing: {_times(bill.drops, 'context')}")
    if bill.failed_moves:
        lines.append(f"  failed: {_times(bill.failed_moves, 'move')}, blocks stayed where they were")
    return lines


def _time(bill: Bill) -> list[str]:
    spans = bill.spans
    rows = [
        ("tools", spans.tools_s), ("prefill of new tokens", spans.prefill_s), ("decode", spans.decode_s),
        ("queue", spans.queued_s), ("restore from host or disk", spans.restore_s), ("recompute of lost KV", spans.recompute_s),
    ]  # fmt: skip
    total_s = sum(seconds for _, seconds in rows)
    lines = [f"  {name:<27}{format_seconds(s):>12}  {percent(s / total_s if total_s else 0.0):>7}" for name, s in rows]
    lines.append(f"  {'wall time':<27}{format_seconds(spans.wall_s):>12}")
    return lines


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, left: Sequence[int]) -> list[str]:
    """Aligned columns with a head line; columns in `left` are left-aligned, the others right-aligned."""
    widths = [max(len(row[i]) for row in (heads, *rows)) for i in range(len(heads))]

    def line(*cells: str) -> str:
        aligned = (
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return ("  " + "  ".join(aligned)).rstrip()

    return [line(*heads), *starmap(line, rows)]


def _times(n: int, noun: str) -> str:
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def percent(share: float | None) -> str:
    """A share for people; what is there is not printed as 0.0."""
    if share is None:
        return "-"
    percent = share * 100
    return f"{percent:.2g} %" if 0 < percent < _SMALL_PERCENT else f"{percent:.1f} %"
