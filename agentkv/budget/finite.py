"""Durations that are no numbers: a broken clock somewhere must not take a bill, a span or an export with it."""

from __future__ import annotations

from dataclasses import replace
from math import isfinite

from agentkv.budget.facts import ContextFact, Fact, ModelCall, MoveFact, ToolCallFact
from agentkv.core.usage import Timing


def finite(fact: Fact) -> Fact:
    """The fact, with 0 for a duration that is no number (None for a predicted one)."""
    if isinstance(fact, ModelCall):
        timing = fact.timing
        total = timing.total_s + timing.stall_s + timing.prefill_s + timing.decode_s + timing.ttft_s + fact.device_s
        return fact if isfinite(total) else replace(fact, timing=Timing(), device_s=0.0)
    if isinstance(fact, ToolCallFact):
        known = [s for s in (fact.predicted_p10_s, fact.predicted_p50_s, fact.predicted_p90_s) if s is not None]
        if all(map(isfinite, (fact.actual_s, *known))):
            return fact
        return replace(
            fact,
            actual_s=fact.actual_s if isfinite(fact.actual_s) else 0.0,
            predicted_p10_s=None,
            predicted_p50_s=None,
            predicted_p90_s=None,
        )
    if isinstance(fact, MoveFact | ContextFact) and not isfinite(fact.seconds):
        return replace(fact, seconds=0.0)
    return fact
