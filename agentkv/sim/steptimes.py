"""Constants of an engine from the calls of one recorded run: what a step costs, and how even the machine was.

Covers the fit of step times to how long each call's prefill and decode took, the machine's slowness by the minute, and
how much is left that neither explains. Stalls and task times go into none of them. Replaying is `replay.py`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from agentkv.core.rates import Prefill
from agentkv.errors import ConfigError
from agentkv.policy.fit import non_negative
from agentkv.sim.costs import Costs
from agentkv.sim.stepwise import Pace, steady

if TYPE_CHECKING:
    from agentkv.sim.record import Record, Recorded

CHUNK_TOKENS = 512
"""Prompt tokens in one step of the embedded engine, unless it is told otherwise."""
_MEMCPY_BYTES_S = 4e9
"""For a lane that carried nothing in the whole run."""
_GUST_S = 2.0
"""For so long the machine keeps a speed that was drawn."""
_LEAST_S = 0.05
"""Shorter windows say nothing of speed."""


def calibrated(record: Record) -> Costs:
    """The engine's constants as this record shows them: sizes, lane rates, and the fitted times of its steps."""
    sizes = record.sizes
    base_s, per_token_s, linear_s, quadratic_s = step_times(record)
    rates = {lane: sizes.rates_bytes_s.get(lane) or _MEMCPY_BYTES_S for lane in ("h2d", "d2h", "read", "write")}
    return Costs(
        token_bytes=sizes.block_bytes // sizes.block_tokens,
        prefill=Prefill(linear_s=linear_s, quadratic_s=quadratic_s),
        decode_base_s=base_s,
        decode_per_token_s=per_token_s,
        h2d_bytes_s=rates["h2d"],
        d2h_bytes_s=rates["d2h"],
        read_bytes_s=rates["read"] if sizes.disk_blocks else None,
        write_bytes_s=rates["write"] if sizes.disk_blocks else None,
        device_bytes=sizes.device_blocks * sizes.block_bytes,
        host_bytes=sizes.host_blocks * sizes.block_bytes,
        disk_bytes=sizes.disk_blocks * sizes.block_bytes,
        token_budget=CHUNK_TOKENS,
        model=record.model,
        gpu="as recorded",
    )


def step_times(record: Record) -> tuple[float, float, float, float]:
    """A step's seconds: base + per_token x (contexts that decode in it) + linear x (prompt tokens) + quadratic x
    (end^2 - start^2 of the chunk).

    Two equations for each call, one for its prefill and one for its decode, with what others did meanwhile (their
    windows overlap its own). Least squares over seconds, none of the four negative, then scaled so that all of them
    together take what was measured. Raises ConfigError if the record says too little.
    """
    import numpy as np

    equations = _equations(record)
    columns, wanted = np.array([one.row for one in equations]), np.array([one.seconds for one in equations])
    if len(equations) < 4 or not wanted.sum() > 0:  # noqa: PLR2004  four unknowns
        raise ConfigError(f"{len(equations)} timings are too few to fit what a step costs; record a longer run")
    found = non_negative(columns, wanted)
    scale = wanted.sum() / (columns @ found).sum()
    base_s, per_token_s, linear_s, quadratic_s = (float(value * scale) for value in found)
    return base_s, per_token_s, linear_s, quadratic_s


class Equation(NamedTuple):
    """What the steps of one window had to do (`row`, in the order of `step_times`), and how long they took."""

    row: tuple[float, float, float, float]
    seconds: float
    from_s: float
    until_s: float


