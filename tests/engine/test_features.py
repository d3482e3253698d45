"""What not every engine can do: asked for, refused by name, or passed on to a remote server in its own words."""

from __future__ import annotations

import pytest

from agentkv import Message, Request, RequestInvalid, ResponseFormat, Sampling, ToolChoice, ToolSpec
from agentkv.engine.remote import RemoteEngine
from agentkv.engine.request import FEATURES, refuse_unless
from agentkv.engine.wire import PASSED_ON, call_arguments

USER = Message(role="user", content="hello")
TOOL = ToolSpec(name="read", parameters={"type": "object"})
STRICT = ToolSpec(name="read", parameters={"type": "object"}, strict=True)
ASKED = {
    "n": {"n": 2},
    "logprobs": {"logprobs": 0},
    "logit_bias": {"sampling": Sampling(logit_bias=((5, -100),))},
    "presence_penalty": {"sampling": Sampling(presence_penalty=1)},
    "frequency_penalty": {"sampling": Sampling(frequency_penalty=-1)},
    "tool_choice": {"tools": (TOOL,), "tool_choice": ToolChoice(mode="required")},
    "parallel_tool_calls": {"tools": (TOOL,), "tool_choice": ToolChoice(parallel=False)},
    "tools.strict": {"tools": (STRICT,)},
    "response_format": {"response_format": ResponseFormat()},
    "continue_final_message": {
        "messages": (USER, Message(role="assistant", content="One,")), "continue_final_message": True,
    },
    "salt": {"salt": "s"},
    "reasoning_effort": {"reasoning_effort": "low"},
    "chat_template_kwargs": {"chat_template_kwargs": {"enable_thinking": False}},
    "extra_body": {"extra_body": {"service_tier": "flex"}},
    "extra_headers": {"extra_headers": {"X-Run": "7"}},
}  # fmt: skip


def request(**fields) -> Request:
    return Request(**{"messages": (USER,), **fields})


def test_the_table_is_whole():
    """Every feature is asked for here."""
    assert FEATURES == ASKED.keys()


@pytest.mark.parametrize("name", ASKED)
def test_what_an_engine_cannot_do_is_refused_by_name(name):
    """An engine that can it lets it pass; a plain request passes everywhere."""
    refuse_unless(request(**ASKED[name]), frozenset({name}), engine="this one")
    refuse_unless(request(), frozenset(), engine="this one")
    with pytest.raises(RequestInvalid, match="not supported by this one") as caught:
        refuse_unless(request(**ASKED[name]), FEATURES - {name}, engine="this one")
    assert (name, "unsupported_value") == (caught.value.param, caught.value.code)


@pytest.mark.parametrize("name", sorted(FEATURES - PASSED_ON))
def test_a_remote_engine_refuses_what_it_cannot_gather(name):
    """Before anything is sent."""
    engine = RemoteEngine(base_url="http://127.0.0.1:9", model="m", api_key="k")
    try:
        with pytest.raises(RequestInvalid, match="a remote engine") as caught:
            engine.submit(request(**ASKED[name]))
        assert name == caught.value.param
    finally:
        engine.close()


def test_the_rest_is_told_to_the_server_in_its_words():
    """Nothing of it where nothing is asked."""

    def sent(**fields) -> dict:
        plain = call_arguments(request(tools=(TOOL,)), model="m", max_tokens_field="max_tokens")
        asked = call_arguments(request(**{"tools": (TOOL,), **fields}), model="m", max_tokens_field="max_tokens")
        return {name: value for name, value in asked.items() if plain.get(name) != value}

    assert {} == sent()
    assert {"logit_bias": {"5": -100}} == sent(**ASKED["logit_bias"])
    assert {"presence_penalty": 1} == sent(**ASKED["presence_penalty"])
    assert {"tool_choice": "required"} == sent(**ASKED["tool_choice"])
    assert {"parallel_tool_calls": False} == sent(**ASKED["parallel_tool_calls"])
    assert {"response_format": {"type": "json_object"}} == sent(**ASKED["response_format"])
    plain = ResponseFormat(schema={"type": "object", "required": ["a"]}, plain=True)
    assert {"response_format": {"type": "json_object"}} == sent(response_format=plain)
    assert {"reasoning_effort": "low"} == sent(**ASKED["reasoning_effort"])
    variables = ASKED["chat_template_kwargs"]
    assert {"extra_body": variables} == sent(**variables)
    assert sent(tools=(STRICT,))["tools"][0]["function"]["strict"] is True
    named = ToolChoice(mode="required", names=("read",))
    assert {"type": "function", "function": {"name": "read"}} == sent(tool_choice=named)["tool_choice"]
    allowed = sent(tool_choice=ToolChoice(names=("read",)))["tool_choice"]["allowed_tools"]
    assert {"mode": "auto", "tools": [{"type": "function", "function": {"name": "read"}}]} == allowed
    shape = sent(response_format=ResponseFormat(schema={"type": "object"}, name="x", strict=False))["response_format"]
    assert {"name": "x", "schema": {"type": "object"}, "strict": False} == shape["json_schema"]


BAD = [
    {"n": 0}, {"n": 129}, {"n": True}, {"logprobs": 21}, {"logprobs": -1},
    {"tool_choice": ToolChoice(mode="required")},
    {"tools": (TOOL,), "tool_choice": ToolChoice(names=("write",))},
    {"continue_final_message": True},
    {"prompt": "x", "messages": None, "continue_final_message": True},
    {"reasoning_effort": "much"}, {"reasoning_effort": ""}, {"chat_template_kwargs": "x"}, {"chat_template_kwargs": {1: 2}},
    {"chat_template_kwargs": {"a": {1, 2}}},
    {"prompt": "x", "messages": None, "reasoning_effort": "none"},
    {"prompt": "x", "messages": None, "chat_template_kwargs": {"a": 1}},
]  # fmt: skip


@pytest.mark.parametrize("fields", BAD, ids=str)
def test_what_no_engine_could_do_is_no_request(fields):
    """Refused when it is made, so that none ever sees one."""
    with pytest.raises(RequestInvalid) as caught:
        request(**fields)
    assert caught.value.param in fields


@pytest.mark.parametrize(
    "fields",
    [{"logit_bias": ((-1, 0),)}, {"logit_bias": ((1, 101),)}, {"presence_penalty": 2.1}, {"frequency_penalty": None}],
    ids=str,
)
def test_sampling_values_have_limits(fields):
    """OpenAI's."""
    with pytest.raises(RequestInvalid) as caught:
        Sampling(**fields)
    assert caught.value.param in fields
