"""The diagnosis: one made-up bill for each wall, and the words that go with it."""

from decimal import Decimal

import pytest

from agentkv.budget.bill import Bill
from agentkv.budget.diagnosis import FEW_CALLS, RULES
from agentkv.budget.facts import ContextFact, ModelCall, ToolCallFact
from agentkv.core.usage import Timing, Usage


def call(fresh=100, cached=0, output=50, seconds=1.0, **more):
    usage = Usage(input_tokens=cached + fresh, cached_tokens=cached, output_tokens=output, calls=1)
    timing = more.pop("timing", Timing(decode_s=seconds, total_s=seconds))
    return ModelCall(task="t", usage=usage, timing=timing, **{"session": "s", **more})


def growing(n):
    """Every call reads again all that came before, from a provider that caches nothing."""
    return [call(fresh=1000 * (number + 1), output=10) for number in range(n)]


def chain(n):
    """Short prompts, each in a context of its own, and long answers."""
    return [call(output=400, session=f"s{number}") for number in range(n)]


KINDS = {
    "long context": growing(20),
    "long chain": chain(20),
    "communication": [
        call(output=5),
        *[call(fresh=4000, output=5, branch=f"b:{n}", session=f"b{n}") for n in range(6)],
    ],
    "memory pressure": [call(timing=Timing(queued_s=1.0, restore_s=0.5, decode_s=1.0, total_s=2.5)) for _ in range(3)],
    "tools": [call(), ToolCallFact(task="t", tool="pytest", actual_s=180.0), call()],
    "prefix breaks": [call(), ContextFact(task="t", event="break", cause="clock", before_tokens=150), call()],
    "unused work": [call(status="failed"), call(status="failed", attempt=2), call(attempt=3)],
    "": [call(), call(fresh=20, cached=150)],
}


@pytest.mark.parametrize("wall", KINDS)
def test_each_kind_of_bill_meets_its_own_wall(wall):
    """The name, and what to do; with none, the one that would come first is named and no advice given."""
    found = Bill.from_facts("t", KINDS[wall]).diagnosis
    assert wall == found.wall
    assert ("What to do: " in found.text) is bool(wall)
    assert (
        f"the wall of {wall} first"
        if wall
        else "No wall stands out. Going on like this, long chain would be the first: 98 % of"
    ) in found.text


def test_every_rule_has_a_bill_that_meets_it():
    """A rule that is added gets a case above."""
    names = {rule(Bill.from_facts("t", [call()])).name for rule in RULES}
    assert names == set(KINDS) - {""}


def test_a_short_task_has_neither_wall():
    """Below eight calls neither a chain nor a context is long."""
    assert "long" not in Bill.from_facts("t", growing(FEW_CALLS - 1)).diagnosis.wall
    assert "long context" == Bill.from_facts("t", growing(FEW_CALLS)).diagnosis.wall


def test_without_a_wall_the_nearest_is_named_with_its_figures():
    """Some of its measure is there, and not enough."""
    facts = [call(fresh=1000), ContextFact(task="t", event="break", cause="clock", before_tokens=99)]
    assert "No wall stands out. Nearest is prefix breaks (10 % where 10 % would count): 99 of 1,000" in (
        Bill.from_facts("t", facts).diagnosis.text
    )


def test_a_wall_needs_its_threshold():
    """One token of breaks less than a tenth of the input is none."""

    def broken(tokens):
        facts = [call(fresh=1000), ContextFact(task="t", event="break", cause="clock", before_tokens=tokens)]
        return next(w for w in Bill.from_facts("t", facts).diagnosis.walls if w.name == "prefix breaks").height

    assert broken(99) < 1 <= broken(100)


def test_little_waiting_is_no_wall_however_large_its_share():
    """Half of 200 ms."""
    short = Timing(queued_s=0.1, decode_s=0.1, total_s=0.2)
    assert "memory pressure" != Bill.from_facts("t", [call(timing=short)]).diagnosis.wall


def test_the_three_dearest_steps_come_by_money_where_prices_are_known():
    """Not the largest: the dearest."""
    costs = ("0.1", "0.4", "0.2", "0.3")
    facts = [call(fresh=1000 - number, cost_usd=Decimal(cost)) for number, cost in enumerate(costs)]
    steps = Bill.from_facts("t", facts).diagnosis.steps
    assert [2, 4, 3] == [step.number for step in steps]
    assert steps[0].figures.startswith("$0.40, 999 in (0 cached), 50 out")


def test_the_dearest_steps_come_by_weight_where_a_price_is_missing():
    """Output weighs five times as much as input, cached input a tenth."""
    facts = [
        call(fresh=100, output=100),
        call(fresh=500, output=0),
        call(fresh=0, cached=2000, output=0, cost_usd=Decimal(9)),
    ]
    assert [1, 2, 3] == [step.number for step in Bill.from_facts("t", facts).diagnosis.steps]


def test_the_dearest_steps_of_a_task_that_waits_are_tools_too():
    """By time: the slow tool comes first."""
    steps = Bill.from_facts("t", KINDS["tools"]).diagnosis.steps
    assert ("tool call", 1, "pytest") == (steps[0].kind, steps[0].number, steps[0].name)


def test_further_walls_are_named_behind_the_first():
    """A task may meet two."""
    facts = [*growing(20), ContextFact(task="t", event="break", cause="clock", before_tokens=60_000)]
    text = Bill.from_facts("t", facts).diagnosis.text
    assert "wall of prefix breaks first" in text
    assert "Then: long context (" in text


def test_nothing_spent_has_nothing_to_find():
    """And is no error."""
    found = Bill.from_facts("t", []).diagnosis
    assert ("", (), ()) == (found.wall, found.walls, found.steps)


def test_the_diagnosis_is_plain_json_and_the_same_every_time():
    """Fixed rules."""
    bills = [Bill.from_facts("t", KINDS["long context"]).diagnosis.to_json() for _ in range(2)]
    assert bills[0] == bills[1]
    assert {"wall", "walls", "steps", "text"} == set(bills[0])
