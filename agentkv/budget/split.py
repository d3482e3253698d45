"""What a task's tokens and money went into: inference, context and memory, communication and state.

The definition, call by call. Input is *carried* (this session was charged for it before) or new.
- context and memory: carried input, recalled memories, and calls that were made to shorten a context, whole;
- communication and state: what agents said to each other, and the first prompt of every further branch: that is what
  another agent had to be told again;
- inference: all other new input, and the output of every step: the length of the chain.
A call's money is shared among its tokens by what such tokens usually cost: cached input `CACHED_WEIGHT` and output
`OUTPUT_WEIGHT` times as much as other input. The three add up to the whole bill, to the token and to the cent.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from decimal import Decimal

from agentkv.budget.facts import AgentMessageFact, ContextFact, Fact, ModelCall

CACHED_WEIGHT = 0.1
OUTPUT_WEIGHT = 5.0
CLASSES = {
    "inference": "long-chain inference",
    "context": "context and memory",
    "communication": "communication and state",
}
_SHARES = ("context", "communication")
_CENT_OF_A_MICRO = Decimal("1e-12")


@dataclass(slots=True)
class Part:
    """One class: its tokens, their weight in tokens of plain input, and its money as far as prices are known."""

    tokens: int = 0
    weight: float = 0.0
    cost_usd: Decimal = Decimal(0)


@dataclass(slots=True)
class Split:
    """The three classes of a bill."""

    parts: dict[str, Part] = field(default_factory=lambda: {name: Part() for name in CLASSES})
    priced: bool = True
    """Every call has a price, so shares are of money; else of weight."""

    def shares(self) -> dict[str, float]:
        """The share of each class, adding up to 1; all 0 where nothing was spent."""
        weights = {name: part.weight for name, part in self.parts.items()}
        money = {name: float(part.cost_usd) for name, part in self.parts.items()}
        sizes = money if self.priced and any(money.values()) else weights
        total = sum(sizes.values())
        return {name: size / total if total else 0.0 for name, size in sizes.items()}


@dataclass(slots=True)
class _Told:
    """Tokens that were put into a context and not seen in a prompt yet, by session ("" = any)."""

    tokens: dict[str, int] = field(default_factory=dict)

    def add(self, session: str, tokens: int) -> None:
        self.tokens[session] = self.tokens.get(session, 0) + max(0, tokens)

    def take(self, session: str, most: int) -> int:
        taken = 0
        for key in {session, ""}:
            part = min(self.tokens.get(key, 0), most - taken)
            if part:
                self.tokens[key] -= part
                taken += part
        return taken


def weight_of(call: ModelCall) -> float:
    """What the call's tokens weigh, in tokens of plain input."""
    usage = call.usage
    return usage.uncached_tokens + CACHED_WEIGHT * usage.cached_tokens + OUTPUT_WEIGHT * usage.output_tokens


def split(facts: Iterable[Fact]) -> Split:
    """The split of one task's facts, in their order. Calls that a response cache answered cost nothing and are left out."""
    result = Split()
    seen: dict[tuple[str, str], int] = {}  # by session: how large its context was
    branches: set[str] = set()
    recalled, said = _Told(), _Told()
    for fact in facts:
        if isinstance(fact, ContextFact) and fact.event == "recall":
            recalled.add(fact.session, fact.after_tokens)
        elif isinstance(fact, AgentMessageFact):
            said.add(fact.session, fact.tokens)
        elif isinstance(fact, ModelCall) and not fact.served_locally:
            key = (fact.session, "") if fact.session else (fact.branch, fact.node)
            further = bool(branches) and fact.branch not in branches
            _count(result, fact, seen.get(key), recalled, said, further=further)
            branches.add(fact.branch)
            if fact.purpose == "answer":
                seen[key] = fact.usage.total_tokens
    return result


def _count(result: Split, call: ModelCall, before: int | None, recalled: _Told, said: _Told, *, further: bool) -> None:
    usage = call.usage
    carried = min(before or 0, usage.input_tokens)
    cached_carried = min(carried, usage.cached_tokens)
    new, cached_new = usage.input_tokens - carried, usage.cached_tokens - cached_carried
    tokens = dict.fromkeys(CLASSES, 0)
    weight = dict.fromkeys(CLASSES, 0.0)
    if call.purpose == "summary":
        tokens["context"], weight["context"] = usage.total_tokens, weight_of(call)
    else:
        of_new = (new - cached_new + CACHED_WEIGHT * cached_new) / new if new else 0.0
        memory = recalled.take(call.session, new)
        talk = new - memory if further and before is None else said.take(call.session, new - memory)
        tokens["context"] = carried + memory
        weight["context"] = carried - cached_carried + CACHED_WEIGHT * cached_carried + memory * of_new
        tokens["communication"], weight["communication"] = talk, talk * of_new
        tokens["inference"] = usage.total_tokens - tokens["context"] - talk
        weight["inference"] = (new - memory - talk) * of_new + OUTPUT_WEIGHT * usage.output_tokens
    for name, part in result.parts.items():
        part.tokens += tokens[name]
        part.weight += weight[name]
    if call.cost_usd is None:
        result.priced = False
    elif call.cost_usd:
        _share_money(result, call.cost_usd, weight)


def _share_money(result: Split, cost_usd: Decimal, weight: dict[str, float]) -> None:
    """Inference takes what rounding leaves, so that the parts add up exactly."""
    total, rest = sum(weight.values()), cost_usd
    for name in _SHARES:
        if weight[name] and total:
            money = (cost_usd * Decimal(weight[name] / total)).quantize(_CENT_OF_A_MICRO)
            result.parts[name].cost_usd += money
            rest -= money
    result.parts["inference"].cost_usd += rest
