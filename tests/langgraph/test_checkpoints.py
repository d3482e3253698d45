"""Resume, replay, fork and time travel: what really ran is billed once each, no hint stays open, prefixes match again.

The whole story runs on a checkpointer in memory, in SQLite and in PostgreSQL; and the state holds plain values only.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from agentkv_langgraph import ChatAgentKV, LangGraphHost
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.types import Command, RetryPolicy, interrupt

from agentkv import AgentKV, Budget, ScriptedEngine, ToolCall
from agentkv.core.hint import Hint, HintKind
from agentkv.engine.script import Reply

CONFIG: Any = {"configurable": {"thread_id": "case"}}
SYSTEM = " ".join(f"rule {n}," for n in range(60))


def answer(request: Any) -> Reply | str:
    """Ask for the tool until two results are there."""
    results = sum(message.role == "tool" for message in request.messages)
    if results < 2:
        call = ToolCall(id=f"call-{results}", name="deploy", arguments=f'{{ "to":"host-{results}" }}')
        return Reply(text=f"I deploy, {results}.", tool_calls=(call,))
    return "All is deployed."


class Case:
    """An agent whose tool asks a person, what was heard of it, and what its engine saw."""

    def __init__(self, saver: Any) -> None:
        self.engine = ScriptedEngine(iter(lambda: answer, None))
        self.kv = AgentKV.with_engine(self.engine, host=LangGraphHost())
        self.hints: list[Hint] = []
        self.kv.subscribe(self.hints.append)
        self.deployed: list[str] = []
        model = ChatAgentKV(self.kv).bind_tools([self._tool()])

        @self.kv.node
        def agent(state: MessagesState) -> Any:
            return {"messages": [model.invoke([("system", SYSTEM), *state["messages"]])]}

        graph = StateGraph(MessagesState)
        graph.add_node("agent", agent)
        graph.add_node("tools", self.kv.node(ToolNode([self._tool()])))
        graph.add_edge(START, "agent")
        graph.add_conditional_edges("agent", lambda state: "tools" if state["messages"][-1].tool_calls else END)
        graph.add_edge("tools", "agent")
        self.app = self.kv.attach(graph.compile(checkpointer=saver))

    def _tool(self) -> Any:
        @tool
        def deploy(to: str) -> str:
            """Deploy the release, if a person agrees."""
            with self.kv.tool("deploy", args={"to": to}):
                self.deployed.append(to)
                return f"{interrupt({'deploy': to})} on {to}"

        return deploy

    def calls(self) -> int:
        """Model calls on the bill, which are those that the engine saw."""
        calls = self.kv.report("case").calls
        assert len(self.engine.requests) == len(calls)
        assert self.engine.stats()["input_tokens"] == sum(call.usage.input_tokens for call in calls)
        return len(calls)

    def no_hint_is_open(self) -> list[str]:
        """Each start has its end; how the calls ended, in order."""
        kinds = Counter(hint.kind for hint in self.hints)
        ends = [hint for hint in self.hints if hint.kind in {HintKind.TOOL_END, HintKind.TOOL_ERROR}]
        assert kinds[HintKind.TOOL_START] == len(ends)
        assert kinds[HintKind.TURN_START] == kinds[HintKind.TURN_END] == len(self.engine.requests)
        open_calls: Counter[str] = Counter()
        for hint in self.hints:
            if hint.call is not None:
                open_calls[hint.call.call_id] += {HintKind.TOOL_START: 1, HintKind.TOOL_UPDATE: 0}.get(hint.kind, -1)
                assert open_calls[hint.call.call_id] in {0, 1}
        assert not any(open_calls.values())
        return [str(hint.call.status) for hint in ends]

    def close(self) -> None:
        self.kv.close()


@contextmanager
def memory(_request: Any) -> Iterator[Any]:
    yield InMemorySaver()


@contextmanager
def sqlite(_request: Any) -> Iterator[Any]:
    module = pytest.importorskip("langgraph.checkpoint.sqlite", reason="pip install langgraph-checkpoint-sqlite")
    with module.SqliteSaver.from_conn_string(":memory:") as saver:
        yield saver


@contextmanager
def postgres(_request: Any) -> Iterator[Any]:
    module = pytest.importorskip("langgraph.checkpoint.postgres", reason="pip install langgraph-checkpoint-postgres")
    path = Path(__file__).parents[1] / "budget" / "conftest.py"
    spec = importlib.util.spec_from_file_location("ledger_tests_server", path)
    tests = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tests)
    for server in tests._server():
        with module.PostgresSaver.from_conn_string(server.new_database()) as saver:
            saver.setup()
            yield saver


SAVERS = [pytest.param(memory, id="memory"), pytest.param(sqlite, id="sqlite"),
          pytest.param(postgres, id="postgres", marks=pytest.mark.slow)]  # fmt: skip


@pytest.fixture(params=SAVERS)
def saver(request) -> Iterator[Any]:
    with request.param(request) as opened:
        yield opened


@pytest.fixture
def case(saver) -> Iterator[Case]:
    made = Case(saver)
    yield made
    made.close()


def test_a_person_is_asked_twice_and_everything_is_billed_once(case) -> None:
    """Model, tool, pause, resume, model, tool, pause, resume, model: three calls, four runs of the tool, none open."""
    assert "__interrupt__" in case.app.invoke({"messages": [HumanMessage("go")]}, CONFIG)
    assert 1 == case.calls()
    assert ["paused"] == case.no_hint_is_open()
    assert "__interrupt__" in case.app.invoke(Command(resume="done"), CONFIG)
    state = case.app.invoke(Command(resume="done"), CONFIG)
    assert "All is deployed." == state["messages"][-1].text
    assert 3 == case.calls()
    assert ["paused", "succeeded"] * 2 == case.no_hint_is_open()
    assert ["host-0", "host-0", "host-1", "host-1"] == case.deployed
    assert ["paused", "succeeded"] * 2 == [fact.status for fact in case.kv.report("case").tools]


def test_a_paused_tool_call_counts_once_against_the_budget(case) -> None:
    """Two calls are allowed, and two are made: that each was paused and began again is not a third."""
    with case.kv.task("case", budget=Budget(tool_calls=2), final=False):
        for step in ({"messages": [HumanMessage("go")]}, Command(resume="done"), Command(resume="done")):
            state = case.app.invoke(step, CONFIG)
    assert "All is deployed." == state["messages"][-1].text
    assert 2 == case.kv.report("case").usage.calls - 1


def test_each_call_after_a_resume_finds_the_prefix_of_the_one_before(case) -> None:
    """What was computed before the pause is not computed again: the prompt is what it was, and longer."""
    case.app.invoke({"messages": [HumanMessage("go")]}, CONFIG)
    case.app.invoke(Command(resume="done"), CONFIG)
    case.app.invoke(Command(resume="done"), CONFIG)
    first, second, third = case.kv.report("case").calls
    assert 0 == first.usage.cached_tokens
    for before, after in ((first, second), (second, third)):
        assert before.usage.total_tokens <= after.usage.cached_tokens + 1
        assert before.session == after.session


def test_a_resume_in_a_new_process_sends_the_same_bytes(saver) -> None:
    """Another AgentKV on the same checkpoints sends the prompt that the first one would have sent."""
    requests = []
    whole = Case(InMemorySaver())
    for step in ({"messages": [HumanMessage("go", id="m")]}, Command(resume="done"), Command(resume="done")):
        whole.app.invoke(step, CONFIG)
        other = Case(saver)
        other.app.invoke(step, CONFIG)
        requests.extend(other.engine.requests)
        assert 1 == other.calls()
        other.close()
    assert [one.messages for one in whole.engine.requests] == [one.messages for one in requests]
    whole.close()


def test_a_replay_is_billed_for_what_it_really_calls_and_finds_its_prefix(case) -> None:
    """From a checkpoint in the past the same prompt is sent once more: a real call, whose prefix is there."""
    case.app.invoke({"messages": [HumanMessage("go")]}, CONFIG)
    case.app.invoke(Command(resume="done"), CONFIG)
    history = list(case.app.get_state_history(CONFIG))
    assert 2 == case.calls()  # looking back costs nothing
    before_agent = next(state for state in history if state.next == ("agent",))
    case.app.invoke(None, before_agent.config)
    assert 3 == case.calls()
    last = case.kv.report("case").calls[-1].usage
    assert last.input_tokens - 1 == last.cached_tokens
    assert ["paused", "succeeded", "paused", "paused"] == case.no_hint_is_open()


def test_a_fork_is_billed_from_where_it_leaves_and_shares_the_prefix_up_to_there(case) -> None:
    """`update_state` calls nothing; the other branch then pays for its own calls only, and both can go on."""
    case.app.invoke({"messages": [HumanMessage("go", id="human")]}, CONFIG)
    first = next(state for state in case.app.get_state_history(CONFIG) if state.next == ("agent",))
    forked = case.app.update_state(first.config, {"messages": [HumanMessage("go elsewhere", id="human")]})
    assert 1 == case.calls()
    case.app.invoke(None, forked)
    assert 2 == case.calls()
    last = case.kv.report("case").calls[-1].usage
    assert 120 <= last.cached_tokens < last.input_tokens  # the system's rules
    case.app.invoke(Command(resume="done"), CONFIG)
    case.app.invoke(Command(resume="done"), CONFIG)
    assert 4 == case.calls()
    assert ["paused", "paused", "succeeded", "paused", "succeeded"] == case.no_hint_is_open()


def test_a_state_set_by_hand_skips_the_tool_and_calls_nothing_twice(case) -> None:
    """A person writes the tool's answer herself (`as_node`); the paused call stays paused, the agent goes on."""
    case.app.invoke({"messages": [HumanMessage("go")]}, CONFIG)
    case.app.update_state(CONFIG, {"messages": [ToolMessage("by hand", tool_call_id="call-0")]}, as_node="tools")
    case.app.invoke(None, CONFIG)
    assert 2 == case.calls()
    assert ["host-0", "host-1"] == case.deployed
    assert ["paused", "paused"] == case.no_hint_is_open()


