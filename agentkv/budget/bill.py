"""Bill: what one task cost, computed from its facts.

Covers the numbers; their parts are computed in `split.py` (classes), `work.py` (what was used), `stalls.py` (moving KV),
`branches.py` (who spent it) and `shaping.py` (prompts). `console.py`, `html.py` and `billjson.py` show a bill,
`diagnosis.py` reads it, `outcomes.py` compares the bills of many tasks. Everything is derived: the same facts give the
same bill, in this process or from a saved ledger.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Self

from agentkv.budget.branches import Spender, spenders
from agentkv.budget.facts import (
    AgentMessageFact,
    ContextFact,
    DeliveryFact,
    Fact,
    ModelCall,
    MoveFact,
    OutcomeFact,
    TaskFact,
    ToolCallFact,
)
from agentkv.budget.finite import finite
from agentkv.budget.shaping import Shaping, shaping_of
from agentkv.budget.split import Split, split
from agentkv.budget.stalls import Stalls, resume_stalls, stalls
from agentkv.budget.work import Work, work
from agentkv.core.usage import Timing, Usage

if TYPE_CHECKING:
    from agentkv.budget.diagnosis import Diagnosis

_COPIES = ("write", "demote", "prefetch", "load")
_DIRECTIONS = ("device", "host", "disk")


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """What was copied towards one tier."""

    moves: int = 0
    blocks: int = 0
    size_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """Where the time went, summed over calls: branches in parallel make the sum exceed the wall time `wall_s`."""

    wall_s: float = 0.0
    queued_s: float = 0.0
    restore_s: float = 0.0
    recompute_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    tools_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """One task's bill. `print(bill)` is the console report.

    `usage` leaves out calls that a local response cache answered. `cost_usd` sums the calls whose price is known (None:
    of none is), `unpriced_calls` counts the others. `cached_by` tells the tiers from which cached tokens came, as far
    as engines tell. `resume_stalls_s` holds, for each model call that was the first of its session after a tool call,
    what it waited for its own old context (queue, restore, recompute). `visible_tokens` reached the user: as marked by
    deliveries (`delivered`), else the output of calls that said so, else that of the last call that ended well.
    `completed` is the task's outcome, None as long as nobody told it. `saved_ms` is when the last of it was saved by the
    database's clock, where it was read from one: the other times are those of the machines that things happened on.
    """

    task: str
    usage: Usage
    calls: tuple[ModelCall, ...] = ()
    tools: tuple[ToolCallFact, ...] = ()
    moves: tuple[MoveFact, ...] = ()
    events: tuple[ContextFact, ...] = ()
    cost_usd: Decimal | None = None
    unpriced_calls: int = 0
    cached_by: dict[str, int]
    split: Split
    work: Work
    stalls: Stalls
    spenders: tuple[Spender, ...] = ()
    moved: dict[str, Moved]
    drops: int = 0
    failed_moves: int = 0
    resume_stalls_s: tuple[float, ...] = ()
    spans: Spans
    shaping: Shaping
    visible_tokens: int = 0
    delivered: bool = False
    peak_context_tokens: int = 0
    mean_context_tokens: float = 0.0
    started_ms: int | None = None
    finished_ms: int | None = None
    last_ms: int | None = None
    agent_messages: int = 0
    agent_message_tokens: int = 0
    task_type: str = ""
    completed: bool | None = None
    saved_ms: int | None = None

    @classmethod
    def from_facts(cls, task: str, facts: Iterable[Fact]) -> Self:
        """The bill of `task`; facts of other tasks are left out, and none at all give an empty bill."""
        mine = [finite(fact) for fact in facts if fact.task == task]
        kinds: dict[str, list[Any]] = {}
        for fact in mine:
            kinds.setdefault(fact.kind, []).append(fact)
        calls: list[ModelCall] = kinds.get(ModelCall.kind, [])
        tools: list[ToolCallFact] = kinds.get(ToolCallFact.kind, [])
        moves: list[MoveFact] = kinds.get(MoveFact.kind, [])
        events: list[TaskFact] = kinds.get(TaskFact.kind, [])
        shaped: list[ContextFact] = kinds.get(ContextFact.kind, [])
        messages: list[AgentMessageFact] = kinds.get(AgentMessageFact.kind, [])
        deliveries: list[DeliveryFact] = kinds.get(DeliveryFact.kind, [])
        outcomes: list[OutcomeFact] = kinds.get(OutcomeFact.kind, [])
        paid = [call for call in calls if not call.served_locally]
        unpriced = sum(call.cost_usd is None for call in paid)
        sizes = [call.usage.total_tokens for call in paid if call.usage.total_tokens]  # a refused call has no context
        timed = [fact for fact in mine if fact.at_ms] or mine  # a clock that was not set yet tells no time
        started_ms = min((_begin_ms(fact) for fact in timed), default=None)
        last_ms = max((_end_ms(fact) for fact in timed), default=None)
        return cls(
            task=task,
            usage=_sum_of(paid),
            calls=tuple(calls),
            tools=tuple(tools),
            moves=tuple(moves),
            events=tuple(shaped),
            cost_usd=None if unpriced and unpriced == len(paid) else _money_of(paid),
            unpriced_calls=unpriced,
            cached_by=_cached_by(paid),
            split=split(mine),
            work=work(mine),
            stalls=stalls(mine),
            spenders=tuple(spenders(calls, tools)),
            moved=_moved(moves),
            drops=sum(move.action == "drop" and move.outcome in ("done", "partial") for move in moves),
            failed_moves=sum(move.outcome == "failed" for move in moves),
            resume_stalls_s=resume_stalls(mine),
            shaping=shaping_of(shaped, calls),
            spans=_spans(calls, tools, wall_ms=0 if started_ms is None else (last_ms or 0) - started_ms),
            visible_tokens=sum(d.tokens for d in deliveries) if deliveries else _visible_tokens(calls),
            delivered=bool(deliveries),
            peak_context_tokens=max(sizes, default=0),
            mean_context_tokens=sum(sizes) / len(sizes) if sizes else 0.0,
            started_ms=started_ms,
            finished_ms=events[-1].at_ms if events and events[-1].event == "finished" else None,
            last_ms=last_ms,
            agent_messages=len(messages),
            agent_message_tokens=sum(message.tokens for message in messages),
            task_type=_type_of(outcomes, events, calls),
            completed=outcomes[-1].completed if outcomes else None,
        )

    @property
    def hit_rate(self) -> float | None:
        """Share of input tokens whose KV was reused; None without input."""
        return self.usage.cached_tokens / self.usage.input_tokens if self.usage.input_tokens else None

    @property
    def effective_token_ratio(self) -> float | None:
        """Tokens that reached the user over all tokens, at most 1; None without tokens."""
        return min(1.0, self.visible_tokens / self.usage.total_tokens) if self.usage.total_tokens else None

    @property
    def effective_utilisation(self) -> float | None:
        """Share of this task's device time that produced tokens that were used; None where none was measured."""
        return self.work.effective

    @property
    def raw_utilisation(self) -> float | None:
        """Share of the task's wall time in which a device was busy for it; above 1 for branches in parallel."""
        return self.work.device_s / self.spans.wall_s if self.work.device_s and self.spans.wall_s else None

    @property
    def loops(self) -> dict[str, int]:
        """Calls that counted against the cap of a loop (retry, reflection, correction ...), by its name."""
        return dict(Counter(call.loop for call in self.calls if call.loop))

    @property
    def estimated(self) -> bool:
        """True if some call's tokens were counted by us because the engine did not tell them."""
        return any(call.estimated for call in self.calls)

    @property
    def diagnosis(self) -> Diagnosis:
        """Which wall this task meets first, its dearest steps, and what to do."""
        from agentkv.budget.diagnosis import diagnose

        return diagnose(self)

    def __str__(self) -> str:
        from agentkv.budget.console import render

        return render(self)

    def to_json(self) -> dict[str, Any]:
        """The bill as plain JSON values; `bill.schema.json` in this package describes them."""
        from agentkv.budget.billjson import bill_to_json

        return bill_to_json(self)

    def to_html(self) -> str:
        """The bill as one HTML page that needs nothing else."""
        from agentkv.budget.html import page

        return page(self)


