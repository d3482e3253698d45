"""`kv.attach(graph)`: hints and bill of a graph that contains no line of ours."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
import weakref
from typing import Any

import pytest
from agentkv_langgraph import AgentKVCallback, ChatAgentKV, LangGraphHost
from langchain_core.caches import InMemoryCache
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_core.tools import ToolException, tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.types import Command, interrupt

from agentkv import AgentKV, Budget, BudgetExceeded, ScriptedEngine
from agentkv.core.hint import HintKind, ToolStatus
from agentkv.errors import ConfigError


@tool
def shell(cmd: str) -> str:
    """Run a command."""
    if cmd == "fail":
        raise OSError("no")
    if cmd == "ask":
        return str(interrupt("sure?"))
    return cmd


def calling(*cmds: str) -> AIMessage:
    calls = [{"name": "shell", "args": {"cmd": cmd}, "id": f"call-{n}"} for n, cmd in enumerate(cmds)]
    return AIMessage("", tool_calls=calls)


def tools_graph(*tools: Any, **options: Any) -> Any:
    graph = StateGraph(MessagesState)
    graph.add_node("tools", ToolNode(list(tools), **options))
    graph.add_edge(START, "tools")
    return graph.compile(checkpointer=InMemorySaver())


def model_graph(model: Any) -> Any:
    def talk(state: MessagesState) -> MessagesState:
        return {"messages": [model.invoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node(talk)
    graph.add_edge(START, "talk")
    return graph.compile()


def told(hints: list[Any]) -> list[tuple[str, ToolStatus]]:
    return [(hint.call.call_id, hint.call.status) for hint in hints if hint.call is not None]


CONFIG = {"configurable": {"thread_id": "t"}}


@pytest.mark.parametrize("is_async", [False, True])
def test_tool_calls_are_told_by_their_id_with_task_node_and_command(kv, hints, is_async) -> None:
    """Two parallel calls of one message are two calls; arguments stay out."""
    app = kv.attach(tools_graph(shell))
    given = {"messages": [calling("pytest -q --secret", "ruff check")]}
    if is_async:
        asyncio.run(app.ainvoke(given, CONFIG))
    else:
        app.invoke(given, CONFIG)
    assert {"call-0": 2, "call-1": 2} == {key: len(list(rows)) for key, rows in _by_call(hints)}
    assert {("t", "tools", "shell", "pytest"), ("t", "tools", "shell", "ruff")} == {
        (hint.task, hint.node, hint.call.tool, hint.call.command) for hint in hints
    }
    assert "secret" not in repr(hints)
    assert ["succeeded"] * 2 == [row.status for row in kv.report("t").tools]


def _by_call(hints: list[Any]) -> Any:
    ordered = sorted(hints, key=lambda hint: hint.call.call_id)
    return [(key, list(rows)) for key, rows in itertools.groupby(ordered, key=lambda hint: hint.call.call_id)]


def test_a_failing_tool_is_told_as_failed_whether_its_error_is_handled_or_not(kv, hints) -> None:
    """handle_tool_errors changes what the model sees, not what happened."""
    kv.attach(tools_graph(shell, handle_tool_errors=True)).invoke({"messages": [calling("fail")]}, CONFIG)
    with pytest.raises(OSError):
        kv.attach(tools_graph(shell, handle_tool_errors=False)).invoke({"messages": [calling("fail")]}, CONFIG)
    assert [("call-0", ToolStatus.RUNNING), ("call-0", ToolStatus.FAILED)] * 2 == told(hints)
    assert [HintKind.TOOL_START, HintKind.TOOL_ERROR] * 2 == [hint.kind for hint in hints]


def test_a_tool_that_answers_with_its_error_is_told_as_failed(kv, hints) -> None:
    """The tool itself turned its exception into a message."""

    @tool
    def picky() -> str:
        """Refuse."""
        raise ToolException("no")

    picky.handle_tool_error = True
    call = AIMessage("", tool_calls=[{"name": "picky", "args": {}, "id": "call-0"}])
    kv.attach(tools_graph(picky)).invoke({"messages": [call]}, CONFIG)
    assert [("call-0", ToolStatus.RUNNING), ("call-0", ToolStatus.FAILED)] == told(hints)


async def test_hints_of_an_async_graph_are_told_without_a_hop_to_another_thread(kv) -> None:
    """The first decision is made in the caller."""
    threads = []
    kv.subscribe(lambda _: threads.append(threading.current_thread()))

    @tool
    async def quick() -> str:
        """Be quick."""
        return "done"

    call = AIMessage("", tool_calls=[{"name": "quick", "args": {}, "id": "call-0"}])
    await kv.attach(tools_graph(quick)).ainvoke({"messages": [call]}, CONFIG)
    assert [threading.current_thread()] * 2 == threads


def test_an_interrupted_tool_is_told_as_paused_and_starts_again(kv, hints) -> None:
    """The graph pauses and resumes as without us."""
    app = kv.attach(tools_graph(shell, handle_tool_errors=True))
    assert "__interrupt__" in app.invoke({"messages": [calling("ask")]}, CONFIG)
    assert "yes" == app.invoke(Command(resume="yes"), CONFIG)["messages"][-1].text
    expected = [ToolStatus.RUNNING, ToolStatus.PAUSED, ToolStatus.RUNNING, ToolStatus.SUCCEEDED]
    assert [("call-0", status) for status in expected] == told(hints)


async def test_a_cancelled_tool_is_told_once_as_cancelled(kv, hints) -> None:
    """The caller gives up while the tool runs."""
    running = asyncio.Event()

    @tool
    async def sleeper() -> str:
        """Sleep."""
        running.set()
        await asyncio.sleep(60)
        return "slept"

    app = kv.attach(tools_graph(sleeper))
    call = AIMessage("", tool_calls=[{"name": "sleeper", "args": {}, "id": "call-0"}])
    run = asyncio.create_task(app.ainvoke({"messages": [call]}, CONFIG))
    await running.wait()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert [("call-0", ToolStatus.RUNNING), ("call-0", ToolStatus.CANCELLED)] == told(hints)


def test_a_tool_called_outside_of_a_tool_node_is_told_too(kv, hints) -> None:
    """A plain node that calls a tool needs no change either."""

    def node(state: MessagesState) -> MessagesState:
        return {"messages": [shell.invoke({"cmd": "ls"})]}

    graph = StateGraph(MessagesState)
    graph.add_node(node)
    graph.add_edge(START, "node")
    kv.attach(graph.compile()).invoke({"messages": []}, CONFIG)
    assert [ToolStatus.RUNNING, ToolStatus.SUCCEEDED] == [status for _, status in told(hints)]
    assert {"ls"} == {hint.call.command for hint in hints}


USED = {
    "input_tokens": 10,
    "output_tokens": 4,
    "total_tokens": 14,
    "input_token_details": {"cache_read": 6, "audio": 1},
}


def foreign(*, cache: Any = None, usage: Any = USED) -> GenericFakeChatModel:
    answers = (
        AIMessage("hi", usage_metadata=usage, response_metadata={"model_name": "gpt-x"}, id=f"m{n}")
        for n in itertools.count()
    )
    return GenericFakeChatModel(messages=answers, cache=cache, disable_streaming=True)


needs_books = pytest.mark.skipif(
    not hasattr(AgentKV, "record_call"), reason="AgentKV cannot yet put a foreign call on its books"
)


@needs_books
def test_a_foreign_models_usage_is_billed_to_the_task(kv) -> None:
    """Input, cached and output tokens, with the model's name."""
    kv.attach(model_graph(foreign())).invoke({"messages": ["a"]}, CONFIG)
    bill = kv.report("t")
    assert (10, 6, 4) == (bill.usage.input_tokens, bill.usage.cached_tokens, bill.usage.output_tokens)
    assert [("gpt-x", "talk")] == [(call.model, call.node) for call in bill.calls]


