"""What only the application knows: deliveries, outcomes, messages between agents."""

import pytest

from agentkv import AgentKV, ScriptedEngine
from agentkv.budget.bill import Bill
from agentkv.budget.ledger import Ledger, ModelCall
from agentkv.clock import ManualClock
from agentkv.core.task import UNATTRIBUTED, Caller
from agentkv.core.usage import Usage
from agentkv.errors import ConfigError
from agentkv.runtime.deliveries import Deliveries


class Words:
    """An engine whose tokens are words."""

    model = "words"

    def count_text(self, text):
        return len(text.split())


class Desk:
    """A ledger, who is calling, and the object under test."""

    def __init__(self, caller=None, engine=None):
        self.ledger = Ledger()
        self.caller = caller or Caller(task="t", node="lead")
        self.tell = Deliveries(
            append=self.ledger.append,
            clock=ManualClock(wall_ms=7),
            caller=lambda: self.caller,
            engine=engine or Words(),
        )

    def bill(self, task="t"):
        return Bill.from_facts(task, self.ledger.rows(task))


def test_what_is_delivered_is_what_counts_as_visible():
    """A text is counted and not kept; so many tokens are taken as they are."""
    desk = Desk()
    desk.ledger.append(ModelCall(task="t", usage=Usage(input_tokens=10, output_tokens=10, calls=1)))
    assert (3, 2) == (desk.tell.deliver("three little words"), desk.tell.deliver(2))
    bill = desk.bill()
    assert (5, 0.25) == (bill.visible_tokens, bill.effective_token_ratio)
    assert "words" not in str(desk.ledger.rows("t"))


def test_an_engine_that_cannot_count_has_its_texts_counted():
    """By the model's tokenizer, or an estimate."""
    remote = type("Remote", (), {"model": "gpt-4o"})()
    assert 3 == Desk(engine=remote).tell.deliver("three little words")


def test_an_outcome_is_told_for_whoever_is_calling_or_by_name():
    """The last word counts."""
    desk = Desk()
    desk.tell.outcome(completed=False, task_type="fix")
    desk.tell.outcome(completed=True)
    desk.tell.outcome(completed=False, task="other")
    assert (True, "fix", False) == (desk.bill().completed, desk.bill().task_type, desk.bill("other").completed)


def test_an_outcome_is_of_the_type_that_its_task_was_given():
    """Said once, at the task's scope; a type of its own wins."""
    with AgentKV.with_engine(ScriptedEngine(["ok"])) as kv:
        with kv.task("t", type="review", final=False):
            kv.outcome(completed=True)
        assert "review" == kv.report("t").task_type
        kv.outcome(completed=True, task="t", task_type="audit")
        assert "audit" == kv.report("t").task_type


def test_an_outcome_outside_of_any_task_is_refused():
    """Nobody could be charged with it."""
    desk = Desk(Caller(task=UNATTRIBUTED))
    with pytest.raises(ConfigError, match="outside of any task"):
        desk.tell.outcome(completed=True)


def test_messages_between_agents_are_counted_with_who_sent_them():
    """The calling node, unless somebody else is named."""
    desk = Desk()
    desk.tell.agent_message("find the invoice", to="search")
    desk.tell.agent_message(10, to="lead", sender="search")
    assert (2, 13) == (desk.bill().agent_messages, desk.bill().agent_message_tokens)
    assert [("lead", "search"), ("search", "lead")] == [(m.sender, m.receiver) for m in desk.ledger.rows("t")]


@pytest.mark.parametrize("what", [-1, True, 1.5, None])
def test_what_is_no_text_and_no_number_of_tokens_is_refused(what):
    """With what to give instead."""
    with pytest.raises(ConfigError, match="give the text, or how many tokens"):
        Desk().tell.deliver(what)
