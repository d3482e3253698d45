"""Whether to fold, and how far: marks, payback and hysteresis, as one pure function.

Covers the decision with its numbers and its reason in words. Does not cover writing the summary (`folder.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from agentkv.context.notebook import Fold
from agentkv.context.summary.turns import groups
from agentkv.core.message import Message

_SHARE = 4  # a summary is taken to need a quarter of what it replaces, and never more than its bound
_LEAST = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """What to do now. "fold": replace the first `k` messages; "defer": above the mark, but it does not pay; "none".

    `saved_tokens` is how much shorter each later call gets, `invalidated_tokens` what must be computed again once,
    `payback_calls` their quotient (0 where the prefix breaks anyway). `folded` is what goes into the summary, `request` the
    first user message, which stays.
    """

    kind: Literal["fold", "defer", "none"]
    reason: str
    saved_tokens: int = 0
    invalidated_tokens: int = 0
    payback_calls: float = 0.0
    forced: bool = False
    digest: bytes = b""
    k: int = 0
    pinned: tuple[int, ...] = ()
    folded: tuple[Message, ...] = field(default=(), repr=False)
    request: Message | None = field(default=None, repr=False)
    replaced_tokens: int = 0
    tools_tokens: int = 0
    previous: Fold | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """The numbers of a Folder, all in tokens but `keep_last` (messages) and `max_payback_calls`."""

    soft: int
    low: int
    window: int | None
    reserve: int
    summary: int
    keep_last: int
    max_payback_calls: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """One place to fold at, with what it brings; `window` messages stay behind it, `count` are folded."""

    k: int
    window: int
    count: int
    removed: int
    after: int
    invalidated: int


def plan(
    marks: Marks,
    messages: Sequence[Message],
    digest: bytes,
    tokens: Sequence[int],
    *,
    tools_tokens: int,
    fold: Fold | None,
    summary_tokens: int,
    fresh_tokens: int,
    breaks_anyway: bool,
) -> Proposal:
    """The decision for a prompt of `messages` under `fold`, whose summary takes `summary_tokens`. O(what is left)."""
    start, pinned = (fold.k, fold.pinned) if fold else (0, ())
    size = tools_tokens + summary_tokens + sum(tokens[index] for index in pinned) + sum(tokens[start:])
    limit = None if marks.window is None else marks.window - marks.reserve
    forced = limit is not None and size > limit
    if size <= marks.soft and not forced:
        return Proposal(kind="none", reason=f"{size:,} tokens are not above the mark of {marks.soft:,}")
    above = _above(marks, size, forced=forced)
    if fold is not None and fold.digest == digest:
        return Proposal(kind="defer", reason=f"{above}, but these messages are folded already")
    stay = _staying(messages, pinned, start)
    cuts = _cuts(
        marks, messages, tokens, size, fold, stay=stay, summary_tokens=summary_tokens, fresh_tokens=fresh_tokens
    )
    cut = _chosen(marks, cuts, size, limit if forced else None)
    if cut is None:
        return Proposal(
            kind="defer", forced=forced,
            reason=f"{above}, but there is nothing to fold: what stays is system messages, tools, requests and the last "
            f"{marks.keep_last} messages",
        )  # fmt: skip
    saved = size - cut.after
    invalidated = 0 if breaks_anyway else cut.invalidated
    payback = invalidated / saved if saved > 0 else float("inf")
    fold_it = saved > 0 and (forced or payback <= marks.max_payback_calls)
    places = (*pinned, *range(start, cut.k))
    request = next((messages[index] for index in stay if messages[index].role == "user"), None)
    return Proposal(
        kind="fold" if fold_it else "defer",
        reason=f"{above}; {_in_words(marks, cut, saved, invalidated, payback, forced=forced, free=breaks_anyway)}",
        saved_tokens=saved,
        invalidated_tokens=invalidated,
        payback_calls=payback,
        forced=forced,
        digest=digest,
        k=cut.k,
        pinned=tuple(index for index in places if index in stay),
        folded=tuple(messages[index] for index in places if index not in stay),
        request=request,
        replaced_tokens=cut.removed,
        tools_tokens=tools_tokens,
        previous=fold,
    )


def _staying(messages: Sequence[Message], pinned: tuple[int, ...], start: int) -> dict[int, bool]:
    """The indices that are never folded: system messages, the first and the newest request.

    True for those that stand behind the summary, so that a fold moves them.
    """
    places = [*pinned, *range(start, len(messages))]
    users = [index for index in places if messages[index].role == "user"]
    leading = 0
    while leading < len(messages) and messages[leading].role == "system":
        leading += 1
    stay = {index: index >= leading for index in places if messages[index].role == "system"}
    return dict.fromkeys(users[:1], False) | dict.fromkeys(users[1:][-1:], True) | stay


def _cuts(
    marks: Marks,
    messages: Sequence[Message],
    tokens: Sequence[int],
    size: int,
    fold: Fold | None,
    *,
    stay: dict[int, bool],
    summary_tokens: int,
    fresh_tokens: int,
) -> list[_Cut]:
    """Every place between two turns where something more would be folded, from the earliest to the last turn."""
    k, pinned = (fold.k, fold.pinned) if fold else (0, ())
    loose = [index for index in pinned if index not in stay]  # the newest request of the fold before
    count, dropped = len(loose), sum(tokens[index] for index in loose)
    moved = sum(tokens[index] for index in pinned if stay.get(index))
    behind = sum(tokens[k:])
    cuts: list[_Cut] = []
    turns = groups(messages[k:])
    while turns and turns[-1][0].role == "system":
        turns.pop()  # a turn must stay behind the summary: whose it is decides what form the summary has
    for group in turns[:-1]:
        for index in range(k, k + len(group)):
            behind -= tokens[index]
            if index in stay:
                moved += tokens[index] if stay[index] else 0
            else:
                count += 1
                dropped += tokens[index]
        k += len(group)
        if count == len(loose):
            continue
        summary = min(marks.summary, summary_tokens + max(_LEAST, dropped // _SHARE))
        removed = summary_tokens + dropped
        cuts.append(
            _Cut(
                k=k,
                window=len(messages) - k,
                count=count,
                removed=removed,
                after=size - removed + summary,
                invalidated=summary + max(0, moved + behind - fresh_tokens),
            )
        )
    return cuts


def _chosen(marks: Marks, cuts: list[_Cut], size: int, limit: int | None) -> _Cut | None:
    """The earliest cut that comes down to the low mark, else the deepest that leaves `keep_last` messages.

    One that does not pay gives way to the deepest, which pays best. With a `limit` the last messages give way too,
    down to one turn.
    """
    gentle = [cut for cut in cuts if cut.window >= marks.keep_last]
    chosen = next((cut for cut in gentle if cut.after <= marks.low), gentle[-1] if gentle else None)
    if limit is not None and (chosen is None or chosen.after > limit):
        return next((cut for cut in cuts if cut.after <= limit), cuts[-1] if cuts else None)
    if chosen is not None and chosen.invalidated > marks.max_payback_calls * (size - chosen.after):
        return gentle[-1]
    return chosen


def _above(marks: Marks, size: int, *, forced: bool) -> str:
    if forced:
        return (
            f"{size:,} tokens and a reserve of {marks.reserve:,} for the answer and the next result do not fit the window "
            f"of {marks.window:,}"
        )
    return f"{size:,} tokens are above the mark of {marks.soft:,}"


def _in_words(
    marks: Marks, cut: _Cut, saved: int, invalidated: int, payback: float, *, forced: bool, free: bool
) -> str:
    what = f"folding {cut.count} messages would leave {cut.after:,}"
    if saved <= 0:
        return f"{what}, so it saves nothing; deferred"
    cost = f"{saved:,} fewer per call for {invalidated:,} to compute again"
    if free:
        return f"{what}: {saved:,} fewer per call, and free: the prefix breaks anyway"
    if payback <= marks.max_payback_calls:
        return f"{what}: {cost}, repaid in {payback:.1f} calls (at most {marks.max_payback_calls:g})"
    if forced:
        return f"{what}: {cost}, {payback:.1f} calls to repay, but there is no room without it"
    return (
        f"{what}: {cost}, {payback:.1f} calls to repay (at most {marks.max_payback_calls:g}); deferred until it pays, "
        "the prefix breaks anyway or the window is full"
    )
