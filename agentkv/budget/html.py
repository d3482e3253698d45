"""A bill as one HTML page: no network, no other file, readable without its script, on paper and in the dark.

Covers the text and its order; `svg.py` draws the timeline, page/ holds the style. Every name from outside goes through
`_text`: it is made printable and escaped, and the page allows no script but its own.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, tzinfo
from html import escape
from importlib.resources import files

from agentkv.budget.bill import Bill
from agentkv.budget.branches import Spender, place_of
from agentkv.budget.facts import ModelCall, ToolCallFact
from agentkv.budget.money import format_cost, format_usd
from agentkv.budget.names import clean, shortened
from agentkv.budget.split import CLASSES
from agentkv.budget.svg import draw, stacked, swatch
from agentkv.budget.timeline import PHASES, TIERS, timeline
from agentkv.units import format_bytes, format_seconds

MAX_ROWS = 400
"""Rows of a table; of a longer one the first and the last half of that."""
_TITLE_CHARS = 80
_Cell = tuple[str, float | None]  # what is shown, already escaped, and what it is sorted by (None: the text)


def page(bill: Bill, *, zone: tzinfo | None = None) -> str:
    """The page; times are told in `zone`, by default this machine's."""
    style, script = _resource("page.css"), _resource("page.js")
    policy = f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(script)}"
    body = [_head(bill, zone)]
    if bill.calls or bill.tools:
        body += [
            _cards(bill),
            _finding(bill),
            _split(bill),
            _timeline(bill),
            _spenders(bill.spenders),
            _calls(bill.calls),
        ]
        body += [_tools(bill.tools), _moved(bill), _time(bill), _prompts(bill)]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Bill of {escape(shortened(bill.task, _TITLE_CHARS))}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        + "\n".join(part for part in body if part)
        + f"\n{_FOOTER}\n<script>{script}</script>\n</body>\n</html>\n"
    )


def _resource(name: str) -> str:
    return files("agentkv.budget.page").joinpath(name).read_text("utf-8")


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _text(text: str) -> str:
    return escape(clean(text))


def _when(at_ms: int | None, zone: tzinfo | None) -> str:
    if at_ms is None:
        return "-"
    try:
        return datetime.fromtimestamp(at_ms / 1000, UTC).astimezone(zone).strftime("%Y-%m-%d %H:%M:%S %Z")
    except (OverflowError, ValueError, OSError):
        return f"{at_ms} ms since 1970"


def _head(bill: Bill, zone: tzinfo | None) -> str:
    outcome = {True: '<span class="good">completed</span>', False: '<span class="bad">not completed</span>', None: ""}
    about = [_text(shortened(bill.task_type, _TITLE_CHARS)), outcome[bill.completed]]
    if bill.started_ms is not None:
        until = f"to {_when(bill.finished_ms, zone)}" if bill.finished_ms is not None else "and not finished"
        about.append(f"from {_when(bill.started_ms, zone)} {until} ({format_seconds(bill.spans.wall_s)})")
    if not bill.calls and not bill.tools:
        about.append("nothing was spent" if bill.started_ms is not None else "no such task is known here")
    told = " · ".join(part for part in about if part)
    return f'<header><h1>Bill of {_text(bill.task)}</h1><p class="soft">{told}</p></header>'


def _percent(share: float | None) -> str:
    if share is None:
        return "-"
    percent = share * 100
    return f"{percent:.2g} %" if 0 < percent < 0.1 else f"{percent:.1f} %"  # noqa: PLR2004  not 0.0 for something


def _cards(bill: Bill) -> str:
    usage = bill.usage
    reasoning = f", {usage.reasoning_tokens:,} reasoning" if usage.reasoning_tokens else ""
    tiers = ", ".join(f"{tier} {_percent(n / usage.input_tokens)}" for tier, n in sorted(bill.cached_by.items()) if n)
    paid = f"{format_seconds(bill.stalls.paid_s)} paid"
    cards = [
        ("cost", format_usd(bill.cost_usd), format_cost(bill.cost_usd, bill.unpriced_calls) if bill.unpriced_calls else ""),
        ("tokens", f"{usage.total_tokens:,}", f"{len(bill.calls):,} calls" + (", partly estimated" if bill.estimated else "")),
        ("input", f"{usage.input_tokens:,}", f"{usage.cached_tokens:,} cached"),
        ("output", f"{usage.output_tokens:,}", f"{bill.visible_tokens:,} reached the user{reasoning}"),
        ("KV hit rate", _percent(bill.hit_rate), tiers),
        ("effective token ratio", _percent(bill.effective_token_ratio), "reached the user / all"),
        ("effective utilisation", _percent(bill.effective_utilisation), _device(bill)),
        ("peak context", f"{bill.peak_context_tokens:,}", f"mean {bill.mean_context_tokens:,.0f} tokens"),
        ("tools", format_seconds(bill.spans.tools_s), f"{len(bill.tools):,} call{'' if len(bill.tools) == 1 else 's'}, {_predicted(bill)}"),
        ("stall", paid, f"{format_seconds(bill.stalls.hidden_s)} hidden behind tools"),
    ]  # fmt: skip
    return (
        '<section class="cards">'
        + "".join(
            f'<div class="card"><span>{n}</span><b>{_text(v)}</b><span>{_text(s)}</span></div>' for n, v, s in cards
        )
        + "</section>"
    )


