"""Every field of a call has its effect or is refused by name; none is silently without effect."""

from __future__ import annotations

import json

import pytest

from agentkv.core.message import Message, ToolCall, ToolSpec
from agentkv.engine.base import Sampling
from agentkv.errors import RequestInvalid
from agentkv.server.fields import read_json
from agentkv.server.requests import chat_request, completion_request
from agentkv.server.sampled import HARMLESS, STOP_LIMIT

USER = {"role": "user", "content": "hello"}
TOOL = {"type": "function", "function": {"name": "read", "description": "a file", "parameters": {"type": "object"}}}


def chat(**fields):
    return chat_request({"model": "m", "messages": [USER], **fields}, model="m")


def completion(**fields):
    return completion_request({"model": "m", "prompt": "once", **fields}, model="m")


def refused(read, **fields) -> RequestInvalid:
    with pytest.raises(RequestInvalid) as caught:
        read(**fields)
    assert len(str(caught.value)) < 400
    return caught.value


SAMPLING_EFFECTS = [
    ({"max_tokens": 7}, {"max_tokens": 7}),
    ({"max_completion_tokens": 7}, {"max_tokens": 7}),
    ({"max_completion_tokens": 7, "max_tokens": 7}, {"max_tokens": 7}),
    ({"temperature": 0}, {"temperature": 0}),
    ({"temperature": 0.7}, {"temperature": 0.7}),
    ({"top_p": 0.3}, {"top_p": 0.3}),
    ({"seed": 11}, {"seed": 11}),
    ({"stop": "end"}, {"stop": ("end",)}),
    ({"stop": ["a", "b"]}, {"stop": ("a", "b")}),
    ({"presence_penalty": 0.5}, {"presence_penalty": 0.5}),
    ({"frequency_penalty": -0.5}, {"frequency_penalty": -0.5}),
    ({"logit_bias": {"5": 1, "77": -100.0}}, {"logit_bias": ((5, 1), (77, -100.0))}),
]


@pytest.mark.parametrize("read", [chat, completion])
@pytest.mark.parametrize(("fields", "effect"), SAMPLING_EFFECTS, ids=str)
def test_sampling_fields_reach_the_engine(read, fields, effect):
    """Each field is in the Sampling that the engine gets; the others keep their defaults."""
    plain = read().request.sampling
    defaults = {name: getattr(plain, name) for name in ("max_tokens", "temperature", "top_p", "seed", "stop")}
    assert Sampling(**{**defaults, **effect}) == read(**fields).request.sampling


def test_defaults_are_openais():
    """Temperature 1, no limit for a chat and 16 tokens for a completion; null counts as absent."""
    assert Sampling(temperature=1.0) == chat().request.sampling
    assert Sampling(temperature=1.0, max_tokens=16) == completion().request.sampling
    assert Sampling(temperature=1.0) == chat(temperature=None, stop=None, max_tokens=None, n=None).request.sampling


BAD_SAMPLING = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "7"}, "max_tokens"),
    ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ({"max_completion_tokens": 7, "max_tokens": 8}, "max_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "warm"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": True}, "top_p"),
    ({"seed": 1.5}, "seed"),
    ({"seed": 2**63}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop": ["x"] * (STOP_LIMIT + 1)}, "stop"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": 1.0}, "n"),
    ({"n": True}, "n"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": "much"}, "frequency_penalty"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"\u0665": 1}}, "logit_bias"),
    ({"logit_bias": [5]}, "logit_bias"),
    ({"logit_bias": {str(n): 1 for n in range(2000)}}, "logit_bias"),
    ({"logprobs": 6.0}, "logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": {"every": 2}}, "stream_options.every"),
    ({"top_k": 4}, "top_k"),
    ({"model": "other"}, "model"),
    ({"model": None}, "model"),
    ({"model": 4}, "model"),
]


@pytest.mark.parametrize("read", [chat, completion])
@pytest.mark.parametrize(("fields", "param"), BAD_SAMPLING, ids=str)
def test_bad_values_are_refused_by_name(read, fields, param):
    """The error names the field as the client wrote it."""
    assert param == refused(read, **fields).param


