"""`kv.openai()` over a server elsewhere: the user's own fields and headers arrive there, and win over ours.

The same calls through `kv.http_client()` carry the same. Where the engine is in this process nothing changes: a field has
its effect or is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from decimal import Decimal
from pathlib import Path

import openai
import pytest

from agentkv import AgentKV, Budget, BudgetExceeded, ScriptedEngine
from agentkv.adapters import probe
from agentkv.adapters.strict import CHAT_FIELDS, StrictServer
from agentkv.engine.extras import MOST_BODY_BYTES

sys.path.insert(0, str(Path(__file__).parent.parent / "adapters"))

from hosted_servers import Hosted

MESSAGES = [{"role": "user", "content": "hello"}]
ANYTHING = CHAT_FIELDS | {
    "nvext", "cache_salt", "prompt_cache_key", "service_tier", "priority", "top_k", "vllm_xargs", "metadata", "user",
    "id_slot", "verbosity", "session_id", "kv_transfer_params",
}  # fmt: skip
OWN_BODY = {
    "model", "messages", "stream", "stream_options", "temperature", "max_tokens",
}  # fmt: skip
OWN_HEADERS = {
    "host", "connection", "accept", "accept-encoding", "content-length", "content-type", "user-agent", "authorization",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    """A loaded machine is slow to say what it is."""
    monkeypatch.setattr("agentkv.adapters.found.PROBE_S", 20.0)


@pytest.fixture
def server():
    with StrictServer(dialect="dynamo", accepts=ANYTHING) as made:
        yield made


@pytest.fixture
def kv(server):
    with AgentKV.remote(base_url=server.url, model="m", ledger="memory") as made:
        yield made


def asked(server):
    return [one for one in server.asked if one.method == "POST"][-1]


def ask(kv, server, **fields):
    with kv.task("run-7", final=False):
        kv.openai().chat.completions.create(model="m", messages=MESSAGES, **fields)
    return asked(server)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_cache_key": "mine"}, {"service_tier": "flex"}, {"verbosity": "low"}, {"user": "u"},
        {"metadata": {"a": "b"}}, {"extra_body": {"priority": 3}}, {"extra_body": {"cache_salt": "x"}},
        {"extra_body": {"top_k": 5}}, {"extra_body": {"id_slot": 7}},
        {"extra_body": {"vllm_xargs": {"job_id": "j"}}},
        {"extra_body": {"vllm_xargs": {"tokencake": {"lifecycle_id": "l", "new": 1}}}},
    ],
    ids=str,
)  # fmt: skip
def test_a_field_that_is_not_read_here_arrives_there(kv, server, fields):
    """As it is, whoever it is for."""
    body = ask(kv, server, **fields).body
    wanted = fields.get("extra_body", fields)
    assert wanted == {name: body.get(name) for name in wanted}
    assert "extra_fields" in body["nvext"]  # and ours are there as well


def test_the_users_own_values_win_deep_inside(kv, server):
    """Field by field: what he does not say is still ours."""
    body = ask(kv, server, extra_body={"nvext": {"agent_hints": {"osl": 5}, "extra_fields": ["timing"]}}).body
    assert {"agent_hints": {"osl": 5}, "extra_fields": ["timing"]} == body["nvext"]
    assert {"osl": 6} == ask(kv, server, extra_body={"nvext": {"agent_hints": {"osl": 6}}}).body["nvext"]["agent_hints"]
    assert "extra_fields" in asked(server).body["nvext"]


def test_a_null_says_that_there_shall_be_nothing(kv, server):
    """That is a value too, and wins."""
    assert ask(kv, server, extra_body={"nvext": None}).body["nvext"] is None


def test_the_users_own_headers_win(kv, server):
    """His session is not ours; ours are there where he says nothing."""
    assert "run-7" == ask(kv, server).headers["x-dynamo-session-id"]
    headers = ask(kv, server, extra_headers={"X-Dynamo-Session-ID": "mine", "x-tenant-id": "t"}).headers
    assert ("mine", "t") == (headers["x-dynamo-session-id"], headers["x-tenant-id"])


def test_headers_of_the_connection_and_of_this_door_stay_here(kv, server):
    """The key there is the engine's; nobody else is told the name of a task."""
    told = {"Authorization": "Bearer stolen", "Cookie": "a=b", "x-agentkv-task": "other", "Proxy-Authorization": "x"}
    headers = ask(kv, server, extra_headers=told).headers
    assert "other" == headers["x-dynamo-session-id"]
    assert not {"cookie", "x-agentkv-task", "proxy-authorization"} & headers.keys()
    assert "stolen" not in str(headers)


