"""OpenTelemetry: the chat spans add up to the bill, the agent span is flagged, metrics name no task."""

from decimal import Decimal

import pytest

pytest.importorskip("opentelemetry.sdk", reason="no OpenTelemetry: pip install 'agentkv-sdk[otel]'")

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from agentkv import log
from agentkv.budget.bill import Bill
from agentkv.budget.facts import ModelCall, OutcomeFact, TaskFact, ToolCallFact
from agentkv.budget.ledger import Ledger
from agentkv.core.usage import Timing, Usage
from agentkv.telemetry import names, otel
from agentkv.telemetry.otel import OpenTelemetry


class Seen:
    """A ledger that tells OpenTelemetry, and what arrived there."""

    def __init__(self):
        self.exporter = InMemorySpanExporter()
        tracers = TracerProvider()
        tracers.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.reader = InMemoryMetricReader()
        self.ledger = Ledger()
        meters = MeterProvider(metric_readers=[self.reader])
        self.telemetry = OpenTelemetry(self.ledger, provider="openai", tracer_provider=tracers, meter_provider=meters)

    def tell(self, facts):
        for fact in facts:
            self.ledger.append(fact)
        return self

    def spans(self, operation=None):
        spans = self.exporter.get_finished_spans()
        return [one for one in spans if operation in (None, one.attributes[names.GEN_AI_OPERATION])]

    def metrics(self):
        data = self.reader.get_metrics_data()
        found = [m for r in data.resource_metrics for s in r.scope_metrics for m in s.metrics]
        return {metric.name: list(metric.data.data_points) for metric in found}


@pytest.fixture
def seen():
    one = Seen()
    yield one
    one.telemetry.close()


def test_the_chat_spans_add_up_to_the_bill(seen, facts):
    """Every attempt once, to the token and to the cent; what a response cache answered adds nothing."""
    chats = seen.tell(facts).spans(names.CHAT)
    bill = Bill.from_facts("t", facts)
    assert len(bill.calls) == len(chats)
    for name, expected in (
        (names.GEN_AI_INPUT_TOKENS, bill.usage.input_tokens),
        (names.GEN_AI_OUTPUT_TOKENS, bill.usage.output_tokens),
        (names.GEN_AI_CACHE_READ_TOKENS, bill.usage.cached_tokens),
        (names.GEN_AI_REASONING_TOKENS, bill.usage.reasoning_tokens),
    ):
        assert expected == sum(chat.attributes.get(name, 0) for chat in chats)
    assert bill.cost_usd == sum(Decimal(chat.attributes.get(names.COST_USD_EXACT, "0")) for chat in chats)


def test_only_chat_spans_carry_usage_and_the_agents_sums_are_flagged(seen, facts):
    """A sum over all spans is not doubled."""
    spans = seen.tell(facts).spans()
    assert {names.CHAT} == {
        s.attributes[names.GEN_AI_OPERATION] for s in spans if names.GEN_AI_INPUT_TOKENS in s.attributes
    }
    sub, agent = seen.spans(names.INVOKE_AGENT)
    assert sub.attributes[names.AGGREGATE]
    bill = Bill.from_facts("t", facts)
    assert (True, bill.usage.input_tokens, float(bill.cost_usd)) == (
        agent.attributes[names.AGGREGATE], agent.attributes[names.AGGREGATE_INPUT], agent.attributes[names.AGGREGATE_COST_USD],
    )  # fmt: skip
    assert ("fix", True, False) == tuple(
        agent.attributes[n] for n in (names.TASK_TYPE, names.COMPLETED, names.STILL_OPEN)
    )


def test_spans_have_their_parent_their_times_and_their_errors(seen, facts):
    """A tool is stamped at its end, a call at its start."""
    spans = seen.tell(facts).spans()
    sub, agent = seen.spans(names.INVOKE_AGENT)
    nested = [one for one in seen.spans(names.CHAT) if names.BRANCH in one.attributes]
    assert [sub.context.span_id] == [one.parent.span_id for one in nested]
    assert all(one.parent.span_id == agent.context.span_id for one in spans if one is not agent and one not in nested)
    slow, failed = seen.spans(names.EXECUTE_TOOL)
    assert 4_000_000_000 == slow.end_time - slow.start_time
    assert ("failed", StatusCode.ERROR) == (failed.attributes[names.ERROR_TYPE], failed.status.status_code)
    timed_out = next(one for one in seen.spans(names.CHAT) if names.ERROR_TYPE in one.attributes)
    assert ("APITimeoutError", "chat m", 1_500_000_000) == (
        timed_out.attributes[names.ERROR_TYPE], timed_out.name, timed_out.end_time - timed_out.start_time,
    )  # fmt: skip
    assert 20_000_000_000 == agent.end_time - agent.start_time


