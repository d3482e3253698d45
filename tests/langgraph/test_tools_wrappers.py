"""`ToolNode(tools, **tool_wrappers(kv))`: sync and async, retries, slimming, pauses, and what the graph sees of it."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from agentkv_langgraph import BudgetStop, tool_wrappers
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.types import Command, RetryPolicy, interrupt

from agentkv import Budget, BudgetExceeded
from agentkv.core.hint import ToolStatus

CONFIG = {"configurable": {"thread_id": "t"}}
LONG = "\n".join(f"line {number}: something new every time {number * 7919}" for number in range(4000))
R, S, F, P, C = (
    ToolStatus.RUNNING,
    ToolStatus.SUCCEEDED,
    ToolStatus.FAILED,
    ToolStatus.PAUSED,
    ToolStatus.CANCELLED,
)


@tool
def shell(cmd: str, timeout: float | None = None) -> str:
    """Run a command."""
    if cmd == "fail":
        raise OSError("no")
    if cmd == "ask":
        return str(interrupt("sure?"))
    return LONG if cmd == "long" else cmd


def calling(*cmds: str, name: str = "shell", **args: Any) -> dict[str, Any]:
    calls = [{"name": name, "args": {"cmd": cmd, **args}, "id": f"call-{n}"} for n, cmd in enumerate(cmds)]
    return {"messages": [AIMessage("", tool_calls=calls)]}


def graph_of(*tools: Any, retry: Any = None, **options: Any) -> Any:
    graph = StateGraph(MessagesState)
    graph.add_node("tools", ToolNode(list(tools), **options), retry_policy=retry)
    graph.add_edge(START, "tools")
    return graph.compile(checkpointer=InMemorySaver())


def told(hints: list[Any]) -> list[tuple[str, int, ToolStatus]]:
    return [(hint.call.call_id, hint.call.attempt, hint.call.status) for hint in hints if hint.call is not None]


def run(app: Any, given: Any, is_async: bool) -> Any:
    return asyncio.run(app.ainvoke(given, CONFIG)) if is_async else app.invoke(given, CONFIG)


BOTH = pytest.mark.parametrize("is_async", [False, True])


@BOTH
def test_each_call_is_told_by_its_id_with_its_features_and_never_its_arguments(kv, hints, is_async) -> None:
    """Command words and a declared time-out, which ends the forecast."""
    answer = run(graph_of(shell, **tool_wrappers(kv)), calling("git log --secret", "ls", timeout=3.0), is_async)
    assert ["git log --secret", "ls"] == [message.text for message in answer["messages"][1:]]
    assert {("call-0", 1, R), ("call-0", 1, S), ("call-1", 1, R), ("call-1", 1, S)} == set(told(hints))
    assert {"git log", "ls"} == {hint.call.command for hint in hints}
    starts = [hint for hint in hints if hint.wait is not None]
    assert all(hint.wait.quantile_s(0.9) <= 3.0 for hint in starts)
    assert "secret" not in repr(hints)


@BOTH
def test_a_long_answer_is_slimmed_on_arrival_unless_asked_not_to(kv, is_async) -> None:
    """With slim=False the state holds what the tool gave."""
    slimmed = run(graph_of(shell, **tool_wrappers(kv)), calling("long"), is_async)["messages"][-1]
    whole = run(graph_of(shell, **tool_wrappers(kv, slim=False)), calling("long"), is_async)["messages"][-1]
    assert len(slimmed.text) < len(LONG) / 4
    assert LONG == whole.text
    assert ("call-0", "shell", "success") == (slimmed.tool_call_id, slimmed.name, slimmed.status)


@BOTH
def test_failures_are_told_as_failed_whether_they_are_handled_or_not(kv, hints, is_async) -> None:
    """Handled, raised, wrong arguments, and a tool that nobody knows (request.tool is None)."""
    handled = graph_of(shell, handle_tool_errors=True, **tool_wrappers(kv))
    assert "error" == run(handled, calling("fail"), is_async)["messages"][-1].status
    with pytest.raises(OSError):
        run(graph_of(shell, handle_tool_errors=False, **tool_wrappers(kv)), calling("fail"), is_async)
    assert "error" == run(handled, calling("a", timeout="soon"), is_async)["messages"][-1].status
    assert "error" == run(handled, calling("a", name="unknown"), is_async)["messages"][-1].status
    assert [R, F] * 4 == [status for *_, status in told(hints)]
    assert [1, 1, 2, 2, 3, 3, 4, 4] == [attempt for _, attempt, _ in told(hints)]


@BOTH
def test_an_interrupt_is_a_pause_and_goes_on_as_the_same_attempt(kv, hints, is_async) -> None:
    """handle_tool_errors=True makes no answer of it."""
    app = graph_of(shell, handle_tool_errors=True, **tool_wrappers(kv))
    assert "__interrupt__" in run(app, calling("ask"), is_async)
    assert "yes" == run(app, Command(resume="yes"), is_async)["messages"][-1].text
    assert [("call-0", 1, status) for status in (R, P, R, S)] == told(hints)
    assert ["paused", "succeeded"] == [one.status for one in kv.report("t").tools]


def test_a_wrapper_that_executes_twice_and_a_node_that_is_retried_count_attempts(kv, hints) -> None:
    """Each run of the tool is a call of its own, under one id."""
    ours = tool_wrappers(kv)["wrap_tool_call"]
    left = iter([OSError("no"), OSError("no"), None])

    @tool
    def flaky(cmd: str) -> str:
        """Fail twice."""
        problem = next(left)
        if problem is not None:
            raise problem
        return cmd

    def twice(request: Any, execute: Any) -> Any:
        try:
            return ours(request, execute)
        except OSError:
            return ours(request, execute)

    policy = RetryPolicy(max_attempts=2, initial_interval=0.01, retry_on=OSError)
    app = graph_of(flaky, retry=policy, handle_tool_errors=False, wrap_tool_call=twice)
    assert "ok" == app.invoke(calling("ok", name="flaky"), CONFIG)["messages"][-1].text
    assert [("call-0", attempt, status) for attempt, end in ((1, F), (2, F), (3, S)) for status in (R, end)] == told(
        hints
    )


async def test_a_cancelled_call_is_told_once_with_the_callback_attached_too(kv, hints) -> None:
    """Caller's cancel."""
    running = asyncio.Event()

    @tool
    async def sleeper(cmd: str) -> str:
        """Sleep."""
        running.set()
        await asyncio.sleep(60)
        return cmd

    app = kv.attach(graph_of(sleeper, **tool_wrappers(kv)))
    task = asyncio.create_task(app.ainvoke(calling("a", name="sleeper"), CONFIG))
    await running.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [("call-0", 1, R), ("call-0", 1, C)] == told(hints)
    assert 0 == len([one for one in kv.report("t").tools if one.status != "cancelled"])


