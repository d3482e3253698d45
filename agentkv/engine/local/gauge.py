"""The gauge of the engine: what computing a context costs, as a quadratic in its length, and how far reality is off.

Covers timing through the real runner, the fit, and `PrefillMeter`, which compares real steps with the fit. Does not
cover copies and disks: that is `kv/gauge.py`.

A long context is not computed to be timed: a chunk behind `start` tokens costs what it costs whatever those tokens
are, so single chunks are timed near the beginning, in the middle and at the end of the longest context.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from agentkv.core.rates import Prefill
from agentkv.errors import ConfigError
from agentkv.kv.geometry import BLOCK_TOKENS
from agentkv.policy.fit import non_negative
from agentkv.units import GIB

if TYPE_CHECKING:
    from agentkv.engine.local.loader import LoadedModel
    from agentkv.engine.local.runner import Span

LONGEST_TOKENS = 32_768
"""Longer contexts are extrapolated."""
_CHUNK_TOKENS = 512
_POOL_BYTES = GIB
"""Beyond this the timed context's blocks repeat: larger than a cache is large enough."""
_NEEDED_PLACES = 3
_WARM_TOKENS = 64
_SMALL_CHUNK_TOKENS = 256
"""Where a whole chunk takes too long; smaller ones are computed in another way."""
_METER_TOKENS = 128
"""Steps with fewer prompt tokens say little about the prefill rate."""
_METER_MEMORY = 0.8


def device_name(loaded: LoadedModel) -> str:
    """What the model runs on: "cpu", or the GPU's name."""
    import torch

    return "cpu" if loaded.device.type == "cpu" else torch.cuda.get_device_name(loaded.device)


class Timing(NamedTuple):
    """`seconds` to compute tokens `start`..`end` behind `start` others."""

    start: int
    end: int
    seconds: float


def measure_prefill(
    loaded: LoadedModel,
    *,
    seconds: float = 5.0,
    chunk_tokens: int = _CHUNK_TOKENS,
    timer: Callable[[], float] = time.perf_counter,
) -> Prefill:
    """Time chunks of `loaded` at several places of a context until `seconds` are over, the first three in any case."""
    return fit(time_chunks(loaded, seconds=seconds, chunk_tokens=chunk_tokens, timer=timer))


def time_chunks(
    loaded: LoadedModel,
    *,
    seconds: float,
    chunk_tokens: int = _CHUNK_TOKENS,
    timer: Callable[[], float] = time.perf_counter,
) -> list[Timing]:
    """The timings behind `measure_prefill`, round after round, on a pool of its own."""
    import torch

    from agentkv.engine.local.runner import Runner, Span

    limit_tokens = min(loaded.context_tokens, LONGEST_TOKENS)
    longest = -(-limit_tokens // BLOCK_TOKENS)
    real = max(1, min(longest, _POOL_BYTES // loaded.geometry.block_bytes))
    shape = (real + 1, *loaded.geometry.block_shape)
    pool = torch.zeros(shape, dtype=loaded.model.dtype, device=loaded.device)
    runner = Runner(loaded.model, pool)
    blocks = [1 + i % real for i in range(longest)]
    ids = [(7919 * i + 13) % loaded.vocabulary for i in range(chunk_tokens)]

    def run(start: int, end: int) -> float:
        span = Span(token_ids=ids[: end - start], start=start, blocks=blocks, sample=True)
        began_s = timer()
        runner.forward([span])[0, 0].item()  # waits for the device
        return timer() - began_s

    end_s = timer() + seconds
    warm = min(_WARM_TOKENS, limit_tokens, chunk_tokens)
    warm_s = run(0, warm)  # the first forward grows buffers
    if chunk_tokens > _SMALL_CHUNK_TOKENS and _NEEDED_PLACES * warm_s * chunk_tokens / warm > seconds:
        chunk_tokens = _SMALL_CHUNK_TOKENS
    places = _places(limit_tokens, chunk_tokens)
    timings: list[Timing] = []
    for i, (start, end) in enumerate(itertools.cycle(places)):
        if i >= _NEEDED_PLACES and timer() >= end_s:
            return timings
        timings.append(Timing(start, end, run(start, end)))
    raise AssertionError("cycle() does not end")


def _places(limit_tokens: int, chunk_tokens: int) -> list[tuple[int, int]]:
    """Chunks (start, end) to be timed, those that the fit needs first: a short context, a chunk at the beginning, one
    at the end; then one in the middle, one near the beginning, and half a chunk.
    """
    chunk = min(chunk_tokens, limit_tokens)
    starts = [at for at in (limit_tokens - chunk, limit_tokens // 2, 2 * chunk) if chunk <= at <= limit_tokens - chunk]
    places = [(0, max(1, chunk // 8)), (0, chunk), *((start, start + chunk) for start in starts)]
    return list(dict.fromkeys([*places, (0, max(1, chunk // 2))]))


def fit(timings: Sequence[Timing]) -> Prefill:
    """The quadratic_s, linear_s, constant_s >= 0 with the least relative error over `timings`.

    A chunk costs quadratic_s (end^2 - start^2) + linear_s (end - start), and constant_s if it is the first. Each place
    counts by its fastest run: whatever else the machine does only adds. Raises ConfigError without any timing.
    """
    if not timings:
        raise ConfigError("no timing, no fit")
    seconds_at: dict[tuple[int, int], list[float]] = {}
    for start, end, seconds in timings:
        seconds_at.setdefault((start, end), []).append(seconds)
    starts, ends = (np.array(side, dtype=np.float64) for side in zip(*seconds_at, strict=True))
    seconds_of = np.array([max(min(several), 1e-9) for several in seconds_at.values()])
    columns = np.stack([ends**2 - starts**2, ends - starts, np.where(starts == 0, 1.0, 0.0)], axis=1)
    columns /= seconds_of[:, None]  # relative errors: long contexts do not hide short ones
    quadratic_s, linear_s, constant_s = non_negative(columns, np.ones(len(seconds_of)))
    return Prefill(quadratic_s=quadratic_s, linear_s=linear_s, constant_s=constant_s)


class PrefillMeter:
    """Real steps: `tokens_s` over those that were mostly prefill, and how far those of one sequence alone are from the
    fit (`expected_s` and `spent_s`).

    Used by the engine's thread; `tokens_s` and `stats()` may be read from any. Without a fit nothing is expected.
    """

    def __init__(self, prefill: Prefill | None) -> None:
        self.tokens_s: float | None = None
        """Prompt tokens a second, old steps fading; None before the first."""
        self._prefill = prefill
        self._tokens = 0
        self._spent_s = 0.0
        self._expected_s = 0.0

    def step(self, spans: Sequence[Span], prefill_tokens: int, seconds: float) -> None:
        """A step computed `spans` in `seconds`, of which `prefill_tokens` were prompt."""
        if prefill_tokens < _METER_TOKENS or len(spans) > prefill_tokens or seconds <= 0:
            return
        seen = prefill_tokens / seconds
        self.tokens_s = seen if self.tokens_s is None else _METER_MEMORY * self.tokens_s + (1 - _METER_MEMORY) * seen
        if len(spans) == 1 and self._prefill is not None:
            self._tokens += prefill_tokens
            self._spent_s += seconds
            self._expected_s += self._prefill.extend_s(spans[0].start, spans[0].end)

    def stats(self) -> dict[str, float]:
        """Plain numbers for `runtime.calibration.observed`."""
        return {"tokens": self._tokens, "spent_s": self._spent_s, "expected_s": self._expected_s}
