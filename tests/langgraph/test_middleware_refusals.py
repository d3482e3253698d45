"""An endpoint that refuses hints costs one refused call, whatever middleware stands between the agent and its model."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
from agentkv_langgraph import AgentKVMiddleware
from agentkv_langgraph.endpoints import Endpoints
from agentkv_langgraph.hinted import with_hint
from langchain.agents import create_agent
from langchain.agents.middleware import (
    AgentMiddleware,
    HumanInTheLoopMiddleware,
    ModelCallLimitMiddleware,
    ModelFallbackMiddleware,
    ModelRetryMiddleware,
    PIIMiddleware,
    SummarizationMiddleware,
)
from langchain_core.caches import InMemoryCache
from langchain_core.language_models import BaseChatModel, FakeListChatModel, GenericFakeChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from pydantic import Field

from agentkv import log

sys.path.insert(0, str(Path(__file__).parent))
from hint_server import openai

CONFIG: Any = {"configurable": {"thread_id": "t"}}
EXTRA = {"extra_body": {"agentkv_hint": {"v": 1}}}


def other() -> Any:
    return GenericFakeChatModel(messages=iter([AIMessage("FALLBACK")] * 9))


class Copies(AgentMiddleware):
    """A middleware that hands on a copy of the model, as some do to set an option."""

    def wrap_model_call(self, request: Any, handler: Any) -> Any:
        return handler(request.override(model=request.model.model_copy(update={"temperature": 0.5})))

    async def awrap_model_call(self, request: Any, handler: Any) -> Any:
        return await handler(request.override(model=request.model.model_copy(update={"temperature": 0.5})))


class Options(AgentMiddleware):
    """A middleware that sets the very options that a hint uses."""

    def wrap_model_call(self, request: Any, handler: Any) -> Any:
        return handler(request.override(model_settings={"extra_body": {"top_k": 3}}))

    async def awrap_model_call(self, request: Any, handler: Any) -> Any:
        return await handler(request.override(model_settings={"extra_body": {"top_k": 3}}))


OTHERS: dict[str, Any] = {
    "none": list,
    "fallback": lambda: [ModelFallbackMiddleware(other())],
    "retry": lambda: [ModelRetryMiddleware(max_retries=1, initial_delay=0.0, jitter=False)],
    "raising retry": lambda: [ModelRetryMiddleware(max_retries=1, initial_delay=0.0, jitter=False, on_failure="error")],
    "summary": lambda: [SummarizationMiddleware(other(), trigger=("messages", 99))],
    "hitl": lambda: [HumanInTheLoopMiddleware(interrupt_on={"other": True})],
    "pii": lambda: [PIIMiddleware("email")],
    "limit": lambda: [ModelCallLimitMiddleware(run_limit=1)],
    "copies": lambda: [Copies()],
    "options": lambda: [Options()],
}
OTHERS["all"] = lambda: [
    one for name in ("fallback", "retry", "summary", "hitl", "pii", "limit") for one in OTHERS[name]()
]
DRIVES = ("invoke", "ainvoke", "stream", "astream")


def answer(agent: Any, drive: str, config: Any = CONFIG) -> str:
    """The last message's text, however the agent is run; what is streamed is the answer."""
    given = {"messages": [HumanMessage("go")]}
    if drive == "invoke":
        return str(agent.invoke(given, config)["messages"][-1].text)
    if drive == "ainvoke":
        return str(asyncio.run(agent.ainvoke(given, config))["messages"][-1].text)
    if drive == "stream":
        return "".join(piece.text for piece, _ in agent.stream(given, config, stream_mode="messages"))

    async def streamed() -> str:
        return "".join([piece.text async for piece, _ in agent.astream(given, config, stream_mode="messages")])

    return asyncio.run(streamed())


@pytest.mark.parametrize("drive", DRIVES)
@pytest.mark.parametrize("first", [True, False], ids=["ours outside", "ours inside"])
@pytest.mark.parametrize("name", OTHERS)
def test_a_refusal_is_mended_before_anybody_hears_of_it(kv, serve, name, first, drive) -> None:
    """One refused call in the life of the middleware; each answer is the model's, and is billed once."""
    server = serve("top_k")
    ours = [AgentKVMiddleware(kv, hints={server.url: "neutral"})]
    both = [*ours, *OTHERS[name]()] if first else [*OTHERS[name](), *ours]
    agent = create_agent(openai(server.url), [], middleware=both)
    before = log.counters["endpoint_refused_hints"]
    assert ["hi"] * 3 == [answer(agent, drive) for _ in range(3)]
    assert [400, 200, 200, 200] == server.statuses
    assert [True, False, False, False] == ["agentkv_hint" in body for body in server.bodies]
    assert 1 == log.counters["endpoint_refused_hints"] - before
    usage = kv.report("t").usage
    assert (3, 42) == (usage.calls, usage.total_tokens)
    if name == "options":
        assert [3] * 4 == [body["top_k"] for body in server.bodies]
    if name == "copies":
        assert [0.5] * 4 == [body["temperature"] for body in server.bodies]


