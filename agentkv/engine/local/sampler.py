"""Choosing tokens from logits: greedy, temperature, top-p, a seed of one's own.

Covers one `Chooser` per call and `choose` for a step's calls together. Does not cover: stop rules, forced tokens
(`sequence.py`). A call's tokens depend on its own logits and its own random numbers, never on its neighbours.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import torch
from torch import Tensor

from agentkv.engine.base import Sampling
from agentkv.errors import ModelError

_SEEDS = 1 << 63
_GREEDY_BELOW = 1e-5
"""Colder than this the best token has all the chances, and scores divided by it leave the range of a float."""


class Chooser:
    """How one call chooses. The generator draws one number per token, on the CPU: the device does not matter."""

    def __init__(self, sampling: Sampling) -> None:
        self.greedy = sampling.temperature <= _GREEDY_BELOW
        self._temperature = sampling.temperature
        self._top_p = sampling.top_p
        self._generator = torch.Generator()
        self._generator.manual_seed(secrets.randbits(63) if sampling.seed is None else sampling.seed % _SEEDS)

    def draw(self, logits: Tensor) -> int:
        """A token by temperature and top-p from one row of logits [vocabulary]."""
        scores = logits.float().cpu()
        chances = torch.softmax((scores - scores.max()) / self._temperature, dim=-1)
        point = float(torch.rand((), generator=self._generator, dtype=torch.float64))
        if self._top_p >= 1:
            return _at(chances, point)
        ordered, ids = chances.sort(descending=True, stable=True)
        total = ordered.cumsum(0)
        kept = int(torch.searchsorted(total, self._top_p)) + 1  # the first token always stays
        return int(ids[_at(ordered[:kept], point)])


def _at(chances: Tensor, point: float) -> int:
    """Index where the running sum of `chances` passes the share `point` of its total."""
    total = chances.double().cumsum(0)
    at = int(torch.searchsorted(total, point * float(total[-1]), right=True))
    return min(at, len(chances) - 1)


@torch.inference_mode()
def choose(logits: Tensor, choosers: Sequence[Chooser]) -> list[int | ModelError]:
    """One token for each row of `logits` [calls, vocabulary], or the error for a row that is not finite."""
    best, tokens = logits.max(dim=-1)
    chosen: list[int | ModelError] = []
    finite = torch.isfinite(best).tolist()
    for row, (chooser, token) in enumerate(zip(choosers, tokens.tolist(), strict=True)):
        if not finite[row]:
            chosen.append(ModelError("the model computed scores that are not finite; no token can be chosen"))
        else:
            chosen.append(token if chooser.greedy else chooser.draw(logits[row]))
    return chosen