def _device(bill: Bill) -> str:
    return (
        f"of {format_seconds(bill.work.device_s)} device time" if bill.work.device_s else "no device of ours was used"
    )


def _predicted(bill: Bill) -> str:
    told = [tool.predicted_p50_s for tool in bill.tools if tool.predicted_p50_s is not None]
    return f"{format_seconds(sum(told))} predicted" if told else "none predicted"


def _finding(bill: Bill) -> str:
    found = bill.diagnosis
    return f'<section><h2>Diagnosis</h2><div class="finding"><p>{_text(found.text)}</p></div></section>'


def _split(bill: Bill) -> str:
    shares = bill.split.shares()
    if not any(shares.values()):
        return ""
    rows = []
    for name, label in CLASSES.items():
        part = bill.split.parts[name]
        money = f", {format_usd(part.cost_usd)}" if bill.cost_usd else ""
        rows.append((name, shares[name], f"{label}: {_percent(shares[name])}{money}, {part.tokens:,} tokens"))
    return f"<section><h2>What the cost went into</h2><figure>{stacked(rows)}{_key((n, text) for n, _, text in rows)}</figure></section>"


def _key(entries: Iterable[tuple[str, str]]) -> str:
    return '<ul class="key">' + "".join(f"<li>{swatch(kind)}{_text(text)}</li>" for kind, text in entries) + "</ul>"


def _timeline(bill: Bill) -> str:
    time = timeline(bill)
    drawn = draw(time)
    if not drawn:
        return ""
    kinds = {bar.kind for lane in time.lanes for bar in (*lane.bars, *lane.tiers)}
    legend = [(kind, kind) for kind in PHASES if kind in kinds]
    legend += [(kind, told) for kind, told in TIERS.items() if kind in kinds]
    hidden = f'<p class="soft">{time.hidden:,} smaller sessions are not drawn.</p>' if time.hidden else ""
    marks = '<p class="soft">▾ the history was folded, \u00d7 a prompt did not extend the one before.</p>'
    marked = marks if any(lane.marks for lane in time.lanes) else ""
    return f'<section id="timeline"><h2>Timeline</h2><figure>{drawn}{_key(legend)}</figure>{marked}{hidden}</section>'


def _table(name: str, heads: Sequence[str], rows: Sequence[Sequence[_Cell]], *, left: Sequence[int]) -> str:
    """A table whose rows can be sorted; of a long one the middle is folded."""
    if not rows:
        return ""
    half = MAX_ROWS // 2
    shown = rows if len(rows) <= MAX_ROWS else [*rows[:half], *rows[-half:]]
    align = [' class="left"' if i in left else "" for i in range(len(heads))]
    lines = ["<tr>" + "".join(_td(cell, align[i]) for i, cell in enumerate(row)) + "</tr>" for row in shown]
    if len(shown) < len(rows):
        told = f"{len(rows) - len(shown):,} more in between; the JSON form has them all"
        lines.insert(half, f'<tr class="folded"><td colspan="{len(heads)}">{told}</td></tr>')
    head = "".join(f'<th scope="col"{align[i]}>{escape(text)}</th>' for i, text in enumerate(heads))
    return (
        f'<section><h2>{escape(name)}</h2><div class="wide"><table class="sortable"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div></section>"
    )


def _td(cell: _Cell, align: str) -> str:
    shown, value = cell
    return f"<td{align}>{shown}</td>" if value is None else f'<td{align} data-v="{value:g}">{shown}</td>'


def _n(number: int) -> _Cell:
    return f"{number:,}", float(number)


def _s(seconds: float | None) -> _Cell:
    return ("-", -1.0) if seconds is None else (format_seconds(seconds), seconds)


def _t(text: str) -> _Cell:
    return _text(text), None


def _money(call: ModelCall) -> _Cell:
    if call.served_locally:
        return "-", 0.0
    return ("?", -1.0) if call.cost_usd is None else (format_usd(call.cost_usd), float(call.cost_usd))


def _spenders(places: Sequence[Spender]) -> str:
    rows = [
        [
            _t(one.place), _n(one.calls), _n(one.input_tokens), _n(one.cached_tokens), _n(one.output_tokens),
            (format_cost(one.cost_usd if one.unpriced < one.calls else None, one.unpriced) if one.calls else "-", float(one.cost_usd)),
            _s(one.model_s), _n(one.tool_calls), _s(one.tools_s), _n(len(one.branches)),
        ]
        for one in places
    ]  # fmt: skip
    heads = ["place", "calls", "input", "cached", "output", "cost", "model time", "tools", "tool time", "branches"]
    return _table("Who spent it", heads, rows, left=(0,))


