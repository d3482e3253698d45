"""Writing: a step's chosen tokens enter an answer, before anybody is told of them.

Covers: a step's turns and their rows of scores, drafts judged, log probabilities as entries. Does not cover: choosing
(`sampler.py`), delivery (`engine.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from torch import Tensor

from agentkv.engine.base import TokenLogprob
from agentkv.engine.local.batch import Turn
from agentkv.engine.local.sampler import Picked, Want, choose
from agentkv.engine.local.sequence import Sequence
from agentkv.errors import AgentKVError, ModelError


@dataclass(slots=True, kw_only=True)
class Fresh:
    """What a step added to a sequence: its text may be shown now. Or the error that ends the call."""

    sequence: Sequence
    text: str = ""
    token_ids: tuple[int, ...] = ()
    error: AgentKVError | None = None


def write(planned: Seq[Turn], good: Seq[Turn], logits: Tensor, raw: Callable[[int], bytes]) -> list[Fresh]:
    """What the calls write now: chosen, in their answers and in their ids, but not told to anybody yet.

    `logits` [rows, vocabulary] are those of the `planned` turns that sample; turns that are not among the `good` ones
    computed on nonsense. `raw`: a token's bytes.
    """
    confirmed = {id(turn) for turn in good}
    wants: list[Want] = []
    sampled: list[Turn] = []
    row = 0
    for turn in planned:
        if not turn.span.sample:
            continue
        if id(turn) in confirmed:
            wants.append(Want(turn.sequence.chooser, row, turn.draft, turn.sequence.answer.next_forced))
            sampled.append(turn)
        row += 1 + turn.span.drafted
    picked = choose(logits, wants) if wants else []
    return [_one(turn, tokens, raw) for turn, tokens in zip(sampled, picked, strict=True)]


def _one(turn: Turn, picked: list[Picked] | AgentKVError, raw: Callable[[int], bytes]) -> Fresh:
    """Whatever goes wrong with one answer ends that call alone."""
    try:
        return _written(turn, picked, raw)
    except Exception as error:
        return Fresh(sequence=turn.sequence, error=ModelError(f"the answer could not be written: {error!r}"))


def _written(turn: Turn, picked: list[Picked] | AgentKVError, raw: Callable[[int], bytes]) -> Fresh:
    """Put the tokens into the sequence's answer and ids, up to its end."""
    sequence = turn.sequence
    if isinstance(picked, AgentKVError):
        return Fresh(sequence=sequence, error=picked)
    answer, text, before = sequence.answer, "", len(sequence.ids)
    for one in picked:
        sequence.ids.append(one.token)
        text += answer.add(one.token, _entry(one, raw))
        if answer.reason is not None:
            break
    if sequence.chooser.ended:
        answer.complete()
    if turn.draft and sequence.drafter is not None and not sequence.certain:
        drafted = len(turn.draft)
        if answer.reason is not None:  # guesses behind the end are nobody's
            drafted = min(drafted, len(sequence.ids) - before)
        sequence.drafter.taken(drafted, min(len(picked) - 1, drafted))
    return Fresh(sequence=sequence, text=text, token_ids=tuple(sequence.ids[before:]))


def _entry(picked: Picked, raw: Callable[[int], bytes]) -> TokenLogprob | None:
    if picked.logprob is None:
        return None
    top = tuple(TokenLogprob(token_id=id_, raw=raw(id_), logprob=by) for id_, by in picked.top)
    return TokenLogprob(token_id=picked.token, raw=raw(picked.token), logprob=picked.logprob, top=top)
