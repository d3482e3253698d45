"""ChatAgentKV: what reaches the engine, what comes back, and that both survive a checkpoint."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from agentkv_langgraph import ChatAgentKV
from langchain_core.messages import (
    AIMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.tools import tool

from agentkv import Message, ScriptedEngine, ToolCall
from agentkv.engine.script import Reply
from agentkv.errors import ConfigError, RequestInvalid


@tool
def weather(city: str, days: int = 1) -> str:
    """The weather of a city."""
    return f"{city} {days}"


CALL = ToolCall(id="call-1", name="weather", arguments='{ "city":"Köln",  "days": 1.0 }')
BAD = ToolCall(id="call-2", name="weather", arguments='{"city": ')


async def collected(stream):
    return [chunk async for chunk in stream]


WAYS = {
    "invoke": lambda model, messages: model.invoke(messages),
    "ainvoke": lambda model, messages: asyncio.run(model.ainvoke(messages)),
    "stream": lambda model, messages: sum_of(model.stream(messages)),
    "astream": lambda model, messages: sum_of(asyncio.run(collected(model.astream(messages)))),
}


def sum_of(chunks):
    first, *rest = chunks
    for chunk in rest:
        first = first + chunk
    return first


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_every_way_to_call_gives_the_same_answer_usage_and_metadata(make_kv, way) -> None:
    """Text, tokens with the cached ones, model, finish reason, session and timing."""
    kv = make_kv(["one two three", "four"])
    model = ChatAgentKV(kv)
    first = way(model, [SystemMessage("be brief"), HumanMessage("count please")])
    second = way(model, [SystemMessage("be brief"), HumanMessage("count please"), first, HumanMessage("more")])
    assert "one two three" == first.text
    usage = first.usage_metadata
    assert 3 == usage["output_tokens"]
    assert usage["input_tokens"] + 3 == usage["total_tokens"]
    assert 0 == usage["input_token_details"]["cache_read"]
    assert 0 < second.usage_metadata["input_token_details"]["cache_read"] < second.usage_metadata["input_tokens"]
    about = first.response_metadata
    assert ("scripted", "stop") == (about["model_name"], about["finish_reason"])
    assert about["agentkv"]["session"]
    assert about["agentkv"]["timing"]["total_s"] >= 0
    json.dumps([first.response_metadata, first.additional_kwargs, first.usage_metadata])


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_tool_calls_come_back_parsed_and_broken_ones_are_kept(make_kv, way) -> None:
    """A call whose arguments are no JSON object does not disappear."""
    kv = make_kv([Reply(text="Let me see.", tool_calls=(CALL, ToolCall(id="call-2", name="weather", arguments="[1]")))])
    answer = way(ChatAgentKV(kv).bind_tools([weather]), "weather?")
    assert [("call-1", {"city": "Köln", "days": 1})] == [(c["id"], c["args"]) for c in answer.tool_calls]
    assert [("call-2", "[1]")] == [(c["id"], c["args"].strip('"')) for c in answer.invalid_tool_calls]
    assert "Let me see." == answer.text
    assert "tool_calls" == answer.response_metadata["finish_reason"]


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_turn_is_sent_again_byte_for_byte(make_kv, way) -> None:
    """Odd spacing, floats and broken arguments of the model's own JSON survive the round trip."""
    kv = make_kv([Reply(text="", tool_calls=(CALL, BAD)), "done"])
    model = ChatAgentKV(kv)
    answer = way(model, "weather?")
    assert ["call-2"] == [call["id"] for call in answer.invalid_tool_calls]
    model.invoke([HumanMessage("weather?"), answer, ToolMessage("rain", tool_call_id="call-1")])
    sent = kv.engine.requests[1].messages
    assert {CALL.arguments, BAD.arguments} == {call.arguments for call in sent[1].tool_calls}
    assert Message(role="tool", content="rain", tool_call_id="call-1") == sent[2]


def test_an_edited_turn_is_sent_as_edited(make_kv) -> None:
    """What a person or a middleware changed is not undone by the remembered raw text."""
    kv = make_kv([Reply(text="", tool_calls=(CALL,)), "some answer", "done"])
    model = ChatAgentKV(kv)
    called = model.invoke("weather?")
    called.tool_calls[0]["args"] = {"city": "Bonn"}
    said = model.invoke("hm?")
    said.content = "[removed]"
    model.invoke([HumanMessage("x"), called, ToolMessage("rain", tool_call_id="call-1"), said])
    sent = kv.engine.requests[2].messages
    assert '{"city": "Bonn"}' == sent[1].tool_calls[0].arguments
    assert "[removed]" == sent[3].content


def test_messages_of_all_kinds_are_carried_over(make_kv) -> None:
    """Roles, names, lists of text blocks, and an assistant turn's own blocks."""
    kv = make_kv(["ok"])
    ChatAgentKV(kv, context=False).invoke([
        SystemMessage("s"),
        HumanMessage(["a", {"type": "text", "text": "b"}], name="ann"),
        ChatMessage("c", role="user"),
        AIMessage([{"type": "reasoning", "reasoning": "hm"}, {"type": "text", "text": "d"}]),
        ToolMessage([{"type": "text", "text": "e"}, "f"], tool_call_id="t", name="weather"),
    ])  # fmt: skip
    assert (
        Message(role="system", content="s"),
        Message(role="user", content="ab", name="ann"),
        Message(role="user", content="c"),
        Message(role="assistant", content="d"),
        Message(role="tool", content="ef", tool_call_id="t", name="weather"),
    ) == kv.engine.requests[0].messages


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (
            HumanMessage([{"type": "image_url", "image_url": {"url": "data:,"}}]),
            "message 1 holds a block of type 'image",
        ),
        (FunctionMessage("x", name="f"), "message 1 is a FunctionMessage"),
        (ChatMessage("x", role="critic"), "role 'critic'"),
    ],
)
def test_what_cannot_be_sent_is_refused_with_its_position(kv, message, words) -> None:
    """Nothing is dropped silently."""
    with pytest.raises(RequestInvalid, match=words):
        ChatAgentKV(kv).invoke([HumanMessage("x"), message])
    assert [] == kv.engine.requests


