"""A tool that hands over to the parent graph is done: it counts, whoever tells of it; one that is interrupted does not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from agentkv_langgraph import tool_wrappers
from langchain_core.messages import AIMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.types import Command, interrupt

from agentkv import Budget
from agentkv.core.hint import ToolStatus
from agentkv.errors import BudgetExceeded

WAYS = ("scope", "function above", "function below", "wrappers", "attach")


class State(MessagesState, total=False):
    hops: int


def hand_over() -> Any:
    """A graph whose node commands its parent."""

    def hand(state: State) -> Any:
        return Command(graph=Command.PARENT, goto="lead", update={"hops": state.get("hops", 0) + 1})

    return StateGraph(State).add_node("hand", hand).add_edge(START, "hand").compile()


def graph_of(kv: Any, way: str, rounds: int) -> Any:
    """`lead` asks for `work` until it did so `rounds` times; `work` runs a tool that ends by a command for the parent."""
    inner = hand_over()

    def delegate(hops: int) -> Any:
        """Delegate."""
        if way == "scope":
            with kv.tool("delegate", args={"hops": hops}):
                return inner.invoke({"messages": [], "hops": hops})
        return inner.invoke({"messages": [], "hops": hops})

    made = tool(kv.tool_function(delegate) if way == "function below" else delegate)
    made = kv.tool_function(made) if way == "function above" else made
    node = ToolNode([made], **(tool_wrappers(kv) if way == "wrappers" else {}))

    def lead(state: State) -> Any:
        hops = state.get("hops", 0)
        call = {"name": "delegate", "args": {"hops": hops}, "id": f"call-{hops}"}
        ask = {"messages": [AIMessage("", tool_calls=[call])]}
        return Command(goto="work", update=ask) if hops < rounds else Command(goto=END)

    graph = StateGraph(State)
    graph.add_node("lead", lead, destinations=("work", END))
    graph.add_node("work", node)
    graph.add_edge(START, "lead")
    app = graph.compile()
    return kv.attach(app) if way == "attach" else app


def run(app: Any, is_async: bool) -> Any:
    given = {"messages": []}
    return asyncio.run(app.ainvoke(given)) if is_async else app.invoke(given)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_hand_over_is_a_call_that_succeeded(kv, hints, way, is_async) -> None:
    """The graph goes on where the command says, and the bill and the hints tell of calls that are over."""
    with kv.task("t", final=False):
        assert 3 == run(graph_of(kv, way, rounds=3), is_async)["hops"]
    assert ["succeeded"] * 3 == [call.status for call in kv.report("t").tools]
    told = [hint.call.status for hint in hints if hint.call is not None]
    assert [ToolStatus.RUNNING, ToolStatus.SUCCEEDED] * 3 == told


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_budget_of_tool_calls_holds_over_hand_overs(kv, way, is_async) -> None:
    """The third of two is refused."""
    with kv.task("t", budget=Budget(tool_calls=2), final=False), pytest.raises(BudgetExceeded):
        run(graph_of(kv, way, rounds=6), is_async)
    assert ["succeeded"] * 2 == [call.status for call in kv.report("t").tools]


def test_an_interrupt_still_gives_back(kv) -> None:
    """It runs again, and counts once."""

    def work(state: State) -> Any:
        with kv.tool("ask"):
            return {"messages": [("user", interrupt("sure?"))]}

    graph = StateGraph(State).add_node("work", work).add_edge(START, "work")
    app = graph.compile(checkpointer=InMemorySaver())
    config = {"configurable": {"thread_id": "t"}}
    with kv.task("t", budget=Budget(tool_calls=1), final=False):
        app.invoke({"messages": []}, config)
        assert "yes" == app.invoke(Command(resume="yes"), config)["messages"][-1].text
    assert ["paused", "succeeded"] == [call.status for call in kv.report("t").tools]
