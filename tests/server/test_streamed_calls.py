"""Calls while they are written, through every door, with a real engine that is held to them: E14, E15, E16.

What a client puts together from a stream is what it gets in one piece; a call that is cut is executed by nobody.
"""

from __future__ import annotations

import json

import openai
import pytest
from agentkv_langgraph import ChatAgentKV
from agentkv_langgraph.choice import Choice
from agentkv_langgraph.structured import AnswerInvalid
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import tools_condition

ARGUMENTS = {"path": 'a "}}</tool_call> é\\.py', "deep": {"x": [1, {"y": "[{"}]}}
SCHEMA = {
    "type": "object",
    "properties": {name: {"const": value} for name, value in ARGUMENTS.items()},
    "required": list(ARGUMENTS),
    "additionalProperties": False,
}
FUNCTION = {"name": "read", "parameters": SCHEMA, "strict": True}
TOOL = {"type": "function", "function": FUNCTION}
FLAT = {"type": "function", **FUNCTION}
USER = {"role": "user", "content": "hello"}
ASK = {"messages": [USER], "tools": [TOOL], "tool_choice": "required", "temperature": 0, "parallel_tool_calls": False}


@pytest.fixture
def place(engine_place):
    return engine_place()


def asked(place, **more):
    return {"model": place.kv.engine.model, "max_tokens": 300, **ASK, **more}


def added_up(chunks):
    """(text, calls by index, why it ended) as any client adds them up."""
    text, calls, reason = "", {}, None
    for chunk in chunks:
        for choice in chunk.choices:
            text, reason = text + (choice.delta.content or ""), choice.finish_reason or reason
            for part in choice.delta.tool_calls or []:
                if part.id:
                    assert ("function", "") == (part.type, part.function.arguments)
                    assert len(calls) == part.index
                    calls[part.index] = {"id": part.id, "name": part.function.name, "arguments": ""}
                else:
                    assert (None, None) == (part.type, part.function.name)
                calls[part.index]["arguments"] += part.function.arguments
    return text, list(calls.values()), reason


def whole_of(place, **more):
    choice = place.openai().chat.completions.create(**asked(place, **more)).choices[0]
    calls = [
        {"id": call.id, "name": call.function.name, "arguments": call.function.arguments}
        for call in choice.message.tool_calls or []
    ]
    return choice.message.content or "", calls, choice.finish_reason


def without_ids(told):
    text, calls, reason = told
    return text, [(call["name"], call["arguments"]) for call in calls], reason


@pytest.mark.parametrize("in_process", [False, True], ids=["socket", "in process"])
def test_a_chat_streams_its_call(place, in_process):
    """First its id and name, then its arguments in pieces, which add up to those of the whole answer."""
    client = place.kv.openai() if in_process else place.openai()
    chunks = list(client.chat.completions.create(stream=True, **asked(place)))
    told = added_up(chunks)
    assert sum(bool(choice.delta.tool_calls) for chunk in chunks for choice in chunk.choices) > 3
    assert without_ids(whole_of(place)) == without_ids(told)
    assert ("tool_calls", ARGUMENTS) == (told[2], json.loads(told[1][0]["arguments"]))


@pytest.mark.parametrize("limit", [1, 11, 20, 34, 42, 60, 75, 97, 104, 110, 112])
def test_a_call_that_is_cut_ends_with_length_in_both_forms(place, limit):
    """The same pieces, no valid JSON, and OpenAI's own helper refuses it."""
    body = {"max_tokens": limit}
    told = added_up(place.openai().chat.completions.create(stream=True, **asked(place, **body)))
    assert without_ids(whole_of(place, **body)) == without_ids(told)
    assert ("", "length") == (told[0], told[2])
    for call in told[1]:
        with pytest.raises(json.JSONDecodeError):
            json.loads(call["arguments"])
    with (
        pytest.raises(openai.LengthFinishReasonError),
        place.openai().chat.completions.stream(**asked(place, **body)) as stream,
    ):
        stream.get_final_completion()


def test_openais_helper_reads_the_stream(place):
    """Typed events, and a parsed object at the end."""
    with place.openai().chat.completions.stream(**asked(place)) as stream:
        events = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    assert call.function.arguments == "".join(event.arguments_delta for event in events)
    assert ARGUMENTS == call.function.parsed_arguments
    assert len(events) > 3