async def test_a_hundred_slow_async_calls_overlap(kv, hints) -> None:
    """The wrapper does not serialise them."""

    @tool
    async def nap(cmd: str) -> str:
        """Nap."""
        await asyncio.sleep(0.2)
        return cmd

    started = time.monotonic()
    app = graph_of(nap, **tool_wrappers(kv))
    answer = await app.ainvoke(calling(*[str(n) for n in range(100)], name="nap"), CONFIG)
    assert time.monotonic() - started < 5
    assert [str(n) for n in range(100)] == [m.text for m in answer["messages"][1:]]
    assert 200 == len(told(hints))


def test_threads_of_a_sync_tool_node_tell_each_its_own_call(kv, hints) -> None:
    """A hundred calls in LangGraph's own pool."""
    app = graph_of(shell, **tool_wrappers(kv))
    app.invoke(calling(*[str(n) for n in range(100)]), CONFIG)
    by_call: dict[str, list[ToolStatus]] = {}
    for call, _, status in told(hints):
        by_call.setdefault(call, []).append(status)
    assert {f"call-{n}": [R, S] for n in range(100)} == by_call


@BOTH
def test_a_spent_budget_is_not_made_an_answer_of(kv, is_async) -> None:
    """It reaches the caller through handle_tool_errors=True."""
    app = graph_of(shell, handle_tool_errors=True, **tool_wrappers(kv))
    with kv.task("small", budget=Budget(tool_calls=1)), pytest.raises(BudgetExceeded, match="tool") as caught:
        run(app, calling("a", "b"), is_async)
    assert isinstance(caught.value, BudgetStop)
    assert (1, "small") == (caught.value.allowed, caught.value.task)


@BOTH
def test_commands_and_lists_pass_and_only_their_texts_are_slimmed(kv, is_async) -> None:
    """A tool that answers with a Command keeps its update."""

    @tool
    def commands(cmd: str) -> Command:
        """Answer with a command."""
        return Command(update={"messages": [ToolMessage(LONG, tool_call_id="call-0", artifact=LONG)]})

    last = run(graph_of(commands, **tool_wrappers(kv)), calling("a", name="commands"), is_async)["messages"][-1]
    assert len(last.text) < len(LONG) / 4
    assert LONG == last.artifact
