"""AgentKVMiddleware in real agents: the same answers as without it, one bill, hints only where they were asked for."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from agentkv_langgraph import AgentKVMiddleware, ChatAgentKV
from agentkv_langgraph.endpoints import is_refusal
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
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command
from pydantic import Field

from agentkv import Budget, BudgetExceeded, ToolCall
from agentkv.core.hint import ToolStatus
from agentkv.engine.script import Reply
from agentkv.errors import ConfigError

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


# -- hints in the call


class Server(ThreadingHTTPServer):
    """An OpenAI-compatible server that keeps what it was asked and refuses fields that it does not know."""

    def __init__(self, known: tuple[str, ...]) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.known = {"messages", "model", "stream", "tools", "temperature", *known}
        self.bodies: list[dict[str, Any]] = []
        self.tasks: list[str | None] = []
        self.statuses: list[int] = []
        self.url = f"http://127.0.0.1:{self.server_port}/v1"


class _Answers(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        unknown = sorted(set(body) - self.server.known)
        self.server.bodies.append(body)
        self.server.tasks.append(self.headers.get("x-agentkv-task"))
        self.server.statuses.append(400 if unknown else 200)
        usage = {"prompt_tokens": 10, "completion_tokens": 4, "total_tokens": 14}
        choice = {"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}
        answer = {
            "id": "c",
            "object": "chat.completion",
            "created": 0,
            "model": "m",
            "choices": [choice],
            "usage": usage,
        }
        text = json.dumps({"error": {"message": f"unknown fields {unknown}"}} if unknown else answer).encode()
        self.send_response(self.server.statuses[-1])
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def serve() -> Iterator[Any]:
    servers: list[Server] = []

    def start(*known: str) -> Server:
        server = Server(known)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def openai(url: str, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(model="m", base_url=url, api_key="none", max_retries=0, **options)


class Settings(AgentMiddleware):
    """A user's own per-call settings."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self._settings = settings

    def wrap_model_call(self, request: Any, handler: Any) -> Any:
        return handler(request.override(model_settings={**request.model_settings, **self._settings}))

    async def awrap_model_call(self, request: Any, handler: Any) -> Any:
        return await handler(request.override(model_settings={**request.model_settings, **self._settings}))


def test_nothing_is_sent_to_an_endpoint_that_nobody_named(kv, serve) -> None:
    """Hints are no blanket."""
    server, named = serve(), serve("agentkv_hint")
    ours = AgentKVMiddleware(kv, hints={named.url: "neutral"})
    run(create_agent(openai(server.url), [], middleware=[ours]), asked())
    assert [200] == server.statuses
    assert "agentkv_hint" not in server.bodies[0]
    assert (1, 14) == (kv.report("t").usage.calls, kv.report("t").usage.total_tokens)


@BOTH
@pytest.mark.parametrize("per_call", [False, True])
def test_a_hint_goes_under_what_the_user_set_at_the_model_and_in_the_call(kv, serve, per_call, is_async) -> None:
    """Nothing of the user's is lost, and where both say something the user's stands."""
    server = serve("agentkv_hint", "chat_template_kwargs", "top_k", "mine")
    model = openai(
        server.url,
        extra_body={"chat_template_kwargs": {"thinking": True}, "agentkv_hint": {"v": "mine"}},
        default_headers={"x-agentkv-task": "overridden"},
    )
    settings = [Settings(extra_body={"top_k": 3, "chat_template_kwargs": {"deep": 1}})] if per_call else []

    def both(_caller: Any) -> Any:
        return {
            "extra_body": {"agentkv_hint": {"v": "ours", "id": "1"}, "chat_template_kwargs": {"thinking": False}},
            "extra_headers": {"x-agentkv-task": "t"},
        }

    ours = AgentKVMiddleware(kv, hints={server.url: both})
    run(create_agent(model, [], middleware=[*settings, ours]), asked(), is_async)
    body = server.bodies[0]
    assert {"v": "mine", "id": "1"} == body["agentkv_hint"]
    assert {"thinking": True, **({"deep": 1} if per_call else {})} == body["chat_template_kwargs"]
    assert (3 if per_call else None) == body.get("top_k")
    assert ["t"] == server.tasks


@BOTH
def test_a_refused_hint_is_left_out_once_and_for_all(kv, serve, is_async) -> None:
    """One failed call, then none; the answer is there each time."""
    server = serve()
    agent = create_agent(openai(server.url), [], middleware=[AgentKVMiddleware(kv, hints={server.url: "neutral"})])
    for _ in range(2):
        assert "hi" == texts(run(agent, asked(), is_async))[-1]
    assert [400, 200, 200] == server.statuses
    assert 28 == kv.report("t").usage.total_tokens


def test_an_error_that_is_not_the_hints_stays_and_the_hints_too(kv, serve) -> None:
    """The second try fails as well: hints were not to blame."""
    server = serve("agentkv_hint")
    agent = create_agent(
        openai(server.url, extra_body={"wrong": 1}),
        [],
        middleware=[AgentKVMiddleware(kv, hints={server.url: "neutral"})],
    )
    for _ in range(2):
        with pytest.raises(Exception, match="wrong"):
            run(agent, asked())
    assert [400] * 4 == server.statuses
    assert ["agentkv_hint" in body for body in server.bodies] == [True, False, True, False]


@pytest.mark.parametrize("first", [True, False], ids=["ours first", "ours last"])
def test_a_hint_does_not_reach_the_fallback(kv, serve, first) -> None:
    """Another endpoint, another dialect."""
    strict, broken = serve(), serve("agentkv_hint")
    broken.known.discard("model")
    fallback = ModelFallbackMiddleware(openai(strict.url))
    ours = AgentKVMiddleware(kv, hints={broken.url: "neutral"})
    both = [ours, fallback] if first else [fallback, ours]
    assert "hi" == texts(run(create_agent(openai(broken.url), [], middleware=both), asked()))[-1]
    assert {200} == set(strict.statuses)
    assert not any("agentkv_hint" in body for body in strict.bodies)


def test_our_own_server_is_told_the_task(kv, serve) -> None:
    """A header, and nothing in the body."""
    server = serve()
    agent = create_agent(
        openai(server.url), [], middleware=[AgentKVMiddleware(kv, hints={server.url + "/": "agentkv"})]
    )
    run(agent, asked())
    assert (["t"], [200]) == (server.tasks, server.statuses)


def test_an_unknown_kind_is_an_error_at_once(kv) -> None:
    """With the kinds there are."""
    with pytest.raises(ConfigError, match="agentkv, neutral"):
        AgentKVMiddleware(kv, hints={"http://x": "vlm"})


def test_a_tool_message_of_the_state_is_plain(kv) -> None:
    """Only msgpack-native values."""
    agent = create_agent(foreign(calling("ls"), AIMessage("done")), [shell], middleware=[AgentKVMiddleware(kv)])
    message = run(agent, asked())["messages"][2]
    assert isinstance(message, ToolMessage)
    json.dumps(message.model_dump())


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (TypeError("create() got an unexpected keyword argument 'extra_body'"), True),
        (TypeError("unsupported operand"), False),
        (ValueError("unexpected keyword"), False),
        (type("Refused", (Exception,), {"status_code": 422})(), True),
        (type("Denied", (Exception,), {"status_code": 401})(), False),
        (type("Broken", (Exception,), {"status_code": 500})(), False),
    ],
)
def test_only_what_may_be_an_unknown_field_is_tried_without_hints(error, expected) -> None:
    """Log-ins and broken servers are not."""
    assert expected is is_refusal(error)
