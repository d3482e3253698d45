"""A bill as text for a console of 80 columns or more: plain characters, no terminal needed.

Covers layout and folding of long lists. The numbers are `bill.py`'s.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import starmap

from agentkv.budget.bill import Bill, Shaping
from agentkv.budget.ledger import ModelCall, ToolCallFact
from agentkv.core.usage import Usage
from agentkv.units import format_bytes, format_seconds

WIDTH = 80
SHOWN = 12
"""Rows of a list that are shown; of a longer one the first and the last half of that."""
_NAME_WIDTH = 12
_SMALL_PERCENT = 0.1  # what is there is not printed as 0.0


def render(bill: Bill) -> str:
    """The console report of `bill`."""
    lines = [f"Bill of {_clean(bill.task)}", "=" * WIDTH, *_summary(bill)]
    if bill.calls:
        lines += ["", "Model calls", *_model_calls(bill.calls)]
    if bill.tools:
        lines += ["", "Tool calls (predicted at their start)", *_tool_calls(bill.tools)]
    moves = _moves(bill)
    if moves:
        lines += ["", "KV moved", *moves]
    if bill.calls or bill.tools:
        lines += ["", "Where the time went", *_time(bill)]
    return "\n".join(lines)


def _summary(bill: Bill) -> list[str]:
    usage = bill.usage
    if not bill.calls and not bill.tools:
        known = bill.started_ms is not None
        return ["  nothing was spent: no model call and no tool call" if known else "  no such task is known here"]
    counted = ", partly estimated" if bill.estimated else ""
    rows = [
        ("tokens", f"{usage.total_tokens:,} in {_times(len(bill.calls), 'model call')}{counted}"),
        ("input", f"{usage.input_tokens:,}, of which {usage.cached_tokens:,} cached"),
        ("output", f"{usage.output_tokens:,}, of which {bill.visible_tokens:,} visible to the user"),
        ("KV hit rate", _percent(bill.hit_rate)),
        ("peak context", f"{bill.peak_context_tokens:,} tokens"),
        ("effective token ratio", f"{_percent(bill.effective_token_ratio)} (visible output / all tokens)"),
    ]
    if bill.resume_stalls_s:
        median, worst = statistics.median(bill.resume_stalls_s), max(bill.resume_stalls_s)
        resumed = _times(len(bill.resume_stalls_s), "resume")
        rows.append(("stall after a tool", f"median {format_seconds(median)}, max {format_seconds(worst)}, {resumed}"))
    rows += _context(bill.shaping)
    rows.append(("retrievals, messages", f"{bill.shaping.retrievals}, {bill.agent_messages} between agents"))
    return [f"  {name:<23}{value}" for name, value in rows]


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
        causes = ", ".join(f"{cause} {number}x" for cause, number in sorted(shaping.breaks.items()))
        rows.append(("prefix broken", f"{causes}; {shaping.break_tokens:,} tokens computed again"))
    if shaping.recalled_tokens:
        rows.append(("recalled", f"{shaping.recalled_tokens:,} tokens of memories"))
    return rows


def _model_calls(calls: Sequence[ModelCall]) -> list[str]:
    rows = [_model_row(number, call) for number, call in enumerate(calls, 1)]
    heads = ["#", "node", "input", "cached", "output", "ttft", "stall", ""]
    lines = _table(heads, rows, left=(1, 7))
    if len(calls) > SHOWN:
        half = SHOWN // 2
        usage = sum((call.usage for call in calls[half:-half]), Usage())
        folded = (
            f"  ... {_times(len(calls) - 2 * half, 'more call')}: {usage.input_tokens:,} input, "
            f"{usage.cached_tokens:,} cached, {usage.output_tokens:,} output"
        )
        lines[1 + half : -half] = [folded]
    return lines


def _model_row(number: int, call: ModelCall) -> list[str]:
    notes = [] if call.status == "ok" else [call.status]
    notes += ["est."] if call.estimated else []
    notes += [call.purpose] if call.purpose not in {"answer", call.node} else []
    notes += [f"try {call.attempt}"] if call.attempt > 1 else []
    times = (format_seconds(call.timing.ttft_s), format_seconds(call.timing.stall_s))
    return [
        str(number), _short(call.node or "-"), f"{call.usage.input_tokens:,}", f"{call.usage.cached_tokens:,}",
        f"{call.usage.output_tokens:,}", *(times if call.status == "ok" else ("-", "-")), ", ".join(notes),
    ]  # fmt: skip


def _tool_calls(tools: Sequence[ToolCallFact]) -> list[str]:
    rows = [_tool_row(tool) for tool in tools]
    lines = _table(["tool", "p10", "p50", "p90", "actual", ""], rows, left=(0, 5))
    if len(tools) > SHOWN:
        half = SHOWN // 2
        seconds = sum(tool.actual_s for tool in tools[half:-half])
        lines[1 + half : -half] = [f"  ... {_times(len(tools) - 2 * half, 'more call')}: {format_seconds(seconds)}"]
    return lines


def _tool_row(tool: ToolCallFact) -> list[str]:
    name = f"{tool.tool} ({tool.command})" if tool.command and tool.command != tool.tool else tool.tool
    predicted = [tool.predicted_p10_s, tool.predicted_p50_s, tool.predicted_p90_s]
    return [
        _short(name, 30),
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
    lines = _table(["", "moves", "blocks", "size", "copying"], rows, left=(0,)) if rows else []
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
    lines = [f"  {name:<27}{format_seconds(s):>12}  {_percent(s / total_s if total_s else 0.0):>7}" for name, s in rows]
    lines.append(f"  {'wall time':<27}{format_seconds(spans.wall_s):>12}")
    return lines


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, left: Sequence[int]) -> list[str]:
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


def _percent(share: float | None) -> str:
    if share is None:
        return "-"
    percent = share * 100
    return f"{percent:.2g} %" if 0 < percent < _SMALL_PERCENT else f"{percent:.1f} %"


def _clean(text: str) -> str:
    """Names come from users and models: whatever would move the cursor is shown as a question mark."""
    return "".join(char if char.isprintable() else "?" for char in text)


def _short(text: str, width: int = _NAME_WIDTH) -> str:
    text = _clean(text)
    return text if len(text) <= width else text[: width - 3] + "..."
