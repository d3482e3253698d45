"""What has no column of its own in the matrix: other places for a function, sub-graphs in closures, hundreds of tools."""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from typing import Any

import pytest
from conformance_nodes import State, subgraph
from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint, task
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.pregel._utils import find_subgraph_pregel
from langgraph.types import Command, RetryPolicy, interrupt

from agentkv.core.hint import HintKind
from agentkv.runtime import identity

ASKED: dict[str, Any] = {"seen": [], "messages": []}


def plain(node: Any = None, **_options: Any) -> Any:
    """A decorator that does nothing."""
    return (lambda one: one) if node is None else node


def graph_of(node: Any, name: str = "node", **options: Any) -> Any:
    graph = StateGraph(State)
    graph.add_node(name, node, **options)
    graph.add_edge(START, name)
    return graph


@pytest.mark.parametrize("users_own", [False, True], ids=["bare", "under another decorator"])
def test_a_subgraph_in_a_nodes_closure_is_found(shared_kv, users_own) -> None:
    """LangGraph looks for graphs that a node's function refers to, and finds the same ones behind our decorator."""
    inner = subgraph(lambda state: {"seen": ["inner"]})

    def calls(state: State) -> Any:
        return inner.invoke(state)

    def shell(fn: Any) -> Any:
        @functools.wraps(fn)
        def called(state: State) -> Any:
            return fn(state)

        return called

    node = shell(calls) if users_own else calls
    for decorate in (plain, shared_kv.node):
        app = graph_of(decorate(node)).compile()
        assert find_subgraph_pregel(app.nodes["node"].bound) is inner
        assert ["node"] == [name for name, _ in app.get_subgraphs()]


def test_methods_of_every_sort_may_be_decorated_in_their_class(shared_kv) -> None:
    """Plain, class and static methods, below or above their own decorators."""

    class Agent:
        word = "agent"

        @shared_kv.node
        def plain(self, state: State) -> Any:
            return {"seen": [self.word]}

        @shared_kv.node
        @classmethod
        def of_class(cls, state: State) -> Any:
            return {"seen": [cls.word]}

        @shared_kv.node
        @staticmethod
        async def static(state: State) -> Any:
            return {"seen": ["static"]}

        @staticmethod
        @shared_kv.node
        def inner_static(state: State) -> Any:
            return {"seen": ["inner static"]}

    agent = Agent()
    assert {"seen": ["agent"]} == agent.plain(ASKED) == agent.of_class(ASKED) == Agent.of_class(ASKED)
    assert {"seen": ["inner static"]} == agent.inner_static(ASKED)
    assert {"seen": ["static"]} == asyncio.run(Agent.static(ASKED))
    assert agent is shared_kv.node(agent.plain).__self__


def test_a_dictionary_of_runnables_is_a_node(shared_kv) -> None:
    """LangGraph makes parallel runs of it; so do we."""

    def seen(state: State) -> Any:
        return [identity.wants_as_is(shared_kv)]

    decorated = graph_of(shared_kv.node(context=False)({"seen": seen}))
    assert {"seen": [False], "messages": []} == graph_of({"seen": seen}).compile().invoke(ASKED)
    assert {"seen": [True], "messages": []} == decorated.compile().invoke(ASKED)


def test_routes_and_error_handlers_may_be_decorated(shared_kv) -> None:
    """Functions of conditional edges and of error handling run as they do undecorated."""

    def fails(state: State) -> Any:
        raise ValueError("no")

    def handles(state: State, error: Any = None) -> Any:
        return {"seen": ["handled"]}

    def routes(state: State) -> str:
        return "left" if state["seen"] else "right"

    def built(decorate: Any) -> Any:
        graph = graph_of(decorate(fails), error_handler=decorate(handles))
        for name in ("left", "right"):
            graph.add_node(name, lambda state, name=name: {"seen": [name]})
        graph.add_conditional_edges("node", decorate(routes), ["left", "right"])
        return graph.compile()

    assert built(plain).invoke(ASKED) == built(shared_kv.node).invoke(ASKED)
    assert built(plain).get_graph().to_json() == built(shared_kv.node).get_graph().to_json()


