"""From single calls to sessions: order, clocks, duplicates, parallel calls, and what only the next record tells.

Every correction is counted in the tally, every record that is left out as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from agentkv.sim.lines import Tally
from agentkv.sim.trace import Kind, Wait

_EPOCH_FROM_S = 1e8
"""No session lasts three years: a larger start is a time since 1970."""

_EPOCH_UNITS = ((1e11, 1.0, "s"), (1e14, 1e-3, "ms"), (1e17, 1e-6, "us"), (float("inf"), 1e-9, "ns"))


@dataclass(slots=True, kw_only=True)
class Call:
    """One record as it was read. None: the record does not say. `start` may be relative or since the epoch."""

    line: int
    session: str
    step: int | None = None
    kind: Kind = "tool"
    tool: str = ""
    command: str = ""
    start: float | None
    duration_s: float
    prompt_tokens: int
    output_tokens: int
    next_prompt_tokens: int | None
    reuse_tokens: int | None
    llm_s: float = 0.0
    censored: bool = False
    timeout_s: float | None = None
    parallel: int = 1
    arg_bytes: int = 0
    arrival_s: float | None = None


Session = list[Call]


def sessions_of(groups: dict[str, Session], tally: Tally) -> tuple[tuple[tuple[Wait, ...], ...], tuple[float, ...]]:
    """All sessions in the order of their first record, and when they began; empties `groups` on the way."""
    sessions: list[tuple[Wait, ...]] = []
    arrivals: list[float | None] = []
    for name in list(groups):
        calls = groups.pop(name)
        arrival_s = next((call.arrival_s for call in calls if call.arrival_s is not None), None)
        waits = _session(calls, tally)
        if waits:
            sessions.append(waits)
            arrivals.append(arrival_s)
    known = [each for each in arrivals if each is not None]
    if len(known) < len(arrivals) or not known:
        return tuple(sessions), ()
    first_s = min(known)
    return tuple(sessions), tuple(each - first_s for each in known)


def _session(calls: Session, tally: Tally) -> tuple[Wait, ...]:
    calls = _in_order(_one_clock(calls, tally), tally)
    steps = _steps(calls, tally)
    return tuple(_wait(step, number) for number, step in enumerate(steps))


def _one_clock(calls: Session, tally: Tally) -> Session:
    """Starts in seconds since the session's start; those of another clock than the first are left out."""
    first = next((call.start for call in calls if call.start is not None), None)
    if first is None:
        return calls
    epoch = first >= _EPOCH_FROM_S
    kept = []
    for call in calls:
        if call.start is not None and (call.start >= _EPOCH_FROM_S) != epoch:
            tally.skip(call.line, "start by another clock than the session's first")
        else:
            kept.append(call)
    if epoch:
        factor, unit = next((factor, unit) for below, factor, unit in _EPOCH_UNITS if first < below)
        origin = min(call.start for call in kept if call.start is not None)
        for call in kept:
            if call.start is not None:
                call.start = (call.start - origin) * factor
                tally.note(f"start taken as {unit} since 1970")
    return kept


def _in_order(calls: Session, tally: Tally) -> Session:
    if all(call.step is not None for call in calls):
        ordered = sorted(calls, key=lambda call: (call.step or 0, call.line))
    elif all(call.start is not None for call in calls):
        ordered = sorted(calls, key=lambda call: (call.start or 0.0, call.line))
    else:
        return calls
    if any(before.line > after.line for before, after in pairwise(ordered)):
        tally.note("session out of order, sorted")
    return ordered


def _steps(calls: Session, tally: Tally) -> list[list[Call]]:
    """Calls that the session waited for together, in one list each; a second record of a step is left out."""
    steps: list[list[Call]] = []
    for call in calls:
        last = steps[-1] if steps else None
        if last is None:
            steps.append([call])
        elif call.step is not None and call.step == last[0].step:
            if call.parallel == 1 or len(last) >= call.parallel:
                tally.skip(call.line, "second record of a step")
            else:
                last.append(call)
        elif _together(last, call):
            last.append(call)
        else:
            steps.append([call])
    return steps


def _together(last: list[Call], call: Call) -> bool:
    if call.parallel == 1 or last[0].parallel == 1 or len(last) >= call.parallel:
        return False
    end = max((each.start or 0.0) + each.duration_s for each in last)
    return call.start is not None and call.start < end


def _wait(step: list[Call], number: int) -> Wait:
    singles = tuple(_single(call, number) for call in step)
    if len(singles) == 1:
        return singles[0]
    start_s = min(each.start_s for each in singles)
    last = max(singles, key=lambda each: each.start_s + each.duration_s)
    return Wait(
        **{name: getattr(last, name) for name in Wait.__slots__}
        | {"start_s": start_s, "duration_s": last.start_s + last.duration_s - start_s, "calls": singles}
    )


def _single(call: Call, number: int) -> Wait:
    next_prompt = call.next_prompt_tokens or 0
    return Wait(
        session=call.session,
        step=number,
        kind=call.kind,
        tool=call.tool,
        command=call.command,
        start_s=call.start or 0.0,
        duration_s=call.duration_s,
        prompt_tokens=call.prompt_tokens,
        output_tokens=call.output_tokens,
        next_prompt_tokens=next_prompt,
        reuse_tokens=min(call.reuse_tokens or 0, call.prompt_tokens),
        llm_s=call.llm_s,
        censored=call.censored,
        timeout_s=call.timeout_s,
        parallel=call.parallel,
        arg_bytes=call.arg_bytes,
    )
