"""Checked by mypy, never run: what is decorated keeps its type, and a wrong use of it is found."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, TypedDict, assert_type

from langchain_core.runnables import RunnableConfig, RunnableLambda
from langgraph.graph import StateGraph
from langgraph.graph.state import CompiledStateGraph

from agentkv import AgentKV, ScriptedEngine


class State(TypedDict):
    n: int


kv = AgentKV.with_engine(ScriptedEngine([]))


@kv.node
def bare(state: State) -> State:
    return state


@kv.node(name="named", context=False)
def with_options(state: State, config: RunnableConfig) -> State:
    return state


@kv.node
async def coroutine(state: State, *, word: str = "") -> State:
    return state


@kv.node
def generator(state: State) -> Iterator[State]:
    yield state


@kv.node
async def async_generator(state: State) -> AsyncIterator[State]:
    yield state


class Agent:
    @kv.node
    def method(self, state: State) -> State:
        return state

    def __call__(self, state: State) -> State:
        return state


given: State = {"n": 1}
assert_type(bare(given), State)
assert_type(with_options(given, {}), State)
awaited: Coroutine[Any, Any, State] = assert_type(coroutine(given, word="x"), Coroutine[Any, Any, State])
assert_type(generator(given), Iterator[State])
assert_type(async_generator(given), AsyncIterator[State])
assert_type(Agent().method(given), State)
assert_type(kv.node(Agent()), Agent)
assert_type(kv.node(functools.partial(bare)), functools.partial[State])
assert_type(kv.node(RunnableLambda(bare)), RunnableLambda[State, State])
assert_type(kv.carry(bare)(given), State)

bare()  # type: ignore[call-arg]
bare("text")  # type: ignore[arg-type]
bare(given, 1)  # type: ignore[call-arg]
awaited = coroutine(given, word=1)  # type: ignore[arg-type]
wrong: Callable[[int], State] = bare  # type: ignore[assignment]

graph = StateGraph(State)
graph.add_node("bare", bare)
graph.add_node("coroutine", coroutine)
compiled = graph.compile()
assert_type(kv.attach(compiled), CompiledStateGraph[State, None, State, State])
assert_type(kv.node(compiled), CompiledStateGraph[State, None, State, State])
