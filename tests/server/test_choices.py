"""Several choices, log probabilities, echo and usage: whole and streamed say the same, on a scripted engine."""

from __future__ import annotations

import json
import math

import pytest

from agentkv import ToolCall
from agentkv.engine.base import CallDelta, Chunk, Generation, TokenLogprob, Usage
from agentkv.engine.scripted import Reply
from agentkv.engine.stream import Stream
from agentkv.server.replies import completion_logprobs

CALL = ToolCall(id="call_1", name="read", arguments='{"path":  "a.py"}')
THREE = ("one", "two words", Reply(text="three", tool_calls=(CALL,)))


def chunks_of(response) -> list[dict]:
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert ("[DONE]", 1) == (lines[-1], lines.count("[DONE]"))
    return [json.loads(line) for line in lines[:-1]]


def by_choice(chunks: list[dict]) -> dict[int, list[dict]]:
    told: dict[int, list[dict]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            told.setdefault(choice["index"], []).append(choice)
    return told


def test_three_choices_are_told_whole_and_streamed(door_of):
    """Each has its index, its text, its calls and its reason; usage is of them all, the prompt counted once (E28)."""
    door = door_of(THREE, THREE)
    whole = door.chat(n=3).json()
    assert [0, 1, 2] == [choice["index"] for choice in whole["choices"]]
    assert ["one", "two words", "three"] == [choice["message"]["content"] for choice in whole["choices"]]
    assert ["stop", "stop", "tool_calls"] == [choice["finish_reason"] for choice in whole["choices"]]
    asked = {"n": 3, "stream": True, "stream_options": {"include_usage": True}}
    chunks = chunks_of(door.chat(**asked))
    told = by_choice(chunks)
    assert {0, 1, 2} == told.keys()
    for index, choice in enumerate(whole["choices"]):
        deltas = [piece["delta"] for piece in told[index]]
        assert "assistant" == deltas[0]["role"]
        assert choice["message"]["content"] == "".join(delta.get("content") or "" for delta in deltas)
        reasons = [piece["finish_reason"] for piece in told[index]]
        assert [None] * (len(reasons) - 1) + [choice["finish_reason"]] == reasons
    assert whole["usage"] | {"prompt_tokens_details": {"cached_tokens": 3}} == chunks[-1]["usage"]
    assert 4 == whole["usage"]["prompt_tokens"]


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": True}], ids=str)
@pytest.mark.parametrize("body", [{}, {"n": 3}], ids=str)
@pytest.mark.parametrize("answer", [THREE, CALL], ids=["choices", "call"])
def test_e28_usage_comes_once_last_and_only_when_asked(door_of, options, body, answer):
    """One chunk without choices at the end, equal to what the whole reply says; else no chunk has it."""
    door = door_of(answer, answer)
    asked = body | {"stream": True} | ({} if options is None else {"stream_options": options})
    chunks = chunks_of(door.chat(**asked))
    without_choice = [chunk for chunk in chunks if not chunk["choices"]]
    if not (options or {}).get("include_usage"):
        assert [] == without_choice
        assert not any("usage" in chunk for chunk in chunks)
        return
    assert [chunks[-1]] == without_choice
    whole = door.chat(**body).json()["usage"]
    same = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [whole[name] for name in same] == [chunks[-1]["usage"][name] for name in same]


@pytest.mark.parametrize("count", [2, 5])
def test_e15_parallel_calls_have_indexes_of_their_own(door_of, count):
    """Two and five calls in one turn, and in two choices at once: indexes 0 to n-1, ids unique, arguments whole."""
    calls = tuple(ToolCall(id=f"call_{n}", name="read", arguments=f'{{"n": {n}}}') for n in range(count))
    others = tuple(ToolCall(id=f"other_{n}", name="read", arguments="{}") for n in range(count))
    door = door_of((Reply(tool_calls=calls), Reply(tool_calls=others)))
    told = by_choice(chunks_of(door.chat(n=2, stream=True)))
    for index, wanted in enumerate((calls, others)):
        deltas = [d for piece in told[index] for d in piece["delta"].get("tool_calls", [])]
        assert list(range(count)) == [delta["index"] for delta in deltas]
        assert [call.id for call in wanted] == [delta["id"] for delta in deltas]
        assert [call.arguments for call in wanted] == [delta["function"]["arguments"] for delta in deltas]


class Piecemeal:
    """An engine that tells calls while it writes them, two at once."""

    model = "scripted"

    def __init__(self, calls):
        self._calls = calls

    def submit(self, request):
        stream = Stream()
        for index, call in enumerate(self._calls):
            stream.push(Chunk(text="", token_ids=(1,), calls=(CallDelta(index=index, id=call.id, name=call.name),)))
        for at in range(max(len(call.arguments) for call in self._calls)):
            for index, call in enumerate(self._calls):
                if call.arguments[at : at + 1]:
                    stream.push(Chunk(text="", calls=(CallDelta(index=index, arguments=call.arguments[at]),)))
        usage = Usage(input_tokens=1, output_tokens=2, calls=1)
        stream.finish(
            Generation(
                text="", raw="", token_ids=(1,), finish_reason="tool_calls", usage=usage, tool_calls=tuple(self._calls)
            )
        )
        return stream


def test_calls_that_come_in_pieces_are_passed_on_and_not_told_twice(door_of):
    """openai's own accumulator puts them together; nothing is added at the end."""
    calls = [ToolCall(id=f"call_{n}", name="read", arguments=f'{{"path": "{n}.py"}}') for n in range(2)]
    door = door_of(submit=lambda engine: Piecemeal(calls).submit)
    client = door.doors.openai()
    with client.chat.completions.stream(model="scripted", messages=[{"role": "user", "content": "x"}]) as stream:
        stream.until_done()
        message = stream.get_final_completion().choices[0].message
    assert [(c.id, c.name, c.arguments) for c in calls] == [
        (c.id, c.function.name, c.function.arguments) for c in message.tool_calls
    ]
    with client.responses.stream(model="scripted", input="x") as stream:
        stream.until_done()
        output = stream.get_final_response().output
    assert [(c.id, c.name, c.arguments) for c in calls] == [(o.call_id, o.name, o.arguments) for o in output]


def test_logprobs_are_told_whole_and_streamed(door_of):
    """The bytes of all entries are the text's; each has as many alternatives as were asked for."""
    door = door_of("Hello to you", "Hello to you", "Hello to you")
    content = door.chat(logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]["content"]
    assert "Hello to you" == bytes(byte for entry in content for byte in entry["bytes"]).decode()
    assert [2, 2, 2] == [len(entry["top_logprobs"]) for entry in content]
    told = by_choice(chunks_of(door.chat(logprobs=True, top_logprobs=2, stream=True)))[0]
    assert content == [entry for piece in told if piece["logprobs"] for entry in piece["logprobs"]["content"]]
    assert door.chat().json()["choices"][0]["logprobs"] is None


def test_e13_odd_logprobs_stay_json(door_of):
    """Half a character has its bytes; an impossible token has a number, not an infinity."""
    entries = tuple(
        TokenLogprob(token_id=n, raw=raw, logprob=logprob)
        for n, (raw, logprob) in enumerate([(b"\xf0\x9f", -math.inf), (b"\x98\x80", math.nan)])
    )
    door = door_of(Reply(text="😀 x", logprobs=entries))
    response = door.chat(logprobs=True)
    content = json.loads(response.text, parse_constant=pytest.fail)["choices"][0]["logprobs"]["content"]
    assert "😀" == bytes(byte for entry in content for byte in entry["bytes"]).decode()
    assert [-9999.0, -9999.0] == [entry["logprob"] for entry in content]


def test_completions_repeat_the_prompt_and_tell_logprobs(door_of):
    """echo puts the prompt before every choice's text; logprobs have offsets in the text."""
    door = door_of(*[("one two", "three")] * 4)

    def ask(**more):
        return door.http.post("/v1/completions", json={"model": "scripted", "prompt": "Say: ", "n": 2, **more})

    assert ["Say: one two", "Say: three"] == [choice["text"] for choice in ask(echo=True).json()["choices"]]
    told = by_choice(chunks_of(ask(echo=True, stream=True)))
    assert ["Say: one two", "Say: three"] == ["".join(p["text"] for p in told[n]) for n in range(2)]
    whole = ask(logprobs=1).json()["choices"][0]["logprobs"]
    assert (["one", " two"], [0, 3]) == (whole["tokens"], whole["text_offset"])
    pieces = [piece["logprobs"] for piece in by_choice(chunks_of(ask(logprobs=1, stream=True)))[0] if piece["logprobs"]]
    assert [0, 3] == [offset for piece in pieces for offset in piece["text_offset"]]


def test_offsets_count_characters_of_the_text():
    """Tokens that share a character begin where it does; what is broken counts as the one character that it became."""
    raws = [b"a", b"\xf0", b"\x9f\x98", b"\x80", b"b", b"\xf0", b"\x9f", b"\xf0", b"c", b"\xef\xbf", b"\xbd", b"\xff"]
    told = completion_logprobs([TokenLogprob(token_id=0, raw=raw, logprob=-1.0) for raw in raws], 7)
    assert [7 + offset for offset in (0, 1, 1, 1, 2, 3, 3, 4, 5, 6, 6, 7)] == told["text_offset"]
    text = b"".join(raws).decode(errors="replace")
    assert "a😀b\ufffd\ufffdc\ufffd\ufffd" == text


def test_what_is_asked_reaches_the_engine(door_of):
    """Choice, format, bias and penalties are in the request that the engine gets."""
    tool = {"type": "function", "function": {"name": "read", "strict": True, "parameters": {"type": "object"}}}
    door = door_of("x", "x", "x", "x")
    door.chat(tools=[tool], tool_choice={"type": "function", "function": {"name": "read"}}, parallel_tool_calls=False)
    request = door.engine.requests[-1]
    assert ("required", ("read",), False) == (
        request.tool_choice.mode,
        request.tool_choice.names,
        request.tool_choice.parallel,
    )
    assert request.tools[0].strict
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "read"}}]}
    door.chat(tools=[tool], tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert ("auto", ("read",)) == (
        door.engine.requests[-1].tool_choice.mode,
        door.engine.requests[-1].tool_choice.names,
    )
    schema = {"name": "answer", "schema": {"type": "object"}, "strict": True}
    door.chat(response_format={"type": "json_schema", "json_schema": schema}, logit_bias={"5": -1}, presence_penalty=1)
    request = door.engine.requests[-1]
    assert ({"type": "object"}, True) == (request.response_format.schema, request.response_format.strict)
    assert (((5, -1),), 1) == (request.sampling.logit_bias, request.sampling.presence_penalty)
    said = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "One, two,"}]
    door.chat(messages=said, continue_final_message=True, add_generation_prompt=False)
    assert (True, True) == (door.engine.requests[-1].continue_final_message, door.engine.requests[-1].as_is)
