"""Diagnosis: which wall a task meets first, its three dearest steps, and what to do about it. Fixed rules, no model.

Each wall has a measure between 0 and 1 and a threshold from which on it counts. The one whose measure exceeds its
threshold most (as a ratio) is the first; with none, nothing stands out. The measures are shares of what the bill adds
up: money, tokens, device time or wall time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from agentkv.budget.branches import place_of
from agentkv.budget.money import format_usd
from agentkv.budget.names import shortened
from agentkv.budget.split import weight_of
from agentkv.units import format_seconds

if TYPE_CHECKING:
    from agentkv.budget.bill import Bill
    from agentkv.budget.facts import ModelCall, ToolCallFact

FEW_CALLS = 8
"""Below so many model calls a chain is not long, and context has no time to grow."""
LITTLE_STALL_S = 1.0
"""Less waiting than this in a whole task is no wall, whatever its share."""
DEAREST = 3
_NAME_CHARS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Wall:
    """One wall: `share` was measured, from `threshold` on it counts. `figures` and `advice` are sentences."""

    name: str
    share: float
    threshold: float
    figures: str
    advice: str

    @property
    def height(self) -> float:
        """Measure over threshold; 1 and more is a wall."""
        return self.share / self.threshold


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One of the dearest steps: its place in the bill's list (from 1), what it was, and its figures in words."""

    number: int
    kind: str
    name: str
    figures: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """`wall` is the name of the first wall, "" for none; `walls` holds all of them, the highest first."""

    wall: str
    walls: tuple[Wall, ...]
    steps: tuple[Step, ...]
    text: str

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self) | {"walls": [asdict(wall) for wall in self.walls], "steps": [asdict(s) for s in self.steps]}


def diagnose(bill: Bill) -> Diagnosis:
    """Read a bill. Pure: the same bill gives the same words."""
    if not bill.calls and not bill.tools:
        return Diagnosis(wall="", walls=(), steps=(), text="Nothing was spent, so there is nothing to find.")
    walls = tuple(sorted((rule(bill) for rule in RULES), key=lambda wall: -wall.height))
    first = walls[0] if walls[0].height >= 1 else None
    steps = _dearest(bill, by_time=first is not None and first.name in _OF_TIME)
    return Diagnosis(
        wall="" if first is None else first.name, walls=walls, steps=steps, text=_text(bill, walls, first, steps)
    )


# -- the rules


def _long_context(bill: Bill) -> Wall:
    share = bill.split.shares()["context"] if len(bill.calls) >= FEW_CALLS else 0.0
    first = next((call.usage.input_tokens for call in bill.calls if call.status == "ok"), 0)
    return Wall(
        name="long context",
        share=share,
        threshold=0.5,
        figures=(
            f"{_percent(bill.split.shares()['context'])} of the cost is context that was read before; prompts went from "
            f"{first:,} to {max((call.usage.input_tokens for call in bill.calls), default=0):,} tokens in "
            f"{_many(len(bill.calls), 'call')}"
        ),
        advice=(
            "keep prompts short: slim tool outputs, lower `soft_tokens` so that turns are folded earlier, or cut the "
            "task into segments"
        ),
    )


def _long_chain(bill: Bill) -> Wall:
    share = bill.split.shares()["inference"]
    return Wall(
        name="long chain",
        share=share if len(bill.calls) >= FEW_CALLS else 0.0,
        threshold=0.5,
        figures=(
            f"{_percent(share)} of the cost is new input and output of {_many(len(bill.calls), 'model call')}, "
            f"{bill.usage.output_tokens:,} tokens of it written"
        ),
        advice="make fewer or cheaper steps: route simple ones to a smaller model, do several tool calls in one step, cap loops",
    )


def _communication(bill: Bill) -> Wall:
    share = bill.split.shares()["communication"]
    places = {call.branch for call in bill.calls}
    return Wall(
        name="communication",
        share=share,
        threshold=0.4,
        figures=f"{_percent(share)} of the cost is telling {_many(len(places), 'branch', 'branches')} what another one knew",
        advice="send agents structured, short messages and share one prefix (same instructions and tools first)",
    )


def _memory_pressure(bill: Bill) -> Wall:
    model_s = sum(call.timing.total_s for call in bill.calls)
    paid_s = bill.stalls.paid_s
    return Wall(
        name="memory pressure",
        share=min(1.0, paid_s / model_s) if model_s and paid_s >= LITTLE_STALL_S else 0.0,
        threshold=0.2,
        figures=(
            f"calls waited {format_seconds(paid_s)} for their own old context ({format_seconds(bill.spans.queued_s)} queue, "
            f"{format_seconds(bill.spans.restore_s)} restore, {format_seconds(bill.spans.recompute_s)} recompute) of "
            f"{format_seconds(model_s)} in all"
        ),
        advice="give the device pool or the host tier more memory, or run fewer tasks at once",
    )


def _tools(bill: Bill) -> Wall:
    wall_s, tools_s = bill.spans.wall_s, bill.spans.tools_s
    busy_s = tools_s + sum(call.timing.total_s for call in bill.calls)
    failed = sum(tool.status == "failed" for tool in bill.tools)
    return Wall(
        name="tools",
        share=tools_s / busy_s if busy_s else 0.0,
        threshold=0.95,
        figures=(
            f"{format_seconds(tools_s)} of {format_seconds(busy_s)} went into {_many(len(bill.tools), 'tool call')}"
            + (f", {failed} of them failed" if failed else "")
            + f", in {format_seconds(wall_s)} of wall time"
        ),
        advice="the model is not what you wait for: run tools in parallel, cache or speed up the slowest",
    )


