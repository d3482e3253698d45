"""The order of a response's stream, piece by piece, as openai's own helper puts it together."""

from __future__ import annotations

import json

import openai
import pytest
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from agentkv.core.message import ToolCall
from agentkv.core.usage import Usage
from agentkv.engine.base import CallDelta, Chunk, Generation
from agentkv.server.events import ResponseReply

EVENT = TypeAdapter(ResponseStreamEvent)
TOLD = {
    "instructions": None, "max_output_tokens": None, "metadata": {}, "parallel_tool_calls": True, "temperature": 1.0,
    "previous_response_id": None, "text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": [], "top_p": 1.0,
    "truncation": "disabled",
}  # fmt: skip
HEAD, TAIL = CallDelta(index=0, id="call_1", name="read", arguments=""), CallDelta(index=0, arguments="{}")
PIECES = {
    "t": Chunk(text="Some "),
    "T": Chunk(text="text."),
    "r": Chunk(text="", reasoning="Hm, "),
    "R": Chunk(text="", reasoning="yes."),
    "c": Chunk(text="", calls=(HEAD,)),
    "C": Chunk(text="", calls=(TAIL,)),
    "x": Chunk(text="all", reasoning="of ", calls=(HEAD, TAIL)),
}


def streamed(order: str, finish: str = "stop"):
    """The events of these pieces, checked against openai's types, and the response that its helper put together."""
    reply = ResponseReply(model="m", created_s=1, told=TOLD, store=False, keep=lambda *_: None)
    chunks = [PIECES[one] for one in order]
    calls = (ToolCall(id="call_1", name="read", arguments="{}"),) if set(order) & set("Cx") else ()
    generation = Generation(
        text="".join(chunk.text for chunk in chunks), reasoning="".join(chunk.reasoning for chunk in chunks), raw="",
        token_ids=(), finish_reason=finish, tool_calls=calls, usage=Usage(input_tokens=1, output_tokens=1, calls=1),
    )  # fmt: skip
    raw = reply.begin() + b"".join(map(reply.piece, chunks)) + reply.end(generation)
    bodies = [json.loads(part.partition("data: ")[2]) for part in raw.decode().split("\n\n") if part]
    events = [EVENT.validate_python(body, strict=True) for body in bodies]
    assert list(range(len(events))) == [event.sequence_number for event in events]
    helper = ResponseStreamState(input_tools=[], text_format=openai.NOT_GIVEN)
    for event in events:
        helper.handle_event(event)
    whole = ResponseReply(model="m", created_s=1, told=TOLD, store=False, keep=lambda *_: None).whole(generation)
    return events, Response.model_validate(whole)


@pytest.mark.parametrize("finish", ["stop", "length"])
@pytest.mark.parametrize(
    "order", ["tT", "rRtT", "rtcC", "tRr", "tRTrcC", "cCtT", "rcCtTR", "x", "rcC", "cC", "rR", "", "trtRT", "rtRcC"]
)
def test_every_item_has_its_own_place(order, finish):
    """Whatever comes in whatever order: an item's events lie between its beginning and its end, under its index and id."""
    events, whole = streamed(order, finish)
    open_ids: dict[int, str] = {}
    ended: dict[int, object] = {}
    for event in events:
        at = getattr(event, "output_index", None)
        if event.type == "response.output_item.added":
            assert len(open_ids) == at
            open_ids[at] = event.item.id
        elif event.type == "response.output_item.done":
            assert open_ids[at] == event.item.id
            assert at not in ended
            ended[at] = event.item
        elif at is not None:
            assert open_ids[at] == event.item_id
            assert at not in ended
    output = events[-1].response.output
    assert output == [ended[at] for at in range(len(open_ids))]
    assert len({item.id for item in output}) == len(output)
    assert parts(whole.output) == parts(output)


def parts(output):
    """What a response says, whatever the order of its items."""
    told = {"reasoning": "", "message": "", "function_call": ""}
    for item in output:
        content = getattr(item, "content", None) or []
        told[item.type] += getattr(item, "arguments", "") + "".join(part.text for part in content)
    return told, {item.type: item.status for item in output}
