"""openai's own types, validated strictly, read every answer: whole and streamed, through a socket."""

from __future__ import annotations

import json

import openai.types.responses as events
import pytest
from openai.types import Completion, CompletionUsage, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response

from agentkv import ToolCall
from agentkv.engine.scripted import Reply

CALLS = tuple(ToolCall(id=f"call_{n}", name="read", arguments=f'{{"path":  "{n}.py"}}') for n in range(3))
ANSWERS = ["Hello to you 👨‍👩‍👧", "", Reply(text="I look.", tool_calls=CALLS), CALLS[0]]
TOOL = {"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}
FLAT_TOOL = {"type": "function", "name": "read", "parameters": {"type": "object"}, "strict": False}
USER = {"role": "user", "content": "hello"}
EVENTS = {
    "response.created": events.ResponseCreatedEvent,
    "response.in_progress": events.ResponseInProgressEvent,
    "response.output_item.added": events.ResponseOutputItemAddedEvent,
    "response.content_part.added": events.ResponseContentPartAddedEvent,
    "response.output_text.delta": events.ResponseTextDeltaEvent,
    "response.output_text.done": events.ResponseTextDoneEvent,
    "response.content_part.done": events.ResponseContentPartDoneEvent,
    "response.output_item.done": events.ResponseOutputItemDoneEvent,
    "response.function_call_arguments.delta": events.ResponseFunctionCallArgumentsDeltaEvent,
    "response.function_call_arguments.done": events.ResponseFunctionCallArgumentsDoneEvent,
    "response.completed": events.ResponseCompletedEvent,
    "response.incomplete": events.ResponseIncompleteEvent,
    "response.failed": events.ResponseFailedEvent,
}


def strict(kind, text):
    """Validate strictly, and see that nothing was told that the type does not know."""
    value = kind.model_validate_json(text, strict=True)
    assert not value.model_extra, value.model_extra
    return value


def sent(response) -> list[str]:
    assert 200 == response.status_code, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return [line.partition("data: ")[2] for line in response.text.split("\n\n") if line]


@pytest.mark.parametrize("answer", ANSWERS, ids=["text", "empty", "text and calls", "call"])
@pytest.mark.parametrize("more", [{}, {"n": 3}, {"logprobs": True, "top_logprobs": 2}], ids=str)
def test_chats_are_openais_own_types(scripted_place, answer, more):
    """Whole and in chunks, one choice and three, with and without log probabilities."""
    place = scripted_place(answer, answer)
    body = {"tools": [TOOL], **more}
    strict(ChatCompletion, place.chat(**body).text)
    lines = sent(place.chat(**body, stream=True, stream_options={"include_usage": True}))
    assert "[DONE]" == lines.pop()
    chunks = [strict(ChatCompletionChunk, line) for line in lines]
    assert isinstance(chunks[-1].usage, CompletionUsage)
    assert set(range(more.get("n", 1))) == {choice.index for chunk in chunks for choice in chunk.choices}


@pytest.mark.parametrize("more", [{}, {"n": 2, "logprobs": 2}, {"echo": True}], ids=str)
def test_completions_are_openais_own_types(scripted_place, more):
    """Chunks of a completion have no finish reason until the last, which the type does not foresee: they are read by hand."""
    place = scripted_place("one two", "one two")
    body = {"model": "scripted", "prompt": "once", **more}
    strict(Completion, place.http.post("/v1/completions", json=body).text)
    lines = sent(place.http.post("/v1/completions", json={**body, "stream": True}))
    assert "[DONE]" == lines.pop()
    reasons = [choice["finish_reason"] for line in lines for choice in json.loads(line)["choices"]]
    assert more.get("n", 1) == len([reason for reason in reasons if reason == "stop"])
    for line in lines:
        strict(Completion, line.replace('"finish_reason":null', '"finish_reason":"stop"'))


@pytest.mark.parametrize("answer", ANSWERS, ids=["text", "empty", "text and calls", "call"])
@pytest.mark.parametrize("include", [[], ["message.output_text.logprobs"]], ids=["plain", "logprobs"])
def test_responses_are_openais_own_types(scripted_place, answer, include):
    """Whole, and as events in the order that clients rely on; the last one holds what the whole response is."""
    place = scripted_place(answer, answer)
    body = {"model": "scripted", "input": "hello", "tools": [FLAT_TOOL], "include": include}
    response = place.http.post("/v1/responses", json=body)
    whole = strict(Response, without(response.text, "store"))
    lines = sent(place.http.post("/v1/responses", json={**body, "stream": True}))
    told = [strict(EVENTS[json.loads(line)["type"]], without(line, "store", "name")) for line in lines]
    assert list(range(len(told))) == [event.sequence_number for event in told]
    assert ["response.created", "response.in_progress"] == [event.type for event in told[:2]]
    last = told[-1]
    assert "response.completed" == last.type
    assert nameless(whole) == nameless(last.response)
    assert "".join(e.delta for e in told if e.type == "response.output_text.delta") == whole.output_text


def without(text: str, *names: str) -> str:
    """`text` without fields that openai's server sends and its own types leave out."""

    def strip(value):
        if isinstance(value, dict):
            keep = {k: strip(v) for k, v in value.items() if not (k in names and k == "store")}
            if value.get("type") == "response.function_call_arguments.done":
                keep.pop(
                    "name", None
                ) if "name" not in events.ResponseFunctionCallArgumentsDoneEvent.model_fields else None
            return keep
        return [strip(item) for item in value] if isinstance(value, list) else value

    return json.dumps(strip(json.loads(text)))


def nameless(response: Response) -> dict:
    """A response without what differs each time."""
    body = response.model_dump(exclude={"id", "created_at", "usage"})
    for item in body["output"]:
        item.pop("id")
    return body


def test_models_are_openais_own_types(scripted_place):
    """The card of the model."""
    place = scripted_place()
    strict(Model, place.http.get("/v1/models/scripted").text)
    assert ["scripted"] == [model.id for model in place.openai().models.list()]


def test_a_failed_response_is_an_event_of_its_own(scripted_place):
    """The error stands in the response; no [DONE], no completed event."""
    place = scripted_place(ValueError("secret"))
    lines = sent(place.http.post("/v1/responses", json={"model": "scripted", "input": "x", "stream": True}))
    last = strict(events.ResponseFailedEvent, without(lines[-1]))
    assert ("failed", "server_error") == (last.response.status, last.response.error.code)
    assert "secret" not in "".join(lines)
