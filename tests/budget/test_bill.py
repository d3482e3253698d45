"""The bill: every number from the facts, and a report that fits a console."""

import json
from decimal import Decimal

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentkv.budget.bill import Bill
from agentkv.budget.billjson import schema
from agentkv.budget.ledger import ContextFact, ModelCall, MoveFact, TaskFact, ToolCallFact
from agentkv.core.usage import Timing, Usage


def call(at_ms=0, cached=0, fresh=10, output=5, **more):
    timing = more.pop("timing", Timing(total_s=1.0))
    usage = Usage(input_tokens=cached + fresh, cached_tokens=cached, output_tokens=output, calls=1)
    return ModelCall(task="t", at_ms=at_ms, usage=usage, timing=timing, **more)


def test_an_empty_task_has_an_empty_bill():
    """Not an error, and it prints."""
    bill = Bill.from_facts("t", [])
    assert (bill.usage, bill.hit_rate, bill.effective_token_ratio, bill.started_ms) == (Usage(), None, None, None)
    assert "no such task is known" in str(bill)
    refused = Bill.from_facts("t", [TaskFact(task="t", at_ms=1)])
    assert "nothing was spent" in str(refused)
    assert json.loads(json.dumps(bill.to_json()))["total_tokens"] == 0


def test_other_tasks_are_not_billed():
    """Facts of another task are left out."""
    assert Bill.from_facts("t", [ModelCall(task="other", usage=Usage(input_tokens=9))]).calls == ()


def test_totals_hit_rate_peak_and_effective_ratio():
    """Two calls: the last one's output is what the user sees."""
    bill = Bill.from_facts("t", [call(cached=0, fresh=100, output=20), call(cached=110, fresh=30, output=10)])
    assert bill.usage == Usage(input_tokens=240, cached_tokens=110, output_tokens=30, calls=2)
    assert bill.hit_rate == pytest.approx(110 / 240)
    assert bill.peak_context_tokens == 150
    assert bill.visible_tokens == 10
    assert bill.effective_token_ratio == pytest.approx(10 / 270)


def test_output_that_was_told_to_be_visible_counts_instead_of_the_last():
    """Told for one call, the others are not."""
    bill = Bill.from_facts("t", [call(output=20, visible=True), call(output=10)])
    assert bill.visible_tokens == 20


def test_failed_and_repeated_attempts_are_listed_and_their_spend_counts():
    """Three attempts, two of which failed after the model answered: the total is the real spend."""
    facts = [call(status="failed", attempt=1), call(status="failed", attempt=2), call(attempt=3)]
    bill = Bill.from_facts("t", facts)
    assert bill.usage.total_tokens == 45
    assert bill.visible_tokens == 5
    assert "failed, try 2" in str(bill)


def test_a_fully_cached_prompt_is_usage_and_a_warm_hit():
    """Zero fresh tokens are not "no usage"."""
    bill = Bill.from_facts("t", [call(cached=64, fresh=0)])
    assert bill.hit_rate == 1.0
    assert bill.usage.input_tokens == 64


def test_estimated_tokens_are_marked():
    """The reader knows that an engine told nothing."""
    bill = Bill.from_facts("t", [call(estimated=True), call()])
    assert bill.estimated
    assert "partly estimated" in str(bill)


def test_resume_stalls_are_those_of_the_first_call_after_a_tool():
    """Per session; the calls that no tool preceded are not resumes."""
    stalled = Timing(restore_s=0.2, queued_s=0.1)
    facts = [
        call(session="a", timing=stalled),
        ToolCallFact(task="t", session="a", tool="x", actual_s=2.0),
        call(session="b", timing=stalled),
        call(session="a", timing=Timing(restore_s=0.4)),
        call(session="a", timing=stalled),
    ]
    bill = Bill.from_facts("t", facts)
    assert bill.resume_stalls_s == (0.4,)
    assert bill.to_json()["resume_stall_max_s"] == 0.4


