"""The responses endpoint: items in, items out, earlier responses, and what is refused by name."""

from __future__ import annotations

import openai
import pytest

from agentkv import Message, ToolCall
from agentkv.engine.scripted import Reply
from agentkv.errors import RequestInvalid, TemplateRejected
from agentkv.server.responses import in_words_of_responses, response_request
from agentkv.server.stored import Stored

CALL = ToolCall(id="call_1", name="read", arguments='{"path":  "a.py"}')
TOOL = {"type": "function", "name": "read", "parameters": {"type": "object"}, "strict": True}


def read(**fields):
    return response_request({"model": "m", "input": "hello", **fields}, model="m")


def test_items_become_messages(door_of):
    """What an assistant said and the calls behind it are one turn; outputs may be lists of parts."""
    items = [
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "Look "}, {"type": "input_text", "text": "twice."}],
        },
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}],
        },
        {
            "type": "function_call",
            "id": "fc_1",
            "call_id": "a",
            "name": "read",
            "arguments": "{}",
            "status": "completed",
        },
        {"type": "function_call", "call_id": "b", "name": "read", "arguments": '{"n":  1}'},
        {"type": "function_call_output", "call_id": "a", "output": "done"},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "done too"}]},
    ]
    asked = read(input=items, instructions="Be brief.")
    calls = (ToolCall(id="a", name="read", arguments="{}"), ToolCall(id="b", name="read", arguments='{"n":  1}'))
    history = (
        Message(role="user", content="Look twice."),
        Message(role="assistant", content="I look.", tool_calls=calls),
        Message(role="tool", content="done", tool_call_id="a"),
        Message(role="tool", content="done too", tool_call_id="b"),
    )
    assert (Message(role="system", content="Be brief."), *history) == asked.asked.request.messages
    assert history == asked.kept


def test_what_a_model_refused_with_is_what_it_said():
    """A history of another model goes on; calls behind a refusal are one turn with it."""
    parts = [{"type": "output_text", "text": "Well. "}, {"type": "refusal", "refusal": "No."}]
    items = [
        {"role": "user", "content": "Go."},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": parts[1:]},
        {"role": "user", "content": "Go!"},
        {"role": "assistant", "content": parts},
        {"type": "function_call", "call_id": "call_1", "name": "read", "arguments": CALL.arguments},
        {"type": "function_call_output", "call_id": "call_1", "output": "done"},
    ]
    assert (
        Message(role="user", content="Go."),
        Message(role="assistant", content="No."),
        Message(role="user", content="Go!"),
        Message(role="assistant", content="Well. No.", tool_calls=(CALL,)),
        Message(role="tool", content="done", tool_call_id="call_1"),
    ) == read(input=items).kept


@pytest.mark.parametrize(
    "item",
    [
        {"role": "user", "content": [{"type": "refusal", "refusal": "no"}]},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "refusal", "refusal": "no"}]},
    ],
)
def test_nobody_but_the_model_refuses(item):
    """Such a part of others is no text."""
    with pytest.raises(RequestInvalid) as caught:
        read(input=[item])
    assert "unsupported_value" == caught.value.code