@pytest.mark.parametrize("drive", DRIVES)
@pytest.mark.parametrize("name", OTHERS)
def test_a_hint_that_is_taken_arrives_through_any_middleware(kv, serve, name, drive) -> None:
    """Each time."""
    server = serve("agentkv_hint", "top_k")
    both = [AgentKVMiddleware(kv, hints={server.url: "neutral"}), *OTHERS[name]()]
    agent = create_agent(openai(server.url), [], middleware=both)
    assert ["hi"] * 2 == [answer(agent, drive) for _ in range(2)]
    assert ([200] * 2, [True] * 2) == (server.statuses, ["agentkv_hint" in body for body in server.bodies])


@pytest.mark.parametrize("drive", DRIVES)
def test_where_hints_were_not_to_blame_a_fallback_takes_over_and_hints_stay(kv, serve, drive) -> None:
    """Each try is one with and one without."""
    server = serve("agentkv_hint")
    both = [AgentKVMiddleware(kv, hints={server.url: "neutral"}), ModelFallbackMiddleware(other())]
    agent = create_agent(openai(server.url, extra_body={"wrong": 1}), [], middleware=both)
    for _ in range(2):
        assert "FALLBACK" == answer(agent, drive)
    assert [True, False] * 2 == ["agentkv_hint" in body for body in server.bodies]
    assert all("wrong" in body for body in server.bodies)


def test_a_hint_is_no_part_of_a_responses_key_in_the_cache(kv, serve) -> None:
    """The second call of the same prompt is answered from LangChain's cache."""
    server = serve("agentkv_hint")
    model = openai(server.url, cache=InMemoryCache())
    agent = create_agent(model, [], middleware=[AgentKVMiddleware(kv, hints={server.url: "neutral"})])
    assert ["hi", "hi"] == [answer(agent, "invoke") for _ in range(2)]
    assert [200] == server.statuses


class Refusal(Exception):
    status_code = 400


