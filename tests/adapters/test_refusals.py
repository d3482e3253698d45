"""Refusals in the words of different providers: our field is left out, once, and remembered only where that was what helped."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest

from agentkv import AgentKV, Message, Request
from agentkv.adapters.inject import Extra, Injector, injecting_async_client, injecting_client, named_in
from agentkv.adapters.strict import StrictServer, _raw

FIELD = "prompt_cache_key"
MESSAGES = [{"role": "user", "content": "hello"}]
ANSWER = {
    "id": "c", "object": "chat.completion", "created": 0, "model": "m",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "ok"}}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}  # fmt: skip
FORBIDDEN = {"type": "extra_forbidden", "loc": ["body", FIELD], "msg": "Extra inputs are not permitted", "input": "s"}
WORDINGS = {
    "OpenAI": (
        400,
        {"error": {"message": f"Unknown parameter: '{FIELD}'.", "param": FIELD, "code": "unknown_parameter"}},
    ),
    "OpenAI of old": (400, {"error": {"message": f"Unrecognized request argument supplied: {FIELD}", "param": None}}),
    "pydantic": (422, {"detail": [FORBIDDEN]}),
    "pydantic as text": (400, {"object": "error", "message": str([FORBIDDEN]), "type": "BadRequestError", "code": 400}),
    "pydantic in JSON in JSON": (422, {"message": json.dumps({"detail": [FORBIDDEN]}), "code": "1000"}),
    "in camel case": (
        400,
        {"error": {"message": "Extra inputs are not permitted, field: 'promptCacheKey', value: 's'"}},
    ),
    "protobuf": (
        400,
        [{"error": {"code": 400, "message": f'Invalid JSON payload. Unknown name "{FIELD}": Cannot find field.'}}],
    ),
    "a property": (400, {"error": {"message": f"property '{FIELD}' is unsupported", "type": "invalid_request_error"}}),
    "Anthropic": (400, {"type": "error", "error": {"message": f"{FIELD}: Extra inputs are not permitted"}}),
    "a key in brackets": (400, {"message": f"Malformed input request: #: extraneous key [{FIELD}] is not permitted"}),
    "serde": (422, {"error": f"unknown field `{FIELD}`, expected one of `model`, `messages` at line 1 column 99"}),
    "an error that is text": (400, {"error": f"Model does not support parameter {FIELD}"}),
    "in other words": (400, {"error": {"message": "Upstream error: 400", "param": "", "code": None}}),
    "nothing": (400, {}),
}
OTHERS = {
    "context": (
        400,
        {"error": {"message": "The context is 8192 tokens.", "param": "messages", "code": "context_length_exceeded"}},
    ),
    "model": (400, {"error": {"message": "no such model", "param": "model"}}),
}


FIELDS = ("session_id", "kv_transfer_params", "cache_salt")
ONE_BY_ONE = {
    "OpenAI": lambda name: (400, {"error": {"message": f"Unknown parameter: '{name}'.", "param": name}}),
    "serde": lambda name: (422, {"error": f"unknown field `{name}`, expected one of `model`, `messages`"}),
}


class Picky:
    """A chat route that answers `refusal` to whatever `refuses(body)`."""

    def __init__(self, refuses, refusal):
        self.refuses, self.refusal = refuses, refusal

    def __call__(self, body):
        status, words = self.refusal if isinstance(self.refusal, tuple) else self.refusal(body)
        return (status, words) if self.refuses(body) else (200, ANSWER)


def served(picky):
    return StrictServer(routes={"POST /v1/chat/completions": picky})


@pytest.fixture(params=["sync", "async", "ChatOpenAI", "ChatOpenAI, async"])
def ask(request):
    """`ask(server, injector)`: one chat through the injecting client of one of its kinds."""
    kind = request.param

    def call(server, injector):
        shared = {"base_url": server.url, "api_key": "k", "max_retries": 0}
        if kind == "sync":
            return asked_once(server, injector)
        if kind == "async":
            return asyncio.run(asked(injector, shared))
        langchain_openai = pytest.importorskip("langchain_openai")
        sync, own = injecting_client(injector), injecting_async_client(injector)
        model = langchain_openai.ChatOpenAI(model="m", http_client=sync, http_async_client=own, **shared)
        if kind == "ChatOpenAI":
            answer = model.invoke("hello")
            asyncio.run(own.aclose())
        else:
            answer = asyncio.run(invoked(model, own))
        sync.close()
        return answer.content

    async def invoked(model, client):
        try:
            return await model.ainvoke("hello")
        finally:
            await client.aclose()

    async def asked(injector, shared):
        async with openai.AsyncOpenAI(http_client=injecting_async_client(injector), **shared) as client:
            answer = await client.chat.completions.create(model="m", messages=MESSAGES)
            return answer.choices[0].message.content

    return call


def asked_once(server, injector):
    """One chat through the injecting client; raises what the openai package makes of a refusal."""
    shared = {"base_url": server.url, "api_key": "k", "max_retries": 0}
    with openai.OpenAI(http_client=injecting_client(injector), **shared) as client:
        return client.chat.completions.create(model="m", messages=MESSAGES).choices[0].message.content


@pytest.fixture
def injector():
    return Injector(lambda _: Extra(body={FIELD: "s", "id_slot": 1}))


@pytest.mark.parametrize("refusal", WORDINGS.values(), ids=WORDINGS)
def test_a_field_that_is_refused_is_left_out_once_and_remembered(ask, injector, refusal):
    """Whatever the words; the user's call is answered, and the next request goes without the field at once."""
    with served(Picky(lambda body: FIELD in body, refusal)) as server:
        assert "ok" == ask(server, injector)
        assert "ok" == ask(server, injector)
        assert [True, False, False] == [FIELD in asked.body for asked in server.asked]
        names_it = named_in(json.dumps(refusal[1]), frozenset({FIELD}))
        assert [True, False, bool(names_it)] == ["id_slot" in asked.body for asked in server.asked]


