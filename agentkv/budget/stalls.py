"""What moving KV cost and saved: stalls paid and hidden, bytes that were moved for nothing.

*Paid* is what calls waited for their own old context (queue, restore, recompute). *Hidden* is the time of copies back
towards the device that fell inside a wait of the same session on a tool: nobody waited for it.
*Wasted* bytes were copied by a move that then failed or was cancelled, or brought to the device for a session that made
no call afterwards. *Unread* bytes were written to host or disk as a precaution and never brought back.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from agentkv.budget.facts import Fact, ModelCall, MoveFact, ToolCallFact

_COPIES = ("write", "demote", "prefetch", "load")
_BACK = ("prefetch", "load")
_Waits = tuple[list[float], list[float]]  # where they begin and end, ms, in order, apart from each other


@dataclass(frozen=True, slots=True, kw_only=True)
class Stalls:
    """Seconds and bytes; see the module."""

    paid_s: float = 0.0
    hidden_s: float = 0.0
    moved_bytes: int = 0
    wasted_bytes: int = 0
    unread_bytes: int = 0


def stalls(facts: Sequence[Fact]) -> Stalls:
    """What the moves among `facts` cost and saved."""
    calls = [fact for fact in facts if isinstance(fact, ModelCall)]
    moves = [fact for fact in facts if isinstance(fact, MoveFact) and fact.action in _COPIES]
    waits = _waits(fact for fact in facts if isinstance(fact, ToolCallFact))
    last_call_ms: dict[str, int] = {}
    for call in calls:
        last_call_ms[call.session] = max(call.at_ms + _ms(call.timing.total_s), last_call_ms.get(call.session, 0))
    written: dict[str, int] = {}
    read: dict[str, int] = {}
    hidden_s, wasted = 0.0, 0
    for move in moves:
        if move.outcome in ("failed", "cancelled"):
            wasted += move.size_bytes
        elif move.action not in _BACK:
            written[move.session] = written.get(move.session, 0) + move.size_bytes
        else:
            read[move.session] = read.get(move.session, 0) + move.size_bytes
            hidden_s += _inside(waits.get(move.session) or waits.get(""), move.at_ms - move.seconds * 1000, move.at_ms)
            if last_call_ms.get(move.session, -1) < move.at_ms:
                wasted += move.size_bytes
    return Stalls(
        paid_s=sum(call.timing.stall_s for call in calls),
        hidden_s=hidden_s,
        moved_bytes=sum(move.size_bytes for move in moves),
        wasted_bytes=wasted,
        unread_bytes=sum(max(0, size - read.get(session, 0)) for session, size in written.items()),
    )


def resume_stalls(facts: Iterable[Fact]) -> tuple[float, ...]:
    """For each call that was the first of its session after a tool call: what it waited for its own old context."""
    waiting: set[str] = set()
    found = []
    for fact in facts:
        if isinstance(fact, ToolCallFact):
            waiting.add(fact.session)
        elif isinstance(fact, ModelCall) and waiting & {fact.session, ""}:
            waiting -= {fact.session, ""}
            found.append(fact.timing.stall_s)
    return tuple(found)


def _waits(tools: Iterable[ToolCallFact]) -> dict[str, _Waits]:
    """The times in which each session waited on tools, joined where they overlap."""
    by_session: dict[str, list[tuple[float, float]]] = {}
    for tool in tools:
        by_session.setdefault(tool.session, []).append((tool.at_ms - tool.actual_s * 1000, tool.at_ms))
    joined: dict[str, _Waits] = {}
    for session, spans in by_session.items():
        begins, ends = joined.setdefault(session, ([], []))
        for begin, end in sorted(spans):
            if ends and begin <= ends[-1]:
                ends[-1] = max(ends[-1], end)
            else:
                begins.append(begin)
                ends.append(end)
    return joined


def _inside(waits: _Waits | None, begin_ms: float, end_ms: float) -> float:
    """Seconds of [begin, end] that lie inside the waits."""
    if waits is None:
        return 0.0
    begins, ends = waits
    inside_ms, at = 0.0, max(0, bisect_right(begins, begin_ms) - 1)
    while at < len(begins) and begins[at] < end_ms:
        inside_ms += max(0.0, min(end_ms, ends[at]) - max(begin_ms, begins[at]))
        at += 1
    return inside_ms / 1000


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
