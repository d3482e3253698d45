"""Choosing tokens from logits: greedy or drawn, penalties, a grammar's mask, a seed of one's own, log probabilities.

Covers one `Chooser` per call and `choose` for a step's calls together, drafts included. Does not cover: stop rules
(`answer.py`), grammars (`guide.py`), where drafts come from (`drafts.py`). A call's tokens depend on its own logits and
its own random numbers, never on its neighbours.

Drafts are exact: each token is chosen as if there were no draft, from scores behind tokens that were chosen, and the
first one that differs from the draft ends what the step can say. One random number per token: a seed gives the same
tokens with and without drafts.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from agentkv.engine.base import Sampling
from agentkv.errors import AgentKVError, ModelError

_SEEDS = 1 << 63
_GREEDY_BELOW = 1e-5
"""Colder than this the best token has all the chances, and scores divided by it leave the range of a float."""


class Chance(NamedTuple):
    """A token and the logarithm of its chance."""

    token: int
    logprob: float


class Picked(NamedTuple):
    """A chosen token; `logprob` and the likeliest tokens in its place where the call asked for them."""

    token: int
    logprob: float | None = None
    top: tuple[Chance, ...] = ()


class Guide(Protocol):
    """What may be written next."""

    def mask(self, scores: Tensor) -> Tensor:
        """`scores` [vocabulary] with -inf for what must not come next."""
        ...

    def accept(self, token: int) -> None:
        """This token was written."""
        ...

    def ahead(self, most: int) -> Sequence[int]:
        """Tokens that must come next, at most `most`."""
        ...

    @property
    def ended(self) -> bool:
        """True if nothing may follow any more."""
        ...


class Chooser:
    """How one call chooses. The generator draws one number per token, on the CPU: the device does not matter.

    `logprobs` as in Request.
    """

    def __init__(
        self,
        sampling: Sampling,
        *,
        logprobs: int | None = None,
        guide: Guide | None = None,
    ) -> None:
        self._sampling = sampling
        self._logprobs = logprobs
        self._guide = guide
        self._greedy = sampling.temperature <= _GREEDY_BELOW
        self._counts: dict[int, int] = {}
        self._counting = bool(sampling.presence_penalty or sampling.frequency_penalty)
        self._bent = self._counting or bool(sampling.logit_bias)
        self.fast = self._greedy and not self._bent and logprobs is None and guide is None
        """True if the best score decides, and nobody asks for more."""
        self._generator = torch.Generator()
        self._generator.manual_seed(secrets.randbits(63) if sampling.seed is None else sampling.seed % _SEEDS)

    def pick(self, logits: Tensor, forced: int | None = None) -> Picked:
        """A token from one row of logits [vocabulary], or the forced one with what the row says of it."""
        scores = logits.float().cpu()
        if self._bent:
            scores = self._bend(scores)
        told = None if self._logprobs is None else torch.log_softmax(scores, dim=-1)
        allowed = scores if self._guide is None or forced is not None else self._guide.mask(scores)
        token = forced if forced is not None else int(allowed.argmax()) if self._greedy else self._draw(allowed)
        self._note(token)
        if told is None or self._logprobs is None:
            return Picked(token)
        best, ids = told.topk(min(self._logprobs, len(told)))
        top = tuple(Chance(id_, by) for id_, by in zip(ids.tolist(), best.tolist(), strict=True))
        return Picked(token, float(told[token]), top)

    def ahead(self, most: int) -> Sequence[int]:
        """Tokens about which the grammar leaves no choice, at most `most`."""
        return () if self._guide is None else self._guide.ahead(most)

    @property
    def ended(self) -> bool:
        """True if a grammar lets nothing follow any more but an end token."""
        return self._guide is not None and self._guide.ended

    def _bend(self, scores: Tensor) -> Tensor:
        """Bias and penalties, in this order, on a copy."""
        sampling, scores = self._sampling, scores.clone()
        if sampling.logit_bias:
            biased, amounts = zip(*sampling.logit_bias, strict=True)
            scores.index_add_(0, torch.tensor(biased), torch.tensor(amounts, dtype=scores.dtype))
        if self._counts:
            ids = torch.tensor(list(self._counts))
            times = torch.tensor(list(self._counts.values()), dtype=scores.dtype)
            scores[ids] -= sampling.presence_penalty + sampling.frequency_penalty * times
        return scores

    def _note(self, token: int) -> None:
        if self._counting:
            self._counts[token] = self._counts.get(token, 0) + 1
        if self._guide is not None:
            self._guide.accept(token)

    def _draw(self, scores: Tensor) -> int:
        """By temperature, then top-p."""
        sampling = self._sampling
        chances = torch.softmax((scores - scores.max()) / sampling.temperature, dim=-1)
        point = float(torch.rand((), generator=self._generator, dtype=torch.float64))
        if sampling.top_p >= 1:
            return _at(chances, point)
        ordered, ids = chances.sort(descending=True, stable=True)
        total = ordered.cumsum(0)
        kept = int(torch.searchsorted(total, sampling.top_p)) + 1  # the first token always stays
        return int(ids[_at(ordered[:kept], point)])


def _at(chances: Tensor, point: float) -> int:
    """Index where the running sum of `chances` passes the share `point` of its total."""
    total = chances.double().cumsum(0)
    at = int(torch.searchsorted(total, point * float(total[-1]), right=True))
    return min(at, len(chances) - 1)


class Want(NamedTuple):
    """One call's rows: `first` and one more for each token of the `draft`. `forced`: the token that comes whatever is best."""

    chooser: Chooser
    first: int
    draft: Sequence[int] = ()
    forced: int | None = None


@torch.inference_mode()
def choose(logits: Tensor, wants: Sequence[Want]) -> list[list[Picked] | AgentKVError]:
    """The next tokens of each call from `logits` [rows, vocabulary]: one, and one more for each draft token that it
    chose itself; or the error of a call whose scores are not finite.
    """
    best, tokens = logits.max(dim=-1)
    finite, greedy = torch.isfinite(best).tolist(), tokens.tolist()
    return [_of_call(logits, want, finite, greedy) for want in wants]


def _of_call(logits: Tensor, want: Want, finite: list[bool], greedy: list[int]) -> list[Picked] | AgentKVError:
    """Whatever goes wrong with one call's tokens is its own."""
    try:
        return _of_one(logits, want, finite, greedy)
    except AgentKVError as error:
        return error
    except Exception as error:
        return ModelError(f"no token could be chosen: {error!r}")


def _of_one(logits: Tensor, want: Want, finite: list[bool], greedy: list[int]) -> list[Picked] | ModelError:
    picked: list[Picked] = []
    for row, guess in enumerate([*want.draft, None], want.first):
        if not finite[row] and want.forced is None:
            return picked or ModelError("the model computed scores that are not finite; no token can be chosen")
        chooser = want.chooser
        one = Picked(greedy[row]) if chooser.fast and want.forced is None else chooser.pick(logits[row], want.forced)
        picked.append(one)
        if one.token != guess:
            break
    return picked