def test_asynchronous_and_streamed_calls_carry_them_too(kv, server):
    """There is one reading of requests."""

    async def run():
        client = kv.async_openai()
        with kv.task("run-7", final=False):
            stream = await client.chat.completions.create(
                model="m", messages=MESSAGES, stream=True, service_tier="flex", extra_headers={"x-tag": "a"}
            )
            assert [chunk async for chunk in stream]

    asyncio.run(run())
    assert ("flex", "a") == (asked(server).body["service_tier"], asked(server).headers["x-tag"])


def test_a_response_carries_them_too(kv, server):
    """It reaches the server as a chat; what this door keeps itself stays here."""
    with kv.task("t", final=False):
        kv.openai().responses.create(
            model="m", input="hello", service_tier="flex", metadata={"a": "b"}, extra_body={"top_k": 5}
        )
    body = asked(server).body
    assert ("flex", 5) == (body["service_tier"], body["top_k"])
    assert "metadata" not in body


def test_a_completion_carries_them_too(server):
    """On a server that has the route."""
    answer = {
        "id": "c", "object": "text_completion", "created": 0, "model": "m",
        "choices": [{"index": 0, "text": "ok", "finish_reason": "stop"}],
    }  # fmt: skip
    server.routes = {"POST /v1/completions": lambda _: (200, answer)}
    with AgentKV.remote(base_url=server.url, model="m", ledger="memory") as kv, kv.task("t"):
        with contextlib.suppress(openai.APIError):  # a stream was asked for
            kv.openai().completions.create(model="m", prompt="once", extra_body={"top_k": 5})
        assert 5 == asked(server).body["top_k"]


@pytest.mark.parametrize(
    ("create", "fields"),
    [
        ("chat", {"extra_body": {"n_predict": 100_000}}),
        ("chat", {"extra_body": {"prompt": "another"}}),
        ("chat", {"functions": [{"name": "f"}]}),
        ("responses", {"extra_body": {"max_tokens": 100_000}}),
        ("responses", {"extra_body": {"messages": []}}),
        ("chat", {"extra_body": {"top_k": "a" * MOST_BODY_BYTES}}),
        ("chat", {"extra_headers": {"x-tag": "a" * 20_000}}),
    ],
    ids=["limit", "prompt", "functions", "limit of a response", "messages", "long", "long header"],
)
def test_what_would_undo_what_was_read_is_refused_here(kv, server, create, fields):
    """A limit under another name would be no limit, nor would the budget be one."""
    client = kv.openai()
    with pytest.raises(openai.BadRequestError):
        if create == "chat":
            client.chat.completions.create(model="m", messages=MESSAGES, **fields)
        else:
            client.responses.create(model="m", input="hello", **fields)
    assert [] == [one for one in server.asked if one.method == "POST"]


@pytest.mark.parametrize(
    ("fields", "answer"),
    [({"extra_body": {"nvext": {}}}, "nvext"), ({"extra_body": {"top_k": 5}}, "top_k"), ({"service_tier": "flex"}, "")],
    ids=str,
)
def test_an_engine_in_this_process_reads_all_or_refuses(fields, answer):
    """There is nobody to pass a field on to."""
    with AgentKV.with_engine(ScriptedEngine(["ok"]), ledger="memory") as kv:
        create = kv.openai().chat.completions.with_raw_response.create
        ask = {"model": kv.engine.model, "messages": MESSAGES, **fields}
        if answer:
            with pytest.raises(openai.BadRequestError, match=answer):
                create(**ask)
        else:
            assert "service_tier" == create(**ask).headers["x-agentkv-ignored"]


