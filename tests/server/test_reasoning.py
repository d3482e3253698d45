"""What a model thinks before it answers, through every door: beside the answer, never in it."""

from __future__ import annotations

import openai.types.responses as events
import pytest
from agentkv_langgraph import ChatAgentKV
from agentkv_langgraph.chat import _chunks
from langchain_core.messages import HumanMessage
from openai.types.responses import Response

from agentkv import AgentKV, ScriptedEngine, ToolCall
from agentkv.engine.base import CallDelta, Chunk
from agentkv.engine.script import Reply

CALL = ToolCall(id="call_1", name="read", arguments='{"path": "a.py"}')
THINKS = Reply(reasoning="Hm, let me see.\nYes.", text="Hello to you.")
CALLS = Reply(reasoning="I need the file.", text="I look.", tool_calls=(CALL,))
ONLY = Reply(reasoning="I think and think.")
TOOL = {"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}
FLAT = {"type": "function", "name": "read", "parameters": {"type": "object"}, "strict": False}
ANSWERS = [THINKS, CALLS, ONLY]
IDS = ["text", "calls", "nothing else"]


def told(message):
    return message.content or "", message.reasoning_content, [call.id for call in message.tool_calls or []]


@pytest.mark.parametrize("answer", ANSWERS, ids=IDS)
def test_a_chat_tells_thoughts_in_a_field_of_their_own(scripted_place, answer):
    """Whole and streamed, before the answer, and counted in the usage."""
    place = scripted_place(answer, answer)
    body = {"model": "scripted", "messages": [{"role": "user", "content": "x"}], "tools": [TOOL]}
    whole = place.openai().chat.completions.create(**body)
    text, thought, calls = "", "", []
    for chunk in place.openai().chat.completions.create(**body, stream=True):
        delta = chunk.choices[0].delta
        piece = getattr(delta, "reasoning_content", None) or ""
        assert not (piece and text)
        text, thought = text + (delta.content or ""), thought + piece
        calls += [call.id for call in delta.tool_calls or []]
    assert (answer.text, answer.reasoning, [call.id for call in answer.tool_calls]) == (text, thought, calls)
    assert (text, thought, calls) == told(whole.choices[0].message)
    words = len(answer.reasoning.split())
    assert words == whole.usage.completion_tokens_details.reasoning_tokens < whole.usage.completion_tokens + 1


def test_an_answer_without_thoughts_has_no_field_for_them(scripted_place):
    """So that clients that do not know it see what they always saw."""
    message = scripted_place("Hello.").chat().json()["choices"][0]["message"]
    assert "reasoning_content" not in message


@pytest.mark.parametrize("answer", ANSWERS, ids=IDS)
@pytest.mark.parametrize("limit", [None, 2], ids=["whole", "cut in the thought"])
def test_a_response_has_a_reasoning_item(scripted_place, answer, limit):
    """First, with its text in events of openai's own types; the stream ends in the same items."""
    place = scripted_place(answer, answer)
    body = {"model": "scripted", "input": "x", "tools": [FLAT], "max_output_tokens": limit}
    whole = Response.model_validate_json(place.http.post("/v1/responses", json=body).text, strict=True)
    seen, text = [], ""
    for event in place.openai().responses.create(**body, stream=True):
        if isinstance(event, events.ResponseReasoningTextDeltaEvent):
            text += event.delta
        if isinstance(event, events.ResponseReasoningTextDoneEvent):
            assert text == event.text
        if isinstance(event, events.ResponseOutputItemAddedEvent):
            seen.append(event.item.type)
        if isinstance(event, events.ResponseOutputItemDoneEvent):
            seen.append(f"{event.item.type} done")
        if isinstance(event, events.ResponseCompletedEvent | events.ResponseIncompleteEvent):
            ended = event.response

    def items(response):
        return [(item.type, item.status, getattr(item, "content", None)) for item in response.output]

    assert items(whole) == items(ended)
    assert (None, None) != (whole.output[0].content, ended.output[0].content)
    assert text == whole.output[0].content[0].text
    assert (answer.reasoning if limit is None else " ".join(answer.reasoning.split()[:2])) == text
    assert ["reasoning"] == [kind for kind in seen if "done" not in kind][:1]
    assert sorted(kind for kind in seen if "done" not in kind) == sorted(item.type for item in ended.output)
    assert 2 * len(ended.output) == len(seen)
    assert [] == whole.output[0].summary
    if limit is not None:
        assert [("reasoning", "incomplete")] == [(item.type, item.status) for item in whole.output]
        assert ("incomplete", 2) == (whole.status, whole.usage.output_tokens_details.reasoning_tokens)


def test_thoughts_that_come_back_reach_the_engine(scripted_place):
    """In a chat under either name, in a response as an item or by its id; a thought that nothing follows is none."""
    place = scripted_place(CALLS, "a", "b", "c", "d")
    engine, client = place.kv.engine, place.openai()
    user = {"role": "user", "content": "x"}
    first = client.responses.create(model="scripted", input="x", tools=[FLAT])
    output = {"type": "function_call_output", "call_id": "call_1", "output": "text"}
    client.responses.create(model="scripted", input=[output], previous_response_id=first.id)
    items = [item.model_dump(exclude_none=True) for item in first.output]
    lost = {"type": "reasoning", "id": "rs_9", "summary": [], "content": [{"type": "reasoning_text", "text": "lost"}]}
    client.responses.create(model="scripted", input=[user, *items, output, lost, user, lost])
    for name in ("reasoning_content", "reasoning"):
        said = {"role": "assistant", "content": "Hello.", name: "Hm."}
        client.chat.completions.create(model="scripted", messages=[user, said, user])
    sent = [[message for message in request.messages if message.role == "assistant"] for request in engine.requests[1:]]
    for turns in sent[:2]:
        assert [("I look.", "I need the file.", ("call_1",))] == [
            (turn.content, turn.reasoning, tuple(call.id for call in turn.tool_calls)) for turn in turns
        ]
    for turns in sent[2:]:
        assert [("Hello.", "Hm.")] == [(turn.content, turn.reasoning) for turn in turns]


@pytest.mark.parametrize("way", ["invoke", "stream"])
def test_langchain_finds_thoughts_where_it_looks_for_them(way):
    """In additional_kwargs, and so among the content blocks; they go back with the turn."""
    with AgentKV.with_engine(ScriptedEngine([CALLS, THINKS, "c"]), ledger="memory") as kv:
        model = ChatAgentKV(kv)
        turns = [HumanMessage("x")]
        for answer in (CALLS, THINKS):
            if way == "invoke":
                message = model.invoke(turns)
            else:
                pieces = list(model.stream(turns))
                message = pieces[0]
                for piece in pieces[1:]:
                    message += piece
            assert (answer.text, answer.reasoning) == (message.text, message.additional_kwargs["reasoning_content"])
            assert [answer.reasoning] == [b["reasoning"] for b in message.content_blocks if b["type"] == "reasoning"]
            assert len(answer.reasoning.split()) == message.usage_metadata["output_token_details"]["reasoning"]
            turns += [message, HumanMessage("more")]
        model.invoke(turns)
        sent = [message for message in kv.engine.requests[-1].messages if message.role == "assistant"]
    assert [(one.text, one.reasoning) for one in (CALLS, THINKS)] == [(one.content, one.reasoning) for one in sent]


def test_a_thought_that_comes_with_a_call_is_not_lost():
    """Guesses ahead can end a thought and begin a call in one step."""
    delta = CallDelta(index=0, id="call_1", name="read", arguments="{}")
    first, second = _chunks(Chunk(text="", reasoning="Hm.", calls=(delta,)))
    assert {"reasoning_content": "Hm."} == first.message.additional_kwargs
    assert "call_1" == second.message.tool_call_chunks[0]["id"]


@pytest.mark.parametrize("bad", [5, ["x"], {"a": 1}])
def test_a_thought_is_a_text(scripted_place, bad):
    """Or null; anything else is named."""
    place = scripted_place("a")
    turn = {"role": "assistant", "content": "Hello.", "reasoning_content": bad}
    answer = place.chat(messages=[turn, {"role": "user", "content": "x"}])
    assert (400, "messages[0].reasoning_content") == (answer.status_code, answer.json()["error"]["param"])
    turn["reasoning_content"] = None
    assert 200 == place.chat(messages=[turn, {"role": "user", "content": "x"}]).status_code