def test_model_calls_before_an_interrupt_are_billed_each_time_that_they_really_run(make_kv, saver) -> None:
    """A node runs from its first line on each resume: three runs, three calls, three times their tokens."""
    kv = make_kv()
    model = ChatAgentKV(kv)

    @kv.node
    def asks(state: MessagesState) -> Any:
        model.invoke([HumanMessage("what shall I ask?")])
        return {"messages": [AIMessage(interrupt("one") + interrupt("two"))]}

    graph = StateGraph(MessagesState)
    graph.add_node("asks", asks)
    graph.add_edge(START, "asks")
    app = graph.compile(checkpointer=saver)
    for number, step in enumerate(({"messages": []}, Command(resume="a"), Command(resume="b")), 1):
        app.invoke(step, CONFIG)
        assert number == len(kv.report("case").calls) == len(kv.engine.requests)
    assert {"ok"} == {call.status for call in kv.report("case").calls}


def test_a_retried_node_is_billed_for_each_attempt_and_a_cached_one_once(make_kv) -> None:
    """Each attempt says which it was; a hit in LangGraph's cache calls nothing."""
    from langgraph.cache.memory import InMemoryCache
    from langgraph.types import CachePolicy

    kv = make_kv()
    model = ChatAgentKV(kv)
    runs: list[int] = []

    @kv.node
    def shaky(state: MessagesState) -> Any:
        message = model.invoke([HumanMessage("go")])
        runs.append(1)
        if len(runs) < 3:
            raise ConnectionError
        return {"messages": [message]}

    graph = StateGraph(MessagesState)
    retry = RetryPolicy(max_attempts=3, initial_interval=0.001, jitter=False)
    graph.add_node("shaky", shaky, retry_policy=retry, cache_policy=CachePolicy(key_func=lambda state: "same"))
    graph.add_edge(START, "shaky")
    app = graph.compile(cache=InMemoryCache())
    for _ in range(2):
        app.invoke({"messages": []}, CONFIG)
    assert [1, 2, 3] == [call.attempt for call in kv.report("case").calls]


