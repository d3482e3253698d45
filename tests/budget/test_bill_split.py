"""What the money went into: three classes that add up to the bill, used work, stalls, places."""

from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentkv.budget.bill import Bill
from agentkv.budget.branches import place_of, spenders
from agentkv.budget.facts import (
    AgentMessageFact,
    ContextFact,
    DeliveryFact,
    ModelCall,
    MoveFact,
    OutcomeFact,
    TaskFact,
    ToolCallFact,
)
from agentkv.core.usage import Timing, Usage


def call(fresh=10, cached=0, output=5, **more):
    usage = Usage(input_tokens=cached + fresh, cached_tokens=cached, output_tokens=output, calls=1)
    return ModelCall(task="t", usage=usage, **more)


def bill(*facts):
    return Bill.from_facts("t", facts)


def tokens_of(one):
    return {name: part.tokens for name, part in one.split.parts.items()}


def test_a_chain_on_a_fresh_context_is_inference():
    """The first prompt and every answer are new."""
    assert {"inference": 105, "context": 0, "communication": 0} == tokens_of(bill(call(100, output=5, session="a")))


def test_what_a_session_reads_again_is_context():
    """100 in and 5 out before: 105 of the next 120 are carried."""
    one = bill(call(100, output=5, session="a"), call(20, 100, output=5, session="a"))
    assert {"inference": 105 + 15 + 5, "context": 105, "communication": 0} == tokens_of(one)


def test_calls_without_a_session_are_told_apart_by_branch_and_node():
    """Hosted engines know no sessions."""
    one = bill(call(100, node="a"), call(30, node="b"), call(110, node="a"))
    assert 105 == tokens_of(one)["context"]


def test_summaries_and_recalled_memories_are_context():
    """A summary call is context as a whole, told memories are part of a later prompt's new input."""
    one = bill(
        call(100, output=5, session="a"),
        ContextFact(task="t", session="a", event="recall", before_tokens=3, after_tokens=8),
        call(30, 100, output=5, session="a"),
        call(90, output=10, session="a", purpose="summary"),
    )
    assert {"inference": 105 + 17 + 5, "context": 105 + 8 + 100, "communication": 0} == tokens_of(one)


def test_the_first_prompt_of_another_branch_and_messages_are_communication():
    """What a second agent had to be told, and what agents said to each other."""
    one = bill(
        call(100, output=5, session="a"),
        call(60, output=5, session="b", branch="sub:1"),
        AgentMessageFact(task="t", session="a", tokens=12),
        call(40, 105, output=5, session="a"),
    )
    assert {"inference": 105 + 5 + (40 - 12) + 5, "context": 105, "communication": 60 + 12} == tokens_of(one)


def test_what_a_response_cache_answered_is_neither_tokens_nor_money():
    """It is listed, and says so."""
    one = bill(call(100, cost_usd=Decimal("0.01")), call(100, served_locally=True))
    assert (105, 2, Decimal("0.01"), 0) == (one.usage.total_tokens, len(one.calls), one.cost_usd, one.unpriced_calls)
    assert 105 == sum(tokens_of(one).values())
    assert "served locally" in str(one)


calls = st.builds(
    call, st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**5), session=st.sampled_from(["", "a", "b"]),
    branch=st.sampled_from(["", "x:1", "x:2"]), purpose=st.sampled_from(["answer", "summary"]),
    cost_usd=st.none() | st.decimals(0, 10**4, places=10), served_locally=st.booleans(),
    status=st.sampled_from(["ok", "failed", "aborted"]), attempt=st.integers(1, 3),
)  # fmt: skip
others = st.builds(
    ContextFact, task=st.just("t"), session=st.sampled_from(["", "a"]), after_tokens=st.integers(0, 10**6),
    event=st.sampled_from(["recall", "fold", "fold_failed"]),
) | st.builds(AgentMessageFact, task=st.just("t"), session=st.sampled_from(["", "b"]), tokens=st.integers(0, 10**6))  # fmt: skip


