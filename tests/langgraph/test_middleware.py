"""AgentKVMiddleware in real agents: the same answers as without it, one bill, hints only where they were asked for."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import pytest
from agentkv_langgraph import AgentKVMiddleware, ChatAgentKV
from langchain.agents import create_agent
from langchain.agents.middleware import (
    AgentMiddleware,
    HumanInTheLoopMiddleware,
    ModelCallLimitMiddleware,
    ModelFallbackMiddleware,
    ModelRetryMiddleware,
    PIIMiddleware,
    SummarizationMiddleware,
    ToolCallLimitMiddleware,
    ToolRetryMiddleware,
)
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command
from pydantic import Field

from agentkv import Budget, BudgetExceeded, ToolCall
from agentkv.core.hint import ToolStatus
from agentkv.engine.script import Reply

CONFIG = {"configurable": {"thread_id": "t"}}
LONG = "\n".join(f"line {number}: something new every time {number * 7919}" for number in range(4000))
USED = {"input_tokens": 10, "output_tokens": 4, "total_tokens": 14}
BOTH = pytest.mark.parametrize("is_async", [False, True])


class Scripted(BaseChatModel):
    """A foreign model that says what it is told to, with usage, and fails where an error is next."""

    answers: Any = Field(exclude=True)
    name_: str = "gpt-x"

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Any, **_: Any) -> Any:
        return self

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **_: Any) -> ChatResult:
        answer = next(self.answers)
        if isinstance(answer, Exception):
            raise answer
        about = {"model_name": self.name_}
        message = answer.model_copy(update={"usage_metadata": USED, "response_metadata": about})
        return ChatResult(generations=[ChatGeneration(message=message)])


def foreign(*answers: Any, name: str = "gpt-x") -> Scripted:
    return Scripted(answers=iter(answers), name_=name)


def calling(cmd: str, call_id: str = "call-0") -> AIMessage:
    return AIMessage("", tool_calls=[{"name": "shell", "args": {"cmd": cmd}, "id": call_id}])


@tool
def shell(cmd: str) -> str:
    """Run a command."""
    if cmd == "fail":
        raise OSError("no")
    return LONG if cmd == "long" else f"did {cmd}"


def run(agent: Any, given: Any, is_async: bool = False) -> Any:
    return asyncio.run(agent.ainvoke(given, CONFIG)) if is_async else agent.invoke(given, CONFIG)


def asked(text: str = "go") -> dict[str, Any]:
    return {"messages": [HumanMessage(text)]}


def texts(answer: Any) -> list[str]:
    return [message.text for message in answer["messages"]]


def told(hints: list[Any]) -> list[ToolStatus]:
    return [hint.call.status for hint in hints if hint.call is not None]


@BOTH
def test_an_agent_answers_as_without_it_and_has_a_bill_and_hints(kv, hints, is_async) -> None:
    """Two model calls, one tool call; the states are equal."""
    script = (calling("ls"), AIMessage("done"))
    plain = run(create_agent(foreign(*script), [shell]), asked(), is_async)
    ours = run(create_agent(foreign(*script), [shell], middleware=[AgentKVMiddleware(kv)]), asked(), is_async)
    assert texts(plain) == texts(ours)
    assert [type(one) for one in plain["messages"]] == [type(one) for one in ours["messages"]]
    bill = kv.report("t")
    assert (2, 20, 8) == (bill.usage.calls, bill.usage.input_tokens, bill.usage.output_tokens)
    assert {"model"} == {call.node for call in bill.calls}
    assert ["shell"] == [one.tool for one in bill.tools]
    assert [ToolStatus.RUNNING, ToolStatus.SUCCEEDED] == told(hints)


def test_the_graph_has_no_more_nodes_than_with_a_middleware_that_does_nothing(kv) -> None:
    """No checkpoint more per step either."""
    plain = create_agent(foreign(), [shell], middleware=[AgentMiddleware()]).get_graph()
    ours = create_agent(foreign(), [shell], middleware=[AgentKVMiddleware(kv)]).get_graph()
    assert plain.nodes.keys() == ours.nodes.keys()


@BOTH
def test_our_own_model_is_billed_once(make_kv, is_async) -> None:
    """With the middleware, with the callback attached, and with both."""
    bills = []
    for wrap in ("plain", "middleware", "both"):
        script = [Reply(tool_calls=(ToolCall(id="call-0", name="shell", arguments='{"cmd": "ls"}'),)), "done"]
        kv = make_kv(script)
        agent = create_agent(ChatAgentKV(kv), [shell], middleware=[] if wrap == "plain" else [AgentKVMiddleware(kv)])
        run(kv.attach(agent) if wrap == "both" else agent, asked(), is_async)
        bills.append(kv.report("t"))
    assert [2, 2, 2] == [bill.usage.calls for bill in bills]
    assert 1 == len({bill.usage for bill in bills})
    assert [0, 1, 1] == [len(bill.tools) for bill in bills]


@BOTH
def test_two_in_one_agent_and_the_callback_tell_everything_once(kv, hints, is_async) -> None:
    """Names are made unique; one kv has one callback and one call."""
    first, second = AgentKVMiddleware(kv), AgentKVMiddleware(kv, slim=False)
    assert first.name != second.name
    agent = create_agent(foreign(calling("ls"), AIMessage("done")), [shell], middleware=[first, second])
    run(kv.attach(agent), asked(), is_async)
    assert 2 == kv.report("t").usage.calls
    assert [ToolStatus.RUNNING, ToolStatus.SUCCEEDED] == told(hints)


@BOTH
def test_two_agentkvs_in_one_agent_have_each_their_own_bill(kv, make_kv, is_async) -> None:
    """Each hears everything once."""
    other = make_kv()
    agent = create_agent(
        foreign(calling("ls"), AIMessage("done")), [shell], middleware=[AgentKVMiddleware(kv), AgentKVMiddleware(other)]
    )
    run(agent, asked(), is_async)
    for one in (kv, other):
        assert (2, 1) == (one.report("t").usage.calls, len(one.report("t").tools))


@BOTH
def test_outputs_are_slimmed_and_can_be_read_again(kv, is_async) -> None:
    """slim=False leaves the state as it is; read_output brings the tool."""
    script = (calling("long"), AIMessage("done"))
    slim = create_agent(foreign(*script), [shell], middleware=[AgentKVMiddleware(kv, read_output=True)])
    message = run(slim, asked(), is_async)["messages"][2]
    assert len(message.text) < len(LONG) / 4
    assert "read_output" in slim.get_graph().nodes["tools"].data.tools_by_name
    whole = create_agent(foreign(*script), [shell], middleware=[AgentKVMiddleware(kv, slim=False)])
    assert LONG == asyncio.run(whole.ainvoke(asked()))["messages"][2].text


# -- among langchain's own


def _limits() -> list[AgentMiddleware]:
    return [ModelCallLimitMiddleware(run_limit=20), ToolCallLimitMiddleware(run_limit=20)]


OTHERS: dict[str, Any] = {
    "pii": lambda: [PIIMiddleware("email")],
    "summary": lambda: [SummarizationMiddleware(foreign(*[AIMessage("short")] * 9), trigger=("messages", 99))],
    "model retry": lambda: [ModelRetryMiddleware(max_retries=2, initial_delay=0.0, jitter=False)],
    "tool retry": lambda: [ToolRetryMiddleware(max_retries=2, initial_delay=0.0, jitter=False)],
    "fallback": lambda: [ModelFallbackMiddleware(foreign(*[AIMessage("never")] * 9))],
    "limits": _limits,
    "hitl": lambda: [HumanInTheLoopMiddleware(interrupt_on={"other": True})],
}


@BOTH
@pytest.mark.parametrize("first", [True, False], ids=["ours first", "ours last"])
@pytest.mark.parametrize("others", OTHERS.values(), ids=OTHERS)
def test_it_lives_beside_each_of_langchains_in_either_order(kv, hints, others, first, is_async) -> None:
    """Same texts, one bill."""
    script = (calling("ls"), AIMessage("done, me@x.org"))
    plain = run(create_agent(foreign(*script), [shell], middleware=others()), asked("go, me@x.org"), is_async)
    ours = [AgentKVMiddleware(kv)]
    both = [*ours, *others()] if first else [*others(), *ours]
    agent = create_agent(foreign(*script), [shell], middleware=both)
    assert texts(plain) == texts(run(agent, asked("go, me@x.org"), is_async))
    assert (2, 1) == (kv.report("t").usage.calls, len(kv.report("t").tools))
    assert [ToolStatus.RUNNING, ToolStatus.SUCCEEDED] == told(hints)


@pytest.mark.parametrize("seed", range(6))
def test_it_lives_among_all_of_them_in_any_order(kv, seed) -> None:
    """Orders drawn by chance."""
    import random

    script = (calling("ls"), AIMessage("done"))
    together = [AgentKVMiddleware(kv), *itertools.chain(*(make() for make in OTHERS.values()))]
    random.Random(seed).shuffle(together)
    answer = run(create_agent(foreign(*script), [shell], middleware=together), asked())
    assert ["go", "", "did ls", "done"] == texts(answer)
    assert (2, 1) == (kv.report("t").usage.calls, len(kv.report("t").tools))


@BOTH
@pytest.mark.parametrize("first", [True, False], ids=["ours first", "ours last"])
def test_every_attempt_of_a_retried_model_and_tool_is_on_the_bill(kv, hints, first, is_async) -> None:
    """Attempts that failed, and the calls of a fallback under its own name."""
    spare = foreign(calling("fail"), calling("ls", "call-1"), AIMessage("done"), name="spare")
    retries = [
        ModelFallbackMiddleware(spare),
        ToolRetryMiddleware(max_retries=1, initial_delay=0.0, jitter=False, on_failure="continue"),
    ]
    main = foreign(OSError("1"), OSError("2"), OSError("3"), name="main")
    both = [AgentKVMiddleware(kv), *retries] if first else [*retries, AgentKVMiddleware(kv)]
    answer = run(create_agent(main, [shell], middleware=both), asked(), is_async)
    assert "done" == texts(answer)[-1]
    calls = kv.report("t").calls
    assert ["ok", "ok", "ok"] == [call.status for call in calls if call.model == "spare"]
    assert 3 == sum(call.status == "failed" for call in calls)
    assert 42 == kv.report("t").usage.total_tokens
    attempts = 1 if first else 2
    assert attempts + 1 == len(kv.report("t").tools)
    if not first:
        assert [1, 1, 2, 2, 1, 1] == [hint.call.attempt for hint in hints if hint.call is not None]


@BOTH
@pytest.mark.parametrize("first", [True, False], ids=["ours first", "ours last"])
def test_a_human_in_the_loop_stops_and_goes_on(kv, hints, first, is_async) -> None:
    """Nothing is billed twice, and the tool is told when it really runs."""
    asks = HumanInTheLoopMiddleware(interrupt_on={"shell": True})
    both = [AgentKVMiddleware(kv), asks] if first else [asks, AgentKVMiddleware(kv)]
    model = foreign(calling("ls"), AIMessage("done"))
    agent = create_agent(model, [shell], middleware=both, checkpointer=InMemorySaver())
    assert "__interrupt__" in run(agent, asked(), is_async)
    assert [] == told(hints)
    answer = run(agent, Command(resume={"decisions": [{"type": "approve"}]}), is_async)
    assert "done" == texts(answer)[-1]
    assert 2 == kv.report("t").usage.calls
    assert [ToolStatus.RUNNING, ToolStatus.SUCCEEDED] == told(hints)


@BOTH
def test_a_spent_budget_ends_the_agent(kv, is_async) -> None:
    """From the tool call, through retries and handled errors."""
    script = (calling("ls"), calling("ls", "call-1"), AIMessage("done"))
    retry = ToolRetryMiddleware(max_retries=3, initial_delay=0.0, jitter=False)
    agent = create_agent(foreign(*script), [shell], middleware=[retry, AgentKVMiddleware(kv)])
    with kv.task("small", budget=Budget(tool_calls=1)), pytest.raises(BudgetExceeded):
        run(agent, asked(), is_async)
    assert 1 == len(kv.report("small").tools)


def test_a_tool_message_of_the_state_is_plain(kv) -> None:
    """Only msgpack-native values."""
    agent = create_agent(foreign(calling("ls"), AIMessage("done")), [shell], middleware=[AgentKVMiddleware(kv)])
    message = run(agent, asked())["messages"][2]
    assert isinstance(message, ToolMessage)
    json.dumps(message.model_dump())
