"""The tool scope inside real graphs: told once as what it was, whether it ends, fails, pauses or is cancelled."""

from __future__ import annotations

import asyncio
import operator
import threading
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.messages import AIMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import NodeTimeoutError
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.types import Command, interrupt

from agentkv.core.hint import HintKind, ToolStatus


class State(TypedDict):
    seen: Annotated[list[Any], operator.add]


def graph_of(*nodes: Any, timeout: float | None = None, checkpointer: Any = None) -> Any:
    graph = StateGraph(State)
    for node in nodes:
        graph.add_node(node, timeout=timeout)
        graph.add_edge(START, node.__name__)
    return graph.compile(checkpointer=checkpointer)


def told(hints: list[Any]) -> list[tuple[HintKind, ToolStatus]]:
    return [(hint.kind, hint.call.status) for hint in hints if hint.call is not None]


START_ = (HintKind.TOOL_START, ToolStatus.RUNNING)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_tool_in_a_node_is_told_with_its_task_node_and_command(kv, hints, is_async) -> None:
    """Start and end carry who and what; never the arguments."""

    @kv.node
    def node(state: State) -> State:
        with kv.tool("shell", args={"cmd": "pytest -q --secret"}):
            return {"seen": []}

    @kv.node
    async def anode(state: State) -> State:
        async with kv.tool("shell", args={"cmd": "pytest -q --secret"}):
            return {"seen": []}

    config = {"configurable": {"thread_id": "t"}}
    if is_async:
        asyncio.run(graph_of(anode).ainvoke({"seen": []}, config))
    else:
        graph_of(node).invoke({"seen": []}, config)
    assert [START_, (HintKind.TOOL_END, ToolStatus.SUCCEEDED)] == told(hints)
    assert {("t", "anode" if is_async else "node", "shell", "pytest")} == {
        (hint.task, hint.node, hint.call.tool, hint.call.command) for hint in hints
    }
    assert "secret" not in repr(hints)


def test_a_failing_tool_is_told_as_failed_and_its_error_passes(kv, hints) -> None:
    """The graph sees the very error."""
    problem = OSError("disk on fire")

    @kv.node
    def node(state: State) -> None:
        with kv.tool("shell"):
            raise problem

    with pytest.raises(OSError) as caught:
        graph_of(node).invoke({"seen": []})
    assert problem is caught.value
    assert [START_, (HintKind.TOOL_ERROR, ToolStatus.FAILED)] == told(hints)


def test_an_interrupted_tool_is_told_as_paused_and_resumes(kv, hints) -> None:
    """Neither failed nor finished; the resumed run is a new start with its own end."""

    @kv.node
    def node(state: State) -> State:
        with kv.tool("ask", call_id="call-1"):
            return {"seen": [interrupt("sure?")]}

    app = graph_of(node, checkpointer=InMemorySaver())
    config = {"configurable": {"thread_id": "t"}}
    app.invoke({"seen": []}, config)
    assert [START_, (HintKind.TOOL_END, ToolStatus.PAUSED)] == told(hints)
    assert ["yes"] == app.invoke(Command(resume="yes"), config)["seen"]
    assert [START_, (HintKind.TOOL_END, ToolStatus.SUCCEEDED)] == told(hints)[2:]


def test_an_interrupt_inside_a_tool_of_a_tool_node_pauses_although_errors_are_handled(kv, hints) -> None:
    """handle_tool_errors=True does not turn the pause into an answer."""

    @tool
    def ask() -> str:
        """Ask a person."""
        with kv.tool("ask"):
            return str(interrupt("sure?"))

    graph = StateGraph(MessagesState)
    graph.add_node("tools", ToolNode([ask], handle_tool_errors=True))
    graph.add_edge(START, "tools")
    app = graph.compile(checkpointer=InMemorySaver())
    call = AIMessage("", tool_calls=[{"name": "ask", "args": {}, "id": "call-1"}])
    config = {"configurable": {"thread_id": "t"}}
    assert "__interrupt__" in app.invoke({"messages": [call]}, config)
    assert [START_, (HintKind.TOOL_END, ToolStatus.PAUSED)] == told(hints)
    assert "yes" == app.invoke(Command(resume="yes"), config)["messages"][-1].text


async def test_a_callers_cancel_is_told_once_as_cancelled(kv, hints) -> None:
    """The graph's task is cancelled while the tool runs."""
    running = asyncio.Event()

    @kv.node
    async def node(state: State) -> None:
        async with kv.tool("shell"):
            running.set()
            await asyncio.sleep(60)

    run = asyncio.create_task(graph_of(node).ainvoke({"seen": []}))
    await running.wait()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert [START_, (HintKind.TOOL_END, ToolStatus.CANCELLED)] == told(hints)


async def test_a_node_timeout_is_told_once_as_cancelled(kv, hints) -> None:
    """LangGraph cancels the node; the caller sees the timeout."""

    @kv.node
    async def node(state: State) -> None:
        async with kv.tool("shell"):
            await asyncio.sleep(60)

    with pytest.raises(NodeTimeoutError):
        await graph_of(node, timeout=0.05).ainvoke({"seen": []})
    assert [START_, (HintKind.TOOL_END, ToolStatus.CANCELLED)] == told(hints)


async def test_a_failing_sibling_cancels_a_tool_once(kv, hints) -> None:
    """The sibling's error is the run's error."""
    running = asyncio.Event()

    @kv.node
    async def waits(state: State) -> None:
        async with kv.tool("shell"):
            running.set()
            await asyncio.sleep(60)

    @kv.node
    async def fails(state: State) -> None:
        await running.wait()
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await graph_of(waits, fails).ainvoke({"seen": []})
    assert [START_, (HintKind.TOOL_END, ToolStatus.CANCELLED)] == told(hints)


async def test_parallel_async_tools_overlap(kv) -> None:
    """Two tools run at the same time: each waits for the other to have started."""
    started = [asyncio.Event(), asyncio.Event()]

    def made(mine: int) -> Any:
        async def node(state: State) -> State:
            async with kv.tool("shell"):
                started[mine].set()
                await asyncio.wait_for(started[1 - mine].wait(), 5)
            return {"seen": [mine]}

        node.__name__ = f"node{mine}"
        return kv.node(node)

    assert [0, 1] == sorted((await graph_of(made(0), made(1)).ainvoke({"seen": []}))["seen"])


def test_a_late_end_from_another_thread_is_tolerated(kv, hints) -> None:
    """A tool that outlives its run still tells its end."""
    release = threading.Event()
    threads = []

    @kv.node
    def node(state: State) -> State:
        scope = kv.tool("shell")
        scope.__enter__()
        thread = threading.Thread(target=lambda: (release.wait(5), scope.__exit__(None, None, None)))
        thread.start()
        threads.append(thread)
        return {"seen": []}

    graph_of(node).invoke({"seen": []})
    assert [START_] == told(hints)
    release.set()
    threads[0].join(5)
    assert [START_, (HintKind.TOOL_END, ToolStatus.SUCCEEDED)] == told(hints)