BAD = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": 4}, "input"),
    ({"input": [{"type": "reasoning", "id": "r"}]}, "input"),
    ({"input": [{"type": "item_reference", "id": "r"}]}, "input[0].type"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
    ({"input": [{"type": "function_call_output", "call_id": "a"}]}, "input[0].output"),
    ({"input": [{"type": "function_call", "call_id": "a", "name": "x"}]}, "input[0].arguments"),
    ({"input": [{"role": "user", "content": "x", "mood": 1}]}, "input[0].mood"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tool_choice": {"type": "file_search"}}, "tool_choice.type"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"background": True}, "background"),
    ({"conversation": "c"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"truncation": "auto"}, "truncation"),
    ({"reasoning": {"effort": "much"}}, "reasoning.effort"),
    ({"reasoning": {"summary": "auto"}}, "reasoning.summary"),
    ({"reasoning": {"mood": "good"}}, "reasoning.mood"),
    ({"reasoning": "high"}, "reasoning"),
    ({"max_tool_calls": 3}, "max_tool_calls"),
    ({"include": ["file_search_call.results"]}, "include[0]"),
    ({"text": {"verbosity": "high"}}, "text.verbosity"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": 1}}}, "text.format.schema"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"metadata": {"a": 1}}, "metadata"),
    ({"stop": "x"}, "stop"),
    ({"n": 2}, "n"),
    ({"stream_options": {}}, "stream_options"),
    ({"model": "other"}, "model"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
]


@pytest.mark.parametrize(("fields", "param"), BAD, ids=str)
def test_what_is_not_done_is_refused_by_name(fields, param):
    """The same policy as everywhere: an effect, or a 400 that names the field."""
    with pytest.raises(RequestInvalid) as caught:
        read(**fields)
    assert param == caught.value.param


def test_a_conversation_goes_on_by_id(door_of):
    """The earlier turns are put before the new input, without the old instructions; each turn only adds to the prompt."""
    door = door_of(Reply(text="I look.", tool_calls=(CALL,)), "Done.", "Bye.")
    client = door.doors.openai()
    first = client.responses.create(model="scripted", input="Look.", instructions="Old rules.", tools=[TOOL])
    output = {"type": "function_call_output", "call_id": "call_1", "output": "found"}
    second = client.responses.create(model="scripted", input=[output], previous_response_id=first.id, tools=[TOOL])
    third = client.responses.create(model="scripted", input="Thanks.", previous_response_id=second.id)
    assert ("Done.", "Bye.", second.id) == (second.output_text, third.output_text, third.previous_response_id)
    history = (
        Message(role="user", content="Look."),
        Message(role="assistant", content="I look.", tool_calls=(CALL,)),
        Message(role="tool", content="found", tool_call_id="call_1"),
    )
    assert history == door.engine.requests[1].messages
    assert (
        *history,
        Message(role="assistant", content="Done."),
        Message(role="user", content="Thanks."),
    ) == door.engine.requests[2].messages


def test_streamed_and_unstored_responses(door_of):
    """A streamed response is stored like a whole one; with store=False nothing is, and going on from it is a typed 400."""
    door = door_of("one", "two", "three")
    client = door.doors.openai()
    with client.responses.stream(model="scripted", input="a") as stream:
        stream.until_done()
        first = stream.get_final_response()
    unstored = client.responses.create(model="scripted", input="b", previous_response_id=first.id, store=False)
    with pytest.raises(openai.BadRequestError, match="send the whole input") as caught:
        client.responses.create(model="scripted", input="c", previous_response_id=unstored.id)
    assert ("previous_response_not_found", "previous_response_id") == (caught.value.code, caught.value.param)


def test_a_cut_answer_is_incomplete(door_of):
    """Status and reason say so, whole and streamed."""
    door = door_of("one two three", "one two three")
    client = door.doors.openai()
    whole = client.responses.create(model="scripted", input="x", max_output_tokens=2)
    assert ("incomplete", "max_output_tokens") == (whole.status, whole.incomplete_details.reason)
    events = list(client.responses.create(model="scripted", input="x", max_output_tokens=2, stream=True))
    assert "response.incomplete" == events[-1].type
    assert whole.usage.output_tokens == events[-1].response.usage.output_tokens == 2


def test_stored_responses_are_bounded_and_each_tenants_own():
    """Longest unused goes first, by number and by size; a tenant never finds another's."""
    stored = Stored(most=2, most_chars=100)
    for name in "ab":
        stored.put("alice", name, (Message(role="user", content=name),))
    stored.get("alice", "a")
    stored.put("alice", "c", (Message(role="user", content="c"),))
    assert 2 == len(stored)
    assert stored.get("alice", "a")
    for tenant, name in (("alice", "b"), ("bob", "a"), ("", "a")):
        with pytest.raises(RequestInvalid):
            stored.get(tenant, name)
    stored.put("alice", "long", (Message(role="user", content="x" * 99),))
    assert 2 == len(stored)
    stored.put("alice", "longer", (Message(role="user", content="x" * 101),))
    assert 0 == len(stored)


def test_tools_none_and_formats_are_told_back(door_of):
    """What was asked stands in the response, as clients expect."""
    door = door_of("{}")
    response = door.doors.openai().responses.create(
        model="scripted",
        input="x",
        tools=[TOOL],
        tool_choice="none",
        metadata={"run": "7"},
        text={"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}},
    )
    assert ("none", {"run": "7"}, "x") == (response.tool_choice, response.metadata, response.text.format.name)
    assert [("read", True)] == [(tool.name, tool.strict) for tool in response.tools]
    assert () == door.engine.requests[0].tools


def test_how_much_is_thought_reaches_the_engine_and_is_told_back(door_of):
    """An engine's refusal names the field as it is written here."""
    door = door_of("x")
    response = door.doors.openai().responses.create(model="scripted", input="x", reasoning={"effort": "low"})
    assert ("low", "low") == (response.reasoning.effort, door.engine.requests[0].reasoning_effort)
    error = RequestInvalid(
        "reasoning_effort='low' is not supported", param="reasoning_effort", code="unsupported_value"
    )
    told = in_words_of_responses(error)
    assert ("reasoning.effort='low' is not supported", "reasoning.effort", "unsupported_value") == (
        str(told), told.param, told.code,
    )  # fmt: skip
    rejected = in_words_of_responses(TemplateRejected("it refused the messages", param="messages"))
    assert (TemplateRejected, "it refused the input", "input") == (type(rejected), str(rejected), rejected.param)


def test_text_behind_a_call_is_of_the_same_turn():
    """A stream's items stand in the order in which they were written; sent again they are the turn that was stored."""
    call = {"type": "function_call", "call_id": "a", "name": "read", "arguments": "{}"}
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "I looked.", "annotations": []}]}
    output = {"type": "function_call_output", "call_id": "a", "output": "done"}
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    turn = Message(
        role="assistant", content="I looked.", tool_calls=(ToolCall(id="a", name="read", arguments="{}"),),
        reasoning="Hm.Hm.",
    )  # fmt: skip
    for items in ([call, said], [said, call]):
        assert turn == read(input=[thought, thought, *items, output]).kept[0]
    assert [said["content"][0]["text"]] * 2 == [turn.content for turn in read(input=[said, said]).kept]


@pytest.mark.parametrize("top", [3, "x", True, -1])
def test_top_logprobs_without_the_field_that_tells_them_is_refused(top):
    """It would do nothing; a chat refuses it too. With the field it has OpenAI's limits, under its own name."""
    for more in ({}, {"include": []}, {"include": ["message.output_text.logprobs"]} if top != 3 else {}):
        with pytest.raises(RequestInvalid) as caught:
            read(top_logprobs=top, **more)
        assert "top_logprobs" == caught.value.param
    told = read(top_logprobs=3, include=["message.output_text.logprobs"]).asked.request.logprobs
    assert (3, None) == (told, read(top_logprobs=0).asked.request.logprobs)


def test_what_was_thought_counts_in_what_is_stored():
    """A model that thinks at length must not fill the memory."""
    stored = Stored(most_chars=100)
    stored.put("", "one", (Message(role="assistant", content="x", reasoning="y" * 60),))
    stored.put("", "two", (Message(role="assistant", content="x", reasoning="y" * 60),))
    assert 1 == len(stored)
