"""The facts: what they hold, what of them survives JSON, and how older and newer programs read each other's."""

import json
from dataclasses import fields
from decimal import Decimal
from typing import get_args

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from agentkv import log
from agentkv.budget import ledger as ledger_module
from agentkv.budget.codec import fact_to_text, facts_from_rows
from agentkv.budget.ledger import (
    AgentMessageFact,
    DeliveryFact,
    Fact,
    Ledger,
    ModelCall,
    MoveFact,
    OutcomeFact,
    TaskFact,
    ToolCallFact,
    fact_from_json,
    fact_to_json,
    is_known,
)
from agentkv.core.usage import Timing, Usage
from agentkv.errors import LedgerError

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


# -- memory within bounds


class EverythingStore:
    """A store that never forgets and never waits."""

    unsaved = 0

    def __init__(self):
        self.facts = []

    def put(self, fact):
        self.facts.append(fact)

    def saved(self, task):
        return [fact for fact in self.facts if fact.task == task]

    def close(self):
        return None


class LostStore(EverythingStore):
    """A store whose database is gone."""

    def saved(self, task):
        raise LedgerError("the ledger could not be read")


@pytest.fixture
def small(monkeypatch):
    """Bounds that a test can reach."""
    monkeypatch.setattr(ledger_module, "MAX_TASKS", 5)
    monkeypatch.setattr(ledger_module, "MAX_FACTS", 30)
    monkeypatch.setattr(ledger_module, "MAX_FACTS_OF_A_TASK", 20)
    monkeypatch.setattr(ledger_module, "_MAX_CUT", 1000)


class LedgerMachine(RuleBasedStateMachine):
    """Whatever is appended in whatever order: memory keeps its bounds, and with a store every task is whole."""

    def __init__(self):
        super().__init__()
        self.store = EverythingStore()
        self.ledger = Ledger(self.store)
        self.appended = []

    def append(self, fact):
        self.ledger.append(fact)
        self.appended.append(fact)

    @rule(task=st.integers(0, 12), many=st.integers(1, 25))
    def spend(self, task, many):
        for i in range(many):
            self.append(ModelCall(task=f"t{task}", at_ms=len(self.appended) + i))

    @rule(task=st.integers(0, 12), event=st.sampled_from(["started", "finished"]))
    def mark(self, task, event):
        self.append(TaskFact(task=f"t{task}", event=event))

    @invariant()
    def bounds_hold(self):
        self.ledger.check()

    @invariant()
    def every_task_is_whole(self):
        for number in range(13):
            task = f"t{number}"
            assert [fact for fact in self.appended if fact.task == task] == self.ledger.rows(task)


@pytest.mark.usefixtures("small")
def test_memory_keeps_its_bounds_and_every_task_is_whole():
    """A state machine of tasks that speak, end, and come back late."""
    run_state_machine_as_test(LedgerMachine, settings=settings(max_examples=40, stateful_step_count=20, deadline=None))


@pytest.mark.usefixtures("small")
def test_finished_tasks_go_before_running_ones():
    """A bill that is still being written should not need a disk."""
    ledger = Ledger(EverythingStore())
    ledger.append(TaskFact(task="running"))
    for i in range(20):
        ledger.append(TaskFact(task=f"t{i}"))
        ledger.append(TaskFact(task=f"t{i}", event="finished"))
    assert "running" in ledger.tasks()
    assert "t19" in ledger.tasks()


@pytest.mark.usefixtures("small")
def test_a_fact_that_comes_after_its_task_was_forgotten_does_not_make_it_a_running_one():
    """A move that ends late: ten thousand of them must not push out what runs."""
    ledger = Ledger(EverythingStore())
    for i in range(20):
        ledger.append(TaskFact(task=f"t{i}"))
        ledger.append(TaskFact(task=f"t{i}", event="finished"))
    ledger.append(TaskFact(task="running"))
    for i in range(10):
        ledger.append(MoveFact(task=f"t{i}"))
    assert "running" in ledger.tasks()


@pytest.mark.usefixtures("small")
def test_where_the_database_is_gone_memory_answers_with_what_it_has():
    """And says that it is not all."""
    before = log.counters["ledger_rows_incomplete"]
    ledger = Ledger(LostStore())
    for i in range(25):
        ledger.append(ModelCall(task="t", at_ms=i))
    rows = ledger.rows("t")
    assert list(range(25))[-len(rows) :] == [fact.at_ms for fact in rows]
    assert 0 < len(rows) < 25
    assert before + 1 == log.counters["ledger_rows_incomplete"]


@pytest.mark.usefixtures("small")
def test_without_a_store_one_warning_says_that_memory_is_full(monkeypatch):
    """Bounds come first; a database would have kept them."""
    monkeypatch.setattr(log, "_warned", set())
    before = log.counters["ledger_memory_full"]
    ledger = Ledger()
    for i in range(10_000):
        ledger.append(ModelCall(task="unattributed", at_ms=i))
    ledger.check()
    assert log.counters["ledger_memory_full"] > before
    assert 9999 == ledger.rows("unattributed")[-1].at_ms


# -- the short form


EMPTY_BUT_TOLD = [
    ModelCall(task="t", visible=False, attempt=0, status="", priority=0, purpose="", cost_usd=Decimal(0)),
    ToolCallFact(task="t", predicted_p10_s=0.0, predicted_p50_s=0.0, status=""),
    TaskFact(task="t", at_ms=4, event=""),
    ModelCall(task="t", at_ms=4),
]


@pytest.mark.parametrize("fact", [*LATER_FACTS, *EMPTY_BUT_TOLD])
def test_the_short_form_reads_as_the_long_one(fact):
    """Without task and time, which have columns of their own."""
    rows = [(fact.kind, fact.at_ms, fact_to_text(fact))]
    assert ([fact], 0, 0) == facts_from_rows("t", rows)
    assert "at_ms" not in fact_to_text(fact)


def test_defaults_are_what_they_were():
    """They are left out of what is saved: another default would change the past. New fields may join the list."""
    told = {}
    for cls in (*get_args(Fact), Usage, Timing):
        fact = cls() if cls in (Usage, Timing) else cls(task="t")
        told |= {
            f"{cls.__name__}.{f.name}": value
            for f in fields(cls)
            if f.name not in ("task", "at_ms", "usage", "timing")
            and (value := getattr(fact, f.name)) not in (0, "", None, {})
        }
    assert {
        "ModelCall.attempt": 1,
        "ModelCall.status": "ok",
        "ModelCall.priority": 1,
        "ModelCall.purpose": "answer",
        "ToolCallFact.attempt": 1,
        "ToolCallFact.status": "succeeded",
        "MoveFact.outcome": "done",
        "TaskFact.event": "started",
    } == told


@pytest.mark.parametrize(
    "text", ["", "[]", "{", "null", '{"usage": 3}', '{"usage": {"input_tokens": -1}}', "[" * 99999]
)
def test_a_damaged_row_is_counted_and_costs_the_others_nothing(text):
    """Whatever is in it."""
    good = ("model_call", 1, "{}")
    facts, unknown, damaged = facts_from_rows("t", [good, ("model_call", 2, text), ("dream", 3, "{}"), good])
    assert (2, 1, 1) == (len(facts), unknown, damaged)
