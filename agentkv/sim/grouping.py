"""From single records to sessions: order, clocks, duplicates, parallel calls, and what only the next record tells.

Every correction is noted in the tally and every record that is left out is counted there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from agentkv.sim.fields import LONGEST_S
from agentkv.sim.lines import Tally
from agentkv.sim.trace import Kind, Wait

_EPOCH_FROM_S = 1e8
"""No session lasts three years: a larger start is a time since 1970."""

_EPOCH_UNITS = ((1e11, 1.0, "s"), (1e14, 1e-3, "ms"), (1e17, 1e-6, "us"), (float("inf"), 1e-9, "ns"))
_EARLY_S = 5.0
"""Recorded starts are rounded: only a larger overlap with the wait before is worth a note."""


@dataclass(slots=True, kw_only=True)
class Call:
    """One record as it was read; None: the record does not say.

    `start`: when the wait began, by the session's clock or since the epoch, or by the whole trace's clock (`absolute`).
    `begin`: when the model call's input was there. `duration_s` None: until the next record's `begin`, or `delay_s`.
    `prefix_tokens`: how much of this prompt was there before. `parts`: the tool calls of a round.
    """

    line: int
    session: str
    step: int | None = None
    kind: Kind = "tool"
    tool: str = ""
    command: str = ""
    start: float | None = None
    begin: float | None = None
    absolute: bool = False
    duration_s: float | None = None
    delay_s: float | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    next_prompt_tokens: int | None = None
    reuse_tokens: int | None = None
    prefix_tokens: int | None = None
    llm_s: float = 0.0
    censored: bool = False
    timeout_s: float | None = None
    parallel: int = 1
    arg_bytes: int = 0
    arrival_s: float | None = None
    by_person: bool = False
    parts: list[Call] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Waits in order. `arrival_s`: when it began by the whole trace's clock, None where the source does not say."""

    waits: tuple[Wait, ...]
    arrival_s: float | None


def session_of(calls: list[Call], tally: Tally) -> Session:
    """One session from all its records; it may come out empty."""
    arrival_s = next((call.arrival_s for call in calls if call.arrival_s is not None), None)
    calls = _distinct(_in_order(_one_clock(calls, tally), tally), tally)
    _learn_from_the_next(calls, tally)
    origin_s = _since_start(calls)
    waits = tuple(_wait(step, number) for number, step in enumerate(_steps(calls)))
    return Session(waits=_starts(waits, tally), arrival_s=origin_s if arrival_s is None else arrival_s)


def _one_clock(calls: list[Call], tally: Tally) -> list[Call]:
    """Starts since the epoch in seconds; those of another clock than the session's first are left out."""
    first = next((call.start for call in calls if call.start is not None), None)
    if first is None or calls[0].absolute:
        return calls
    epoch = first >= _EPOCH_FROM_S
    kept = []
    for call in calls:
        if call.start is not None and (call.start >= _EPOCH_FROM_S) != epoch:
            tally.skip(call.line, "start by another clock than the session's first")
            continue
        kept.append(call)
        if epoch and call.start is not None:
            factor, unit = next((factor, unit) for below, factor, unit in _EPOCH_UNITS if call.start < below)
            call.start, call.absolute = call.start * factor, True
            tally.note(f"start taken as {unit} since 1970")
    return kept


def _in_order(calls: list[Call], tally: Tally) -> list[Call]:
    if all(call.step is not None for call in calls):
        ordered = sorted(calls, key=lambda call: (call.step or 0, call.line))
    elif all(call.start is not None for call in calls):
        ordered = sorted(calls, key=lambda call: (call.start or 0.0, call.line))
    else:
        return calls
    if any(before.line > after.line for before, after in pairwise(ordered)):
        tally.note("session out of order, sorted")
    return ordered


def _distinct(calls: list[Call], tally: Tally) -> list[Call]:
    """Without further records of a step, unless they are calls that ran side by side."""
    kept: list[Call] = []
    same = 0
    for call in calls:
        same = same + 1 if kept and call.step is not None and call.step == kept[-1].step else 1
        if same > max(1, call.parallel):
            tally.skip(call.line, "second record of a step")
        else:
            kept.append(call)
    return kept


def _learn_from_the_next(calls: list[Call], tally: Tally) -> None:
    """Fill in what a record leaves to the one after it: how long, how large the next prompt, how much of it is old."""
    after: Call | None = None
    for index in range(len(calls) - 1, -1, -1):
        call = calls[index]
        if index + 1 < len(calls) and (call.step is None or call.step != calls[index + 1].step):
            after = calls[index + 1]
        if call.next_prompt_tokens is None:
            call.next_prompt_tokens = after.prompt_tokens if after else 0
            if after is None and call.duration_s is not None:
                call.next_prompt_tokens = call.prompt_tokens + call.output_tokens
                tally.note("last next prompt taken as prompt and output")
        if call.reuse_tokens is None:
            known = after.prefix_tokens if after else None
            call.reuse_tokens = min(call.prompt_tokens, call.next_prompt_tokens) if known is None else known
        if call.duration_s is None and not _timed_by(call, after):
            tally.skip(call.line, "no usable end of the wait")
            del calls[index]
        elif call.parts and after is not None and after.by_person:
            call.kind = "mixed"