def _calls(calls: Sequence[ModelCall]) -> str:
    rows = [
        [
            _n(number), _t(place_of(call.branch, call.node)), _t(call.model or "unknown"), _n(call.usage.input_tokens),
            _n(call.usage.cached_tokens), _n(call.usage.output_tokens), _n(call.usage.reasoning_tokens), _money(call),
            _s(call.timing.ttft_s or None), _s(call.timing.stall_s), _s(call.timing.total_s), _t(_notes(call)),
        ]
        for number, call in enumerate(calls, 1)
    ]  # fmt: skip
    heads = ["#", "place", "model", "input", "cached", "output", "reasoning", "cost", "ttft", "stall", "total", ""]
    return _table("Model calls", heads, rows, left=(1, 2, 11))


def _notes(call: ModelCall) -> str:
    notes = [call.status] if call.status != "ok" else []
    notes += [call.error] if call.error else []
    notes += [f"attempt {call.attempt}"] if call.attempt > 1 else []
    notes += ["served locally"] if call.served_locally else []
    notes += ["estimated"] if call.estimated else []
    notes += [call.purpose] if call.purpose != "answer" else []
    return ", ".join([*notes, *([call.loop] if call.loop else [])])


def _tools(tools: Sequence[ToolCallFact]) -> str:
    rows = [
        [
            _n(number), _t(tool.tool), _t(tool.command), _s(tool.predicted_p10_s), _s(tool.predicted_p50_s),
            _s(tool.predicted_p90_s), _s(tool.actual_s), _t("" if tool.status == "succeeded" else tool.status),
        ]
        for number, tool in enumerate(tools, 1)
    ]  # fmt: skip
    heads = ["#", "tool", "command", "p10", "p50", "p90", "actual", ""]
    return _table("Tool calls (predicted at their start)", heads, rows, left=(1, 2, 7))


def _moved(bill: Bill) -> str:
    rows: list[Sequence[_Cell]] = [
        [_t(f"to {tier}"), _n(m.moves), _n(m.blocks), (format_bytes(m.size_bytes), float(m.size_bytes)), _s(m.seconds)]
        for tier, m in bill.moved.items()
        if m.moves
    ]
    if not rows:
        return ""
    stalls = bill.stalls
    told = (
        f"{format_bytes(stalls.moved_bytes)} moved, {format_bytes(stalls.wasted_bytes)} of it wasted, "
        f"{format_bytes(stalls.unread_bytes)} written as a precaution and not read back; {bill.drops:,} contexts dropped, "
        f"{bill.failed_moves:,} moves failed."
    )
    table = _table("KV moved", ["", "moves", "blocks", "size", "copying"], rows, left=(0,))
    return f'{table}<p class="soft">{told}</p>'


def _time(bill: Bill) -> str:
    spans = bill.spans
    rows = [
        ("tools", spans.tools_s), ("prefill of new tokens", spans.prefill_s), ("decode", spans.decode_s),
        ("queue", spans.queued_s), ("restore from host or disk", spans.restore_s), ("recompute of lost KV", spans.recompute_s),
    ]  # fmt: skip
    total_s = sum(seconds for _, seconds in rows)
    cells = [
        [_t(name), _s(seconds), (_percent(seconds / total_s if total_s else 0.0), seconds)] for name, seconds in rows
    ]
    return _table("Where the time went", ["", "time", "share"], cells, left=(0,))


def _prompts(bill: Bill) -> str:
    shaping = bill.shaping
    told = [f"{shaping.retrievals:,} retrievals, {bill.agent_messages:,} messages between agents"]
    if shaping.slimmed:
        told.append(
            f"{shaping.slimmed:,} tool outputs slimmed from {shaping.slim_before:,} to {shaping.slim_after:,} tokens"
        )
    if shaping.folds or shaping.failed_folds:
        told.append(
            f"{shaping.folds:,} folds ({shaping.failed_folds:,} failed) from {shaping.fold_before:,} to "
            f"{shaping.fold_after:,} tokens, for {shaping.summary_tokens:,} tokens of summary calls"
        )
    if shaping.breaks:
        causes = ", ".join(f"{cause} {number}x" for cause, number in sorted(shaping.breaks.items()))
        told.append(f"prefix broken: {causes}; {shaping.break_tokens:,} tokens computed again")
    return f"<section><h2>Prompts</h2>{''.join(f'<p>{_text(line)}</p>' for line in told)}</section>"


_FOOTER = (
    '<footer class="soft"><p><b>Effective token ratio</b>: tokens that reached the user over all tokens. '
    "<b>Effective utilisation</b>: share of device time whose tokens were used; failed, aborted and repeated calls, summaries "
    "that were thrown away and KV that was computed again are not. <b>Stall</b>: what calls waited for their own old context; "
    "hidden stall is restoring that fell into a tool's wait. Made by agentkv; the page loads nothing.</p></footer>"
)
