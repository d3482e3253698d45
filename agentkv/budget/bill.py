"""Bill: what one task cost, computed from its facts.

Covers the numbers and their JSON form; `console.py` prints them. Money is not here yet. Everything is derived: the
same facts give the same bill, in this process or from a saved ledger.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from agentkv.budget.ledger import ContextFact, Fact, ModelCall, MoveFact, TaskFact, ToolCallFact
from agentkv.core.usage import Timing, Usage

VERSION = "agentkv.bill/1"
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
class Shaping:
    """What was done to the prompts, and what broke them.

    `slimmed` tool outputs went from `slim_before` to `slim_after` tokens. `folds` took `fold_before` tokens of prompt
    to `fold_after`, for `summary_tokens` of model calls; `failed_folds` left the history as it was. `breaks` counts
    prompts that did not extend the one before, by cause, `break_tokens` what had to be computed again for them.
    `retrievals` is how often memories were looked up, `recalled_tokens` what was told of them.
    """

    slimmed: int = 0
    slim_before: int = 0
    slim_after: int = 0
    folds: int = 0
    fold_before: int = 0
    fold_after: int = 0
    summary_tokens: int = 0
    failed_folds: int = 0
    breaks: dict[str, int]
    break_tokens: int = 0
    retrievals: int = 0
    recalled_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """One task's bill. `print(bill)` is the console report.

    `resume_stalls_s` holds, for each model call that was the first of its session after a tool call, what it waited
    for its own old context (queue, restore, recompute). `visible_tokens` are output tokens that went to the user:
    those of calls that said so, else of the last call that ended well.
    """

    task: str
    usage: Usage
    calls: tuple[ModelCall, ...] = ()
    tools: tuple[ToolCallFact, ...] = ()
    moved: dict[str, Moved]
    drops: int = 0
    failed_moves: int = 0
    resume_stalls_s: tuple[float, ...] = ()
    spans: Spans
    shaping: Shaping
    visible_tokens: int = 0
    peak_context_tokens: int = 0
    started_ms: int | None = None
    finished_ms: int | None = None
    agent_messages: int = 0

    @classmethod
    def from_facts(cls, task: str, facts: Iterable[Fact]) -> Self:
        """The bill of `task`; facts of other tasks are left out, and none at all give an empty bill."""
        mine = [fact for fact in facts if fact.task == task]
        calls = tuple(fact for fact in mine if isinstance(fact, ModelCall))
        tools = tuple(fact for fact in mine if isinstance(fact, ToolCallFact))
        moves = [fact for fact in mine if isinstance(fact, MoveFact)]
        events = [fact for fact in mine if isinstance(fact, TaskFact)]
        started_ms = min((fact.at_ms for fact in mine), default=None)
        closed = bool(events) and events[-1].event == "finished"
        ended_ms = max((_end_ms(fact) for fact in mine), default=None)
        return cls(
            task=task,
            usage=sum((call.usage for call in calls), Usage()),
            calls=calls,
            tools=tools,
            moved=_moved(moves),
            drops=sum(move.action == "drop" and move.outcome in ("done", "partial") for move in moves),
            failed_moves=sum(move.outcome == "failed" for move in moves),
            resume_stalls_s=_resume_stalls(mine),
            shaping=_shaping([fact for fact in mine if isinstance(fact, ContextFact)], calls),
            spans=_spans(calls, tools, wall_ms=0 if started_ms is None else (ended_ms or 0) - started_ms),
            visible_tokens=_visible_tokens(calls),
            peak_context_tokens=max((call.usage.total_tokens for call in calls), default=0),
            started_ms=started_ms,
            finished_ms=events[-1].at_ms if closed else None,
        )

    @property
    def hit_rate(self) -> float | None:
        """Share of input tokens whose KV was reused; None without input."""
        return self.usage.cached_tokens / self.usage.input_tokens if self.usage.input_tokens else None

    @property
    def effective_token_ratio(self) -> float | None:
        """Tokens of user-visible output over all tokens; None without tokens."""
        return self.visible_tokens / self.usage.total_tokens if self.usage.total_tokens else None

    @property
    def estimated(self) -> bool:
        """True if some call's tokens were counted by us because the engine did not tell them."""
        return any(call.estimated for call in self.calls)

    def __str__(self) -> str:
        from agentkv.budget.console import render

        return render(self)

    def to_json(self) -> dict[str, Any]:
        """The bill as plain JSON values."""
        import statistics

        return {
            "v": VERSION,
            "task": self.task,
            "started_ms": self.started_ms,
            "finished_ms": self.finished_ms,
            "model_calls": len(self.calls),
            "input_tokens": self.usage.input_tokens,
            "cached_tokens": self.usage.cached_tokens,
            "output_tokens": self.usage.output_tokens,
            "total_tokens": self.usage.total_tokens,
            "estimated": self.estimated,
            "kv_hit_rate": self.hit_rate,
            "peak_context_tokens": self.peak_context_tokens,
            "visible_tokens": self.visible_tokens,
            "effective_token_ratio": self.effective_token_ratio,
            "retrievals": self.shaping.retrievals,
            "agent_messages": self.agent_messages,
            "context": asdict(self.shaping),
            "calls": [asdict(call) for call in self.calls],
            "tools": [asdict(tool) for tool in self.tools],
            "moved": {direction: asdict(moved) for direction, moved in self.moved.items()},
            "drops": self.drops,
            "failed_moves": self.failed_moves,
            "resume_stalls_s": list(self.resume_stalls_s),
            "resume_stall_median_s": statistics.median(self.resume_stalls_s) if self.resume_stalls_s else None,
            "resume_stall_max_s": max(self.resume_stalls_s, default=None),
            "time": asdict(self.spans),
        }