def test_moves_are_summed_by_where_they_went_and_drops_counted():
    """Moves that found nothing to do are not moves; failed ones are told apart."""
    facts = [
        MoveFact(task="t", action="write", to="host", blocks=10, size_bytes=1000, seconds=0.1),
        MoveFact(task="t", action="demote", to="host", blocks=5, size_bytes=500, seconds=0.1),
        MoveFact(task="t", action="demote", to="disk", blocks=5, size_bytes=500),
        MoveFact(task="t", action="prefetch", to="device", blocks=15, size_bytes=1500),
        MoveFact(task="t", action="demote", to="host", outcome="nothing"),
        MoveFact(task="t", action="prefetch", to="device", outcome="failed"),
        MoveFact(task="t", action="drop", blocks=3),
    ]
    bill = Bill.from_facts("t", facts)
    assert (bill.moved["host"].moves, bill.moved["host"].size_bytes) == (2, 1500)
    assert (bill.moved["disk"].blocks, bill.moved["device"].blocks) == (5, 15)
    assert (bill.drops, bill.failed_moves) == (1, 1)


def test_time_is_wall_time_and_where_it_went():
    """Wall time from the first fact to the end of the last, spans summed over calls."""
    timing = Timing(queued_s=0.1, prefill_s=0.5, decode_s=1.0, total_s=1.6)
    facts = [
        TaskFact(task="t", at_ms=1000),
        call(at_ms=2000, timing=timing),
        ToolCallFact(task="t", tool="x", at_ms=7000, actual_s=3.0),
        call(at_ms=7000, timing=timing),
        TaskFact(task="t", at_ms=9000, event="finished"),
    ]
    bill = Bill.from_facts("t", facts)
    spans = bill.spans
    assert (spans.wall_s, spans.tools_s, spans.prefill_s, spans.decode_s, spans.queued_s) == (8.0, 3.0, 1.0, 2.0, 0.2)
    assert (bill.started_ms, bill.finished_ms) == (1000, 9000)
    assert Bill.from_facts("t", facts[:-1]).finished_ms is None
    assert Bill.from_facts("t", facts[:-1]).spans.wall_s == pytest.approx(7.6)


def test_predicted_and_actual_waits_stand_side_by_side():
    """For each tool call."""
    fact = ToolCallFact(
        task="t", tool="bash", command="pytest", predicted_p10_s=1.0, predicted_p50_s=2.5, predicted_p90_s=130.0,
        actual_s=3.5,
    )  # fmt: skip
    line = next(line for line in str(Bill.from_facts("t", [fact])).splitlines() if "pytest" in line)
    assert line.split() == ["bash", "(pytest)", "1.0", "s", "2.5", "s", "2", "min", "10", "s", "3.5", "s"]


def test_long_lists_are_folded_and_the_fold_says_what_it_hides():
    """Twelve of a hundred calls are shown, the others summed."""
    text = str(Bill.from_facts("t", [call(fresh=10, output=1) for _ in range(100)]))
    assert "... 88 more calls: 880 input, 0 cached, 88 output" in text
    assert len(text.splitlines()) < 50


def test_the_fields_of_the_task_bill_are_all_in_json():
    """Requirement C7's list."""
    bill = Bill.from_facts("t", [call()]).to_json()
    for name in (
        "task", "total_tokens", "calls", "kv_hit_rate", "peak_context_tokens", "retrievals", "agent_messages",
        "effective_token_ratio",
    ):  # fmt: skip
        assert name in bill
    assert {"input_tokens", "cached_tokens", "output_tokens"} <= set(bill["calls"][0]["usage"])


def test_a_first_token_that_nobody_timed_is_a_dash():
    """Other clients' calls tell only how long they took."""
    one = Bill.from_facts("t", [call(timing=Timing(total_s=2.0))])
    (row,) = [line for line in str(one).splitlines() if line.startswith("  1  ")]
    assert ["-", "0", "ms"] == row.split()[-3:]
    assert '<td data-v="-1">-</td>' in one.to_html()


def test_names_cannot_move_the_cursor():
    """A node name with control characters prints as question marks."""
    text = str(Bill.from_facts("t", [call(node="a\x1b[2Jb\nc")]))
    assert "\x1b" not in text
    assert "a?[2Jb?c" in text