def _timed_by(call: Call, after: Call | None) -> bool:
    """Give `call` the duration that the next record implies; False where it implies none that can be."""
    if after is None:
        call.duration_s = 0.0  # the session's last model call: Wait.ends
    elif after.delay_s is not None:
        call.duration_s = after.delay_s
    elif call.start is not None and after.begin is not None and 0 <= after.begin - call.start <= LONGEST_S:
        call.duration_s = after.begin - call.start
    return call.duration_s is not None


def _since_start(calls: list[Call]) -> float | None:
    """Make absolute starts relative to the session's first model call; when that was by the trace's clock."""
    known = [call.start - call.llm_s for call in calls if call.absolute and call.start is not None]
    if not known:
        return None
    origin_s = min(known)
    for call in calls:
        for each in (call, *call.parts):
            if each.start is not None:
                each.start = max(0.0, each.start - origin_s)
    return origin_s


def _steps(calls: list[Call]) -> list[list[Call]]:
    """Calls that the session waited for together, in one list each."""
    steps: list[list[Call]] = []
    for call in calls:
        if (steps and (call.step is not None and call.step == steps[-1][0].step)) or (
            steps and _together(steps[-1], call)
        ):
            steps[-1].append(call)
        else:
            steps.append([call])
    return steps


def _together(last: list[Call], call: Call) -> bool:
    if call.parallel == 1 or last[0].parallel == 1 or len(last) >= call.parallel:
        return False
    end = max((each.start or 0.0) + (each.duration_s or 0.0) for each in last)
    return call.start is not None and call.start < end


def _wait(step: list[Call], number: int) -> Wait:
    parts = step[0].parts if len(step) == 1 and step[0].parts else step
    singles = tuple(_single(part, step[0], number, len(parts)) for part in parts)
    if len(singles) == 1:
        return singles[0]
    start_s = min(each.start_s for each in singles)
    last = max(singles, key=lambda each: each.start_s + each.duration_s)
    until_s = step[0].duration_s or 0.0 if parts is not step else (last.start_s - start_s) + last.duration_s
    return _changed(last, kind=step[0].kind, start_s=start_s, duration_s=until_s, calls=singles)


def _single(part: Call, call: Call, number: int, parallel: int) -> Wait:
    return Wait(
        session=call.session,
        step=number if call.step is None else call.step,
        kind=part.kind if parallel > 1 else call.kind,
        tool=part.tool,
        command=part.command,
        start_s=part.start if part.start is not None else call.start if call.start is not None else -1.0,
        duration_s=part.duration_s or 0.0,
        prompt_tokens=call.prompt_tokens,
        output_tokens=call.output_tokens,
        next_prompt_tokens=call.next_prompt_tokens or 0,
        reuse_tokens=min(call.reuse_tokens or 0, call.prompt_tokens),
        llm_s=call.llm_s,
        censored=part.censored,
        timeout_s=part.timeout_s,
        parallel=max(parallel, part.parallel),
        arg_bytes=part.arg_bytes,
    )


def _starts(waits: tuple[Wait, ...], tally: Tally) -> tuple[Wait, ...]:
    """Starts that are missing or go back are reckoned from the wait before."""
    made: list[Wait] = []
    for wait in waits:
        before = made[-1] if made else None
        ready_s = (before.start_s + before.duration_s if before else 0.0) + wait.llm_s
        if wait.start_s < 0:
            tally.note("missing start, reckoned from the wait before")
            wait = _moved(wait, ready_s)  # noqa: PLW2901 - a value, changed
        elif before is not None and wait.start_s < before.start_s:
            tally.note("start went back, reckoned from the wait before")
            wait = _moved(wait, ready_s)  # noqa: PLW2901 - likewise
        elif before is not None and wait.start_s < before.start_s + before.duration_s - _EARLY_S:
            tally.note("starts before the wait before it ended")
        made.append(wait)
    return tuple(made)


def _moved(wait: Wait, start_s: float) -> Wait:
    shift_s = start_s - wait.start_s
    calls = tuple(_changed(each, start_s=max(0.0, each.start_s + shift_s)) for each in wait.calls)
    return _changed(wait, start_s=start_s, calls=calls)


def _changed(wait: Wait, **changes: object) -> Wait:
    values = {name: getattr(wait, name) for name in Wait.__slots__}
    return Wait(**values | changes)