@pytest.mark.parametrize("refusal", WORDINGS.values(), ids=WORDINGS)
def test_a_server_that_refuses_everything_is_asked_twice_and_no_more(injector, refusal):
    """The user hears of it; that it was our field has not been proved, and nothing is remembered."""
    with served(Picky(lambda _body: True, refusal)) as server:
        with pytest.raises((openai.BadRequestError, openai.UnprocessableEntityError)):
            asked_once(server, injector)
        assert 2 == len(server.asked)
        assert frozenset() == injector.refused(server.url.removesuffix("/v1"))


@pytest.mark.parametrize("refusal", OTHERS.values(), ids=OTHERS)
def test_a_refusal_of_something_else_is_the_users(injector, refusal):
    """It names a parameter that is none of ours: the request does not go again, and nothing is remembered."""
    with served(Picky(lambda _body: True, refusal)) as server:
        with pytest.raises(openai.BadRequestError):
            asked_once(server, injector)
        assert 1 == len(server.asked)
        assert frozenset() == injector.refused(server.url.removesuffix("/v1"))


def test_a_server_that_repeats_the_request_in_its_error_does_not_name_our_field(injector):
    """The mistake is the user's; the field is sent again with the next request, and taken."""

    def repeats(body):
        return 400, {"detail": [{"loc": ["body", "messages"], "msg": "Input should be a list", "input": body}]}

    with served(Picky(lambda body: not body["messages"], repeats)) as server:
        with openai.OpenAI(
            base_url=server.url, api_key="k", max_retries=0, http_client=injecting_client(injector)
        ) as client:
            for _ in range(2):
                with pytest.raises(openai.BadRequestError):
                    client.chat.completions.create(model="m", messages=[])
            client.chat.completions.create(model="m", messages=MESSAGES)
        assert FIELD in server.asked[-1].body
        assert 5 == len(server.asked)


# -- servers that name one field at a time


def first_of(body, words):
    """The refusal of the first of FIELDS that the body has."""
    return next((words(name) for name in FIELDS if name in body), (200, ANSWER))


@pytest.mark.parametrize("words", ONE_BY_ONE.values(), ids=ONE_BY_ONE)
def test_a_server_that_names_one_field_at_a_time_answers_every_call(ask, words):
    """Each call is sent twice at most, and finds one field more; in the end none of them is sent."""
    injector = Injector(lambda _: Extra(body=dict.fromkeys(FIELDS, "x") | {FIELD: "s"}))
    with StrictServer(routes={"POST /v1/chat/completions": lambda body: first_of(body, words)}) as server:
        for number in range(len(FIELDS) + 1):
            assert "ok" == ask(server, injector)
            assert min(2 * (number + 1), 2 * len(FIELDS) + 1) == len(server.asked)
        assert set(FIELDS) == injector.refused(server.url.removesuffix("/v1"))
        assert FIELD in server.asked[-1].body


def test_the_second_try_is_the_users_own_request(injector):
    """With a header of ours it could be refused once more."""
    injector = Injector(lambda _: Extra(body={FIELD: "s"}, headers={"X-Session-ID": "s"}))
    with served(Picky(lambda body: FIELD in body, WORDINGS["OpenAI"])) as server:
        asked_once(server, injector)
        asked_once(server, injector)
        assert [True, False, True] == ["x-session-id" in asked.headers for asked in server.asked]


@pytest.mark.parametrize("words", ONE_BY_ONE.values(), ids=ONE_BY_ONE)
@pytest.mark.parametrize("usage", [True, False])
def test_calls_of_a_remote_engine_are_answered_too(words, usage):
    """Whether or not the server also refuses to be asked for usage."""
    refused = ("session_id", "cache_salt") if usage else ("session_id", "stream_options", "cache_salt")

    class OneByOne(StrictServer):
        def _chat(self, http, body, headers):
            name = next((name for name in refused if name in body), None)
            if name is None:
                return super()._chat(http, body, headers)
            status, told = words(name)
            return _raw(http, status, "application/json", json.dumps(told).encode())

    with (
        OneByOne() as server,
        AgentKV.remote(base_url=server.url, model="m", ledger="memory", speaks="vllm", salt="tenant") as kv,
    ):
        for number in range(4):
            with kv.task(f"t{number}"):
                said = kv.submit(Request(messages=(Message(role="user", content="hi"),))).result(20)
                assert "ok" == said.text
        assert not set(refused) & set(server.asked[-1].body)