BAD_CHAT = [
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": []}}},
        "response_format.json_schema.schema",
    ),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"add_generation_prompt": False}, "add_generation_prompt"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
    ({"vllm_xargs": {"other": 1}}, "vllm_xargs.tokencake"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"reasoning_effort": "much"}, "reasoning_effort"),
    ({"reasoning_effort": 3}, "reasoning_effort"),
    ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
    ({"chat_template_kwargs": "thinking"}, "chat_template_kwargs"),
    ({"functions": []}, "functions"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "any"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "read"}}}, "tool_choice"),
    ({"tool_choice": {"type": "mcp"}}, "tool_choice.type"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "write"}}}, "tool_choice"),
    (
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "none", "tools": []}}},
        "tool_choice.allowed_tools.mode",
    ),
    ({"tools": {}}, "tools"),
    ({"tools": [TOOL, TOOL]}, "tools"),
    ({"tools": [{"type": "custom"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"name": "x", "strict": "yes"}}]}, "tools[0].function.strict"),
    ({"tools": [{"type": "function", "function": {"name": "x", "parameters": []}}]}, "tools[0].function.parameters"),
    ({"tools": [{"type": "function", "function": {"description": "x"}}]}, "tools[0].function.name"),
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": ["hello"]}, "messages[0]"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [USER, {"role": "user"}]}, "messages[1].content"),
    ({"messages": [{"role": "user", "content": 4}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": "x", "mood": "good"}]}, "messages[0].mood"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": []}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "x", "arguments": {}}}]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
]


@pytest.mark.parametrize(("fields", "param"), BAD_CHAT, ids=str)
def test_bad_chats_are_refused_by_name(fields, param):
    """Messages and tools too, with the whole path."""
    assert param == refused(chat, **fields).param


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": ["a", "b"]},
        {"prompt": [1, 2]},
        {"prompt": None},
        {"echo": True, "logprobs": 1},
        {"best_of": 2},
        {"suffix": "x"},
    ],
    ids=str,
)
def test_bad_completions_are_refused_by_name(fields):
    """One text in, one text out."""
    assert next(iter(fields)) == refused(completion, **fields).param


def test_values_that_ask_for_nothing_are_accepted():
    """A client that spells out the defaults is not punished."""
    spelled = {
        "n": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "logprobs": False,
        "response_format": {"type": "text"}, "parallel_tool_calls": True, "tool_choice": "auto", "stream": False,
    }  # fmt: skip
    assert chat() == chat(**spelled)


def test_a_chat_says_how_much_is_thought():
    """And sets what else its template reads; what that is, the engine knows."""
    asked = chat(reasoning_effort="none", chat_template_kwargs={"enable_thinking": True}).request
    assert ("none", {"enable_thinking": True}) == (asked.reasoning_effort, asked.chat_template_kwargs)
    assert chat() == chat(reasoning_effort=None, chat_template_kwargs=None)
    assert "reasoning_effort" == refused(completion, reasoning_effort="low").param


def test_harmless_fields_are_named_and_unknown_ones_refused():
    """The whole policy: the list is short and none of it changes an answer."""
    asked = chat(**dict.fromkeys(HARMLESS, "x"))
    assert tuple(sorted(HARMLESS)) == asked.ignored
    assert chat().request == asked.request
    error = refused(chat, unheard_of=1)
    assert ("unheard_of", "unknown_parameter") == (error.param, error.code)


def test_ignored_fields_are_told_in_a_header(door_of):
    """The sender can see what had no effect."""
    door = door_of("x", "x", "x")
    assert "metadata,user" == door.chat(user="u", metadata={}).headers["x-agentkv-ignored"]
    assert "user" == door.chat(user="u", stream=True).headers["x-agentkv-ignored"]
    assert "x-agentkv-ignored" not in door.chat().headers