def test_only_plain_values_are_in_the_checkpoints(saver) -> None:
    """Whatever we put into messages is text, numbers, lists and dictionaries."""
    case = Case(saver)
    case.app.invoke({"messages": [HumanMessage("go")]}, CONFIG)
    case.app.invoke(Command(resume="done"), CONFIG)

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            for key, one in value.items():
                assert str is type(key)
                walk(one)
        elif isinstance(value, list | tuple):
            for one in value:
                walk(one)
        else:
            assert type(value) in {str, int, float, bool, type(None)}

    for state in case.app.get_state_history(CONFIG):
        for message in state.values.get("messages", ()):
            walk(message.model_dump())
        walk(dict(state.metadata or {}))
    case.close()


STRICT = """
import sys
sys.path[:0] = [{folder!r}]
from test_checkpoints import CONFIG, Case, Command, HumanMessage
from langgraph.checkpoint.{module} import {name}

with {name}.from_conn_string({where!r}) as saver:
    case = Case(saver)
    case.app.invoke({{"messages": [HumanMessage("go")]}}, CONFIG)
    case.app.invoke(Command(resume="done"), CONFIG)
    print(case.app.invoke(Command(resume="done"), CONFIG)["messages"][-1].text, case.calls())
    case.close()
"""


def test_strict_msgpack_refuses_nothing_of_ours(tmp_path) -> None:
    """LANGGRAPH_STRICT_MSGPACK=true in a process of its own: the story goes to its end, without a warning."""
    pytest.importorskip("langgraph.checkpoint.sqlite", reason="pip install langgraph-checkpoint-sqlite")
    where = str(tmp_path / "checkpoints.db")
    code = STRICT.format(folder=str(Path(__file__).parent), module="sqlite", name="SqliteSaver", where=where)
    env = {**os.environ, "LANGGRAPH_STRICT_MSGPACK": "true", "PYTHONPATH": os.pathsep.join(sys.path)}
    argv = [sys.executable, "-W", "error", "-c", textwrap.dedent(code)]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert (0, "All is deployed. 3\n", "") == (done.returncode, done.stdout, done.stderr)