def test_sampling_is_taken_from_the_call_then_the_binding_then_the_constructor(make_kv) -> None:
    """The nearest one wins, option by option; zero is a value."""
    kv = make_kv()
    model = ChatAgentKV(kv, max_tokens=10, temperature=0.5, top_p=0.9, seed=1, stop=["X"])
    model.invoke("a")
    model.bind(max_tokens=20, seed=0, stop=["Y"]).invoke("a")
    model.bind(max_tokens=20).invoke("a", max_tokens=30, temperature=0.0, stop=["Z"])
    model.invoke("a", stop=[])
    assert () == kv.engine.requests.pop().sampling.stop
    got = [(s.max_tokens, s.temperature, s.top_p, s.seed, s.stop) for s in (r.sampling for r in kv.engine.requests)]
    assert [(10, 0.5, 0.9, 1, ("X",)), (20, 0.5, 0.9, 0, ("Y",)), (30, 0.0, 0.9, 1, ("Z",))] == got


def test_how_much_is_thought_is_said_in_the_call_the_binding_or_the_constructor(make_kv) -> None:
    """And so are other variables of the template; nothing said is nothing asked."""
    kv = make_kv()
    model = ChatAgentKV(kv, reasoning_effort="low", chat_template_kwargs={"day": 1})
    model.invoke("a")
    model.bind(reasoning_effort="none").invoke("a", chat_template_kwargs={"day": 2})
    ChatAgentKV(kv).invoke("a")
    got = [(r.reasoning_effort, r.chat_template_kwargs) for r in kv.engine.requests]
    assert [("low", {"day": 1}), ("none", {"day": 2}), (None, {})] == got
    with pytest.raises(RequestInvalid, match="reasoning_effort='much'"):
        ChatAgentKV(kv, reasoning_effort="much").invoke("a")


def test_unknown_options_are_errors_everywhere(kv) -> None:
    """A typo is never ignored."""
    with pytest.raises(ConfigError, match="temprature"):
        ChatAgentKV(kv, temprature=1)
    with pytest.raises(ConfigError, match="top_k"):
        ChatAgentKV(kv).bind(top_k=1).invoke("a")
    with pytest.raises(ConfigError, match="tool_choice='wether'"):
        ChatAgentKV(kv).bind_tools([weather], tool_choice="wether")


def test_tools_reach_the_engine_as_schemas_and_none_sends_none(make_kv) -> None:
    """Functions and BaseTools alike; injected arguments are not part of the schema."""
    kv = make_kv()

    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    ChatAgentKV(kv).bind_tools([weather, add]).invoke("a")
    ChatAgentKV(kv).bind_tools([weather], tool_choice="none").invoke("a")
    first, second = kv.engine.requests
    assert ["add", "weather"] == [spec.name for spec in first.tools]
    assert {"city", "days"} == set(first.tools[1].parameters["properties"])
    assert () == second.tools


class HasTokens(ScriptedEngine):
    """As the embedded engine: it tells a text's tokens."""

    def text_ids(self, text: str) -> tuple[int, ...]:
        return tuple(map(len, text.split()))


def test_token_ids_are_the_engines_or_an_error_and_never_somebody_elses(make_kv, monkeypatch) -> None:
    """LangChain's default asks a hub on the network for GPT-2's."""
    from langchain_core.language_models import base

    def reach_out(*_: Any) -> Any:
        raise AssertionError("asked the hub")

    monkeypatch.setattr(base, "_get_token_ids_default_method", reach_out)
    told = ChatAgentKV(make_kv(engine=HasTokens([])))
    assert [1, 3] == told.get_token_ids("a bcd")
    assert [7] == ChatAgentKV(make_kv(), custom_get_token_ids=lambda _text: [7]).get_token_ids("a")
    silent = ChatAgentKV(make_kv())
    with pytest.raises(NotImplementedError, match="get_num_tokens"):
        silent.get_token_ids("a bcd")
    assert silent.get_num_tokens("a bcd") > 0
    assert silent.get_num_tokens_from_messages([HumanMessage("a")], [weather]) > 0


def test_a_function_in_the_shape_of_the_responses_api_is_a_function(make_kv) -> None:
    """Its fields stand beside its type."""
    kv = make_kv()
    flat = {
        "type": "function",
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {}},
    }
    ChatAgentKV(kv).bind_tools([flat]).invoke("a")
    assert [("add", "Add.")] == [(spec.name, spec.description) for spec in kv.engine.requests[0].tools]


@pytest.mark.parametrize("bound", [{"type": "web_search"}, {"type": "mcp", "server_label": "x"}, {"google_search": {}}])
def test_a_tool_that_a_provider_runs_is_refused_by_its_name(make_kv, bound) -> None:
    """Such tools run on their makers' servers; here is none of them."""
    model = ChatAgentKV(make_kv())
    name = bound.get("type", "google_search")
    with pytest.raises(ConfigError, match=name):
        model.bind_tools([weather, bound])
    with pytest.raises(ConfigError, match=name):
        model.get_num_tokens_from_messages([HumanMessage("a")], [bound])
