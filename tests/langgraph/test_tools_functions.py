"""`@kv.tool_function`: a decorated tool is the plain one to every framework, and each call is told once."""

from __future__ import annotations

import asyncio
import inspect
import time
from functools import partial
from typing import Annotated, Any

import pytest
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import BaseTool, InjectedToolCallId, ToolException, tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import InjectedState, ToolNode, ToolRuntime
from langgraph.types import Command, TimeoutPolicy, interrupt

from agentkv import Request
from agentkv.core.hint import ToolStatus
from agentkv.errors import BudgetExceeded, ConfigError

CONFIG = {"configurable": {"thread_id": "t"}}


def call_of(name: str, call_id: str = "call-0", **args: Any) -> AIMessage:
    return AIMessage("", tool_calls=[{"name": name, "args": args, "id": call_id}])


def graph_of(*tools: Any, timeout: Any = None, **options: Any) -> Any:
    graph = StateGraph(MessagesState)
    graph.add_node("tools", ToolNode(list(tools), **options), timeout=timeout)
    graph.add_edge(START, "tools")
    return graph.compile(checkpointer=InMemorySaver())


def told(hints: list[Any]) -> list[tuple[str, ToolStatus]]:
    return [(hint.call.call_id, hint.call.status) for hint in hints if hint.call is not None]


def once(call_id: str) -> list[tuple[str, ToolStatus]]:
    return [(call_id, ToolStatus.RUNNING), (call_id, ToolStatus.SUCCEEDED)]


def plain_search(  # noqa: PLR0917  injected one by one, as users write them
    cmd: str,
    state: Annotated[dict[str, Any], InjectedState],
    call_id: Annotated[str, InjectedToolCallId],
    runtime: ToolRuntime,
    config: RunnableConfig,
    limit: int = 3,
) -> str:
    """Search for it.

    More words.
    """
    seen = [cmd, limit, len(state["messages"]), call_id, runtime.tool_call_id, config["configurable"]["thread_id"]]
    return repr(seen)


async def async_search(cmd: str, runtime: ToolRuntime, state: Annotated[dict[str, Any], InjectedState]) -> str:
    """Search for it."""
    await asyncio.sleep(0)
    return repr([cmd, len(state["messages"]), runtime.tool_call_id])


ORDERS = {
    "below": lambda kv, fn: tool(kv.tool_function(fn)),
    "above": lambda kv, fn: kv.tool_function(tool(fn)),
}


@pytest.mark.parametrize("fn", [plain_search, async_search])
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_a_decorated_tool_shows_the_model_the_same_and_gets_the_same_injected(kv, hints, fn, order) -> None:
    """Schema, description, name; state, runtime, call id and config; one pair of hints by the call's id."""
    plain, decorated = tool(fn), order(kv, fn)
    assert plain.tool_call_schema.model_json_schema() == decorated.tool_call_schema.model_json_schema()
    assert (plain.name, plain.description, plain.args) == (decorated.name, decorated.description, decorated.args)
    assert isinstance(decorated, type(plain))
    given = {"messages": [call_of(fn.__name__, cmd="grep -r secret")]}
    answers = [asyncio.run(graph_of(one).ainvoke(given, CONFIG))["messages"][-1].content for one in (plain, decorated)]
    assert answers[0] == answers[1]
    assert once("call-0") == told(hints)
    assert {("t", "tools", fn.__name__, "grep")} == {(h.task, h.node, h.call.tool, h.call.command) for h in hints}
    assert "secret" not in repr(hints)


def test_a_decorated_function_is_the_function_to_inspect_and_to_call(kv, hints) -> None:
    """Signature, annotations, docstring, defaults; positional calls outside of any graph."""

    def run(cmd: str, *, times: int = 2) -> str:
        """Run it."""
        return cmd * times

    decorated = kv.tool_function(run)
    assert inspect.signature(run) == inspect.signature(decorated)
    assert (run.__doc__, run.__name__, run.__annotations__) == (
        decorated.__doc__,
        decorated.__name__,
        decorated.__annotations__,
    )
    assert "lsls" == decorated("ls")
    assert ["ls", "ls"] == [hint.call.command for hint in hints]


async def test_async_functions_partials_and_objects_are_told_too(kv, hints) -> None:
    """The forms that frameworks take."""

    async def wait(cmd: str) -> str:
        await asyncio.sleep(0)
        return cmd

    class Runs:
        def __call__(self, cmd: str) -> str:
            return cmd

    class Static:
        @staticmethod
        def __call__(cmd: str, times: int = 1) -> str:
            return cmd * times

    class OfClass:
        @classmethod
        async def __call__(cls, cmd: str) -> str:
            return cls.__name__ + cmd

    assert inspect.iscoroutinefunction(kv.tool_function(wait))
    assert "ls" == await kv.tool_function(wait)("ls")
    assert "ls" == await kv.tool_function(partial(wait, "ls"))()
    assert "ls" == kv.tool_function(Runs())("ls")
    assert "lsls" == kv.tool_function(Static())("ls", 2)
    assert "OfClassls" == await kv.tool_function(OfClass())("ls")
    assert ["wait", "wait", "Runs", "Static", "OfClass"] == [hint.call.tool for hint in hints[::2]]
    assert ["ls", "", "ls", "ls", "ls"] == [hint.call.command for hint in hints[::2]]


