"""Hearing facts: every one, in order, and nothing that a listener does reaches the agent."""

from agentkv import log
from agentkv.budget.ledger import Ledger


def test_a_listener_hears_every_fact_until_it_stops(facts):
    """On the thread that appends it."""
    ledger, heard = Ledger(), []
    ledger.append(facts[0])
    stop = ledger.on_fact(heard.append)
    for fact in facts[1:4]:
        ledger.append(fact)
    stop()
    stop()
    ledger.append(facts[4])
    assert facts[1:4] == heard


def test_a_listener_that_fails_is_counted_and_the_others_hear(facts):
    """The fact is on the books all the same."""
    ledger, heard = Ledger(), []
    before = log.counters["ledger_listener_failed"]

    def broken(_fact):
        raise RuntimeError("sink is gone")

    ledger.on_fact(broken)
    ledger.on_fact(heard.append)
    ledger.append(facts[1])
    assert ([facts[1]], [facts[1]]) == (heard, ledger.rows("t"))
    assert before + 1 == log.counters["ledger_listener_failed"]
