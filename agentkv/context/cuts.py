"""When to cut a long task into segments: how many calls are left before the window or the budget is full.

Pure: sizes of prompts in, a proposal out. The segments themselves are the runtime's (`kv.task(...).segment(...)`).
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

LOOK_AHEAD = 10
"""A cut is proposed if something is full within so many calls."""
_RECENT = 12
_FEWEST = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Cut here: `calls_left` more calls fit before the `wall` ("window" or "budget") is hit; prompts grow by
    `growth_tokens` a call. `reason` says it in words.
    """

    calls_left: int
    wall: str
    growth_tokens: int
    reason: str


def propose_cut(
    sizes: Sequence[int], *, window_tokens: int | None, budget_left: int | None, look_ahead: int = LOOK_AHEAD
) -> Cut | None:
    """Whether a session whose calls had prompts of `sizes` tokens, in order, should end soon; None if it need not.

    Prompts are taken to go on growing by the median of the last differences that are growth (a fold is no growth), and
    each call to spend its prompt from `budget_left` (tokens). Fewer than three calls tell nothing.
    """
    recent = sizes[-_RECENT:]
    growths = [now - before for before, now in itertools.pairwise(recent) if now > before]
    if len(recent) < _FEWEST or not growths:
        return None
    growth, last = round(statistics.median(growths)), recent[-1]
    walls: dict[str, int] = {}
    spent = 0
    for calls in range(1, look_ahead + 1):
        size = last + calls * growth
        spent += size
        if window_tokens is not None and size > window_tokens:
            walls.setdefault("window", calls - 1)
        if budget_left is not None and spent > budget_left:
            walls.setdefault("budget", calls - 1)
    if not walls:
        return None
    wall, calls_left = min(walls.items(), key=lambda item: item[1])
    room = f"a window of {window_tokens:,}" if wall == "window" else f"{budget_left:,} tokens of budget"
    return Cut(
        calls_left=calls_left,
        wall=wall,
        growth_tokens=growth,
        reason=f"prompts of {last:,} tokens grow by {growth:,} a call: {calls_left} more fit into {room}",
    )