def test_options_are_those_of_the_scope(kv, hints) -> None:
    """A name, an estimate, and slimming of what comes out."""

    @kv.tool_function(name="tests", expect_s=30.0, slim=True)
    def run() -> str:
        """Run the tests."""
        return "\n".join(f"line {number}: something new every time {number * 7919}" for number in range(4000))

    assert len(run()) < 20_000
    assert ("tests", 30.0) == (hints[0].call.tool, hints[0].call.expect_s)
    assert hints[0].wait.source == "declared"


def test_what_is_no_tool_is_refused(kv) -> None:
    """With what to do instead."""

    def generates() -> Any:
        yield 1

    with pytest.raises(ConfigError, match="is a generator"):
        kv.tool_function(generates)
    with pytest.raises(ConfigError, match=r"put @kv.tool_function below"):
        kv.tool_function(dict)


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_an_interrupt_in_a_decorated_tool_is_a_pause(kv, hints, order) -> None:
    """handle_tool_errors does not make an answer of it; the resumed run is the same attempt."""

    def ask() -> str:
        """Ask."""
        return str(interrupt("sure?"))

    app = graph_of(order(kv, ask), handle_tool_errors=True)
    assert "__interrupt__" in app.invoke({"messages": [call_of("ask")]}, CONFIG)
    assert "yes" == app.invoke(Command(resume="yes"), CONFIG)["messages"][-1].text
    expected = [ToolStatus.RUNNING, ToolStatus.PAUSED, ToolStatus.RUNNING, ToolStatus.SUCCEEDED]
    assert expected == [status for _, status in told(hints)]
    assert {1} == {hint.call.attempt for hint in hints}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
async def test_a_cancelled_decorated_tool_is_told_once(kv, hints, order) -> None:
    """As cancelled."""
    running = asyncio.Event()

    async def sleeper() -> str:
        """Sleep."""
        running.set()
        await asyncio.sleep(60)
        return ""

    run = asyncio.create_task(graph_of(order(kv, sleeper)).ainvoke({"messages": [call_of("sleeper")]}, CONFIG))
    await running.wait()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert [ToolStatus.RUNNING, ToolStatus.CANCELLED] == [status for _, status in told(hints)]


def test_a_tool_object_that_answers_with_its_failure_is_told_as_failed(kv, hints) -> None:
    """What it raises and what it turns into a message."""

    def picky() -> str:
        """Refuse."""
        raise ToolException("no")

    answering = tool(picky)
    answering.handle_tool_error = True
    result = kv.tool_function(answering).invoke({"type": "tool_call", "name": "picky", "args": {}, "id": "call-0"})
    assert "error" == result.status
    with pytest.raises(ToolException):
        kv.tool_function(tool(picky)).invoke({})
    assert [ToolStatus.RUNNING, ToolStatus.FAILED] * 2 == [status for _, status in told(hints)]


def test_a_tool_class_of_ones_own_is_told(kv, hints) -> None:
    """Not only functions become tools."""

    class Own(BaseTool):
        name: str = "own"
        description: str = "mine"

        def _run(self, cmd: str) -> str:
            return cmd

    decorated = kv.tool_function(Own())
    assert isinstance(decorated, Own)
    assert "ls" == graph_of(decorated).invoke({"messages": [call_of("own", cmd="ls")]}, CONFIG)["messages"][-1].text
    assert once("call-0") == told(hints)


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_decorator_callback_wrappers_and_an_inner_scope_are_one_call(kv, hints, order) -> None:
    """Whoever sees it, it is one wait, one fact and one unit of the budget."""
    from agentkv_langgraph import tool_wrappers

    def run(cmd: str) -> str:
        """Run."""
        with kv.tool("pytest", args={"cmd": cmd}) as call:
            call.progress(0.5)
        return cmd

    app = kv.attach(graph_of(order(kv, run), **tool_wrappers(kv)))
    app.invoke({"messages": [call_of("run", cmd="pytest")]}, CONFIG)
    assert [ToolStatus.RUNNING, ToolStatus.RUNNING, ToolStatus.SUCCEEDED] == [status for _, status in told(hints)]
    assert ["run"] == [one.tool for one in kv.report("t").tools]
    assert 1 == kv._books.account("t").used.tool_calls