def test_a_dearer_tier_is_set_aside_at_its_price(server, tmp_path):
    """The budget holds before anything is spent, not only afterwards."""
    prices = tmp_path / "prices.yaml"
    prices.write_text(
        "version: 1\nrows:\n  - {model: m, date: 2026-01-01, source: us, input: 1, output: 1, tiers: {priority: 1000}}\n"
    )
    with AgentKV.remote(base_url=server.url, model="m", ledger="memory", prices=prices) as kv:

        def spend(task, **fields):
            with kv.task(task, budget=Budget(usd=Decimal("0.001"))):
                kv.openai().chat.completions.create(model="m", messages=MESSAGES, max_tokens=20, **fields)

        spend("a")
        spend("b", service_tier="flex")
        with pytest.raises((openai.RateLimitError, BudgetExceeded)):
            spend("c", service_tier="priority")
    assert "priority" not in [one.body.get("service_tier") for one in server.asked]


# -- both doors


def extras(one):
    """What a request carries beyond what every client sends."""
    headers = {
        name: value for name, value in one.headers.items()
        if name not in OWN_HEADERS and not name.startswith("x-stainless")
    }  # fmt: skip
    return {name: value for name, value in one.body.items() if name not in OWN_BODY}, headers


def _dynamo():
    return StrictServer(dialect="dynamo", accepts=ANYTHING)


def _vllm():
    return StrictServer(dialect="vllm", accepts=ANYTHING, priorities=True)


def _plain():
    return StrictServer(accepts=ANYTHING)


def _llama():
    slots = {"GET /props": lambda _: (200, {"total_slots": 1}), "GET /slots": lambda _: (200, [{"id": 0}])}
    return StrictServer(routes=slots, accepts=ANYTHING)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"prompt_cache_key": "mine", "service_tier": "flex"},
        {"extra_body": {"nvext": {"agent_hints": {"osl": 5}}}},
        {"extra_body": {"nvext": None, "session_id": None, "id_slot": None, "prompt_cache_key": None}},
        {"extra_body": {"id_slot": 1, "session_id": "s", "cache_salt": "x", "priority": 2}},
        {"extra_headers": {"X-Dynamo-Session-ID": "mine", "X-Session-ID": "s"}},
    ],
    ids=["nothing", "named", "deep", "null", "body", "headers"],
)
@pytest.mark.parametrize("made", [_dynamo, _vllm, _plain, _llama, Hosted], ids=lambda made: made.__name__.strip("_"))
def test_both_doors_send_the_same_beside_the_call(monkeypatch, made, fields):
    """`kv.openai()` and a client of one's own over `kv.http_client()`: one promise, one wire."""
    sent = []
    for door in ("own", "theirs"):
        with made() as server:
            if made is Hosted:
                monkeypatch.setitem(probe.PROVIDERS, "127.0.0.1", "openai")
                server.routes = {}
                server.accepts = ANYTHING
            base_url = server.url if door == "own" else "http://127.0.0.1:1/v1"
            with (
                AgentKV.remote(base_url=base_url, model="gpt-5.1", ledger="memory", api_key="k") as kv,
                kv.task("run-7", final=False),
                openai.OpenAI(base_url=server.url, api_key="k", max_retries=0, http_client=kv.http_client()) as theirs,
            ):
                client = kv.openai() if door == "own" else theirs
                client.chat.completions.create(model="gpt-5.1", messages=MESSAGES, **fields)
            sent.append(
                extras(next(one for one in server.asked if one.method == "POST" and one.path.endswith("/completions")))
            )
    assert sent[1] == sent[0]
