"""Injection into the requests of other people's OpenAI clients, against a server that rejects what it does not know."""

from __future__ import annotations

import asyncio
import json
import logging

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentkv.adapters.inject import Extra, Injector, injecting_async_client, injecting_client, merged, spliced
from agentkv.adapters.strict import CHAT_FIELDS, StrictServer

MESSAGES = [{"role": "user", "content": 'say "id_slot"'}]


@pytest.fixture(params=["sync", "async"])
def ask(request):
    """`ask(server, extra, **fields)`: one chat through an injecting client; the same test for both kinds."""
    injectors: dict[int, Injector] = {}
    given_extra: dict[int, Extra | None] = {}

    def call(server, extra, **fields):
        given_extra[id(server)] = extra
        injector = injectors.setdefault(id(server), Injector(lambda _: given_extra[id(server)]))
        shared = {"base_url": server.url, "api_key": "k", "max_retries": 0}
        arguments = {"model": "m", "messages": MESSAGES, **fields}
        if request.param == "sync":
            with openai.OpenAI(http_client=injecting_client(injector), **shared) as client:
                return _text(client.chat.completions.create(**arguments))

        async def run():
            async with openai.AsyncOpenAI(http_client=injecting_async_client(injector), **shared) as client:
                answer = await client.chat.completions.create(**arguments)
                if not arguments.get("stream"):
                    return _text(answer)
                return _text([chunk async for chunk in answer])

        return asyncio.run(run())

    call.injectors = injectors
    return call


def _text(answer):
    if hasattr(answer, "choices"):
        return answer.choices[0].message.content
    return "".join(chunk.choices[0].delta.content or "" for chunk in answer if chunk.choices)


@pytest.mark.parametrize("stream", [False, True])
def test_fields_and_headers_reach_the_server(ask, stream):
    """In streamed calls as well."""
    extra = Extra(body={"id_slot": 1}, headers={"X-Session-ID": "s"})
    with StrictServer(accepts=CHAT_FIELDS | {"id_slot"}) as server:
        assert "ok" == ask(server, extra, stream=stream)
        (asked,) = server.asked
    assert (1, "s") == (asked.body["id_slot"], asked.headers["x-session-id"])
    assert MESSAGES == asked.body["messages"]


def test_the_users_own_values_win(ask):
    """Field by field, deep inside, and header by header."""
    extra = Extra(body={"nvext": {"a": 1, "deep": {"x": 1, "y": 1}}}, headers={"X-Session-ID": "ours"})
    with StrictServer(accepts=CHAT_FIELDS | {"nvext"}) as server:
        ask(server, extra, extra_body={"nvext": {"deep": {"x": 2}}}, extra_headers={"x-session-id": "theirs"})
        (asked,) = server.asked
    assert {"a": 1, "deep": {"x": 2, "y": 1}} == asked.body["nvext"]
    assert "theirs" == asked.headers["x-session-id"]


@pytest.mark.parametrize("status", [400, 422])
def test_a_field_that_the_server_names_is_left_out_from_then_on(ask, status):
    """One retry without all of ours, once: the next request goes without it, and keeps what the server did not name."""
    extra = Extra(body={"nvext": {"a": 1}, "id_slot": 0})
    with StrictServer(accepts=CHAT_FIELDS | {"id_slot"}, status=status) as server:
        assert "ok" == ask(server, extra)
        assert "ok" == ask(server, extra)
        assert [True, False, False] == ["nvext" in asked.body for asked in server.asked]
        assert [True, False, True] == ["id_slot" in asked.body for asked in server.asked]
    assert 1 == server.rejected


def test_a_refusal_without_names_is_tried_without_all_of_ours(ask):
    """Servers that say no more than "bad request" must not fail the user's call because of us."""
    with StrictServer(names_fields=False) as server:
        assert "ok" == ask(server, Extra(body={"id_slot": 0}))
        assert "ok" == ask(server, Extra(body={"id_slot": 0}))
        assert [True, False, False] == ["id_slot" in asked.body for asked in server.asked]


def test_the_users_own_mistake_stays_the_users(ask):
    """The error names what the user sent, and a field that the server has taken before is not given up for it."""
    with StrictServer(accepts=CHAT_FIELDS | {"id_slot"}) as server:
        assert "ok" == ask(server, Extra(body={"id_slot": 0}))
        with pytest.raises(openai.BadRequestError, match="typo"):
            ask(server, Extra(body={"id_slot": 0}), extra_body={"typo": 1})
        assert 2 == len(server.asked)
        assert "ok" == ask(server, Extra(body={"id_slot": 0}))
        assert "id_slot" in server.asked[-1].body