def machine_pace(record: Record, costs: Costs, *, window_s: float = 10.0) -> Pace:
    """How many times slower than `costs` the machine was, window by window: other programs, and the tools themselves.

    From the same timings as `step_times`: what the calls' prefill and decode took in each window over what they should
    have taken. Says nothing of stalls.
    """
    equations = _equations(record)
    count = 1 + int(max(one.until_s for one in equations) // window_s)
    spent, expected = [0.0] * count, [0.0] * count
    for one in equations:
        should_s = _expected_s(one, costs)
        for i in range(int(one.from_s // window_s), int(one.until_s // window_s) + 1):
            share = _share(one.from_s, one.until_s, i * window_s, (i + 1) * window_s)
            spent[i] += share * one.seconds
            expected[i] += share * should_s
    slower = [took / should if should > 0 and took > 0 else 1.0 for took, should in zip(spent, expected, strict=True)]
    return lambda time_s: slower[min(int(time_s // window_s), count - 1)]


def unevenness(record: Record, costs: Costs, *, pace: Pace = steady) -> float:
    """How far apart calls of the same work were under `costs` and `pace`: the spread of ln(taken / expected)."""
    logs = [
        math.log(one.seconds / (pace((one.from_s + one.until_s) / 2) * should_s))
        for one in _equations(record)
        if one.seconds > _LEAST_S and (should_s := _expected_s(one, costs)) > 0
    ]
    mean = sum(logs) / len(logs) if logs else 0.0
    return math.sqrt(sum((one - mean) ** 2 for one in logs) / len(logs)) if logs else 0.0


def gusty(pace: Pace, spread: float, *, seed: int) -> Pace:
    """`pace` times a factor that is drawn anew every two seconds, exp(normal(spread^2 / 2, spread)): the speed, which is
    one over it, has mean 1, so as many steps are done in the end.
    """
    rng = random.Random(seed)  # noqa: S311  a simulation, not a secret
    drawn: list[float] = []

    def at(time_s: float) -> float:
        gust = int(time_s // _GUST_S)
        while len(drawn) <= gust:
            drawn.append(math.exp(rng.gauss(spread * spread / 2, spread)))
        return pace(time_s) * drawn[gust]

    return at


def _expected_s(one: Equation, costs: Costs) -> float:
    factors = (costs.decode_base_s, costs.decode_per_token_s, costs.prefill.linear_s, costs.prefill.quadratic_s)
    return sum(factor * value for factor, value in zip(factors, one.row, strict=True))


def _equations(record: Record) -> list[Equation]:
    """Two for each call: its prefill, and its decode."""
    calls = [call for call in record.calls() if call.output_tokens > 0]
    made: list[Equation] = []
    for call in calls:
        others = [other for other in calls if other is not call]
        made.append(Equation(_prefill_row(call, others), call.prefill_s + call.recompute_s, *_prefill_window(call)))
        if call.output_tokens > 1:
            made.append(Equation(_decode_row(call, others), call.decode_s, *_decode_window(call)))
    return made


def _prefill_row(call: Recorded, others: Sequence[Recorded]) -> tuple[float, float, float, float]:
    """What the steps of its own prefill had to do: steps, contexts that decode beside it, prompt tokens, squares."""
    start, end = call.cached_tokens, call.prompt_tokens
    chunks = max(1, -(-(end - start) // CHUNK_TOKENS))
    window = _prefill_window(call)
    contexts, tokens, squares = _beside(window, others)
    return (chunks, chunks * contexts, tokens + end - start, squares + end * end - start * start)


def _decode_row(call: Recorded, others: Sequence[Recorded]) -> tuple[float, float, float, float]:
    """What the steps of its decode had to do: its own token, those of others, and the chunks of others' prompts."""
    steps = call.output_tokens - 1
    contexts, tokens, squares = _beside(_decode_window(call), others)
    return (steps, steps * (contexts + call.prompt_tokens + steps / 2), tokens, squares)


def _beside(window: tuple[float, float], others: Sequence[Recorded]) -> tuple[float, float, float]:
    """What others did within `window`: contexts that decoded, on average; prompt tokens; squares of those."""
    contexts = tokens = squares = 0.0
    for other in others:
        contexts += _share(*window, *_decode_window(other)) * (other.prompt_tokens + other.output_tokens / 2)
        part = _share(*_prefill_window(other), *window)
        tokens += part * (other.prompt_tokens - other.cached_tokens)
        squares += part * (other.prompt_tokens**2 - other.cached_tokens**2)
    return contexts, tokens, squares


def _prefill_window(call: Recorded) -> tuple[float, float]:
    return call.first_token_s - call.prefill_s - call.recompute_s, call.first_token_s


def _decode_window(call: Recorded) -> tuple[float, float]:
    return call.first_token_s, call.ended_s


def _share(from_s: float, until_s: float, other_from_s: float, other_until_s: float) -> float:
    """The part of a window that another one covers."""
    width_s = until_s - from_s
    return max(0.0, min(until_s, other_until_s) - max(from_s, other_from_s)) / width_s if width_s > 0 else 0.0
