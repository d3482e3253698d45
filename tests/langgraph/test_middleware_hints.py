"""Hints that travel in an agent's model call: to whom, under what, and taken back when refused."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
from agentkv_langgraph import AgentKVMiddleware
from agentkv_langgraph.endpoints import is_refusal
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, ModelFallbackMiddleware
from langchain_core.messages import HumanMessage

from agentkv.errors import ConfigError

sys.path.insert(0, str(Path(__file__).parent))
from hint_server import openai

CONFIG = {"configurable": {"thread_id": "t"}}
BOTH = pytest.mark.parametrize("is_async", [False, True])


def run(agent: Any, given: Any, is_async: bool = False) -> Any:
    return asyncio.run(agent.ainvoke(given, CONFIG)) if is_async else agent.invoke(given, CONFIG)


def asked(text: str = "go") -> dict[str, Any]:
    return {"messages": [HumanMessage(text)]}


def texts(answer: Any) -> list[str]:
    return [message.text for message in answer["messages"]]


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
@pytest.mark.parametrize("per_call", [False, True])
def test_a_hint_goes_under_what_the_user_bound_to_the_model(kv, serve, per_call, is_async) -> None:
    """`model.bind(extra_body=...)`; what the constructor set is not lost either."""
    server = serve("agentkv_hint", "top_k", "mine", "deep")
    model = openai(server.url, extra_body={"mine": 1}).bind(extra_body={"top_k": 3, "agentkv_hint": {"v": "bound"}})
    settings = [Settings(extra_body={"deep": 1})] if per_call else []
    ours = AgentKVMiddleware(kv, hints={server.url: "neutral"})
    run(create_agent(model, [], middleware=[*settings, ours]), asked(), is_async)
    body = server.bodies[0]
    assert "bound" == body["agentkv_hint"]["v"]
    assert "turn_start" == body["agentkv_hint"]["kind"]
    assert (1, 3, 1 if per_call else None) == (body.get("mine"), body.get("top_k"), body.get("deep"))


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