@pytest.mark.parametrize("limit", [300, 60, 3], ids=["whole", "cut", "cut before its name"])
def test_a_response_streams_its_call(place, limit):
    """Deltas that add up to what `done` says, in an item that is complete only where the call is."""
    body = {
        "model": place.kv.engine.model, "input": "hello", "tools": [FLAT], "tool_choice": "required",
        "temperature": 0, "parallel_tool_calls": False, "max_output_tokens": limit,
    }  # fmt: skip
    whole = place.openai().responses.create(**body)
    items: dict = {}
    for event in place.openai().responses.create(**body, stream=True):
        if event.type == "response.function_call_arguments.delta":
            items[event.output_index] = items.get(event.output_index, "") + event.delta
        elif event.type == "response.function_call_arguments.done":
            assert items[event.output_index] == event.arguments
        elif event.type in ("response.completed", "response.incomplete"):
            ended = event.response
    status = "completed" if limit == 300 else "incomplete"
    assert (status, status) == (whole.status, ended.status)

    def told(response):
        return [(item.type, item.status, getattr(item, "arguments", None)) for item in response.output]

    assert told(whole) == told(ended)
    kind = "message" if limit == 3 else "function_call"
    assert [(kind, status)] == [(item.type, item.status) for item in ended.output]
    assert list(items.values()) == [item.arguments for item in ended.output if item.type == "function_call"]


@pytest.mark.parametrize("door", ["socket", "ours"])
def test_langchain_adds_the_pieces_up(place, door):
    """The sum of the chunks has the one call, with its id, and so has the whole message."""
    model = ChatOpenAI(base_url=f"{place.url}/v1", api_key="none", model=place.kv.engine.model, temperature=0)
    model = model if door == "socket" else ChatAgentKV(place.kv)
    bound = model.bind_tools([TOOL], tool_choice="any", parallel_tool_calls=False)
    chunks = list(bound.stream("hello"))
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    assert sum(bool(chunk.tool_call_chunks) for chunk in chunks) > 3
    assert [("read", ARGUMENTS)] == [(call["name"], call["args"]) for call in total.tool_calls]
    assert total.tool_calls[0]["id"].startswith("call_")
    assert [ARGUMENTS] == [call["args"] for call in bound.invoke("hello").tool_calls]


@pytest.mark.parametrize("limit", [43, 45, 60, 75, 90, 104, 110])
def test_langchain_is_given_no_half_call_to_run(place, limit):
    """LangChain completes half an object to a whole one with fewer fields: not this one, whole or streamed."""
    model = ChatAgentKV(place.kv, max_tokens=limit)
    free = Choice(names=frozenset(("read",)), checked_elsewhere=True)
    bound = model.bind_tools([TOOL], tool_choice=free, parallel_tool_calls=False)
    total = None
    for chunk in bound.stream("hello"):
        total = chunk if total is None else total + chunk
    whole = bound.invoke("hello")
    for message in (total, whole):
        assert [] == message.tool_calls
        assert "length" == message.response_metadata["finish_reason"]
        assert "__end__" == tools_condition([message])
    assert [call["args"] for call in total.invalid_tool_calls] == [call["args"] for call in whole.invalid_tool_calls]
    assert ["read"] == [call["name"] for call in whole.invalid_tool_calls]
    with pytest.raises(AnswerInvalid):
        model.bind_tools([TOOL], tool_choice="any").invoke("hello")


def test_several_calls_in_one_turn_keep_their_places(engine_place):
    """Indexes from 0 on, each id once; a chunk sum and the whole agree (E15)."""
    place = engine_place()
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
        for name in ("a", "b")
    ]
    body = {"tools": tools, "parallel_tool_calls": True, "logit_bias": {"198": 100}, "max_tokens": 480}
    told = added_up(place.openai().chat.completions.create(stream=True, **asked(place, **body)))
    again = added_up(place.openai().chat.completions.create(stream=True, **asked(place, **body)))
    assert 8 == len(told[1])
    assert 16 == len({call["id"] for call in told[1] + again[1]})
    assert without_ids(whole_of(place, **body)) == without_ids(told)