def test_messages_of_every_kind_are_read():
    """Text parts are joined as they are; an assistant's content may be null or missing; developer is system."""
    call = {"id": "c1", "index": 0, "type": "function", "function": {"name": "read", "arguments": '{"a":  1}'}}
    messages = [
        {"role": "developer", "content": "rules"},
        {"role": "user", "name": "eva", "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "refusal": None, "annotations": [], "tool_calls": [call]},
        {"role": "tool", "content": "done", "tool_call_id": "c1"},
        {"role": "assistant"},
    ]
    assert (
        Message(role="system", content="rules"),
        Message(role="user", name="eva", content="a b"),
        Message(role="assistant", tool_calls=(ToolCall(id="c1", name="read", arguments='{"a":  1}'),)),
        Message(role="tool", content="done", tool_call_id="c1"),
        Message(role="assistant"),
    ) == chat(messages=messages).request.messages


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"content": None, "refusal": "I cannot."}, "I cannot."),
        ({"refusal": "I cannot."}, "I cannot."),
        ({"content": "", "refusal": "I cannot."}, "I cannot."),
        ({"content": [], "refusal": "I cannot."}, "I cannot."),
        ({"content": [{"type": "refusal", "refusal": "I cannot."}]}, "I cannot."),
        ({"content": [{"type": "refusal", "refusal": "I cannot."}], "refusal": "I cannot."}, "I cannot."),
        ({"content": [{"type": "text", "text": "Well. "}, {"type": "refusal", "refusal": "No."}]}, "Well. No."),
        ({"content": "Well.", "refusal": "No."}, "Well."),
        ({"content": "Well.", "refusal": ""}, "Well."),
        ({"content": None, "refusal": ""}, ""),
        ({"content": "Well.", "refusal": None}, "Well."),
    ],
)
def test_what_a_model_refused_with_is_what_it_said(message, said):
    """A history of another model goes on: its refusal is the assistant's text where it has no other."""
    messages = [USER, {"role": "assistant", **message}, USER]
    assert Message(role="assistant", content=said) == chat(messages=messages).request.messages[1]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": "a", "refusal": "no"}, "messages[0].refusal"),
        ({"role": "tool", "content": "a", "tool_call_id": "c", "refusal": "no"}, "messages[0].refusal"),
        ({"role": "user", "content": [{"type": "refusal", "refusal": "no"}]}, "messages[0].content[0].type"),
        ({"role": "assistant", "refusal": 1}, "messages[0].refusal"),
        ({"role": "assistant", "refusal": ["no"]}, "messages[0].refusal"),
        ({"role": "assistant", "content": [{"type": "refusal"}]}, "messages[0].content[0].refusal"),
        ({"role": "assistant", "content": [{"type": "refusal", "text": "a"}]}, "messages[0].content[0].refusal"),
        ({"role": "assistant", "content": [{"type": "text", "refusal": "a"}]}, "messages[0].content[0].text"),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "a", "b": 1}]}, "messages[0].content[0].b"),
    ],
)
def test_refusals_that_are_none_are_refused(message, param):
    """Only models refuse, and only in text."""
    assert param == refused(chat, messages=[message]).param


def test_tools_are_read_and_tool_choice_none_hides_them():
    """A tool without parameters takes none."""
    bare = {"type": "function", "function": {"name": "now"}}
    assert (
        ToolSpec(name="read", description="a file", parameters={"type": "object"}),
        ToolSpec(name="now", parameters={"type": "object", "properties": {}}),
    ) == chat(tools=[TOOL, bare]).request.tools
    assert () == chat(tools=[TOOL], tool_choice="none").request.tools


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"\xff", b'{"a": NaN}', b'{"a": Infinity}', b"[" * 100_000, rb'{"a": "\ud800"}', rb'{"\uDC00": 1}'],
    ids=["empty", "open", "not utf-8", "nan", "infinity", "deep", "half a pair", "half a pair in a name"],
)
def test_bodies_that_are_no_json_are_refused(body):
    """Half a surrogate pair would crash a tokenizer or a hash later: it stops here."""
    with pytest.raises(RequestInvalid) as caught:
        read_json(body)
    assert "body" == caught.value.param


def test_whole_surrogate_pairs_and_nul_pass():
    """An emoji in escapes is text like any other."""
    assert {"a": "😀\x00"} == read_json(rb'{"a": "\ud83d\ude00\u0000"}')


@pytest.mark.parametrize("body", [None, [], "x", 4, True])
def test_body_must_be_an_object(body):
    """Any JSON that is none gets a typed refusal."""
    with pytest.raises(RequestInvalid):
        chat_request(json.loads(json.dumps(body)), model="m")