def _prefix_breaks(bill: Bill) -> Wall:
    shaping = bill.shaping
    causes = ", ".join(
        f"{shortened(cause or 'unknown', _NAME_CHARS)} {number}x" for cause, number in sorted(shaping.breaks.items())
    )
    return Wall(
        name="prefix breaks",
        share=min(1.0, shaping.break_tokens / bill.usage.input_tokens) if bill.usage.input_tokens else 0.0,
        threshold=0.1,
        figures=(
            f"{shaping.break_tokens:,} of {bill.usage.input_tokens:,} input tokens had to be computed again because a "
            f"prompt did not extend the one before ({causes or 'none'})"
        ),
        advice="keep the start of the prompt as it is; `agentkv prefix-check` names the byte that changes",
    )


def _unused_work(bill: Bill) -> Wall:
    work = bill.work
    money = bool(bill.cost_usd) and not bill.unpriced_calls
    share = (
        float(work.unused_cost_usd / bill.cost_usd) if money and bill.cost_usd
        else work.unused_tokens / bill.usage.total_tokens if bill.usage.total_tokens
        else 0.0
    )  # fmt: skip
    return Wall(
        name="unused work",
        share=min(1.0, share),
        threshold=0.25,
        figures=(
            f"{_percent(share)} of the {'money' if money else 'tokens'} went into {_many(work.unused_calls, 'call')} that "
            "failed, were aborted or were made again"
        ),
        advice="look at the errors of the failed attempts, and cap retries and reflection loops",
    )


Rule = Callable[["Bill"], Wall]
RULES: Sequence[Rule] = (
    _long_context, _long_chain, _communication, _memory_pressure, _tools, _prefix_breaks, _unused_work,
)  # fmt: skip
"""In this order where two are equally high."""
_OF_TIME = ("memory pressure", "tools")


# -- the words


def _dearest(bill: Bill, *, by_time: bool) -> tuple[Step, ...]:
    """By time: calls and tools together. Else model calls by money, or by weight while any price is unknown."""
    calls = [(number, call) for number, call in enumerate(bill.calls, 1) if not call.served_locally]
    if by_time:
        timed = [(call.timing.total_s, _call_step(number, call)) for number, call in calls]
        timed += [(tool.actual_s, _tool_step(number, tool)) for number, tool in enumerate(bill.tools, 1)]
        return tuple(step for _, step in sorted(timed, key=lambda pair: -pair[0])[:DEAREST])
    priced = not bill.unpriced_calls and bool(bill.cost_usd)
    calls.sort(key=lambda pair: -(pair[1].cost_usd or Decimal(0)) if priced else -weight_of(pair[1]))
    return tuple(_call_step(number, call) for number, call in calls[:DEAREST])


def _call_step(number: int, call: ModelCall) -> Step:
    usage = call.usage
    cost = f"{format_usd(call.cost_usd)}, " if call.cost_usd else ""
    return Step(
        number=number,
        kind="model call",
        name=shortened(place_of(call.branch, call.node), _NAME_CHARS),
        figures=(
            f"{cost}{usage.input_tokens:,} in ({usage.cached_tokens:,} cached), {usage.output_tokens:,} out, "
            f"{format_seconds(call.timing.total_s)}"
        ),
    )


def _tool_step(number: int, tool: ToolCallFact) -> Step:
    return Step(
        number=number,
        kind="tool call",
        name=shortened(tool.tool or "-", _NAME_CHARS),
        figures=format_seconds(tool.actual_s),
    )


def _text(bill: Bill, walls: Sequence[Wall], first: Wall | None, steps: Sequence[Step]) -> str:
    highest = walls[0]
    if first is not None:
        told = f"This task meets the wall of {first.name} first: {first.figures}."
        others = [wall for wall in walls[1:] if wall.height >= 1]
        if others:
            told += " Then: " + "; ".join(f"{wall.name} ({_percent(wall.share)})" for wall in others) + "."
    elif highest.share:
        told = (
            f"No wall stands out. Nearest is {highest.name} ({_percent(highest.share)} where "
            f"{_percent(highest.threshold)} would count): {highest.figures}."
        )
    else:
        shares = bill.split.shares()
        name = "long context" if shares["context"] > shares["inference"] else "long chain"
        ahead = next(wall for wall in walls if wall.name == name)
        told = f"No wall stands out. Going on like this, {name} would be the first: {ahead.figures}."
    dearest = "; ".join(f"{_called(step)}: {step.figures}" for step in steps)
    told += f" Dearest: {dearest}." if steps else ""
    return told + (f" What to do: {first.advice}." if first is not None else "")


def _called(step: Step) -> str:
    return f"{step.kind} {step.number}" + (f" ({step.name})" if step.name != "-" else "")


def _percent(share: float) -> str:
    return f"{share * 100:.0f} %"


def _many(n: int, one: str, many: str = "") -> str:
    return f"{n:,} {one if n == 1 else many or one + 's'}"
