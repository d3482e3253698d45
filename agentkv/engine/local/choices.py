"""Choices: several answers to one request, which end when the last one does.

Covers putting them together, and what a call used that has no answer. Each is a sequence of its own (`sequence.py`); the prompt is computed for the first and
found by the others, like any shared prefix.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import reduce
from operator import add

from agentkv.core.reported import Reported
from agentkv.core.usage import Usage
from agentkv.engine.base import Choice, Generation


class Choices:
    """Collects `count` Generations. Used by the engine's thread. `error`: why there will be no answer."""

    def __init__(self, count: int = 1) -> None:
        self._count = count
        self._told: dict[int, Generation] = {}
        self._used: dict[int, Reported] = {}
        self.error: Exception | None = None

    def told(self, choice: int, generation: Generation) -> None:
        """One of them is complete."""
        self._told[choice] = generation

    def left(self, choice: int, used: Reported) -> bool:
        """One of them has left the engine, complete or not; True if it was the last."""
        self._used[choice] = used
        return len(self._used) == self._count

    def whole(self) -> Generation | None:
        """The answer, if all of them are complete."""
        if len(self._told) < self._count:
            return None
        first, *others = (self._told[number] for number in sorted(self._told))
        return first if not others else _joined(first, others)

    def spent(self) -> Reported:
        """What those that left have used: the prompt of the first, the output of all."""
        first, *others = (self._used[number] for number in sorted(self._used))
        return replace(first, usage=_with_outputs(first.usage, (one.usage for one in others)))


def _joined(first: Generation, others: list[Generation]) -> Generation:
    """The first one, with the rest in `others`: prompt and reuse are those of the first, output and time of all."""
    every = [first, *others]
    timing = replace(
        first.timing,
        decode_s=max(one.timing.decode_s for one in every),
        total_s=max(one.timing.total_s for one in every),
    )
    return replace(
        first,
        usage=_with_outputs(first.usage, (one.usage for one in others)),
        timing=timing,
        drafted_tokens=sum(one.drafted_tokens for one in every),
        accepted_tokens=sum(one.accepted_tokens for one in every),
        others=tuple(_choices(others)),
    )


def _with_outputs(first: Usage, others: Iterable[Usage]) -> Usage:
    outputs = (Usage(output_tokens=one.output_tokens, reasoning_tokens=one.reasoning_tokens) for one in others)
    return reduce(add, outputs, first)


def _choices(generations: Iterable[Generation]) -> Iterable[Choice]:
    for one in generations:
        yield Choice(
            text=one.text,
            raw=one.raw,
            token_ids=one.token_ids,
            finish_reason=one.finish_reason,
            tool_calls=one.tool_calls,
            logprobs=one.logprobs,
            unfinished=one.unfinished,
            reasoning=one.reasoning,
        )