def test_our_own_models_calls_are_not_billed_twice(kv) -> None:
    """With the callback attached the bill is what it is without it."""
    recorded = []
    kv.record_call = lambda **call: recorded.append(call)
    model_graph(ChatAgentKV(kv)).invoke({"messages": ["a"]}, {"configurable": {"thread_id": "plain"}})
    kv.attach(model_graph(ChatAgentKV(kv))).invoke({"messages": ["a"]}, CONFIG)
    assert [] == recorded
    plain, attached = kv.report("plain").usage, kv.report("t").usage
    assert (plain.input_tokens, plain.output_tokens, 1) == (
        attached.input_tokens,
        attached.output_tokens,
        attached.calls,
    )


def test_a_foreign_models_turn_is_told_and_our_own_models_only_once(kv, hints) -> None:
    """Start and end, with task and node; a turn that fails ends too."""
    kv.attach(model_graph(foreign())).invoke({"messages": ["a"]}, CONFIG)
    turn = [(HintKind.TURN_START, "t", "talk"), (HintKind.TURN_END, "t", "talk")]
    assert turn == [(hint.kind, hint.task, hint.node) for hint in hints]
    hints.clear()
    with pytest.raises(RuntimeError):
        kv.attach(model_graph(GenericFakeChatModel(messages=iter(()), disable_streaming=True))).invoke(
            {"messages": ["a"]}, CONFIG
        )
    assert turn == [(hint.kind, hint.task, hint.node) for hint in hints]
    hints.clear()
    kv.attach(model_graph(ChatAgentKV(kv))).invoke({"messages": ["a"]}, CONFIG)
    assert turn == [(hint.kind, hint.task, hint.node) for hint in hints]


@needs_books
def test_an_answer_from_langchains_cache_costs_nothing(kv) -> None:
    """Two equal calls, one on the wire."""
    app = kv.attach(model_graph(foreign(cache=InMemoryCache())))
    app.invoke({"messages": ["a"]}, CONFIG)
    app.invoke({"messages": ["a"]}, CONFIG)
    bill = kv.report("t")
    assert (1, 14) == (bill.usage.calls, bill.usage.total_tokens)
    assert [False, True] == [call.served_locally for call in bill.calls]
    assert 0 == bill.calls[1].cost_usd


