"""One task, one bill: what ChatOpenAI spends in sub-graphs, tools, threads and sent branches, and nothing is kept."""

from __future__ import annotations

import contextvars
import sys
import threading
import uuid
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from agentkv_langgraph import AgentKVCallback
from agentkv_langgraph.spent import usual
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.language_models import FakeListLLM
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, LLMResult
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import tool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.types import Send

from agentkv import AgentKV
from agentkv.core.reported import reported
from agentkv.core.usage import Usage

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from usage_server import Reply, Server, whole

openai = pytest.importorskip("langchain_openai")

USAGE = {"prompt_tokens": 1000, "completion_tokens": 10, "prompt_tokens_details": {"cached_tokens": 600}}
USD = Decimal("0.00118")  # gpt-4.1: 400 x 2 + 600 x 0.5 + 10 x 8, per million


@pytest.fixture
def model(monkeypatch):
    """ChatOpenAI on a server that gives every call the same answer."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with Server(replies=[Reply(body=whole(usage=USAGE, model="gpt-4.1"))], again=True) as server:
        model = openai.ChatOpenAI(model="gpt-4.1", base_url=server.url, api_key="none", max_retries=0)
        model.metadata = {"server": server}
        yield model


def bodies(model: Any) -> int:
    """Calls that reached the server."""
    return len(model.metadata["server"].bodies)


def graph_of(**nodes: Any) -> Any:
    graph = StateGraph(MessagesState)
    for name, node in nodes.items():
        graph.add_node(name, node)
    names = [START, *nodes]
    for one, two in pairwise(names):
        graph.add_edge(one, two)
    return graph.compile()


def test_everything_that_a_task_makes_others_call_is_on_its_bill(kv, model) -> None:
    """A sub-graph as a node, one inside a tool, a thread, and fifty sent branches: one bill, each call once."""

    def talk(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"][:1])]}

    inner = graph_of(talk=talk)

    @tool
    def expert(question: str) -> str:
        """Ask another agent."""
        return str(inner.invoke({"messages": [HumanMessage(question)]})["messages"][-1].text)

    def threaded(state: MessagesState, config: RunnableConfig) -> dict[str, Any]:
        answers: list[Any] = []
        context = contextvars.copy_context()
        works = [
            lambda: answers.append(model.invoke("in a thread", config)),
            lambda: answers.append(context.run(model.invoke, "in a context")),
        ]
        threads = [threading.Thread(target=work) for work in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        call = {"name": "expert", "args": {"question": "why?"}, "id": "c"}
        return {"messages": [AIMessage("", tool_calls=[call])]}

    def worker(state: dict[str, Any]) -> dict[str, Any]:
        return {"messages": [model.invoke(f"part {state['part']}")]}

    graph = StateGraph(MessagesState)
    graph.add_node("sub", inner)
    graph.add_node("threaded", threaded)
    graph.add_node("tools", ToolNode([expert]))
    graph.add_node("worker", worker)
    graph.add_edge(START, "sub")
    graph.add_edge("sub", "threaded")
    graph.add_edge("threaded", "tools")
    graph.add_conditional_edges("tools", lambda _: [Send("worker", {"part": n}) for n in range(50)], ["worker"])
    app = kv.attach(graph.compile())
    app.invoke({"messages": [HumanMessage("go")]}, {"configurable": {"thread_id": "t"}})
    calls = kv.report("t").calls
    assert 54 == bodies(model) == len(calls)
    assert Usage(input_tokens=54_000, cached_tokens=32_400, output_tokens=540, calls=54) == kv.report("t").usage
    assert 54 * USD == sum(call.cost_usd for call in calls)
    assert 50 == len({call.branch for call in calls if call.node == "worker"})
    assert {"talk", "threaded", "worker"} == {call.node for call in calls}


def test_model_in_the_callbacks_of_both_graph_and_model_is_billed_once(kv, model) -> None:
    """LangChain hands a run to each handler once."""
    callback = kv.attach(graph_of(talk=lambda state: {"messages": [model.invoke(state["messages"])]}))
    callback.invoke({"messages": [HumanMessage("go")]}, {"configurable": {"thread_id": "t"}})
    assert 1 == bodies(model) == len(kv.report("t").calls)


class Paid:
    """A callback driven by hand, as LangChain drives it."""

    def __init__(self, kv: AgentKV) -> None:
        self.callback = AgentKVCallback(kv)

    def run(self, task: str, *, fails: bool) -> None:
        run_id = uuid.uuid4()
        about = {"metadata": {"thread_id": task}, "invocation_params": {"model": "gpt-4.1"}}
        self.callback.on_chat_model_start({}, [[HumanMessage("go")]], run_id=run_id, **about)
        usage = {"input_tokens": 7, "output_tokens": 2, "total_tokens": 9}
        chunk = ChatGenerationChunk(message=AIMessageChunk("one", usage_metadata=usage))
        self.callback.on_llm_new_token("one", chunk=chunk, run_id=run_id)
        if fails:
            self.callback.on_llm_error(ValueError("no"), run_id=run_id, response=LLMResult(generations=[[]]))
        else:
            message = AIMessage("one", usage_metadata=usage)
            self.callback.on_llm_end(LLMResult(generations=[[ChatGeneration(message=message)]]), run_id=run_id)


def test_thousands_of_runs_leave_nothing_and_do_not_mix(kv) -> None:
    """Half of them fail; each bill holds its own call, and the callback is as empty as before."""
    paid = Paid(kv)
    for number in range(2_000):
        paid.run(f"task-{number}", fails=number % 2 == 1)
    callback = paid.callback
    assert ({}, 0, {}) == (callback._models, len(callback._runs), dict(callback._tries._noted))
    for number in range(0, 2_000, 99):
        (call,) = kv.report(f"task-{number}").calls
        assert (9, "failed" if number % 2 else "ok") == (call.usage.total_tokens, call.status)


def test_answer_without_model_name_goes_by_the_name_that_was_asked_for(kv) -> None:
    """And by "unknown" where that is not known either."""
    Paid(kv).run("t", fails=False)
    callback = AgentKVCallback(kv)
    run_id = uuid.uuid4()
    callback.on_chat_model_start({}, [[HumanMessage("go")]], run_id=run_id, metadata={"thread_id": "t"})
    usage = {"input_tokens": 7, "output_tokens": 2, "total_tokens": 9}
    message = AIMessage("one", usage_metadata=usage)
    callback.on_llm_end(LLMResult(generations=[[ChatGeneration(message=message)]]), run_id=run_id)
    first, second = kv.report("t").calls
    assert ("gpt-4.1", "unknown") == (first.model, second.model)
    assert (Decimal("0.00003"), None) == (first.cost_usd, second.cost_usd)


def test_models_that_write_text_are_billed_too(kv) -> None:
    """LangChain's older interface has no messages, and often no usage: it is counted."""
    llm = FakeListLLM(responses=["three little words"])
    with kv.task("t", final=False):
        llm.invoke("What is the answer?", {"callbacks": [AgentKVCallback(kv)]})
    (call,) = kv.report("t").calls
    assert (5, 3, True) == (call.usage.input_tokens, call.usage.output_tokens, call.estimated)


counts = st.one_of(st.integers(-2, 30), st.none(), st.just(10**7), st.just(True))
details = st.dictionaries(st.sampled_from(["cache_read", "audio", "cache_creation", "priority_cache_read"]), counts)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "input_tokens": counts,
            "output_tokens": counts,
            "total_tokens": counts,
            "input_token_details": st.one_of(st.none(), details),
            "output_token_details": st.just({"reasoning": 1}),
        },
    )
)
def test_the_short_way_to_read_usage_reads_the_same_as_the_long_one(usage) -> None:
    """Or nothing; for sums that are right it is not nothing."""
    for one in (usage, {**usage, "total_tokens": (usage.get("input_tokens") or 0) + (usage.get("output_tokens") or 0)}):
        assert usual(one) is None or usual(one) == reported({"usage": one})
    plain = {"input_tokens": 10, "output_tokens": 4, "total_tokens": 14, "input_token_details": {"cache_read": 6}}
    assert reported({"usage": plain}) == usual(plain)
