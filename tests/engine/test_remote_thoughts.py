"""Thoughts that a server tells apart: streamed, whole, billed, and sent again where a loop of calls goes on."""

import json

import pytest

from agentkv import AgentKV, ScriptedEngine
from agentkv.core.message import Message, ToolCall, ToolSpec
from agentkv.core.task import Caller
from agentkv.engine.base import Request
from agentkv.engine.script import Reply
from agentkv.server.app import create_app

CALL = ToolCall(id="call_1", name="get", arguments='{"q": 1}')
TOOLS = (ToolSpec(name="get", parameters={"type": "object"}),)


def chunk(delta, finish=None) -> dict:
    choices = [{"index": 0, "delta": delta, "finish_reason": finish}]
    return {"id": "x", "object": "chat.completion.chunk", "choices": choices}


def told(field, *pieces) -> list[dict]:
    """An answer that thinks in these pieces and then calls."""
    function = {"name": CALL.name, "arguments": CALL.arguments}
    call = {"index": 0, "id": CALL.id, "type": "function", "function": function}
    thoughts = [chunk({field: piece, "content": None}) for piece in pieces] if field else []
    return [*thoughts, chunk({"tool_calls": [call]}), chunk({}, "tool_calls")]


def loop(reasoning) -> Request:
    """The second call of a loop."""
    turns = (
        Message(role="user", content="Go."),
        Message(role="assistant", content="", tool_calls=(CALL,), reasoning=reasoning),
        Message(role="tool", content="seven", tool_call_id=CALL.id),
    )
    return Request(messages=turns, tools=TOOLS, caller=Caller(task="t"))


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_thoughts_are_told_apart_and_sent_again_under_their_own_name(remote_of, peculiar, field):
    """Pieces of the stream join to the whole; the next call of the loop has them in the turn that called."""
    server = peculiar(told(field, "Hm, ", "seven?"), told("", ""))
    remote = remote_of(server)
    stream = remote.submit(Request(messages=(Message(role="user", content="Go."),), tools=TOOLS))
    pieces = [piece.reasoning for piece in stream if piece.reasoning]
    whole = stream.result(20)
    assert (["Hm, ", "seven?"], "Hm, seven?", "") == (pieces, whole.reasoning, whole.text)
    assert whole.usage.reasoning_tokens > 0
    bare = remote.count_tokens(loop(""))
    assert remote.count_tokens(loop(whole.reasoning)) > bare
    remote.submit(loop(whole.reasoning)).result(20)
    user, called, result = server.bodies[1]["messages"]
    assert "Hm, seven?" == called[field]
    assert {"role", "content", "tool_calls", field} == set(called)
    assert field not in user | result


def test_a_server_that_tells_no_thoughts_is_sent_none(remote_of, peculiar):
    """A history from elsewhere brings them along: it knows no such field, and might refuse it."""
    server = peculiar(told(""), told(""))
    remote = remote_of(server)
    for _ in range(2):
        remote.submit(loop("Hm.")).result(20)
    for body in server.bodies:
        assert "Hm." not in json.dumps(body)


def test_a_turn_without_calls_is_sent_as_it_was_said(remote_of, peculiar):
    """Its thought is over."""
    server = peculiar(told("reasoning", "Hm."), told(""))
    remote = remote_of(server)
    remote.submit(loop("")).result(20)
    turns = (Message(role="assistant", content="Seven.", reasoning="Hm."), Message(role="user", content="And?"))
    remote.submit(Request(messages=turns)).result(20)
    assert "Hm." not in json.dumps(server.bodies[1])


def test_a_thought_comes_through_our_own_server_and_back(remote_of):
    """From an engine that thinks, over HTTP, to whoever calls it from elsewhere."""
    replies = [Reply(reasoning="They greet me.", text="Hello."), Reply(text="Seven.")]
    with AgentKV.with_engine(ScriptedEngine(replies), context=None) as kv:
        remote = remote_of(create_app(kv.submit, model="scripted", count_tokens=kv.engine.count_tokens))
        first = remote.submit(Request(messages=(Message(role="user", content="Hi."),))).result(20)
        assert ("They greet me.", "Hello.") == (first.reasoning, first.text)
        remote.submit(loop("Hm, seven?")).result(20)
        assert "Hm, seven?" == kv.engine.requests[1].messages[1].reasoning