@pytest.mark.parametrize("decorated", [False, True])
def test_tasks_and_entry_points_may_be_decorated(shared_kv, decorated) -> None:
    """The functional API: retries, interrupts and what was saved of finished tasks."""
    node = shared_kv.node if decorated else plain
    runs: Counter[str] = Counter()

    @task(retry_policy=RetryPolicy(max_attempts=2, initial_interval=0.001, jitter=False))
    @node
    def shaky(word: str) -> str:
        runs["shaky"] += 1
        if runs["shaky"] == 1:
            raise ConnectionError
        return word.upper()

    partial_task = task(node(functools.partial(lambda first, word: first + word, "first ")), name="partial")

    @entrypoint(checkpointer=InMemorySaver())
    @node
    def flow(word: str, *, previous: Any = None) -> Any:
        runs["flow"] += 1
        loud = shaky(word).result()
        return [loud, partial_task(loud).result(), interrupt("sure?"), previous]

    config = {"configurable": {"thread_id": "t"}}
    assert "__interrupt__" in flow.invoke("word", config)
    assert ["WORD", "first WORD", "yes", None] == flow.invoke(Command(resume="yes"), config)
    assert {"shaky": 2, "flow": 2} == runs


def test_items_of_a_generator_are_taken_outside_of_its_scope(shared_kv) -> None:
    """Whoever iterates over a decorated generator is not inside of it; two of them do not mix."""

    @shared_kv.node
    def one(state: Any) -> Any:
        yield shared_kv.caller().node
        yield shared_kv.caller().node

    @shared_kv.node
    def other(state: Any) -> Any:
        yield shared_kv.caller().node
        yield shared_kv.caller().node

    told = []
    for first, second in zip(one(ASKED), other(ASKED), strict=True):
        told.append((first, second, shared_kv.caller().node))
    assert [("one", "other", "")] * 2 == told

    @shared_kv.node
    async def many(state: Any) -> Any:
        given = yield shared_kv.caller().node
        try:
            yield given
        except KeyError:
            yield shared_kv.caller().node

    async def drive() -> Any:
        items = many(ASKED)
        told = [await anext(items), shared_kv.caller().node, await items.asend("sent"), await items.athrow(KeyError)]
        await items.aclose()
        return told

    assert ["many", "", "sent", "many"] == asyncio.run(drive())


def test_a_callable_object_is_an_instance_of_its_class(shared_kv) -> None:
    """`isinstance` sees the original class, and the stand-in is printed as the original."""

    class Node:
        def __call__(self, state: State) -> Any:
            return state

        def __repr__(self) -> str:
            return "the node"

    stand_in = shared_kv.node(Node())
    assert isinstance(stand_in, Node)
    assert "the node" == repr(stand_in)


async def test_a_pipeline_of_runnables_streams_token_by_token(shared_kv) -> None:
    """A decorated step in the middle of a LangChain sequence transforms its input as it comes."""

    def many(_: Any) -> Any:
        yield from ("a", "b", "c")

    chain = RunnableLambda(many) | shared_kv.node(RunnableLambda(lambda text: text)) | (lambda text: text)
    assert "abc" == "".join(chain.stream(1))
    assert [2, 2] == shared_kv.node(RunnableLambda(lambda n: n * 2)).batch([1, 1])
    assert [2, 2] == await shared_kv.node(RunnableLambda(lambda n: n * 2)).abatch([1, 1])


@pytest.mark.parametrize("drive", ["invoke", "ainvoke"])
@pytest.mark.parametrize("way", ["plain", "decorated", "attached", "both"])
def test_hundreds_of_tools_in_one_step(shared_kv, drive, way) -> None:
    """240 parallel calls: the same answers in the same order, and one start and one end for each."""
    decorate = shared_kv.node if way in {"decorated", "both"} else plain

    def work(n: int) -> str:
        """Work."""
        with shared_kv.tool("work", args={"n": n}):
            return f"{n}: {shared_kv.caller().task}"

    async def awork(n: int) -> str:
        """Work."""
        async with shared_kv.tool("work", args={"n": n}):
            await asyncio.sleep(0.001)
            return f"{n}: {shared_kv.caller().task}"

    made = tool("work")(decorate(work if drive == "invoke" else awork))
    graph = StateGraph(MessagesState)
    graph.add_node("tools", ToolNode([made]))
    graph.add_edge(START, "tools")
    app = shared_kv.attach(graph.compile()) if way in {"attached", "both"} else graph.compile()
    calls = [{"name": "work", "args": {"n": n}, "id": f"{way}-{drive}-{n}"} for n in range(240)]
    heard: list[Any] = []
    stop = shared_kv.subscribe(heard.append)
    config = {"configurable": {"thread_id": f"many-{way}"}}
    try:
        state = {"messages": [AIMessage("", tool_calls=calls)]}
        told = app.invoke(state, config) if drive == "invoke" else asyncio.run(app.ainvoke(state, config))
    finally:
        stop()
    assert [f"{n}: many-{way}" for n in range(240)] == [message.text for message in told["messages"][1:]]
    assert {HintKind.TOOL_START: 240, HintKind.TOOL_END: 240} == Counter(hint.kind for hint in heard)
    assert 240 == len({hint.call.call_id for hint in heard})