names = st.text(max_size=60)
facts = st.lists(
    st.builds(
        call, at_ms=st.integers(0, 2**45), cached=st.integers(0, 10**6), fresh=st.integers(0, 10**6),
        output=st.integers(0, 10**6), node=names, status=st.sampled_from(["ok", "failed", "aborted"]),
        attempt=st.integers(1, 20), estimated=st.booleans(),
        timing=st.builds(Timing, restore_s=st.floats(0, 5e3), ttft_s=st.floats(0, 5e3), total_s=st.floats(0, 1e5)),
    )
    | st.builds(ToolCallFact, task=st.just("t"), tool=names, command=names, actual_s=st.floats(0, 1e5))
    | st.builds(MoveFact, task=st.just("t"), to=st.sampled_from(["", "host", "disk"]), action=names, reason=names),
    max_size=16,
)  # fmt: skip


@settings(max_examples=40)
@given(facts)
def test_any_bill_fits_100_columns_and_plain_json(some):
    """Whatever the facts: readable lines, finite shares, JSON values."""
    bill = Bill.from_facts("t", some)
    assert max(len(line) for line in str(bill).splitlines()) <= 100
    assert json.loads(json.dumps(bill.to_json()))["task"] == "t"
    assert bill.hit_rate is None or 0 <= bill.hit_rate <= 1
    assert bill.effective_token_ratio is None or 0 <= bill.effective_token_ratio <= 1


@settings(max_examples=25)
@given(facts)
def test_every_bill_is_what_its_schema_says(some):
    """The schema that ships with the package, without a field too many or too few."""
    bill = Bill.from_facts("t", [*some, call(cost_usd=Decimal("0.00000001"))])
    jsonschema.Draft202012Validator(schema()).validate(json.loads(json.dumps(bill.to_json())))
    jsonschema.Draft202012Validator(schema()).validate(Bill.from_facts("t", []).to_json())


def test_a_bill_of_an_ordinary_task_fits_80_columns():
    """Long values go on in the next line."""
    facts = [
        call(status="failed", cached=10**5, node="a node of some length", cost_usd=Decimal("12.345")),
        call(attempt=2, timing=Timing(restore_s=100, prefill_s=1, total_s=101), cost_usd=Decimal("0.00012")),
        call(status="aborted"), call(served_locally=True), TaskFact(task="t"),
        *[ContextFact(task="t", event="break", cause=f"cause {n}", before_tokens=10**6) for n in range(9)],
        *[ContextFact(task="t", event="slim", before_tokens=10**7, after_tokens=10**6) for n in range(3)],
        ContextFact(task="t", event="fold", before_tokens=10**7, after_tokens=10**6), ToolCallFact(task="t", tool="x" * 99),
    ]  # fmt: skip
    assert max(len(line) for line in str(Bill.from_facts("t", facts)).splitlines()) <= 80


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_a_duration_that_is_no_number_does_not_take_the_bill(broken):
    """In every form; what else is known is told."""
    facts = [
        call(timing=Timing(total_s=broken, restore_s=broken), device_s=broken, at_ms=5),
        ToolCallFact(task="t", tool="x", actual_s=broken, at_ms=9),
        ToolCallFact(task="t", tool="y", actual_s=1.0, predicted_p50_s=broken, at_ms=9),
        MoveFact(task="t", action="prefetch", to="device", seconds=broken, blocks=1, at_ms=7),
    ]
    bill = Bill.from_facts("t", facts)
    json.dumps(bill.to_json(), allow_nan=False)
    assert "nan" not in str(bill) + bill.to_html()
    assert 15 == bill.usage.total_tokens


def test_guesses_are_told():
    """How many the engine made over all calls, and how many were right; nothing where there were none."""
    bill = Bill.from_facts("t", [call(drafted_tokens=9, accepted_tokens=6), call(drafted_tokens=3), call()])
    assert "6 of 12 tokens were right" in str(bill)
    assert (12, 6) == (bill.to_json()["drafted_tokens"], bill.to_json()["accepted_tokens"])
    assert "guessed" not in str(Bill.from_facts("t", [call()]))
