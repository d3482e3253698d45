"""A decorated node behaves as the undecorated one, in every form and under every way to run a graph."""

from __future__ import annotations

import asyncio
import functools
import inspect
import operator
from typing import Annotated, Any, TypedDict

import pytest
from agentkv_langgraph.nodes import wrap
from langchain_core.runnables import RunnableConfig, RunnableLambda
from langgraph.graph import START, StateGraph
from langgraph.runtime import Runtime
from langgraph.store.base import BaseStore
from langgraph.store.memory import InMemoryStore
from langgraph.types import StreamWriter


class State(TypedDict):
    seen: Annotated[list[str], operator.add]


class Part(TypedDict):
    seen: Annotated[list[str], operator.add]
    extra: str


class Log:
    """Hooks that write down what happens."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def enter(self) -> int:
        self.events.append("enter")
        return len(self.events)

    def leave(self, token: int, error: BaseException | None) -> None:
        self.events.append(("leave", token, type(error).__name__))

    def wrap(self, fn: Any) -> Any:
        return wrap(fn, self.enter, self.leave)


def sync_node(state: State) -> dict[str, Any]:
    return {"seen": ["sync"]}


async def async_node(state: State) -> dict[str, Any]:
    return {"seen": ["async"]}


def generator_node(state: State) -> Any:
    yield {"seen": ["generator"]}


async def asyncgen_node(state: State) -> Any:
    yield {"seen": ["asyncgen"]}


def two_arguments(word: str, state: State) -> dict[str, Any]:
    return {"seen": [word]}


async def two_arguments_async(word: str, state: State) -> dict[str, Any]:
    return {"seen": [word]}


class CountingNode:
    """A callable object with state."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, state: State) -> dict[str, Any]:
        self.calls += 1
        return {"seen": [f"object {self.calls}"]}

    def method(self, state: State) -> dict[str, Any]:
        return {"seen": ["method"]}

    async def async_method(self, state: State) -> dict[str, Any]:
        return {"seen": ["async method"]}


class AsyncCallable:
    async def __call__(self, state: State) -> dict[str, Any]:
        return {"seen": ["async object"]}


def subgraph() -> Any:
    inner = StateGraph(State)
    inner.add_node("inner", sync_node)
    inner.add_edge(START, "inner")
    return inner.compile(name="subgraph")


SYNC = {
    "function": lambda: sync_node,
    "generator": lambda: generator_node,
    "partial": lambda: functools.partial(two_arguments, "partial"),
    "object": CountingNode,
    "method": lambda: CountingNode().method,
    "runnable": lambda: RunnableLambda(sync_node),
    "subgraph": subgraph,
}
ASYNC = {
    "function": lambda: async_node,
    "generator": lambda: asyncgen_node,
    "partial": lambda: functools.partial(two_arguments_async, "async partial"),
    "object": AsyncCallable,
    "method": lambda: CountingNode().async_method,
    "runnable": lambda: RunnableLambda(async_node),
}


def graph_of(node: Any) -> Any:
    graph = StateGraph(State)
    graph.add_node("node", node)
    graph.add_edge(START, "node")
    return graph.compile()


@pytest.mark.parametrize("make", SYNC.values(), ids=SYNC)
def test_sync_nodes_run_under_invoke_and_stream_as_undecorated_with_one_pair_of_hooks(make) -> None:
    """Every sync kind of node gives the same result and stream, and its hooks run once per run."""
    log, plain = Log(), graph_of(make())
    decorated = graph_of(log.wrap(make()))
    assert plain.invoke({"seen": []}) == decorated.invoke({"seen": []})
    assert ["enter", ("leave", 1, "NoneType")] == log.events
    modes = ["updates", "values"]
    assert list(graph_of(make()).stream({"seen": []}, stream_mode=modes)) == list(
        graph_of(log.wrap(make())).stream({"seen": []}, stream_mode=modes)
    )
    assert 4 == len(log.events)


@pytest.mark.parametrize("make", [*SYNC.values(), *ASYNC.values()], ids=[*SYNC, *(f"async {k}" for k in ASYNC)])
async def test_all_nodes_run_under_ainvoke_and_astream_as_undecorated(make) -> None:
    """Every kind of node, sync or async, gives the same result and stream in async graphs."""
    log, plain = Log(), graph_of(make())
    decorated = graph_of(log.wrap(make()))
    assert await plain.ainvoke({"seen": []}) == await decorated.ainvoke({"seen": []})
    assert ["enter", ("leave", 1, "NoneType")] == log.events
    undecorated = [chunk async for chunk in graph_of(make()).astream({"seen": []})]
    assert undecorated == [chunk async for chunk in graph_of(log.wrap(make())).astream({"seen": []})]
    assert 4 == len(log.events)