class Strict(BaseChatModel):
    """A chat model of somebody's own that refuses hints, and counts."""

    extra_body: dict[str, Any] | None = None
    openai_api_base: str = "http://strict/v1"
    calls: int = 0
    seen: list[Any] = Field(default_factory=list)
    late: bool = False

    @property
    def _llm_type(self) -> str:
        return "strict"

    def _heard(self, kwargs: dict[str, Any]) -> bool:
        self.calls += 1
        self.seen.append(kwargs.get("extra_body"))
        return "agentkv_hint" in (kwargs.get("extra_body") or {})

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        if self._heard(kwargs):
            raise Refusal
        return ChatResult(generations=[ChatGeneration(message=AIMessage(f"call {self.calls}"))])

    def _stream(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> Any:
        refused = self._heard(kwargs)
        if refused and not self.late:
            raise Refusal
        yield ChatGenerationChunk(message=AIMessageChunk(content="call "))
        if refused:
            raise Refusal
        yield ChatGenerationChunk(message=AIMessageChunk(content=str(self.calls)))


def hinted_model(model: Any) -> tuple[Any, list[int]]:
    taken_back: list[int] = []
    return with_hint(model, lambda: EXTRA, lambda: taken_back.append(1)), taken_back


async def test_any_chat_model_keeps_what_it_keeps_and_is_asked_once_more(kv) -> None:
    """Its methods run on itself; async ones that come down to sync ones are not asked twice as often."""
    model = Strict()
    hinted, taken_back = hinted_model(model)
    assert isinstance(hinted, Strict)
    assert "call 2" == hinted.invoke("?").text
    assert "call 4" == (await hinted.ainvoke("?")).text
    assert "call 6" == "".join(chunk.text for chunk in hinted.stream("?"))
    assert "call 8" == "".join([chunk.text async for chunk in hinted.astream("?")])
    assert [1] * 4 == taken_back
    assert (8, 8) == (model.calls, hinted.calls)
    assert [EXTRA["extra_body"], None] * 4 == model.seen
    assert "call 9" == model.invoke("?").text


def test_a_stream_that_breaks_after_its_first_piece_is_not_begun_again(kv) -> None:
    """What was read was read."""
    model = Strict(late=True)
    hinted, taken_back = hinted_model(model)
    heard = []
    with pytest.raises(Refusal):
        heard.extend(chunk.text for chunk in hinted.stream("?"))
    assert (["call "], 1, []) == (heard, model.calls, taken_back)


def test_a_model_that_cannot_stream_still_cannot(kv) -> None:
    """LangChain asks a class which methods it has; and a scripted model goes on where it was."""
    hinted, _ = hinted_model(FakeListChatModel(responses=["a", "b"]))
    assert ["a", "b"] == [hinted.invoke("?").text, "".join(chunk.text for chunk in hinted.stream("?"))]

    class Whole(Strict):
        _stream = BaseChatModel._stream

    assert type(hinted_model(Whole())[0])._stream is BaseChatModel._stream


def test_the_user_s_own_options_are_what_the_second_try_sends(kv) -> None:
    """Bound, given in the call, and both."""
    model = Strict(extra_body={"of": "model"})
    bound = with_hint(model.bind(extra_body={"bound": 1}), lambda: EXTRA, lambda: None)
    bound.invoke("?")
    bound.invoke("?", extra_body={"call": 1})
    hint = EXTRA["extra_body"]
    assert [
        {**hint, "of": "model", "bound": 1},
        {"bound": 1},
        {**hint, "of": "model", "bound": 1, "call": 1},
        {"call": 1},
    ] == model.seen


@pytest.mark.parametrize("configured", [False, True], ids=["default", "per run"])
@pytest.mark.parametrize("drive", DRIVES)
def test_a_model_that_is_chosen_by_the_config_is_hinted_as_the_chosen_one(kv, serve, drive, configured) -> None:
    """`init_chat_model(configurable_fields=...)`, by its default and by what a run says; and nothing is warned of."""
    from langchain.chat_models import init_chat_model

    pytest.importorskip("langchain_openai", reason="its releases that take openai 3 need a newer langchain-core")
    server, idle = serve("agentkv_hint"), serve()
    model = init_chat_model(
        "openai:m",
        base_url=idle.url if configured else server.url,
        api_key="none",
        configurable_fields=("base_url", "model"),
    )
    agent = create_agent(model, [], middleware=[AgentKVMiddleware(kv, hints={server.url: "neutral"})])
    chosen = {"base_url": server.url} if configured else {}
    before = dict(log.counters)
    assert "hi" == answer(agent, drive, {"configurable": {"thread_id": "t", **chosen}})
    assert ([200], []) == (server.statuses, idle.statuses)
    assert "agentkv_hint" in server.bodies[0]
    assert before.get("middleware_hint_failed", 0) == log.counters["middleware_hint_failed"]


def test_an_address_from_the_environment_is_known(kv, serve, monkeypatch) -> None:
    """OPENAI_BASE_URL is read by the openai package, not by LangChain."""
    chat = pytest.importorskip("langchain_openai", reason="its releases that take openai 3 need a newer langchain-core")
    server = serve("agentkv_hint")
    monkeypatch.setenv("OPENAI_BASE_URL", server.url)
    agent = create_agent(
        chat.ChatOpenAI(model="m", api_key="none"),
        [],
        middleware=[AgentKVMiddleware(kv, hints={server.url: "neutral"})],
    )
    assert "hi" == answer(agent, "invoke")
    assert "agentkv_hint" in server.bodies[0]


def test_a_model_that_does_not_tell_its_address_is_told_of_once(kv, capsys, monkeypatch) -> None:
    """Where hints were asked for; otherwise nothing is said."""
    monkeypatch.setattr(log, "_warned", set())
    plain = create_agent(other(), [], middleware=[AgentKVMiddleware(kv)])
    named = create_agent(other(), [], middleware=[AgentKVMiddleware(kv, hints={"http://gpu/v1": "neutral"})])
    answer(plain, "invoke")
    assert "hint_address_unknown" not in capsys.readouterr().err
    for _ in range(2):
        answer(named, "invoke")
    assert 1 == capsys.readouterr().err.count("hint_address_unknown")


def test_an_endpoint_that_refused_is_known_by_its_address(serve) -> None:
    """Whichever model object calls it."""
    from agentkv.core.task import Caller

    endpoints = Endpoints({"http://Gpu/v1/": "neutral"})
    assert endpoints.hint_for(Strict(openai_api_base="http://gpu/v1"), Caller(task="t")) is not None
    endpoints.refused(Strict(openai_api_base="http://GPU/v1/"))
    assert endpoints.hint_for(Strict(openai_api_base="http://gpu/v1"), Caller(task="t")) is None