@settings(max_examples=60)
@given(st.lists(calls | others, max_size=24))
def test_the_parts_of_a_bill_add_up_to_it(facts):
    """Classes, places and used work: to the token and to the cent, whatever happened."""
    one = bill(*facts)
    money = sum(
        (fact.cost_usd or 0 for fact in facts if isinstance(fact, ModelCall) and not fact.served_locally), Decimal(0)
    )
    assert one.usage.total_tokens == sum(tokens_of(one).values()) == sum(place.total_tokens for place in one.spenders)
    assert (
        money
        == sum(part.cost_usd for part in one.split.parts.values())
        == sum(place.cost_usd for place in one.spenders)
    )
    assert all(part.tokens >= 0 and part.weight >= -1e-6 and part.cost_usd >= 0 for part in one.split.parts.values())
    shares = one.split.shares()
    assert sum(shares.values()) == pytest.approx(1.0) or not any(shares.values())
    assert one.work.unused_tokens <= one.usage.total_tokens


def test_unknown_prices_are_said_and_never_taken_for_zero():
    """No price at all, some without, all known, and zero because it is free: four different bills."""
    assert (None, 1) == (bill(call()).cost_usd, bill(call()).unpriced_calls)
    assert "no price is known (1 call without a price)" in str(bill(call()))
    some = bill(call(cost_usd=Decimal("0.5")), call())
    assert (Decimal("0.5"), 1) == (some.cost_usd, some.unpriced_calls)
    assert "$0.50 and 1 call without a price" in str(some)
    free = bill(call(cost_usd=Decimal(0), price="self-hosted"))
    assert (Decimal(0), 0) == (free.cost_usd, free.unpriced_calls)
    assert "cost                    $0.00" in str(free)


def test_tiny_costs_add_up_exactly_and_never_print_as_nothing():
    """A million tokens at a ten-millionth of a dollar are ten cents, and one of them is not $0.00."""
    tiny = Decimal("0.0000001")
    assert Decimal("0.0010000") == bill(*[call(cost_usd=tiny)] * 10_000).cost_usd
    assert "$0.0000001" in str(bill(call(cost_usd=tiny)))


def test_a_million_tiny_costs_add_up_exactly():
    """One token each at a ten-millionth of a dollar: floats would be off in the eleventh digit."""
    (place,) = spenders([call(1, 0, 0, cost_usd=Decimal("1e-7"))] * 1_000_000, ())
    assert (Decimal("0.1"), 1_000_000) == (place.cost_usd, place.total_tokens)


def test_device_time_is_used_unless_its_call_came_to_nothing():
    """Failed, made again, recomputed and thrown away: 1 second each beside 1 second that was used."""
    ours = {"timing": Timing(prefill_s=0.5, decode_s=0.5), "price": "self-hosted"}
    one = bill(
        call(status="aborted", device_s=1.0, node="n"),
        call(**ours, node="n"),
        call(**ours, node="n", attempt=2),
        call(**ours, purpose="summary", session="s"),
        ContextFact(task="t", session="s", event="fold_failed"),
        call(timing=Timing(recompute_s=1.0), price="self-hosted", node="o"),
    )
    work = one.work
    assert (5.0, 1.0, 1.0, 1.0, 1.0, 1.0) == (
        work.device_s, work.used_s, work.failed_s, work.replaced_s, work.thrown_away_s, work.recomputed_s,
    )  # fmt: skip
    assert 0.2 == one.effective_utilisation
    assert (3, 45) == (work.unused_calls, work.unused_tokens)
    assert bill(call()).effective_utilisation is None


def test_what_another_server_computed_is_no_device_time_of_ours():
    """Its phases are known only as this side saw them, network and queue included: both utilisations are empty."""
    one = bill(
        call(timing=Timing(prefill_s=0.5, decode_s=0.5, total_s=1.0)), call(timing=Timing(decode_s=1.0), price="x")
    )
    assert (None, None, 0.0) == (one.effective_utilisation, one.raw_utilisation, one.work.device_s)


def test_a_refused_call_does_not_shorten_the_mean_context():
    """It read nothing, so it had no context."""
    refused = call(0, 0, 0, status="failed")
    assert bill(call()).mean_context_tokens == bill(call(), refused, refused).mean_context_tokens


def test_a_retry_replaces_only_the_calls_of_its_own_node_run():
    """Earlier rounds through the same node, before a tool ran or another node, stand."""
    one = bill(
        call(node="n"), ToolCallFact(task="t", node="tools"), call(node="n"), call(node="n", attempt=2),
        call(node="o"), call(node="n"), call(node="n", attempt=2),
    )  # fmt: skip
    assert 2 == one.work.unused_calls


