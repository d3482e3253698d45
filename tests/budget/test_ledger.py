"""The facts: what they hold, what of them survives JSON, and how older and newer programs read each other's."""

import json
from decimal import Decimal
from typing import get_args

import pytest

from agentkv.budget.ledger import (
    AgentMessageFact,
    DeliveryFact,
    Fact,
    ModelCall,
    OutcomeFact,
    fact_from_json,
    fact_to_json,
    is_known,
)
from agentkv.core.usage import Usage

PRICED = ModelCall(
    task="t", cost_usd=Decimal("0.0000001"), price="2026-01/gpt", service_tier="flex", device_s=0.25,
    served_locally=True, loop="retry", cached_by={"host": 5, "device": 7}, error="TimeoutError", outcome_type="review",
    usage=Usage(input_tokens=20, cached_tokens=12, output_tokens=3, calls=1),
)  # fmt: skip
LATER_FACTS = [
    PRICED,
    AgentMessageFact(task="t", session="s", at_ms=5, sender="planner", receiver="coder", tokens=40),
    DeliveryFact(task="t", session="s", at_ms=6, tokens=12),
    OutcomeFact(task="t", at_ms=7, task_type="review", completed=True),
]


def through_json(fact):
    """As another process would read it."""
    return fact_from_json(fact.kind, json.loads(json.dumps(fact_to_json(fact))))


@pytest.mark.parametrize("fact", LATER_FACTS, ids=lambda fact: fact.kind)
def test_prices_and_outcomes_survive_json(fact):
    """All of it, and money to the last digit."""
    assert fact == through_json(fact)


@pytest.mark.parametrize("cls", get_args(Fact))
def test_a_fact_with_nothing_but_its_task_is_a_fact(cls):
    """So what an older program wrote still reads: whatever came later has a default."""
    assert cls(task="t") == fact_from_json(cls.kind, {"task": "t"})


def test_no_price_and_a_price_of_zero_are_two_things():
    """Unknown stays unknown, free stays free."""
    assert through_json(ModelCall(task="t")).cost_usd is None
    assert through_json(ModelCall(task="t", cost_usd=Decimal(0))).cost_usd == Decimal(0)


@pytest.mark.parametrize("text", ["free", "NaN", "Infinity", ""])
def test_money_that_is_no_number_is_no_fact(text):
    """A damaged row must not poison the sum of the others."""
    with pytest.raises(ValueError, match="amount of money"):
        fact_from_json("model_call", {"task": "t", "cost_usd": text})


def test_what_a_newer_program_adds_to_usage_and_timing_is_left_out():
    """As with the fields of the fact itself."""
    body = {"task": "t", "usage": {"input_tokens": 3, "later": 1}, "timing": {"ttft_s": 0.5, "later": 1}, "later": 1}
    fact = fact_from_json("model_call", body)
    assert (3, 0.5) == (fact.usage.input_tokens, fact.timing.ttft_s)


def test_a_kind_of_a_newer_program_is_known_to_be_unknown():
    """So that readers can tell it from a damaged row."""
    assert is_known("model_call")
    assert not is_known("dream")