def test_both_mistaken_the_user_hears_of_the_own_one(ask):
    """Ours is left out, theirs is told."""
    with StrictServer() as server, pytest.raises(openai.BadRequestError, match="typo"):
        ask(server, Extra(body={"id_slot": 0}), extra_body={"typo": 1})
    assert 2 == len(server.asked)


def test_priority_is_never_sent_blind(ask):
    """A stock vLLM refuses every request with one."""
    with StrictServer(accepts=CHAT_FIELDS | {"priority"}) as server:
        ask(server, Extra(body={"priority": 5}))
        ask(server, Extra(body={"priority": 5}, priority_ok=True))
        assert [False, True] == ["priority" in asked.body for asked in server.asked]


def test_refusals_of_one_server_are_not_another_ones(ask):
    """What is remembered is remembered for its address."""
    with StrictServer() as strict:
        ask(strict, Extra(body={"id_slot": 0}))
        (injector,) = ask.injectors.values()
        assert {"id_slot"} == injector.refused(strict.url.removesuffix("/v1"))
        assert set() == injector.refused("http://127.0.0.1:1")


@pytest.mark.parametrize("value", ["a\r\nX-Admin: 1", "a\nb", "", " ", "é", "\0"])
def test_no_value_becomes_a_header_of_its_own(ask, value):
    """What is no plain header is left out."""
    with StrictServer() as server:
        assert "ok" == ask(server, Extra(headers={"X-Session-ID": value, "X-Bad\r\nX-Admin": "1"}))
        assert not {"x-admin", "x-session-id"} & set(server.asked[0].headers)


def test_an_extra_that_fails_changes_nothing(ask, caplog):
    """The request goes as the user wrote it."""
    caplog.set_level(logging.CRITICAL)
    with StrictServer() as server:
        assert "ok" == ask(server, Extra(body={"x": object()}))
        assert set(server.asked[0].body) <= CHAT_FIELDS


def test_other_requests_are_left_alone():
    """Only model calls carry what a model call is to carry."""
    with StrictServer(routes={"GET /v1/models": lambda _: (200, {"object": "list", "data": []})}) as server:
        injector = Injector(lambda _: Extra(headers={"X-Session-ID": "s"}))
        with openai.OpenAI(base_url=server.url, api_key="k", http_client=injecting_client(injector)) as client:
            client.models.list()
        assert "x-session-id" not in server.asked[0].headers


def test_fields_go_under_the_users_in_a_body_that_was_shaped_too(ask):
    """Marks and fields of one adapter in one request: deep inside the user's own values win, and its length is told."""

    def shape(path, body):
        return {**body, "marked": path}

    extra = Extra(body={"nvext": {"a": 1, "b": 1}, "id_slot": 1}, shape=shape, marks=frozenset({"marked"}))
    with StrictServer(accepts=CHAT_FIELDS | {"nvext", "id_slot", "marked"}) as server:
        assert "ok" == ask(server, extra, extra_body={"nvext": {"b": 2}})
        (asked,) = server.asked
    assert ({"a": 1, "b": 2}, 1, "/v1/chat/completions") == (
        asked.body["nvext"],
        asked.body["id_slot"],
        asked.body["marked"],
    )
    assert MESSAGES == asked.body["messages"]
    assert int(asked.headers["content-length"]) > len(json.dumps(MESSAGES))


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.dictionaries(st.sampled_from(["a", "b", "id_slot"]), inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(st.sampled_from(["a", "b", "id_slot", 'q"x']) | st.text(max_size=4), values, max_size=4)


@given(objects, objects)
def test_splicing_is_merging(ours, theirs):
    """The fast way and the slow way give the same object, whatever stands in texts and keys."""
    for text in (json.dumps(theirs), json.dumps(theirs, ensure_ascii=False, indent=1) + "\n"):
        assert merged(ours, theirs) == json.loads(spliced(text.encode("utf-8", "surrogatepass"), ours))


@pytest.mark.parametrize("text", [b"", b"[]", b"null", b"model=m", b"{", b'"{}"'])
def test_what_is_no_object_is_left_alone(text):
    """Nothing is added to a body that we do not understand."""
    assert spliced(text, {"a": 1}) is None