def test_a_tool_in_a_graph_inside_a_graph_stands_with_it():
    """It is a place's own, and what ran before it there and around it is over."""
    inner = {"branch": "sub:1"}
    one = bill(
        call(node="agent"), call(node="think", **inner), ToolCallFact(task="t", node="tools", tool="grep", **inner),
        call(node="think", **inner, attempt=2), call(node="agent", attempt=2),
    )  # fmt: skip
    assert {"agent": 0, "sub / think": 0, "sub / tools": 1} == {place.place: place.tool_calls for place in one.spenders}
    assert 0 == one.work.unused_calls


def test_restores_that_end_within_a_tools_wait_are_hidden():
    """Of a copy of 200 ms half lies in the wait; a load on demand is paid and not hidden."""
    one = bill(
        ToolCallFact(task="t", session="a", at_ms=10_000, actual_s=5.0),
        MoveFact(task="t", session="a", action="prefetch", to="device", at_ms=10_100, seconds=0.2, size_bytes=100),
        MoveFact(task="t", session="a", action="load", to="device", at_ms=12_000, seconds=0.3, size_bytes=50),
        call(session="a", at_ms=11_500, timing=Timing(restore_s=0.3, total_s=2.0)),
    )
    assert 0.1 == pytest.approx(one.stalls.hidden_s)
    assert 0.3 == one.stalls.paid_s
    assert (150, 0) == (one.stalls.moved_bytes, one.stalls.wasted_bytes)


def test_bytes_moved_for_nothing_are_wasted_and_precautions_unread():
    """A prefetch that no call followed, a copy that was cancelled; what was written and not read back."""
    one = bill(
        call(session="a", at_ms=0, timing=Timing(total_s=1.0)),
        MoveFact(task="t", session="a", action="write", to="host", at_ms=2000, size_bytes=100),
        MoveFact(task="t", session="a", action="demote", to="disk", at_ms=2500, size_bytes=30, outcome="cancelled"),
        MoveFact(task="t", session="a", action="prefetch", to="device", at_ms=3000, size_bytes=60),
    )
    assert (190, 90, 40) == (one.stalls.moved_bytes, one.stalls.wasted_bytes, one.stalls.unread_bytes)


def test_fifty_branches_of_one_fan_out_are_one_line():
    """Send x 50, a graph called inside a tool, one in a thread: one bill with a breakdown."""
    fan = [call(branch=f"work:{number:08x}", node="work") for number in range(50)]
    one = bill(call(node="plan"), *fan, call(branch="tools:1|agent:2", node="model"))
    assert {"work": (50, 50), "plan": (1, 1), "tools / agent / model": (1, 1)} == {
        place.place: (place.calls, len(place.branches)) for place in one.spenders
    }
    assert "50 branches" in str(one)
    assert ("-", "n", "a / n") == (place_of("", ""), place_of("", "n"), place_of("a:1", "n"))


def test_cached_tokens_are_told_by_tier():
    """As shares of the input."""
    one = bill(call(50, 50, cached_by={"device": 30, "host": 20}))
    assert {"device": 30, "host": 20} == one.cached_by
    assert "50.0 % (device 30.0 %, host 20.0 %)" in str(one)


def test_deliveries_say_what_reached_the_user():
    """Marked tokens stand instead of the last answer's, and the ratio never exceeds one."""
    one = bill(call(output=20), DeliveryFact(task="t", tokens=3), DeliveryFact(task="t", tokens=4))
    assert (7, True) == (one.visible_tokens, one.delivered)
    assert 1.0 == bill(call(), DeliveryFact(task="t", tokens=10**9)).effective_token_ratio


def test_the_last_outcome_and_type_are_the_tasks():
    """Told twice, the later word counts."""
    one = bill(OutcomeFact(task="t", task_type="fix", completed=False), OutcomeFact(task="t", completed=True))
    assert ("fix", True) == (one.task_type, one.completed)
    assert (None, "x") == (bill(call()).completed, bill(call(outcome_type="x")).task_type)


def test_reasoning_is_shown_and_is_part_of_the_output():
    """Never added to it."""
    usage = Usage(input_tokens=10, output_tokens=9, reasoning_tokens=4, calls=1)
    one = bill(ModelCall(task="t", usage=usage))
    assert (19, 4) == (one.usage.total_tokens, one.usage.reasoning_tokens)
    assert "9, 4 reasoning" in str(one)