def _begin_ms(fact: Fact) -> int:
    """When a fact's deed began; a tool call is stamped at its end."""
    return fact.at_ms - (round(fact.actual_s * 1000) if isinstance(fact, ToolCallFact) and fact.at_ms else 0)


def _end_ms(fact: Fact) -> int:
    """When a fact's deed was over; a model call is stamped at its start, the others at their end."""
    return fact.at_ms + (round(fact.timing.total_s * 1000) if isinstance(fact, ModelCall) else 0)


def _type_of(outcomes: Sequence[OutcomeFact], events: Sequence[TaskFact], calls: Sequence[ModelCall]) -> str:
    """What was told last: with the outcome, else for the task, else with a call."""
    told = [fact.task_type for fact in events] + [fact.task_type for fact in outcomes]
    told = [call.outcome_type for call in calls] + told
    return next((kind for kind in reversed(told) if kind), "")


def _sum_of(calls: Sequence[ModelCall]) -> Usage:
    usages = [call.usage for call in calls]
    return Usage(**{f.name: sum([getattr(usage, f.name) for usage in usages]) for f in fields(Usage)})


def _money_of(calls: Sequence[ModelCall]) -> Decimal:
    return sum((call.cost_usd for call in calls if call.cost_usd is not None), Decimal(0))


def _cached_by(calls: Sequence[ModelCall]) -> dict[str, int]:
    tiers: dict[str, int] = {}
    for call in calls:
        for tier, tokens in call.cached_by.items():
            tiers[tier] = tiers.get(tier, 0) + tokens
    return tiers


def _moved(moves: Sequence[MoveFact]) -> dict[str, Moved]:
    """Copies by the tier they went to; moves that found nothing to do do not count."""
    sums = {}
    for direction in _DIRECTIONS:
        rows = [move for move in moves if move.to == direction and move.action in _COPIES and move.blocks > 0]
        sums[direction] = Moved(
            moves=len(rows),
            blocks=sum(move.blocks for move in rows),
            size_bytes=sum(move.size_bytes for move in rows),
            seconds=sum(move.seconds for move in rows),
        )
    return sums


def _spans(calls: Sequence[ModelCall], tools: Sequence[ToolCallFact], *, wall_ms: int) -> Spans:
    timings: list[Timing] = [call.timing for call in calls]
    names = ("queued_s", "restore_s", "recompute_s", "prefill_s", "decode_s")
    return Spans(
        wall_s=max(0, wall_ms) / 1000,
        tools_s=sum(tool.actual_s for tool in tools),
        **{name: sum([getattr(timing, name) for timing in timings]) for name in names},
    )


def _visible_tokens(calls: Sequence[ModelCall]) -> int:
    if any(call.visible is not None for call in calls):
        return sum(call.usage.output_tokens for call in calls if call.visible)
    answers = (call for call in reversed(calls) if call.status == "ok" and call.purpose == "answer")
    return next((call.usage.output_tokens for call in answers), 0)
