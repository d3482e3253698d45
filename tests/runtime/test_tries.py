"""Calls that a client sent again: facts one after the other, whose times add up to what was waited."""

from agentkv.budget.bill import Bill
from agentkv.budget.facts import ModelCall
from agentkv.core.reported import Reported
from agentkv.core.usage import Timing, Usage
from agentkv.engine.base import Attempt
from agentkv.runtime.tries import with_tries


def attempt(seconds, error="APITimeoutError", read=0):
    usage = Usage(input_tokens=read, calls=1) if read else Usage()
    return Attempt(spent=Reported(usage=usage, estimated=bool(read)), error=error, seconds=seconds)


def call(**more):
    usage = Usage(input_tokens=10, output_tokens=2, calls=1)
    timing = Timing(queued_s=0.5, prefill_s=4.0, decode_s=1.0, ttft_s=4.5, total_s=5.5)
    return ModelCall(task="t", at_ms=1000, usage=usage, timing=timing, device_s=1.0, cached_by={"host": 1}, **more)


def test_tries_lie_one_after_the_other_and_the_time_is_counted_once():
    """Two that failed, of 1 and 2 seconds, in a call that took 5.5."""
    facts = with_tries(call(), [attempt(1.0), attempt(2.0, read=10)])
    assert [(1000, 1.0), (2000, 2.0), (4000, 2.5)] == [(fact.at_ms, fact.timing.total_s) for fact in facts]
    assert 5.5 == Bill.from_facts("t", facts).spans.wall_s == sum(fact.timing.total_s for fact in facts)
    assert (0.5, 1.0, 1.0, 1.5) == (
        facts[-1].timing.queued_s, facts[-1].timing.prefill_s, facts[-1].timing.decode_s, facts[-1].timing.ttft_s,
    )  # fmt: skip
    assert [("failed", 0, 0.0, {}), ("failed", 10, 0.0, {}), ("ok", 10, 1.0, {"host": 1})] == [
        (fact.status, fact.usage.input_tokens, fact.device_s, fact.cached_by) for fact in facts
    ]


def test_a_call_that_was_sent_once_is_as_it_was():
    """To the last field."""
    assert [call()] == with_tries(call(), [])


def test_tries_that_took_longer_than_the_call_leave_it_nothing():
    """Clocks are no promise."""
    assert Timing(queued_s=0.5, decode_s=1.0) == with_tries(call(), [attempt(9.0)])[-1].timing
