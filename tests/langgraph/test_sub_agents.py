"""Sub-agents: whatever way one is run, its calls are on the one task's bill, and it has a session of its own.

Also who is calling from foreign threads, several event loops and a server; and that ten thousand tasks leave nothing.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from agentkv_langgraph import ChatAgentKV
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.config import get_config
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.types import Send

from agentkv import AgentKV
from agentkv.runtime import identity

ASK = {"messages": [HumanMessage("go")]}


def graph_of(*nodes: Any, **options: Any) -> Any:
    graph = StateGraph(MessagesState)
    before = START
    for node in nodes:
        graph.add_node(node.__name__, node)
        graph.add_edge(before, node.__name__)
        before = node.__name__
    return graph.compile(**options)


def asking(name: str, tool_name: str) -> AIMessage:
    return AIMessage("", tool_calls=[{"name": tool_name, "args": {"question": name}, "id": f"call-{name}"}])


class Agents:
    """A main agent that speaks before and after a sub-agent has worked."""

    def __init__(self, kv: AgentKV) -> None:
        self.kv = kv
        self.model = ChatAgentKV(kv)
        self.sub = graph_of(self.talk)

    def talk(self, state: MessagesState) -> Any:
        return {"messages": [self.model.invoke(state["messages"][-1:])]}

    def main(self, state: MessagesState) -> Any:
        return {"messages": [self.model.invoke([*state["messages"][:1], HumanMessage("main")])]}

    def around(self, node: Any) -> Any:
        """main -> node -> main again."""
        graph = StateGraph(MessagesState)
        graph.add_node("main", self.main)
        graph.add_node("sub", node)
        graph.add_node("again", self.main)
        graph.add_edge(START, "main")
        graph.add_edge("main", "sub")
        graph.add_edge("sub", "again")
        return graph.compile(checkpointer=InMemorySaver())


def as_node(agents: Agents) -> Any:
    return agents.around(agents.sub)


def as_decorated_node(agents: Agents) -> Any:
    return agents.around(agents.kv.node(agents.sub))


def called_in_a_node(agents: Agents) -> Any:
    return agents.around(lambda state: agents.sub.invoke(state))  # noqa: PLW0108  a node that is a function


def called_on_a_thread_of_its_own(agents: Agents) -> Any:
    sub = graph_of(agents.talk, checkpointer=InMemorySaver())
    return agents.around(lambda state: sub.invoke(ASK, {"configurable": {"thread_id": "the sub-agent's"}}))


def called_in_a_tool(agents: Agents) -> Any:
    @tool
    def expert(question: str) -> str:
        """Ask another agent."""
        return agents.sub.invoke({"messages": [HumanMessage(question)]})["messages"][-1].text

    def ask(state: MessagesState) -> Any:
        return ToolNode([expert]).invoke({"messages": [asking("q", "expert")]})

    return agents.around(ask)


def as_an_agent_of_langchain(agents: Agents) -> Any:
    """`create_agent` behind a tool, the usual supervisor."""
    make = pytest.importorskip("langchain.agents").create_agent
    expert_agent = make(agents.model, tools=[], name="expert")

    @tool
    def expert(question: str) -> str:
        """Ask another agent."""
        return expert_agent.invoke({"messages": [HumanMessage(question)]})["messages"][-1].text

    def ask(state: MessagesState) -> Any:
        return ToolNode([expert]).invoke({"messages": [asking("q", "expert")]})

    return agents.around(ask)


def in_a_carried_thread(agents: Agents) -> Any:
    def work(state: MessagesState) -> Any:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(agents.kv.carry(agents.sub.invoke), ASK).result()

    return agents.around(work)


WAYS = [
    as_node, as_decorated_node, called_in_a_node, called_on_a_thread_of_its_own, called_in_a_tool,
    as_an_agent_of_langchain, in_a_carried_thread,
]  # fmt: skip


@pytest.mark.parametrize("drive", ["invoke", "ainvoke"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_sub_agent_is_on_its_parents_bill_and_has_a_session_of_its_own(make_kv, way, drive) -> None:
    """Three calls under one task; the main agent's session goes on, and the sub-agent's is another."""
    kv = make_kv()
    app = kv.attach(way(Agents(kv)))
    config = {"configurable": {"thread_id": "one"}}
    if drive == "invoke":
        app.invoke(ASK, config)
    else:
        asyncio.run(app.ainvoke(ASK, config))
    first, sub, last = kv.report("one").calls
    assert first.session == last.session != sub.session
    assert "" == first.branch == last.branch != sub.branch
    assert () == kv.report("unattributed").calls
    assert () == kv.report("the sub-agent's").calls


def test_fifty_sent_branches_have_fifty_sessions_under_one_task(make_kv) -> None:
    """They run side by side, and each continues its own context."""
    kv = make_kv()
    model = ChatAgentKV(kv)

    @kv.node
    def worker(state: Any) -> Any:
        first = model.invoke([HumanMessage(f"part {state['part']}")])
        model.invoke([HumanMessage(f"part {state['part']}"), first, HumanMessage("more")])
        return {"messages": []}

    graph = StateGraph(MessagesState)
    graph.add_node("worker", worker)
    graph.add_conditional_edges(START, lambda _: [Send("worker", {"part": n}) for n in range(50)], ["worker"])
    graph.compile().invoke(ASK, {"configurable": {"thread_id": "t"}})
    calls = kv.report("t").calls
    assert 100 == len(calls)
    assert 50 == len({call.session for call in calls}) == len({call.branch for call in calls})


def test_sub_agents_of_deepagents_are_on_the_parents_bill(make_kv) -> None:
    """Its `task` tool runs them; each run has a session of its own."""
    deepagents = pytest.importorskip(
        "deepagents", reason="pip install 'agentkv-sdk[dev]'; it needs a newer langchain than the oldest"
    )
    from langchain_core.language_models import GenericFakeChatModel

    class Model(GenericFakeChatModel):
        def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
            return self

    kv = make_kv()
    tasks = [
        {"name": "task", "args": {"description": f"do {n}", "subagent_type": "worker"}, "id": f"t{n}"} for n in range(3)
    ]
    usage = {"input_tokens": 10, "output_tokens": 1, "total_tokens": 11}
    main = Model(
        messages=iter([AIMessage("", tool_calls=tasks, usage_metadata=usage), AIMessage("end", usage_metadata=usage)])
    )
    sub = Model(messages=iter([AIMessage("done", usage_metadata=usage)] * 3))
    worker = {"name": "worker", "description": "works", "system_prompt": "work", "model": sub, "tools": []}
    app = kv.attach(deepagents.create_deep_agent(model=main, subagents=[worker]))
    app.invoke(ASK, {"configurable": {"thread_id": "deep"}})
    calls = kv.report("deep").calls
    assert 5 == len(calls)
    assert 4 == len({call.branch for call in calls})
    assert 2 == sum(call.branch == "" for call in calls)
    assert {"task": 3} == {name: sum(fact.tool == name for fact in kv.report("deep").tools) for name in ("task",)}


def test_a_threads_calls_are_carried_or_unattributed_but_never_anothers(make_kv) -> None:
    """Two tasks share one pool, whose threads keep nothing of the one that they worked for before."""
    kv = make_kv()
    model = ChatAgentKV(kv)
    both = threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:

        def node(state: MessagesState) -> Any:
            both.wait(5)
            for number in range(20):
                pool.submit(kv.carry(model.invoke), f"carried {number}").result()
                pool.submit(model.invoke, f"plain {number}").result()
            return {"messages": []}

        app = graph_of(node)
        with ThreadPoolExecutor(2) as runs:
            config = [{"configurable": {"thread_id": name}} for name in ("a", "b")]
            list(runs.map(lambda one: app.invoke(ASK, one), config))
    assert [20, 20, 40] == [len(kv.report(name).calls) for name in ("a", "b", "unattributed")]


def test_what_is_carried_sees_the_graphs_config_and_outlives_its_node(make_kv) -> None:
    """Functions and coroutine functions, on another thread's loop, side by side and again after the run has ended."""
    kv = make_kv()
    kept: list[Any] = []

    @kv.node
    def node(state: MessagesState) -> Any:
        def who() -> Any:
            return kv.caller().task, get_config()["configurable"]["thread_id"]

        async def who_async() -> Any:
            await asyncio.sleep(0)
            return who()

        kept.extend([kv.carry(who), kv.carry(who_async)])
        meet = kv.carry(threading.Barrier(4).wait)
        with ThreadPoolExecutor(4) as pool:
            assert {0, 1, 2, 3} == set(pool.map(lambda _: meet(5), range(4)))
            told = list(pool.map(lambda _: kept[0](), range(20)))
            told += pool.submit(lambda: asyncio.run(kept[1]())).result(), kept[0]()
        return {"messages": [AIMessage(str(set(told)))]}

    state = graph_of(node).invoke(ASK, {"configurable": {"thread_id": "t"}})
    assert "{('t', 't')}" == state["messages"][-1].text
    with ThreadPoolExecutor(1) as pool:
        assert ("t", "t") == pool.submit(kept[0]).result()
    assert "unattributed" == kv.caller().task

    with kv.task("explicit"):
        late = kv.carry(lambda: kv.caller().task)
        assert "explicit" == late()
    assert "unattributed" == late()


