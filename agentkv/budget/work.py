"""Which work was used: device time and tokens of calls whose output went on, and of those that came to nothing.

Not used are calls that failed or were aborted, attempts that a later attempt of the same node replaced, summaries
that were thrown away (the fold failed), and prefill that computed again what this session had computed and lost.
Whether a task as a whole came to anything is `outcomes.py`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

from agentkv.budget.facts import ContextFact, Fact, ModelCall, ToolCallFact
from agentkv.budget.prices import SELF_HOSTED


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Device time in seconds, 0 where the engine tells none. `device_s` is the sum of all that follow.

    `unused_calls`, `unused_tokens` and `unused_cost_usd` are those of calls that came to nothing as a whole.
    """

    device_s: float = 0.0
    used_s: float = 0.0
    failed_s: float = 0.0
    replaced_s: float = 0.0
    thrown_away_s: float = 0.0
    recomputed_s: float = 0.0
    unused_calls: int = 0
    unused_tokens: int = 0
    unused_cost_usd: Decimal = Decimal(0)

    @property
    def effective(self) -> float | None:
        """Share of device time that produced tokens that were used; None where no device time is known."""
        return self.used_s / self.device_s if self.device_s else None


@dataclass(slots=True)
class _Run:
    """A node at work: the attempt that it is at, and the places of its calls."""

    node: str
    attempt: int
    calls: list[int]


def device_s_of(call: ModelCall) -> float:
    """Busy device seconds of the call: as measured, else, on a device of ours, what the engine's timing says.

    0 for a call that ran on somebody else's: how busy that was cannot be seen from here.
    """
    if call.device_s or call.price != SELF_HOSTED:
        return call.device_s
    timing = call.timing
    return timing.prefill_s + timing.recompute_s + timing.decode_s


def work(facts: Sequence[Fact]) -> Work:
    """What became of the device time of these facts, in their order."""
    replaced, thrown_away = _fates(facts)
    sums = {"used_s": 0.0, "failed_s": 0.0, "replaced_s": 0.0, "thrown_away_s": 0.0, "recomputed_s": 0.0}
    calls = tokens = 0
    cost_usd = Decimal(0)
    for number, fact in enumerate(facts):
        if not isinstance(fact, ModelCall) or fact.served_locally:
            continue
        seconds = device_s_of(fact)
        fate = (
            "failed_s" if fact.status != "ok"
            else "replaced_s" if number in replaced
            else "thrown_away_s" if number in thrown_away
            else "used_s"
        )  # fmt: skip
        if fate == "used_s":
            again = min(seconds, fact.timing.recompute_s)
            sums["recomputed_s"] += again
            seconds -= again
        else:
            calls += 1
            tokens += fact.usage.total_tokens
            cost_usd += fact.cost_usd or 0
        sums[fate] += seconds
    return Work(device_s=sum(sums.values()), **sums, unused_calls=calls, unused_tokens=tokens, unused_cost_usd=cost_usd)


def _fates(facts: Sequence[Fact]) -> tuple[set[int], set[int]]:
    """Places of calls that a later attempt replaced, and of summaries that were thrown away."""
    replaced: set[int] = set()
    thrown_away: set[int] = set()
    running: dict[str, _Run] = {}  # by branch: the node that runs there
    summaries: dict[str, list[int]] = {}  # by session
    for number, fact in enumerate(facts):
        if isinstance(fact, ModelCall):
            if fact.purpose == "summary":
                summaries.setdefault(fact.session, []).append(number)
                continue
            run = running.get(fact.branch)
            if run is None or run.node != fact.node or run.attempt > fact.attempt:
                run = running[fact.branch] = _Run(fact.node, fact.attempt, [])
            elif run.attempt < fact.attempt:
                replaced.update(run.calls)
                run.attempt, run.calls = fact.attempt, []
            run.calls.append(number)
        elif isinstance(fact, ToolCallFact):
            _went_on(running, fact)
        elif isinstance(fact, ContextFact) and fact.event in ("fold", "fold_failed"):
            made = summaries.pop(fact.session, None) or summaries.pop("", [])
            if fact.event == "fold_failed":
                thrown_away.update(made)
    return replaced, thrown_away


def _went_on(running: dict[str, _Run], tool: ToolCallFact) -> None:
    """Where a tool ran, and in the graphs around it, the node before it is over."""
    parts = tool.branch.split("|") if tool.branch else []
    for depth in range(len(parts) + 1):
        branch = "|".join(parts[:depth])
        if branch in running and running[branch].node != tool.node:
            del running[branch]