def test_the_current_tool_can_tell_its_progress_from_anywhere(kv, hints) -> None:
    """The innermost open call of this AgentKV; outside of one nobody hears, and nothing fails."""

    def deep() -> None:
        kv.current_tool().progress(0.5)

    @kv.tool_function
    def work() -> None:
        """Work."""
        deep()

    deep()
    work()
    deep()
    assert [None, 0.5, 0.5] == [hint.call.progress for hint in hints]


def test_the_current_tool_is_found_by_its_own_agentkv_only(kv, make_kv, hints) -> None:
    """Two in one process do not tell each other's progress."""
    other = make_kv()
    with kv.tool("mine"), other.tool("theirs") as theirs:
        assert "mine" == kv.current_tool().tool
        assert theirs is other.current_tool()
    assert "" == kv.current_tool().tool


async def test_progress_keeps_a_node_with_an_idle_timeout_alive(kv, hints) -> None:
    """It is LangGraph's heartbeat too."""

    @tool
    @kv.tool_function
    async def slow() -> str:
        """Be slow."""
        for step in range(1, 9):
            await asyncio.sleep(0.2)
            kv.current_tool().progress(step / 8)
        return "done"

    policy = TimeoutPolicy(idle_timeout=1.0, refresh_on="heartbeat")
    app = graph_of(slow, timeout=policy)
    assert "done" == (await app.ainvoke({"messages": [call_of("slow")]}, CONFIG))["messages"][-1].text
    assert 10 == len(told(hints))


async def test_parallel_async_tools_overlap_and_are_told_apart(kv, hints) -> None:
    """A hundred and twenty at once: each has its own start and end, and none waits for another."""
    from agentkv_langgraph import tool_wrappers

    @tool
    @kv.tool_function
    async def nap(n: int) -> str:
        """Nap."""
        await asyncio.sleep(0.2)
        return str(n)

    calls = [{"name": "nap", "args": {"n": n}, "id": f"call-{n}"} for n in range(120)]
    started = time.monotonic()
    answer = await graph_of(nap, **tool_wrappers(kv)).ainvoke({"messages": [AIMessage("", tool_calls=calls)]}, CONFIG)
    assert time.monotonic() - started < 5
    assert [str(n) for n in range(120)] == [m.text for m in answer["messages"] if isinstance(m, ToolMessage)]
    for n in range(120):
        assert once(f"call-{n}") == [one for one in told(hints) if one[0] == f"call-{n}"]


def test_a_tool_call_limit_stops_a_decorated_tool_before_it_runs(kv) -> None:
    """As with the scope."""
    from agentkv import Budget

    ran = []
    work = kv.tool_function(lambda: ran.append(1))
    with kv.task("small", budget=Budget(tool_calls=1)), pytest.raises(BudgetExceeded):
        work()
        work()
    assert [1] == ran


def test_what_a_framework_injects_counts_for_nothing(kv) -> None:
    """A long history is no argument."""

    @tool
    @kv.tool_function
    def sized(cmd: str, state: Annotated[dict[str, Any], InjectedState], runtime: ToolRuntime) -> str:
        """Tell the size of the arguments."""
        return str(kv.current_tool().arg_bytes)

    given = {"messages": [call_of("sized", cmd="x" * 100)]}
    assert "103" == graph_of(sized).invoke(given, CONFIG)["messages"][-1].text


def test_a_scope_inside_a_decorated_tool_is_the_same_call(kv, hints) -> None:
    """With or without a framework around it; what comes after it is a call of its own."""

    @kv.tool_function
    def work() -> None:
        """Work."""
        with kv.tool("pytest") as inner:
            inner.progress(0.5)

    work()
    with kv.tool("ruff"):
        pass
    assert ["work", "work", "work", "ruff", "ruff"] == [hint.call.tool for hint in hints]


def test_scopes_may_end_in_any_order(kv) -> None:
    """The innermost that is still open is the current one."""
    outer, inner = kv.tool("outer"), kv.tool("inner")
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    assert inner is kv.current_tool()
    inner.__exit__(None, None, None)
    assert "" == kv.current_tool().tool


def test_the_tools_of_an_agent_that_runs_as_a_tool_are_its_own_calls(kv, hints) -> None:
    """Its context waits for them, not the one that waits for the agent."""

    @kv.tool_function
    def research() -> None:
        """Be an agent."""
        kv.submit(Request(prompt="a prompt of its own", session="researcher")).result(20)
        with kv.tool("search"):
            pass

    with kv.task("t", final=False):
        kv.submit(Request(prompt="hello")).result(20)
        research()
    told_of = [hint for hint in hints if hint.call is not None]
    assert ["research", "search", "search", "research"] == [hint.call.tool for hint in told_of]
    assert 2 == len({hint.session for hint in told_of})