def test_many_loops_and_threads_at_once_do_not_mix(make_kv) -> None:
    """Eight event loops, eight threads, ten tasks each."""
    kv = make_kv()
    model = ChatAgentKV(kv)

    @kv.node
    async def anode(state: MessagesState) -> Any:
        await asyncio.sleep(0)
        return {"messages": [await model.ainvoke(state["messages"])]}

    @kv.node
    def node(state: MessagesState) -> Any:
        return {"messages": [model.invoke(state["messages"])]}

    app, other = graph_of(anode), graph_of(node)

    def on_a_loop(first: int) -> None:
        async def all_of_them() -> None:
            configs = [{"configurable": {"thread_id": f"loop-{first}-{n}"}} for n in range(10)]
            await asyncio.gather(*(app.ainvoke(ASK, config) for config in configs))

        asyncio.run(all_of_them())

    def on_a_thread(first: int) -> None:
        for n in range(10):
            other.invoke(ASK, {"configurable": {"thread_id": f"thread-{first}-{n}"}})

    with ThreadPoolExecutor(16) as pool:
        for done in [pool.submit(run, n) for n in range(8) for run in (on_a_loop, on_a_thread)]:
            done.result()
    for kind, name in (("loop", "anode"), ("thread", "node")):
        for first in range(8):
            for n in range(10):
                (call,) = kv.report(f"{kind}-{first}-{n}").calls
                assert (name, "ok") == (call.node, call.status)


