"""Shaping: what was done to a task's prompts, and what broke them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from agentkv.budget.facts import ContextFact, ModelCall


@dataclass(frozen=True, slots=True, kw_only=True)
class Shaping:
    """What was done to the prompts, and what broke them.

    `slimmed` tool outputs went from `slim_before` to `slim_after` tokens. `folds` took `fold_before` tokens of prompt
    to `fold_after`, for `summary_tokens` of model calls; `failed_folds` left the history as it was. `breaks` counts
    prompts that did not extend the one before, by cause, `break_tokens` what had to be computed again for them.
    `retrievals` is how often memories were looked up, `recalled_tokens` what was told of them.
    """

    slimmed: int = 0
    slim_before: int = 0
    slim_after: int = 0
    folds: int = 0
    fold_before: int = 0
    fold_after: int = 0
    summary_tokens: int = 0
    failed_folds: int = 0
    breaks: dict[str, int]
    break_tokens: int = 0
    retrievals: int = 0
    recalled_tokens: int = 0


def shaping_of(facts: Sequence[ContextFact], calls: Sequence[ModelCall]) -> Shaping:
    """The sums of a task's context events."""
    by_event: dict[str, list[ContextFact]] = {}
    for fact in facts:
        by_event.setdefault(fact.event, []).append(fact)
    slims, folds, breaks = (by_event.get(event, []) for event in ("slim", "fold", "break"))
    recalls = by_event.get("recall", [])
    return Shaping(
        slimmed=len(slims),
        slim_before=sum(fact.before_tokens for fact in slims),
        slim_after=sum(fact.after_tokens for fact in slims),
        folds=len(folds),
        fold_before=sum(fact.before_tokens for fact in folds),
        fold_after=sum(fact.after_tokens for fact in folds),
        summary_tokens=sum(call.usage.total_tokens for call in calls if call.purpose == "summary"),
        failed_folds=len(by_event.get("fold_failed", [])),
        breaks=dict(Counter(fact.cause for fact in breaks)),
        break_tokens=sum(fact.before_tokens for fact in breaks),
        retrievals=len(recalls),
        recalled_tokens=sum(fact.after_tokens for fact in recalls),
    )