@needs_books
def test_a_run_without_a_name_has_one_bill_for_both_kinds_of_calls(kv) -> None:
    """Root run id: what the callback sees and what our own model sees agree."""
    seen = []

    def both(state: MessagesState) -> MessagesState:
        ours, theirs = ChatAgentKV(kv).invoke("a"), foreign().invoke("a")
        seen.append(kv.caller().task)
        return {"messages": [ours, theirs]}

    graph = StateGraph(MessagesState)
    graph.add_node(both)
    graph.add_edge(START, "both")
    kv.attach(graph.compile()).invoke({"messages": []})
    assert 2 == kv.report(seen[0]).usage.calls


def test_an_answer_without_usage_is_counted_here_and_says_so(kv) -> None:
    """A bill of nothing would be a lie."""
    kv.attach(model_graph(foreign(usage=None))).invoke({"messages": ["a"]}, CONFIG)
    bill = kv.report("t")
    assert (9, 1) == (bill.usage.input_tokens, bill.usage.output_tokens)
    assert bill.estimated


def test_a_graph_that_is_attached_twice_or_inside_an_attached_one_is_told_of_once(kv, hints) -> None:
    """One AgentKV, one pair of hints per call."""
    inner = kv.attach(tools_graph(shell))
    outer = StateGraph(MessagesState)
    outer.add_node("inner", inner)
    outer.add_edge(START, "inner")
    app = kv.attach(kv.attach(outer.compile()))
    app.invoke({"messages": [calling("ls")]}, CONFIG)
    assert [("call-0", ToolStatus.RUNNING), ("call-0", ToolStatus.SUCCEEDED)] == told(hints)


def test_only_what_can_run_can_be_attached(kv) -> None:
    """A builder is told to be compiled."""
    with pytest.raises(ConfigError, match="not a StateGraph; compile it first"):
        kv.attach(StateGraph(MessagesState))


def test_nothing_keeps_an_attached_agentkv_alive_but_its_graph(make_kv) -> None:
    """Ten thousand attached graphs would not pile up."""
    kv = AgentKV.with_engine(ScriptedEngine(["x"]), host=LangGraphHost())
    app, gone = kv.attach(tools_graph(shell)), weakref.ref(kv)
    kv.close()
    del app, kv
    gc.collect()
    assert gone() is None


def test_a_tool_call_budget_stops_the_run(kv) -> None:
    """BudgetExceeded is the one thing that the callback lets out."""
    app = kv.attach(tools_graph(shell, handle_tool_errors=False))
    with kv.task("small", budget=Budget(tool_calls=1)), pytest.raises(BudgetExceeded):
        app.invoke({"messages": [calling("a", "b")]}, CONFIG)


def test_nothing_is_kept_of_runs_that_are_over(kv) -> None:
    """Ten runs leave the callback as empty as it was."""
    callback = AgentKVCallback(kv)
    app = tools_graph(shell).with_config(callbacks=[callback])
    for number in range(10):
        app.invoke({"messages": [calling("a")]}, {"configurable": {"thread_id": str(number)}})
    assert (0, {}, {}) == (len(callback._runs), callback._tools, callback._models)


def test_a_runtime_that_fails_does_not_reach_the_agent() -> None:
    """Hints and reports fail into a log line."""

    class Broken:
        def caller(self) -> Any:
            from agentkv.core.task import Caller

            return Caller(task="t")

        def tool(self, *_: Any, **__: Any) -> Any:
            raise OSError("broken")

        def record_call(self, **_: Any) -> None:
            raise OSError("broken")

    callback = AgentKVCallback(Broken())
    answer = tools_graph(shell).with_config(callbacks=[callback]).invoke({"messages": [calling("a")]}, CONFIG)
    assert "a" == answer["messages"][-1].text
    model_graph(foreign()).with_config(callbacks=[callback]).invoke({"messages": ["a"]}, CONFIG)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_scope_inside_an_announced_tool_is_the_same_call(kv, is_async) -> None:
    """Callbacks and `kv.tool` together count a call once, and what comes after it is a call of its own."""

    @tool
    def pytest_tool(cmd: str) -> str:
        """Run the tests."""
        with kv.tool("pytest", args={"cmd": cmd}) as call:
            call.progress(0.5)
        return cmd

    app = kv.attach(tools_graph(pytest_tool))
    message = AIMessage("", tool_calls=[{"name": "pytest_tool", "args": {"cmd": "pytest"}, "id": "call-0"}])
    if is_async:
        asyncio.run(app.ainvoke({"messages": [message]}, CONFIG))
    else:
        app.invoke({"messages": [message]}, CONFIG)
    assert ["pytest_tool"] == [one.tool for one in kv.report("t").tools]
    with kv.task("t", final=False), kv.tool("ruff"):
        pass
    assert ["pytest_tool", "ruff"] == [one.tool for one in kv.report("t").tools]
    assert 2 == kv._books.account("t").used.tool_calls