def test_a_run_as_a_server_makes_it_is_its_threads_task(make_kv) -> None:
    """Assistants, users and run ids in the configurable and the metadata; the graph is built anew for each request."""
    kv = make_kv()
    model = ChatAgentKV(kv)

    def make_graph(config: Any) -> Any:
        @kv.node
        async def talk(state: MessagesState) -> Any:
            return {"messages": [await model.ainvoke(state["messages"])]}

        return kv.attach(graph_of(talk, checkpointer=InMemorySaver()))

    async def request(thread: str, user: str) -> None:
        config = {
            "configurable": {
                "thread_id": thread, "assistant_id": "assistant", "graph_id": "agent", "run_id": f"run-{thread}",
                "langgraph_auth_user_id": user, "langgraph_auth_user": {"identity": user}, "__request_start_time_ms__": 1,
                "langgraph_request_id": "r",
            },
            "metadata": {"assistant_id": "assistant", "created_by": "system", "run_attempt": 1, "langgraph_version": "1"},
            "run_id": "11111111-2222-3333-4444-555555555555",
        }  # fmt: skip
        async for _ in make_graph(config).astream(ASK, config, stream_mode=["updates", "messages"], subgraphs=True):
            pass

    async def serve() -> None:
        await asyncio.gather(*(request(f"thread-{n % 5}", f"user-{n}") for n in range(20)))

    asyncio.run(serve())
    assert [4] * 5 == [len(kv.report(f"thread-{n}").calls) for n in range(5)]


@pytest.mark.slow
def test_ten_thousand_task_contexts_leave_nothing(make_kv) -> None:
    """Scopes are opened and closed, half of them by an error, side by side; no growth, and nobody is calling after."""
    kv = make_kv()

    @kv.node
    def node(state: Any) -> None:
        if state % 2:
            raise KeyError(state)

    def contexts(first: int, count: int) -> None:
        for n in range(first, first + count):
            try:
                with kv.task(f"task-{n}"):
                    assert f"task-{n}" == kv.caller().task
                    node(n)
            except KeyError:
                pass
            assert "unattributed" == kv.caller().task

    def held_bytes() -> int:
        """Without what the ledger knows on purpose of tasks that it has forgotten, which is bounded."""
        gc.collect()
        ours = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(False, "*/budget/ledger.py")])
        return sum(trace.size for trace in ours.traces)

    tracemalloc.start()
    try:
        contexts(0, 5_000)  # what is bounded is full
        before = held_bytes()
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda part: contexts(10_000 + part * 2_500, 2_500), range(4)))
        grown = held_bytes() - before
    finally:
        tracemalloc.stop()
    assert grown < 200_000  # 20 bytes for each
    assert identity._scope.get() is None