def test_a_node_gets_its_injected_arguments_whatever_its_signature() -> None:
    """config, runtime, writer, store and previous reach decorated nodes, positional or keyword-only."""
    got: dict[str, Any] = {}

    def only_config(state: State, config: RunnableConfig) -> dict[str, Any]:
        got["config"] = config["configurable"]["thread_id"]
        return {"seen": []}

    def keyword_runtime(state: State, *, runtime: Runtime) -> dict[str, Any]:
        got["runtime"] = type(runtime).__name__
        return {"seen": []}

    def everything(
        state: State, config: RunnableConfig, writer: StreamWriter, store: BaseStore, previous: Any = None
    ) -> dict[str, Any]:
        writer("written")
        store.put(("a",), "b", {"c": 1})
        got["everything"] = (config["metadata"]["langgraph_node"], previous)
        return {"seen": []}

    graph = StateGraph(State)
    log = Log()
    for node in (only_config, keyword_runtime, everything):
        graph.add_node(log.wrap(node))
    graph.add_edge(START, "only_config")
    graph.add_edge("only_config", "keyword_runtime")
    graph.add_edge("keyword_runtime", "everything")
    store = InMemoryStore()
    compiled = graph.compile(store=store)
    written = list(compiled.stream({"seen": []}, {"configurable": {"thread_id": "t"}}, stream_mode="custom"))
    assert {"config": "t", "runtime": "Runtime", "everything": ("everything", None)} == got
    assert ["written"] == written
    assert {"c": 1} == store.get(("a",), "b").value


def test_a_callable_object_keeps_its_name_and_its_attributes() -> None:
    """The node is named after the class, and the object's own attributes are read and written through."""
    original = CountingNode()
    decorated = Log().wrap(original)
    graph = StateGraph(State)
    graph.add_node(decorated)
    assert ["CountingNode"] == list(graph.nodes)
    decorated({"seen": []})
    assert (1, 1) == (decorated.calls, original.calls)
    graph.add_node(Log().wrap(functools.partial(two_arguments, "partial")))
    assert ["CountingNode", "partial"] == list(graph.nodes)
    decorated.calls = 7
    assert 7 == original.calls


class Static:
    @staticmethod
    def __call__(state: State) -> dict[str, Any]:
        return {"seen": ["static"]}


class AsyncStatic:
    @staticmethod
    async def __call__(state: State) -> dict[str, Any]:
        return {"seen": ["async static"]}


class OfClass:
    words = ("of class",)

    @classmethod
    def __call__(cls, state: State) -> dict[str, Any]:
        return {"seen": [cls.__name__, *cls.words]}


class AsyncOfClass:
    @classmethod
    async def __call__(cls, state: State) -> dict[str, Any]:
        return {"seen": [cls.__name__]}


class Partial:
    def run(self, word: str, state: State) -> dict[str, Any]:
        return {"seen": [type(self).__name__, word]}

    async def run_async(self, word: str, state: State) -> dict[str, Any]:
        return {"seen": [type(self).__name__, word]}

    __call__ = functools.partialmethod(run, "word")


class AsyncPartial(Partial):
    __call__ = functools.partialmethod(Partial.run_async, "word")


class Stateless:
    def __call__(self, state: State) -> dict[str, Any]:
        return {"seen": ["stateless"]}


class Borrowed:
    __call__ = Stateless()


class Slotted:
    __slots__ = ("n",)

    def __init__(self) -> None:
        self.n = 0

    def __call__(self, state: State) -> dict[str, Any]:
        self.n += 1
        return {"seen": [str(self.n)]}


@pytest.mark.parametrize("kind", [Static, AsyncStatic, OfClass, AsyncOfClass, Partial, AsyncPartial, Borrowed, Slotted])
async def test_a_callable_object_is_called_however_its_class_says_so(kind) -> None:
    """`__call__` as a static method, a class method, a partial method, another object: in graphs and by itself."""
    log, state = Log(), {"seen": []}
    plain, decorated = kind(), log.wrap(kind())
    assert inspect.signature(plain) == inspect.signature(decorated)
    assert inspect.iscoroutinefunction(plain.__call__) == inspect.iscoroutinefunction(decorated.__call__)
    expected = await graph_of(plain).ainvoke(state)
    assert expected == await graph_of(decorated).ainvoke(state)
    assert ["enter", ("leave", 1, "NoneType")] == log.events
    if not inspect.iscoroutinefunction(plain.__call__):
        again = graph_of(kind()).invoke(state)
        assert again == graph_of(log.wrap(kind())).invoke(state)
        assert isinstance(decorated(state), type(plain(state)))
    assert isinstance(decorated, kind)
    assert kind.__call__ is not type(decorated).__call__


def test_what_a_node_raises_passes_through_and_the_hooks_hear_it() -> None:
    """The very exception object reaches the caller."""
    log, problem = Log(), ValueError("no")

    @log.wrap
    def node(state: State) -> None:
        raise problem

    with pytest.raises(ValueError) as caught:
        graph_of(node).invoke({"seen": []})
    assert problem is caught.value
    assert ["enter", ("leave", 1, "ValueError")] == log.events


def test_an_async_generator_that_is_closed_early_closes_the_original() -> None:
    """Cleaning up in the original runs when its consumer stops, and the hooks hear of it."""
    log, closed = Log(), []

    async def numbers() -> Any:
        try:
            for number in range(10):
                yield number
        finally:
            closed.append(True)

    async def consume() -> None:
        stream = log.wrap(numbers)()
        assert 0 == await anext(stream)
        await stream.aclose()
        assert [True] == closed

    asyncio.run(consume())
    assert ["enter", ("leave", 1, "GeneratorExit")] == log.events


def test_something_that_cannot_be_a_node_is_refused() -> None:
    """The error names the type."""
    with pytest.raises(TypeError, match="not int"):
        Log().wrap(3)
