"""Who inside a task spent what: one line for each place, a node of a graph or of a graph inside it.

A branch is named by its host ("sub:1f3c|inner:90aa" in LangGraph); what stands behind the colons numbers the runs, so
fifty branches of one fan-out are one line that says "50 branches".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from decimal import Decimal

from agentkv.budget.facts import ModelCall, ToolCallFact


@dataclass(slots=True)
class Spender:
    """What one place spent. `cost_usd` counts the calls whose price is known, `unpriced` the others."""

    place: str
    calls: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    cost_usd: Decimal = Decimal(0)
    unpriced: int = 0
    model_s: float = 0.0
    tool_calls: int = 0
    tools_s: float = 0.0
    branches: set[str] = field(default_factory=set)

    @property
    def total_tokens(self) -> int:
        """Input plus output."""
        return self.input_tokens + self.output_tokens


def spenders(calls: Iterable[ModelCall], tools: Iterable[ToolCallFact]) -> list[Spender]:
    """All places, the one that spent most tokens first. They add up to the bill."""
    places: dict[str, Spender] = {}
    for call in calls:
        place = place_of(call.branch, call.node)
        one = places.get(place)
        if one is None:
            one = places[place] = Spender(place)
        one.branches.add(call.branch)
        one.calls += 1
        one.model_s += call.timing.total_s
        if call.served_locally:
            continue
        one.input_tokens += call.usage.input_tokens
        one.cached_tokens += call.usage.cached_tokens
        one.output_tokens += call.usage.output_tokens
        if call.cost_usd is None:
            one.unpriced += 1
        else:
            one.cost_usd += call.cost_usd
    for tool in tools:
        place = place_of(tool.branch, tool.node)
        one = places.setdefault(place, Spender(place))
        one.branches.add(tool.branch)
        one.tool_calls += 1
        one.tools_s += tool.actual_s
    return sorted(places.values(), key=lambda one: (-one.total_tokens, one.place))


def place_of(branch: str, node: str) -> str:
    """The graphs and the node, without what numbers single runs: "sub / answer"."""
    names = [part.partition(":")[0] for part in branch.split("|")] if branch else []
    if names and names[-1] == node:
        names.pop()
    return " / ".join(name for name in (*names, node) if name) or "-"
