"""Replay: a recorded run of the embedded engine, simulated with constants from that record, held against what was.

Covers the workload that the simulator gets, and the comparison of stalls and task times. Constants are fitted by
`steptimes.py`. Reading records is `record.py`, the model itself `embedded.py`; what the comparison shows and where it
differs is docs/validation.md. Stalls and task times are never fitted: only how long prefill and decode took is.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from agentkv.policy import make_rules
from agentkv.policy.rules import Rules
from agentkv.policy.schedule import program_order, without_loss
from agentkv.sim.costs import Costs
from agentkv.sim.embedded import Embedded
from agentkv.sim.steptimes import calibrated, gusty, unevenness
from agentkv.sim.stepwise import Pace, steady
from agentkv.sim.workload import Session, Turn, Workload

if TYPE_CHECKING:
    from agentkv.sim.record import Record, Recorded

DRAWS = 20
"""Replays of one record, each on a machine as uneven as the recorded one was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One side of the comparison: every resume stall, and how long each task took, in the same order on both sides."""

    stalls_s: tuple[float, ...]
    tasks_s: tuple[float, ...]

    @property
    def stall_mean_s(self) -> float:
        """Mean resume stall; 0 without any."""
        return statistics.fmean(self.stalls_s) if self.stalls_s else 0.0

    @property
    def task_mean_s(self) -> float:
        """Mean task time; 0 without any."""
        return statistics.fmean(self.tasks_s) if self.tasks_s else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What was measured, what the simulator says of it, and the constants that it had."""

    measured: Side
    predicted: Side
    costs: Costs

    @property
    def stall_error(self) -> float:
        """|predicted - measured| / measured of the mean resume stall; inf where there was none and one is predicted."""
        return relative_error(self.predicted.stall_mean_s, self.measured.stall_mean_s)

    @property
    def task_time_error(self) -> float:
        """The same of the mean task time."""
        return relative_error(self.predicted.task_mean_s, self.measured.task_mean_s)


def relative_error(predicted: float, measured: float) -> float:
    """|predicted - measured| / measured; 0 if both are 0, inf if only `measured` is."""
    if measured == 0:
        return 0.0 if predicted == 0 else math.inf
    return abs(predicted - measured) / measured


def compare(record: Record, costs: Costs | None = None, *, pace: Pace = steady) -> Comparison:
    """Replay `record` once with `costs` (its own by default) and hold the two sides against each other."""
    costs = costs or calibrated(record)
    return Comparison(
        measured=Side(stalls_s=record.stalls_s, tasks_s=record.tasks_s),
        predicted=replay(record, costs, pace=pace),
        costs=costs,
    )


def drawn(record: Record, costs: Costs, *, pace: Pace = steady, draws: int = DRAWS) -> list[Side]:
    """`draws` replays on a machine whose speed varies as the recorded one's did: one run is one draw of many.

    With little memory a call that comes a moment earlier or later decides who waits for whom, so the mean stall of a
    single run is a matter of luck (docs/validation.md); the mean over draws is what the model says.
    """
    spread = unevenness(record, costs, pace=pace)
    return [replay(record, costs, pace=gusty(pace, spread, seed=seed)) for seed in range(draws)]


def replay(record: Record, costs: Costs, *, pace: Pace = steady) -> Side:
    """Simulate the record's tasks: the same prompts, answers, waits and arrivals, under the same policy.

    Raises ConfigError for a policy that is not known here, or a call that `costs` leaves no room for.
    """
    load = workload_of(record)
    simulator = Embedded(load, costs, rules_of(record), shared_tokens=record.sizes.shared_tokens, pace=pace)
    simulator.run()
    stalls = tuple(
        simulator.stalls_s[turns.name][i + 1]
        for calls, turns in zip(record.sessions, load.sessions, strict=True)
        for i, call in enumerate(calls[:-1])
        if call.tool
    )
    tasks = tuple(
        simulator.ended_s[turns.name] - at_s for turns, at_s in zip(load.sessions, load.arrivals_s, strict=True)
    )
    return Side(stalls_s=stalls, tasks_s=tasks)


def rules_of(record: Record) -> Rules:
    """The record's policy. The embedded engine runs in program order and holds tasks back by itself, whatever it says."""
    options = dict(record.policy)
    rules = make_rules(str(options.pop("name", "")), **options)
    return replace(rules, turn_key=program_order, admit=without_loss)


def workload_of(record: Record) -> Workload:
    """The record's sessions as turns, each with what it waited for, and when it began."""
    sessions = tuple(
        Session(name=calls[0].session, turns=tuple(_turn(calls, i) for i in range(len(calls))))
        for calls in record.sessions
    )
    arrivals = tuple(itertools.accumulate((calls[0].submitted_s for calls in record.sessions), max))
    return Workload(sessions=sessions, agents=len(sessions), arrivals_s=arrivals)


def _turn(calls: Sequence[Recorded], i: int) -> Turn:
    call = calls[i]
    return Turn(
        prompt_tokens=call.prompt_tokens,
        output_tokens=max(1, call.output_tokens),
        reuse_tokens=known_tokens(calls[i - 1], call) if i else 0,
        wait_s=call.wait_s,
        tool=call.tool,
        command=call.command,
    )


def known_tokens(before: Recorded, call: Recorded) -> int:
    """So much of `call`'s prompt had the session computed before. Where a history only grew, its last answer too, of
    which the last token is not computed.
    """
    grew = before.reuse_tokens == before.prompt_tokens
    known = before.prompt_tokens + before.output_tokens - 1 if grew else before.reuse_tokens
    return min(known, call.prompt_tokens - 1)
