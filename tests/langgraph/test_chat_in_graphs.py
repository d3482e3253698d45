"""ChatAgentKV over time and inside graphs: streams, cancelling, errors, caches and checkpoints."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
import textwrap
import threading

import pytest
from agentkv_langgraph import ChatAgentKV
from langchain_core.caches import InMemoryCache
from langgraph.graph import START, MessagesState, StateGraph

from agentkv import Budget, BudgetExceeded, ScriptedEngine
from agentkv.errors import GenerationCancelled


def test_streaming_gives_the_chunks_as_they_come_and_calls_back_for_each(make_kv) -> None:
    """The first chunk is there before the last word is written."""
    gate = threading.Event()
    engine = ScriptedEngine(["one two three"], before_chunk=lambda _, index: index < 2 or gate.wait(5))
    model = ChatAgentKV(make_kv(engine=engine))
    stream = model.stream("count")
    assert "one" == next(stream).text
    gate.set()
    assert " two three" == "".join(chunk.text for chunk in stream)


def test_a_stream_that_is_left_early_cancels_the_call(make_kv) -> None:
    """Nobody computes for a consumer who has gone."""
    engine = ScriptedEngine(["one two three"], latency_s=0.01)
    model = ChatAgentKV(make_kv(engine=engine))
    stream = model.stream("count")
    next(stream)
    stream.close()
    assert 1 == len(engine.cancelled)


async def test_cancelling_a_coroutine_cancels_its_call(make_kv) -> None:
    """CancelledError passes and the engine is told."""
    running = threading.Event()
    engine = ScriptedEngine(["one two"], before_chunk=lambda *_: running.set(), latency_s=5)
    call = asyncio.create_task(ChatAgentKV(make_kv(engine=engine)).ainvoke("count"))
    await asyncio.to_thread(running.wait, 20)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert 1 == len(engine.cancelled)


def test_errors_of_the_engine_and_the_budget_pass_unchanged(make_kv) -> None:
    """GenerationCancelled and BudgetExceeded keep their types through LangChain and LangGraph."""
    kv = make_kv([GenerationCancelled("stopped")])
    with pytest.raises(GenerationCancelled):
        ChatAgentKV(kv).invoke("a")
    kv, calls = make_kv(), []

    def node(state: MessagesState) -> MessagesState:
        calls.append(1)
        return {"messages": [ChatAgentKV(kv, max_tokens=5).invoke("a")]}

    graph = StateGraph(MessagesState)
    graph.add_node(node)
    graph.add_edge(START, "node")
    with kv.task("t", budget=Budget(tokens=3)), pytest.raises(BudgetExceeded):
        graph.compile().invoke({"messages": []})
    assert [1] == calls


def test_token_usage_survives_a_graphs_message_stream(make_kv) -> None:
    """stream_mode="messages" turns invoke into a streamed call; usage is there all the same, and counted once."""
    kv = make_kv(["one two three"])
    model = ChatAgentKV(kv)

    @kv.node
    def node(state: MessagesState) -> MessagesState:
        return {"messages": [model.invoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node(node)
    graph.add_edge(START, "node")
    config = {"configurable": {"thread_id": "t"}}
    events = list(graph.compile().stream({"messages": ["hi"]}, config, stream_mode=["messages", "values"]))
    answer = events[-1][1]["messages"][-1]
    assert 3 == answer.usage_metadata["output_tokens"]
    assert ["one", " two", " three", ""] == [event[0].content for mode, event in events if mode == "messages"]
    assert 3 == kv.report("t").usage.output_tokens


def test_langchains_own_cache_tells_calls_apart_by_their_sampling(make_kv) -> None:
    """A cached answer serves the same call and no other."""
    kv = make_kv(f"answer {n}" for n in itertools.count(1))
    cache = InMemoryCache()
    model = ChatAgentKV(kv, cache=cache)
    assert "answer 1" == model.invoke("a").text == model.invoke("a").text
    assert "answer 2" == ChatAgentKV(kv, cache=cache, seed=5).invoke("a").text
    assert 2 == len(kv.engine.requests)


def test_messages_hold_only_what_a_strict_checkpoint_takes() -> None:
    """With LANGGRAPH_STRICT_MSGPACK a run is saved and resumed with equal prompt bytes, and without a warning."""
    program = textwrap.dedent(
        """
        import warnings
        warnings.simplefilter("error")
        from langgraph.checkpoint.memory import InMemorySaver
        from langgraph.graph import START, MessagesState, StateGraph
        from agentkv import AgentKV, ScriptedEngine, ToolCall
        from agentkv.engine.script import Reply
        from agentkv_langgraph import ChatAgentKV, LangGraphHost

        call = ToolCall(id="c", name="f", arguments='{ "a":1.0 }')
        engine = ScriptedEngine([Reply(text="x", tool_calls=(call,)), "y"])
        with AgentKV.with_engine(engine, host=LangGraphHost()) as kv:
            model = ChatAgentKV(kv)

            def node(state: MessagesState) -> MessagesState:
                return {"messages": [model.invoke(state["messages"])]}

            graph = StateGraph(MessagesState)
            graph.add_node(node)
            graph.add_edge(START, "node")
            app = graph.compile(checkpointer=InMemorySaver())
            config = {"configurable": {"thread_id": "t"}}
            app.invoke({"messages": ["hi"]}, config)
            app.invoke({"messages": []}, config)
            sent = engine.requests[1].messages[1]
            print(sent.tool_calls[0].arguments, type(app.get_state(config).values["messages"][1]).__name__)
        """
    )
    env = {"LANGGRAPH_STRICT_MSGPACK": "true", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=200, check=False
    )
    assert ('{ "a":1.0 } AIMessage\n', "") == (done.stdout, done.stderr)


def test_importing_the_package_loads_no_framework() -> None:
    """The names load when they are used."""
    program = "import sys, agentkv_langgraph; print([m for m in ('langgraph', 'langchain_core') if m in sys.modules])"
    env = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=200, check=False
    )
    assert "[]\n" == done.stdout