def test_ten_thousand_facts_are_read_in_one_pass_each():
    """Ten times the facts take about ten times as long, not a hundred: nothing scans the list for each fact."""
    import time

    def seconds(n):
        facts = [TaskFact(task="t")]
        for number in range(n):
            session = f"s{number % 97}"
            facts += [
                call(100, 900, at_ms=number * 10, session=session, branch=f"b:{number % 53}"),
                ToolCallFact(task="t", session="", at_ms=number * 10 + 5, actual_s=0.004),
                MoveFact(
                    task="t", session=session, action="prefetch", to="device", at_ms=number * 10 + 4, seconds=0.001
                ),
                ContextFact(task="t", session=session, event="slim"),
            ]
        began_s = time.perf_counter()
        Bill.from_facts("t", facts)
        return time.perf_counter() - began_s

    small = min(seconds(250) for _ in range(3))
    assert min(seconds(2500) for _ in range(2)) < 40 * small


def test_an_aborted_stream_is_a_line_of_its_own_with_what_it_really_used():
    """Prompt and what was generated until then; its output was not visible."""
    one = bill(call(100, output=7, status="aborted", estimated=True), call(100, output=5))
    assert (212, 5) == (one.usage.total_tokens, one.visible_tokens)
    assert "1 aborted; 107 tokens came to nothing" in str(one)
    assert any("aborted, est." in line for line in str(one).splitlines())


def test_a_call_without_a_model_name_is_billed():
    """Under a name that says so."""
    one = bill(call(100))
    assert 105 == one.usage.total_tokens
    assert ">unknown<" in one.to_html()


def test_a_cache_answer_beside_a_real_call_is_told_apart():
    """The second of two equal calls cost nothing and says so."""
    one = bill(call(100, cost_usd=Decimal("0.2")), call(100, cost_usd=Decimal(0), served_locally=True))
    assert (Decimal("0.2"), 1) == (one.cost_usd, one.to_json()["served_locally"])
    assert "1 served locally" in str(one)


def test_a_summary_call_does_not_lengthen_its_session():
    """The next prompt carries what the last answer left, not what the summary wrote."""
    one = bill(
        call(100, output=5, session="a"),
        call(20, 100, output=50, session="a", purpose="summary"),
        call(130, session="a"),
    )
    assert 105 + 170 == tokens_of(one)["context"]


def test_a_session_that_goes_on_in_another_branch_is_told_nothing_again():
    """It carries its context."""
    one = bill(call(100, output=5, session="a"), call(20, 105, output=5, session="a", branch="x:1"))
    assert {"inference": 105 + 20 + 5, "context": 105, "communication": 0} == tokens_of(one)


def test_shares_are_of_weight_while_a_price_is_missing():
    """Else the calls without a price would have cost nothing."""
    dear = call(100, output=0, session="a", cost_usd=Decimal(1))
    later = {"fresh": 0, "cached": 1000, "output": 0, "session": "b", "purpose": "summary"}
    assert 0.0 == bill(dear, call(**later, cost_usd=Decimal(0))).split.shares()["context"]
    assert 0.5 == pytest.approx(bill(dear, call(**later)).split.shares()["context"])


def test_a_summary_that_became_a_fold_was_used():
    """Only a failed fold throws it away."""
    facts = [call(purpose="summary", session="s"), ContextFact(task="t", session="s", event="fold")]
    assert 0 == bill(*facts).work.unused_calls


def test_parallel_tools_hide_a_restore_once():
    """Two waits that overlap are one."""
    one = bill(
        ToolCallFact(task="t", session="a", at_ms=10_000, actual_s=5.0),
        ToolCallFact(task="t", session="a", at_ms=9_000, actual_s=3.0),
        ToolCallFact(task="t", session="a", at_ms=20_000, actual_s=1.0),
        MoveFact(task="t", session="a", action="prefetch", to="device", at_ms=6_500, seconds=1.0),
    )
    assert 1.0 == pytest.approx(one.stalls.hidden_s)


def test_loops_are_counted_by_name():
    """Retries, reflections, corrections: what their caps counted."""
    one = bill(call(loop="retry"), call(loop="reflection"), call(loop="retry"), call())
    assert {"retry": 2, "reflection": 1} == one.loops == one.to_json()["loops"]
    assert "loops                   reflection 1x, retry 2x" in str(one)


def test_raw_utilisation_stands_beside_the_effective_one():
    """One second of a device in four seconds of wall time."""
    one = bill(
        call(at_ms=1000, timing=Timing(total_s=1.0), device_s=1.0), ToolCallFact(task="t", at_ms=5000, actual_s=3.0)
    )
    assert (0.25, 1.0) == (one.raw_utilisation, one.effective_utilisation)
    assert "(busy for 25.0 % of the time)" in " ".join(str(one).split())
