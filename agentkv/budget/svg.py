"""The timeline as SVG: lanes of phases with a strip of tiers, and the length of the contexts below, on one time axis.

Covers drawing. Bars too narrow to be seen apart are joined, so that a day of work is no larger than a minute of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from agentkv.budget.names import clean, shortened
from agentkv.budget.timeline import Bar, Lane, Timeline
from agentkv.units import format_seconds

WIDTH = 1080.0
_LEFT = 130.0  # room for lanes' names
_LANE = 34.0
_BAR = 18.0
_STRIP = 5.0
_CHART = 150.0
_GAP = 26.0
_THINNEST = 0.6  # pixels that a bar has at least
_COLOURS = 8
_TICKS_S = (0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
_MOST_TICKS = 9
_NAME_CHARS = 18


def draw(time: Timeline) -> str:
    """One `<svg>`; "" for a timeline without any length."""
    if not time.lanes or time.length_ms <= 0:
        return ""
    scale = (WIDTH - _LEFT - 10) / time.length_ms
    parts: list[str] = []
    top = _GAP
    for number, lane in enumerate(time.lanes):
        parts += _lane(number, lane, top, scale)
        top += _LANE
    lanes_end = top
    top += _GAP
    parts += _contexts(time.lanes, top, scale)
    bottom = top + _CHART
    grid = _grid(time.length_ms, scale, lanes_end, top, bottom)
    label = "Timeline: what each session was doing, where its KV was, and how long its context was"
    return (
        f'<svg viewBox="0 0 {WIDTH:.0f} {bottom + 22:.0f}" role="img" aria-label="{label}">'
        + "".join(grid) + "".join(parts) + "</svg>"
    )  # fmt: skip


def swatch(kind: str) -> str:
    """A small square in the colour of `kind`, for a legend."""
    return f'<svg viewBox="0 0 10 10" aria-hidden="true"><rect class="f-{escape(kind)}" width="10" height="10"/></svg>'


def stacked(shares: Sequence[tuple[str, float, str]]) -> str:
    """One bar in parts: (kind, share of the whole, title)."""
    x, parts = 0.0, []
    for kind, share, title in shares:
        parts.append(
            f'<rect class="f-{escape(kind)}" x="{x:.1f}" y="0" width="{share * WIDTH:.1f}" height="26">'
            f"<title>{escape(clean(title))}</title></rect>"
        )
        x += share * WIDTH
    return f'<svg viewBox="0 0 {WIDTH:.0f} 26" role="img" aria-label="Shares of the cost">{"".join(parts)}</svg>'


def _lane(number: int, lane: Lane, top: float, scale: float) -> list[str]:
    name = f"{escape(shortened(lane.name, _NAME_CHARS))}<title>{escape(clean(lane.name))}</title>"
    drawn = [f'<text x="0" y="{top + 13:.0f}">{name}</text>']
    if lane.context:  # the colour of its context below
        drawn.append(f'<path class="trace s-{number % _COLOURS}" d="M0 {top + 19:.0f}h24"/>')
    drawn += _bars(_joined(lane.bars, scale), top, _BAR, scale)
    drawn += _bars(_joined(lane.tiers, scale), top + _BAR + 2, _STRIP, scale)
    return drawn


def _joined(bars: Iterable[Bar], scale: float) -> list[Bar]:
    """Bars of one kind with less than half a pixel between them become one, unless both are wide enough to be read."""
    least_ms = 0.5 / scale
    joined: list[Bar] = []
    last: dict[str, int] = {}
    for bar in bars:
        at = last.get(bar.kind)
        known = joined[at] if at is not None else None
        narrow = bar.end_ms - bar.begin_ms < 4 * least_ms
        if at is not None and known is not None and narrow and bar.begin_ms - known.end_ms < least_ms:
            joined[at] = Bar(bar.kind, known.begin_ms, max(known.end_ms, bar.end_ms), f"{bar.kind}, several")
            continue
        last[bar.kind] = len(joined)
        joined.append(bar)
    return joined


def _bars(bars: Iterable[Bar], top: float, height: float, scale: float) -> list[str]:
    return [
        f'<rect class="f-{bar.kind}" x="{_LEFT + max(0.0, bar.begin_ms) * scale:.1f}" y="{top:.1f}" '
        f'width="{max(_THINNEST, (bar.end_ms - max(0.0, bar.begin_ms)) * scale):.1f}" height="{height:.0f}">'
        f"<title>{escape(clean(bar.title))}</title></rect>"
        for bar in bars
    ]


def _contexts(lanes: Sequence[Lane], top: float, scale: float) -> list[str]:
    """Steps: a context is as long as its last call left it. Triangles mark folds, crosses broken prefixes."""
    most = max((tokens for lane in lanes for _, tokens in lane.context), default=0)
    if not most:
        return []
    drawn = [
        f'<text x="0" y="{top + 10:.0f}">context</text>',
        f'<text x="{_LEFT - 6:.0f}" y="{top + 10:.0f}" text-anchor="end">{most:,}</text>',
        f'<text x="{_LEFT - 6:.0f}" y="{top + _CHART:.0f}" text-anchor="end">0</text>',
    ]
    for number, lane in enumerate(lanes):
        path: list[str] = []
        x_before = -1.0
        for at_ms, tokens in lane.context:
            x = _LEFT + max(0.0, at_ms) * scale
            if path and x - x_before < _THINNEST:
                continue
            y = top + _CHART * (1 - tokens / most)
            path.append(f"H{x:.1f}V{y:.1f}" if path else f"M{x:.1f} {y:.1f}")
            x_before = x
        if len(path) == 1:
            path.append("h3")
        name = escape(clean(lane.name))
        if path:
            drawn.append(f'<path class="trace s-{number % _COLOURS}" d="{"".join(path)}"><title>{name}</title></path>')
        for at_ms, what in lane.marks:
            sign = "▾" if what == "fold" else "\u00d7"
            drawn.append(
                f'<text class="mark" x="{_LEFT + max(0.0, at_ms) * scale:.1f}" y="{top - 4:.0f}" text-anchor="middle">{sign}'
                f"<title>{name}: {'history folded' if what == 'fold' else 'prefix broken'}</title></text>"
            )
    return drawn


def _grid(length_ms: float, scale: float, lanes_end: float, chart_top: float, bottom: float) -> list[str]:
    length_s = length_ms / 1000
    step_s = next((tick for tick in _TICKS_S if length_s / tick <= _MOST_TICKS), length_s / _MOST_TICKS)
    lines = []
    for number in range(int(length_s / step_s) + 1):
        x = _LEFT + number * step_s * 1000 * scale
        lines.append(
            f'<path class="grid" d="M{x:.1f} {_GAP - 6:.0f}V{lanes_end:.0f}M{x:.1f} {chart_top:.0f}V{bottom:.0f}"/>'
            f'<text x="{x:.1f}" y="{bottom + 16:.0f}" text-anchor="middle">{_tick(number * step_s)}</text>'
        )
    return lines


def _tick(seconds: float) -> str:
    """In the largest unit that the tick is a whole number of; in between as 1:10."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h" if not minutes else f"{hours}:{minutes:02} h"
    if minutes:
        return f"{minutes} min" if not rest else f"{minutes}:{rest:02} min"
    return f"{seconds:g} s" if seconds >= 1 or not seconds else format_seconds(seconds)
