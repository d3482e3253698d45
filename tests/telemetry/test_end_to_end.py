"""A whole AgentKV that tells OpenTelemetry and Prometheus: what they add up is the bill."""

import pytest

pytest.importorskip("opentelemetry.sdk", reason="no OpenTelemetry: pip install 'agentkv-sdk[otel]'")
pytest.importorskip("prometheus_client", reason="no prometheus-client: pip install 'agentkv-sdk[prometheus]'")

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from agentkv import AgentKV, Message, Request, ScriptedEngine
from agentkv.telemetry import names
from agentkv.telemetry.otel import OpenTelemetry
from agentkv.telemetry.prometheus import Prometheus


def test_spans_and_metrics_of_a_run_are_its_bill():
    """Two calls, one of which fails, a tool, a delivery and an outcome."""
    exporter = InMemorySpanExporter()
    tracers = TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    question = Request(messages=(Message(role="user", content="what happened to the invoice of May"),))
    engine = ScriptedEngine(["it was rounded twice", RuntimeError("the server went away")])
    with (
        AgentKV.with_engine(engine) as kv,
        OpenTelemetry(kv, tracer_provider=tracers),
        Prometheus(kv, stats=kv.stats) as metrics,
    ):
        with kv.task("t"):
            answer = kv.submit(question).result()
            with kv.tool("lookup"):
                pass
            with pytest.raises(RuntimeError):
                kv.submit(question).result()
            kv.deliver(answer.text)
            kv.agent_message("done", to="lead")
            kv.outcome(completed=True, task_type="ask")
        bill, text = kv.report("t"), metrics.text()
    spans = exporter.get_finished_spans()
    chats = [one for one in spans if one.attributes[names.GEN_AI_OPERATION] == names.CHAT]
    assert (2, 1) == (len(chats), len([one for one in chats if names.ERROR_TYPE in one.attributes]))
    assert bill.usage.input_tokens == sum(chat.attributes[names.GEN_AI_INPUT_TOKENS] for chat in chats)
    assert bill.usage.output_tokens == sum(chat.attributes[names.GEN_AI_OUTPUT_TOKENS] for chat in chats)
    assert {"invoke_agent", "execute_tool lookup", "chat scripted"} == {one.name for one in spans}
    assert f'agentkv_tokens_total{{kind="input",model="scripted"}} {bill.usage.input_tokens}.0' in text
    assert ("ask", True, 1) == (bill.task_type, bill.completed, bill.agent_messages)
    assert bill.delivered