def test_metrics_name_no_task(seen, facts):
    """Nor a session or a branch, whatever happened."""
    points = [point for some in seen.tell(facts).metrics().values() for point in some]
    used = {name for point in points for name in point.attributes}
    assert {
        names.GEN_AI_OPERATION, names.GEN_AI_PROVIDER, names.GEN_AI_REQUEST_MODEL, names.GEN_AI_TOKEN_TYPE, names.GEN_AI_TOOL,
        names.ERROR_TYPE, names.TO, names.OUTCOME,
    } == used  # fmt: skip
    assert "t" not in {value for point in points for value in point.attributes.values()}


def test_metrics_add_up_to_the_bill_too(seen, facts):
    """Tokens, money, stall, bytes."""
    metrics = seen.tell(facts).metrics()
    bill = Bill.from_facts("t", facts)
    tokens = {p.attributes[names.GEN_AI_TOKEN_TYPE]: p.sum for p in metrics[names.TOKEN_USAGE]}
    assert {"input": bill.usage.input_tokens, "output": bill.usage.output_tokens} == tokens
    assert float(bill.cost_usd) == pytest.approx(sum(p.value for p in metrics[names.METRIC_COST]))
    assert 4 * 0.125 == sum(p.value for p in metrics[names.METRIC_STALL])
    assert 1000 == sum(p.value for p in metrics[names.METRIC_MOVED])


def test_a_model_that_is_ever_new_does_not_make_ever_new_labels():
    """Behind the first hundred all are "other"."""
    known = names.Known(most=2)
    assert ["a", "b", "other", "a", "other"] == [known(name) for name in "abcad"]
    assert ("unknown", "x?y") == (names.Known()(""), names.Known()("x\ny"))


def test_ten_thousand_tasks_leave_nothing_behind(seen):
    """Finished ones are gone; those that nobody finishes end by themselves, marked."""
    for number in range(10_000):
        key = f"task {number}"
        seen.tell([TaskFact(task=key), ModelCall(task=key)])
        if number % 2:
            seen.tell([TaskFact(task=key, event="finished")])
    assert otel.MAX_OPEN >= len(seen.telemetry._open)
    seen.telemetry.close()
    agents = seen.spans(names.INVOKE_AGENT)
    assert (10_000, 5000) == (len(agents), sum(one.attributes[names.STILL_OPEN] for one in agents))
    assert all(1 == one.attributes[names.AGGREGATE_CALLS] for one in agents)


def test_an_outcome_that_is_told_after_the_end_opens_no_new_span(seen, facts):
    """Nothing would ever end it."""
    before = log.counters["ledger_listener_failed"]
    seen.tell([*facts, OutcomeFact(task="t", completed=False)])
    assert ({}, before) == (dict(seen.telemetry._open), log.counters["ledger_listener_failed"])


def test_money_keeps_every_digit(seen):
    """A number has sixteen of them, the text all."""
    cost = Decimal("0.1234567890123456789012")
    (chat,) = seen.tell([ModelCall(task="t", cost_usd=cost)]).spans(names.CHAT)
    assert cost == Decimal(chat.attributes[names.COST_USD_EXACT])


def test_what_is_closed_hears_nothing(seen, facts):
    """And closing twice is closing once."""
    seen.telemetry.close()
    seen.telemetry.close()
    assert [] == seen.tell(facts).spans()


def test_the_names_are_those_of_the_conventions():
    """As far as the installed package of the conventions knows them."""
    attributes = pytest.importorskip("opentelemetry.semconv._incubating.attributes.gen_ai_attributes")
    metrics = pytest.importorskip("opentelemetry.semconv._incubating.metrics.gen_ai_metrics")
    known = {value for module in (attributes, metrics) for value in vars(module).values() if isinstance(value, str)}
    ours = {value for value in vars(names).values() if isinstance(value, str) and value.startswith("gen_ai.")}
    assert set() == ours - known