def _end_ms(fact: Fact) -> int:
    """When a fact's deed was over; a model call is stamped at its start, the others at their end."""
    return fact.at_ms + (round(fact.timing.total_s * 1000) if isinstance(fact, ModelCall) else 0)


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


def _shaping(facts: Sequence[ContextFact], calls: Sequence[ModelCall]) -> Shaping:
    by_event: dict[str, list[ContextFact]] = {}
    for fact in facts:
        by_event.setdefault(fact.event, []).append(fact)
    slims, folds, breaks = (by_event.get(event, []) for event in ("slim", "fold", "break"))
    recalls = by_event.get("recall", [])
    return Shaping(
        slimmed=len(slims),
        slim_before=sum(fact.before_tokens for fact in slims),
        slim_after=sum(fact.after_tokens for fact in slims),
        folds=len(folds),
        fold_before=sum(fact.before_tokens for fact in folds),
        fold_after=sum(fact.after_tokens for fact in folds),
        summary_tokens=sum(call.usage.total_tokens for call in calls if call.purpose == "summary"),
        failed_folds=len(by_event.get("fold_failed", [])),
        breaks=dict(Counter(fact.cause for fact in breaks)),
        break_tokens=sum(fact.before_tokens for fact in breaks),
        retrievals=len(recalls),
        recalled_tokens=sum(fact.after_tokens for fact in recalls),
    )


def _resume_stalls(facts: Sequence[Fact]) -> tuple[float, ...]:
    waiting: set[str] = set()
    stalls = []
    for fact in facts:
        if isinstance(fact, ToolCallFact):
            waiting.add(fact.session)
        elif isinstance(fact, ModelCall) and waiting & {fact.session, ""}:
            waiting -= {fact.session, ""}
            stalls.append(fact.timing.stall_s)
    return tuple(stalls)


def _spans(calls: Sequence[ModelCall], tools: Sequence[ToolCallFact], *, wall_ms: int) -> Spans:
    model = sum((call.timing for call in calls), Timing())
    return Spans(
        wall_s=max(0, wall_ms) / 1000,
        queued_s=model.queued_s,
        restore_s=model.restore_s,
        recompute_s=model.recompute_s,
        prefill_s=model.prefill_s,
        decode_s=model.decode_s,
        tools_s=sum(tool.actual_s for tool in tools),
    )


def _visible_tokens(calls: Sequence[ModelCall]) -> int:
    if any(call.visible is not None for call in calls):
        return sum(call.usage.output_tokens for call in calls if call.visible)
    answers = (call for call in reversed(calls) if call.status == "ok" and call.purpose == "answer")
    return next((call.usage.output_tokens for call in answers), 0)
