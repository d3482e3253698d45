"""A whole AgentKV that tells OpenTelemetry and Prometheus: what they add up is the bill."""

from collections import Counter

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


def test_the_spans_of_a_graph_are_nested_as_its_agents_are():
    """A graph in a graph and five sent branches, each with a tool and a model: the sum over the chat spans is the bill."""
    exporter = InMemorySpanExporter()
    tracers = TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    with (
        AgentKV.with_engine(ScriptedEngine(["one two three"] * 7)) as kv,
        OpenTelemetry(kv, tracer_provider=tracers),
    ):
        graph(kv).invoke({"messages": [("user", "hi")]}, {"configurable": {"thread_id": "t"}})
        kv.finish("t")
        bill = kv.report("t")
    spans = exporter.get_finished_spans()
    by_id = {one.context.span_id: one for one in spans}

    def path(span):
        return (f"{path(by_id[span.parent.span_id])} > " if span.parent else "") + span.name

    agents = {"invoke_agent": 1, "invoke_agent > invoke_agent sub": 1, "invoke_agent > invoke_agent worker": 5}
    done = {f"{agent} > {deed}": n for agent, n in agents.items() for deed in ("chat scripted", "execute_tool grep")}
    assert agents | done == Counter(map(path, spans))
    chats = [one for one in spans if one.attributes[names.GEN_AI_OPERATION] == names.CHAT]
    assert bill.usage.input_tokens == sum(one.attributes[names.GEN_AI_INPUT_TOKENS] for one in chats)
    assert 7 == bill.usage.calls == next(s for s in spans if s.parent is None).attributes[names.AGGREGATE_CALLS]


def graph(kv):
    from agentkv_langgraph import ChatAgentKV
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.types import Send

    model = ChatAgentKV(kv=kv)

    def step(state):
        with kv.tool("grep"):
            pass
        return {"messages": [model.invoke(state["messages"])]}

    inner = StateGraph(MessagesState)
    inner.add_node("answer", step)
    inner.add_edge(START, "answer")
    outer = StateGraph(MessagesState)
    outer.add_node("plan", step)
    outer.add_node("sub", inner.compile())
    outer.add_node("worker", step)
    outer.add_edge(START, "plan")
    outer.add_edge("plan", "sub")
    outer.add_conditional_edges("sub", lambda state: [Send("worker", state) for _ in range(5)], ["worker"])
    return kv.attach(outer.compile())
