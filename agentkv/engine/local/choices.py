"""Choices: several answers to one request, which end when the last one does.

Covers putting them together. Each is a sequence of its own (`sequence.py`); the prompt is computed for the first and
found by the others, like any shared prefix.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import reduce
from operator import add

from agentkv.core.usage import Usage
from agentkv.engine.base import Choice, Generation


class Choices:
    """Collects `count` Generations. Used by the engine's thread."""

    def __init__(self, count: int = 1) -> None:
        self._left = count
        self._told: dict[int, Generation] = {}

    def told(self, choice: int, generation: Generation) -> Generation | None:
        """The whole answer once this was the last one missing."""
        self._told[choice] = generation
        self._left -= 1
        if self._left:
            return None
        first, *others = (self._told[number] for number in sorted(self._told))
        return first if not others else _joined(first, others)


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
        usage=reduce(add, (Usage(output_tokens=one.usage.output_tokens) for one in others), first.usage),
        timing=timing,
        drafted_tokens=sum(one.drafted_tokens for one in every),
        accepted_tokens=sum(one.accepted_tokens for one in every),
        others=tuple(_choices(others)),
    )


def _choices(generations: Iterable[Generation]) -> Iterable[Choice]:
    for one in generations:
        yield Choice(
            text=one.text,
            raw=one.raw,
            token_ids=one.token_ids,
            finish_reason=one.finish_reason,
            tool_calls=one.tool_calls,
            logprobs=one.logprobs,
        )