def test_each_sub_agent_has_a_span_of_its_own_that_is_flagged(seen):
    """A graph in a graph, and a branch sent from there: the tree of spans is the tree of agents; sums hold what is below."""
    deep = ModelCall(
        task="t", branch="sub:1|worker:7", node="worker", usage=Usage(input_tokens=3, output_tokens=2, calls=1)
    )
    tool = ToolCallFact(task="t", branch="sub:1", node="tools", tool="grep", at_ms=5000, actual_s=1.0)
    seen.tell(
        [
            TaskFact(task="t"),
            deep,
            ModelCall(task="t", branch="segment=plan"),
            tool,
            TaskFact(task="t", event="finished"),
        ]
    )
    by_name = {one.name: one for one in seen.spans()}
    assert {"invoke_agent", "invoke_agent sub", "invoke_agent worker", "chat", "execute_tool grep"} == set(by_name)
    above = {one.context.span_id: one.name for one in seen.spans()}
    assert ["invoke_agent", "invoke_agent sub", "invoke_agent sub"] == [
        above[by_name[name].parent.span_id] for name in ("invoke_agent sub", "invoke_agent worker", "execute_tool grep")
    ]
    chats = {one.attributes.get(names.BRANCH): above[one.parent.span_id] for one in seen.spans(names.CHAT)}
    assert {"sub:1|worker:7": "invoke_agent worker", "segment=plan": "invoke_agent"} == chats
    agents = seen.spans(names.INVOKE_AGENT)
    assert all(one.attributes[names.AGGREGATE] for one in agents)
    assert {(1, 3), (2, 3)} == {
        (one.attributes[names.AGGREGATE_CALLS], one.attributes[names.AGGREGATE_INPUT]) for one in agents
    }
    assert 5_000_000_000 == by_name["invoke_agent sub"].end_time


def test_a_fan_out_of_ever_new_branches_keeps_a_bounded_number_of_spans_open(seen):
    """Those that were silent longest have ended."""
    for number in range(1000):
        seen.tell([ModelCall(task="t", branch=f"worker:{number}")])
        assert otel.MAX_AGENTS >= len(seen.telemetry._open["t"].agents)
    seen.telemetry.close()
    assert 1001 == len(seen.spans(names.INVOKE_AGENT))


def test_a_clock_that_tells_no_number_costs_no_span(seen):
    """Its tokens are on the bill, so they are in the spans."""
    odd = float("nan")
    seen.tell([
        ModelCall(task="t", usage=Usage(input_tokens=3, calls=1), timing=Timing(total_s=odd)),
        ToolCallFact(task="t", tool="x", actual_s=float("inf")),
    ])  # fmt: skip
    assert [3] == [one.attributes[names.GEN_AI_INPUT_TOKENS] for one in seen.spans(names.CHAT)]
    assert 1 == len(seen.spans(names.EXECUTE_TOOL))


def test_a_name_that_is_no_unicode_can_be_exported(seen):
    """An exporter's encoder would raise, and lose the other spans of its batch."""
    lone = "a\ud800"
    seen.tell([
        TaskFact(task=lone, task_type=lone), ModelCall(task=lone, model=lone, node=lone, branch=lone, error=lone, status="failed"),
        ToolCallFact(task=lone, tool=lone, status=lone), OutcomeFact(task=lone, task_type=lone),
        TaskFact(task=lone, event="finished"),
    ])  # fmt: skip
    spans = seen.spans()
    assert 4 == len(spans)
    for span in spans:
        for text in (span.name, span.status.description, *span.attributes.values()):
            assert not isinstance(text, str) or text.encode()


def test_a_task_that_nobody_told_an_outcome_for_has_its_type(seen):
    """It was told when the task began."""
    seen.tell([TaskFact(task="t", task_type="invoice"), TaskFact(task="t", event="finished")])
    assert ["invoice"] == [one.attributes[names.TASK_TYPE] for one in seen.spans()]


def test_a_first_token_that_nobody_timed_is_not_told_as_none_at_all(seen):
    """0 seconds would pull every mean down."""
    seen.tell([ModelCall(task="t"), ModelCall(task="t", timing=Timing(ttft_s=0.5))])
    assert [None, 0.5] == [one.attributes.get(names.GEN_AI_TTFC) for one in seen.spans(names.CHAT)]
