"""What a request may carry to a server elsewhere beyond its own fields, and what it may not."""

from __future__ import annotations

import dataclasses

import pytest

from agentkv import Message, Request
from agentkv.engine.extras import MOST_BODY_BYTES, MOST_HEADER_BYTES, SAID_OTHERWISE, passed_headers
from agentkv.engine.request import FEATURES, refuse_unless
from agentkv.engine.wire import PASSED_ON, call_arguments
from agentkv.errors import RequestInvalid

USER = (Message(role="user", content="hello"),)


def deep(levels):
    value = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"n_predict": 9}, "n_predict"),
        ({"messages": []}, "messages"),
        ({"x": "a" * MOST_BODY_BYTES}, "extra_body"),
        ({"x": {1, 2}}, "extra_body"),
        ({"x": deep(100_000)}, "extra_body"),
        ({1: 2}, "extra_body"),
        ([1], "extra_body"),
    ],
    ids=["limit", "messages", "long", "no JSON", "deep", "no name", "a list"],
)
def test_what_would_undo_a_request_is_refused(body, param):
    """Nothing that it says itself, nothing without a bound."""
    with pytest.raises(RequestInvalid) as refused:
        Request(messages=USER, extra_body=body)
    assert param == refused.value.param


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer x"}, {"api-key": "x"}, {"Connection": "close"}, {"Transfer-Encoding": "chunked"},
        {"Host": "x"}, {"Content-Length": "1"}, {"Cookie": "a=b"}, {"x-agentkv-task": "t"}, {"a b": "c"},
        {"x": "a\r\nb: c"}, {"x": "ü"}, {"x": 1}, {"x": "a" * MOST_HEADER_BYTES}, {"": "x"},
    ],
    ids=lambda headers: next(iter(headers)),
)  # fmt: skip
def test_a_header_of_the_connection_or_of_a_key_is_refused(headers):
    """Nor one that would end early, or never."""
    with pytest.raises(RequestInvalid):
        Request(messages=USER, extra_headers=headers)


def test_every_field_of_a_request_that_is_sent_is_one_that_it_says_itself():
    """No extra field may stand in for it."""
    request = Request(messages=USER, chat_template_kwargs={"a": 1}, extra_body={"top_k": 3}, extra_headers={"x-a": "b"})
    sent = call_arguments(request, model="m", max_tokens_field="max_tokens")
    assert {"a": 1} == sent["extra_body"].pop("chat_template_kwargs")
    assert {"top_k": 3} == sent.pop("extra_body")
    assert {"x-a": "b"} == sent.pop("extra_headers")
    assert sent.keys() <= SAID_OTHERWISE


def test_a_prompt_carries_them_too():
    """The older route is told the same."""
    sent = call_arguments(
        Request(prompt="once", extra_body={"top_k": 3}, extra_headers={"x-a": "b"}), model="m", max_tokens_field="x"
    )
    assert ({"top_k": 3}, {"x-a": "b"}) == (sent["extra_body"], sent["extra_headers"])


@pytest.mark.parametrize("field", [{"extra_body": {"top_k": 3}}, {"extra_headers": {"x-a": "b"}}], ids=str)
def test_an_engine_without_a_server_refuses_them(field):
    """They would have no effect."""
    request = Request(messages=USER, **field)
    refuse_unless(request, PASSED_ON, engine="a remote engine")
    with pytest.raises(RequestInvalid, match=next(iter(field))):
        refuse_unless(request, FEATURES - set(field), engine="this one")


def test_a_request_with_the_same_prompt_has_the_same_cache():
    """A summary of a salted conversation must not lie in everybody's cache; what shapes the answer is not its own."""
    body = {
        "cache_salt": "s", "service_tier": "flex", "guided_choice": ["a"],
        "nvext": {"cache_salt": "n", "agent_hints": {"osl": 5}},
    }  # fmt: skip
    request = Request(messages=USER, extra_body=body, extra_headers={"x-a": "b"})
    summary = Request(messages=USER, **request.rendering)
    assert {"cache_salt": "s", "service_tier": "flex", "nvext": {"cache_salt": "n"}} == summary.extra_body
    assert {} == summary.extra_headers
    assert request == dataclasses.replace(request)


def test_of_a_clients_headers_only_its_users_are_passed_on():
    """Neither those of the connection, named by it or not, nor the client library's own."""
    said = [
        (b"Host", b"h"), (b"connection", b"keep-alive, X-Hop"), (b"x-hop", b"1"), (b"authorization", b"Bearer k"),
        (b"user-agent", b"u"), (b"x-stainless-lang", b"python"), (b"content-type", b"application/json"),
        (b"accept-encoding", b"gzip"), (b"X-Session-ID", b"a"), (b"x-tag", b"1"), (b"x-tag", b"2"),
        (b"x-agentkv-task", b"t"),
    ]  # fmt: skip
    assert {"x-session-id": "a", "x-tag": "1, 2"} == passed_headers(said)
