"""The tries of one model call that a client repeated: each is a fact, and together they took the call's time once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from agentkv.budget.facts import ModelCall
from agentkv.core.usage import Timing
from agentkv.engine.base import Attempt


def with_tries(call: ModelCall, attempts: Sequence[Attempt]) -> list[ModelCall]:
    """The tries that failed and then `call`, one after the other from `call.at_ms` on.

    The call was timed from its first try on, so what the others took is taken off its total and its time to the first
    token. Waits between tries stay with it.
    """
    facts = []
    tried_s = 0.0
    for attempt in attempts:
        facts.append(
            replace(
                call,
                at_ms=call.at_ms + round(tried_s * 1000),
                usage=attempt.spent.usage,
                timing=Timing(total_s=attempt.seconds),
                status="failed",
                estimated=attempt.spent.estimated,
                service_tier=attempt.spent.service_tier,
                cached_by={},
                worker="",
                expected_hit_rate=None,
                device_s=0.0,
                error=attempt.error,
                drafted_tokens=0,
                accepted_tokens=0,
            )
        )
        tried_s += attempt.seconds
    timing = call.timing
    if tried_s:
        timing = replace(
            timing,
            prefill_s=max(0.0, timing.prefill_s - tried_s),
            ttft_s=max(0.0, timing.ttft_s - tried_s),
            total_s=max(0.0, timing.total_s - tried_s),
        )
    return [*facts, replace(call, at_ms=call.at_ms + round(tried_s * 1000), timing=timing)]
