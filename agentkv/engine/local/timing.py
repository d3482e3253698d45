"""Whose time a step was: wall time by what each call was at, and device time by who computed how much."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from agentkv.engine.local.batch import Turn
from agentkv.engine.local.sequence import Sequence


def book_step(turns: Seq[Turn], running: Seq[Sequence], *, began_s: float, now_s: float) -> int:
    """Book a step that has ended; how many prompt tokens it computed.

    Wall time goes to each call in full: several compute at once. Device time is shared out by tokens computed, so that
    the calls of a step have its length together. Who runs but had no turn was queueing.
    """
    computed = sum(len(turn.span.token_ids) for turn in turns)
    step_s = max(0.0, now_s - began_s)
    prefill = 0
    for turn in turns:
        clock, span, known = turn.sequence.clock, turn.span, turn.sequence.known_tokens
        clock.device_s += step_s * len(span.token_ids) / computed
        if span.start >= turn.sequence.prompt_tokens:
            clock.spend("decode_s", now_s)
            continue
        prefill += len(span.token_ids)
        again = max(0, min(span.end, known) - span.start)
        turn.sequence.again_tokens += again
        clock.spend("prefill_s", now_s, share=1 - again / len(span.token_ids))
    computing = {id(turn.sequence) for turn in turns}
    for sequence in running:
        if id(sequence) not in computing:
            sequence.clock.spend("queued_s", now_s)
    return prefill
