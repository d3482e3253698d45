"""What LangGraph reads off a decorated node: edges, schemas, subgraphs, injected arguments; and what steers it."""

from __future__ import annotations

import operator
from typing import Annotated, Any, Literal, TypedDict

import pytest
from agentkv_langgraph.nodes import wrap
from langchain_core.messages import AIMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import InjectedState, ToolNode, ToolRuntime
from langgraph.types import Command, interrupt


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


def subgraph() -> Any:
    inner = StateGraph(State)
    inner.add_node("inner", sync_node)
    inner.add_edge(START, "inner")
    return inner.compile(name="subgraph")


def graph_of(node: Any) -> Any:
    graph = StateGraph(State)
    graph.add_node("node", node)
    graph.add_edge(START, "node")
    return graph.compile()


class Router:
    def __call__(self, state: Part) -> Command[Literal["left", "right"]]:
        return Command(goto="left")

    def route(self, state: Part) -> Command[Literal["left", "right"]]:
        return Command(goto="right")


def route(state: Part) -> Command[Literal["left", "right"]]:
    return Command(goto="left")


@pytest.mark.parametrize("make", [lambda: route, Router, lambda: Router().route], ids=["function", "object", "method"])
def test_edges_of_a_command_annotation_and_the_input_schema_survive(make) -> None:
    """The drawn graph and the node's own input schema are those of the undecorated node."""

    def built(node: Any) -> StateGraph:
        graph = StateGraph(State)
        graph.add_node("route", node)
        graph.add_node("left", sync_node)
        graph.add_node("right", sync_node)
        graph.add_edge(START, "route")
        graph.add_edge("left", END)
        graph.add_edge("right", END)
        return graph

    plain, decorated = built(make()), built(Log().wrap(make()))
    assert Part is decorated.nodes["route"].input_schema
    assert plain.nodes["route"].input_schema is decorated.nodes["route"].input_schema
    drawing = decorated.compile().get_graph().draw_mermaid()
    assert plain.compile().get_graph().draw_mermaid() == drawing
    assert "route -.-> right" in drawing


def test_a_decorated_subgraph_is_still_a_subgraph() -> None:
    """It is found, drawn and streamed as one, and a configured copy of it keeps its hooks."""
    log = Log()
    decorated = log.wrap(subgraph())
    graph = graph_of(decorated)
    assert ["node"] == [name for name, _ in graph.get_subgraphs()]
    assert "inner" in graph.get_graph(xray=True).draw_mermaid()
    namespaces = [ns for ns, _ in graph.stream({"seen": []}, subgraphs=True)]
    assert any(ns and ns[0].startswith("node:") for ns in namespaces)
    log.events.clear()
    decorated.with_config(tags=["x"]).invoke({"seen": []})
    assert ["enter", ("leave", 1, "NoneType")] == log.events


def test_an_interrupt_and_a_parent_command_pass_through() -> None:
    """A decorated node pauses its graph, and a decorated subgraph node routes its parent."""
    log = Log()

    @log.wrap
    def asks(state: State) -> dict[str, Any]:
        return {"seen": [interrupt("sure?")]}

    graph = StateGraph(State)
    graph.add_node("asks", asks)
    graph.add_edge(START, "asks")
    app = graph.compile(checkpointer=InMemorySaver())
    config = {"configurable": {"thread_id": "t"}}
    assert "__interrupt__" in app.invoke({"seen": []}, config)
    assert {"seen": ["yes"]} == app.invoke(Command(resume="yes"), config)
    assert ["GraphInterrupt", "NoneType"] == [event[2] for event in log.events[1::2]]

    @log.wrap
    def jumps(state: State) -> Command:
        return Command(graph=Command.PARENT, goto="target", update={"seen": ["jumped"]})

    inner = StateGraph(State)
    inner.add_node("jumps", jumps)
    inner.add_edge(START, "jumps")
    outer = StateGraph(State)
    outer.add_node("sub", log.wrap(inner.compile()), destinations=("target",))
    outer.add_node("target", sync_node)
    outer.add_edge(START, "sub")
    assert {"seen": ["jumped", "sync"]} == outer.compile().invoke({"seen": []})
    assert "ParentCommand" in [event[2] for event in log.events if event[0] == "leave"]


async def test_a_decorated_tool_keeps_its_injected_arguments_out_of_its_schema() -> None:
    """A ToolNode injects state and runtime into a decorated async function, and the model never sees them."""
    log = Log()

    async def look_up(word: str, state: Annotated[dict, InjectedState], runtime: ToolRuntime) -> str:
        """Look a word up."""
        return f"{word} {len(state['messages'])} {runtime.tool_call_id}"

    decorated = tool(log.wrap(look_up))
    assert {"word"} == set(decorated.tool_call_schema.model_json_schema()["properties"])
    graph = StateGraph(MessagesState)
    graph.add_node("tools", ToolNode([decorated]))
    graph.add_edge(START, "tools")
    call = AIMessage("", tool_calls=[{"name": "look_up", "args": {"word": "kv"}, "id": "call-1"}])
    state = await graph.compile().ainvoke({"messages": [call]})
    assert "kv 1 call-1" == state["messages"][-1].text
    assert ["enter", ("leave", 1, "NoneType")] == log.events
