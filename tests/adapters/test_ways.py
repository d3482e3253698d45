"""People's own OpenAI and Anthropic clients over `kv.http_client()`: what their requests carry, endpoint by endpoint."""

from __future__ import annotations

import asyncio
import threading
import time

import anthropic
import openai
import pytest
from langchain_openai import ChatOpenAI

from agentkv import AgentKV, Message, Request, ScriptedEngine
from agentkv.adapters.strict import StrictServer
from agentkv.errors import Closed, ConfigError

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    """A loaded machine is slow to say what it is."""
    monkeypatch.setattr("agentkv.adapters.found.PROBE_S", 20.0)


@pytest.fixture
def kv():
    with AgentKV.with_engine(ScriptedEngine(["ok"]), ledger="memory") as made:
        yield made


def until(condition):
    ends = time.monotonic() + 20
    while not condition() and time.monotonic() < ends:
        time.sleep(0.005)
    assert condition()


def chat(kv, server, *, stream=False, **fields):
    with openai.OpenAI(base_url=server.url, api_key="k", max_retries=0, http_client=kv.http_client()) as client:
        answer = client.chat.completions.create(model="m", messages=MESSAGES, stream=stream, **fields)
        return list(answer) if stream else answer


def asked(server):
    return [one for one in server.asked if one.path.endswith("completions")]


@pytest.mark.parametrize("stream", [False, True])
def test_a_clients_own_calls_go_to_their_sessions_slots(kv, llama, stream):
    """Each task has its own, and gives it back when the answer has been read: the same task finds it again."""
    for task in ("a", "b", "a"):
        with kv.task(task, final=False):
            chat(kv, llama, stream=stream)
    slots = [one.body["id_slot"] for one in asked(llama)]
    assert slots[0] == slots[2] != slots[1]


@pytest.mark.parametrize("kind", ["sync", "async", "remote"])
def test_a_calls_own_time_out_bounds_its_wait_for_a_slot(kv, llama, kind):
    """It is not held up for longer than its user would wait for an answer."""
    del llama.slots[1]
    goes_on = threading.Event()

    def slow(body):
        goes_on.wait(60)
        return 200, {}

    def call(kv, task):
        with kv.task(task, final=False):
            if kind == "sync":
                with openai.OpenAI(base_url=llama.url, api_key="k", max_retries=0, http_client=kv.http_client()) as one:
                    one.chat.completions.create(model="m", messages=MESSAGES, timeout=1.0)
            elif kind == "async":
                asyncio.run(awaited(kv))
            else:
                kv.submit(Request(messages=(Message(role="user", content="hello"),))).result(60)

    async def awaited(kv):
        async with openai.AsyncOpenAI(
            base_url=llama.url, api_key="k", max_retries=0, http_client=kv.async_http_client()
        ) as one:
            await one.chat.completions.create(model="m", messages=MESSAGES, timeout=1.0)

    with AgentKV.remote(base_url=llama.url, model="m", ledger="memory", timeout_s=1.0) as own:
        mine = own if kind == "remote" else kv
        with mine.task("a", final=False):
            chat(mine, llama)  # over a client of its own, so that its next call holds the slot
            llama.routes["POST /v1/chat/completions"] = slow
            with openai.OpenAI(
                base_url=llama.url, api_key="k", max_retries=0, http_client=mine.http_client()
            ) as holder:
                thread = threading.Thread(target=held, args=(holder, mine))
                thread.start()
                until(lambda: len(asked(llama)) > 1)
                began_s = time.monotonic()
                with pytest.raises(Exception, match=r"(?i)time"):
                    call(mine, "b")
                assert time.monotonic() - began_s < 20
                goes_on.set()
                thread.join()


def held(client, kv):
    with kv.task("a", final=False):
        client.chat.completions.create(model="m", messages=MESSAGES, timeout=60.0)


def test_an_asynchronous_client_waits_for_no_slot_on_its_event_loop(kv, llama):
    """Two calls at once on one slot each: the loop goes on meanwhile."""

    async def run():
        async with openai.AsyncOpenAI(
            base_url=llama.url, api_key="k", max_retries=0, http_client=kv.async_http_client()
        ) as client:

            async def call(task):
                with kv.task(task, final=False):
                    await client.chat.completions.create(model="m", messages=MESSAGES)

            await asyncio.gather(*(call(f"t{number}") for number in range(5)))

    asyncio.run(run())
    assert 5 == len(asked(llama))
    assert all("id_slot" in one.body for one in asked(llama))


def test_a_broken_stream_gives_its_slot_back(kv, llama):
    """A reader that leaves after the first chunk holds nothing."""
    with (
        kv.task("a", final=False),
        openai.OpenAI(base_url=llama.url, api_key="k", max_retries=0, http_client=kv.http_client()) as client,
    ):
        for _ in range(3):
            with client.chat.completions.create(model="m", messages=MESSAGES, stream=True) as answer:
                next(iter(answer))
    assert [0, 0, 0] == [one.body["id_slot"] for one in asked(llama)]


def test_another_endpoint_gets_nothing_of_what_one_takes(kv, llama):
    """A fallback to a plain server with the same HTTP client must not fail for fields that are not its own."""
    with StrictServer() as plain, kv.task("a", final=False):
        http_client = kv.http_client()
        for url in (llama.url, plain.url, llama.url):
            client = openai.OpenAI(base_url=url, api_key="k", max_retries=0, http_client=http_client)
            client.chat.completions.create(model="m", messages=MESSAGES)
        http_client.close()
        assert 0 == plain.rejected
        assert {"model", "messages"} == set(asked(plain)[0].body)
    assert all("id_slot" in one.body for one in asked(llama))


def test_a_call_of_nobody_goes_as_it_is(kv, llama):
    """Nothing is known of its session."""
    chat(kv, llama)
    assert {"model", "messages", "stream"} == set(asked(llama)[0].body)


def test_the_users_own_fields_win(kv, llama):
    """In `extra_body` as in the call."""
    with kv.task("a", final=False):
        chat(kv, llama, extra_body={"id_slot": 7})
    assert 7 == asked(llama)[0].body["id_slot"]


def test_hints_reach_the_endpoints_that_answered(kv, llama):
    """A tool of a session that was answered there is told there; another's is not."""
    with kv.task("a", final=False):
        chat(kv, llama)
        with kv.tool("pytest", expect_s=30):
            pass
    with kv.task("b", final=False), kv.tool("pytest", expect_s=30):
        pass
    (told,) = kv.stats()["reach"]["others"].values()
    until(lambda: "tool_start a" in str(kv.stats()["reach"]["others"]))
    (told,) = kv.stats()["reach"]["others"].values()
    assert "llama.cpp" == told["adapter"]
    assert " b:" not in str(told["last"])


def test_the_end_of_a_task_ends_the_sessions_of_its_own_clients(kv, llama):
    """Nothing of its prompts stays in a slot."""
    with kv.task("a"):
        chat(kv, llama)
        llama.slots[0] = 500
    until(lambda: ("erase", 0, "") in llama.deeds)
    assert 0 == llama.slots[0]


def test_an_engine_that_nobody_knows_is_refused_at_once():
    """A typo would be told nothing for ever."""
    with pytest.raises(ConfigError, match="vlm"):
        AgentKV.remote(base_url="http://127.0.0.1:1/v1", model="m", ledger="memory", speaks="vlm")


def test_the_same_http_client_serves_anthropics_package(kv):
    """On a server of which nothing is known it adds nothing."""
    answer = {
        "id": "m", "type": "message", "role": "assistant", "model": "m", "content": [{"type": "text", "text": "ok"}],
        "stop_reason": "end_turn", "stop_sequence": None, "usage": {"input_tokens": 3, "output_tokens": 1},
    }  # fmt: skip
    with StrictServer(routes={"POST /v1/messages": lambda _: (200, answer)}) as server, kv.task("a", final=False):
        with anthropic.Anthropic(
            base_url=server.url[:-3], api_key="k", max_retries=0, http_client=kv.http_client()
        ) as client:
            client.messages.create(model="m", max_tokens=4, messages=MESSAGES)
        (sent,) = [one for one in server.asked if one.path == "/v1/messages"]
        assert {"model", "max_tokens", "messages"} == set(sent.body)


def test_a_closed_kv_makes_no_clients():
    """They would tell nobody."""
    kv = AgentKV.with_engine(ScriptedEngine(["ok"]), ledger="memory")
    kv.close()
    with pytest.raises(Closed):
        kv.http_client()


@pytest.fixture
def chat_openai(kv):
    """ChatOpenAI over an HTTP client of ours, which is closed at the end."""
    clients = []

    def made(url, **options):
        clients.append(kv.http_client())
        return ChatOpenAI(base_url=url, api_key="k", model="m", max_retries=0, http_client=clients[-1], **options)

    yield made
    for client in clients:
        client.close()


def test_nothing_that_a_langchain_user_set_is_lost(kv, llama, chat_openai):
    """At the constructor, at bind and per call: ours goes under all of it."""
    llama.accepts = llama.accepts | {"chat_template_kwargs", "nvext"}
    with kv.task("a", final=False):
        model = chat_openai(llama.url, extra_body={"chat_template_kwargs": {"a": 1}})
        model.invoke("hello")
        model.bind(extra_body={"nvext": {"b": 2}, "id_slot": 5}).invoke("hello")
        model.invoke("hello", extra_body={"nvext": {"c": 3}})
    constructed, bound, called = [one.body for one in asked(llama)]
    assert ({"a": 1}, 0) == (constructed["chat_template_kwargs"], constructed["id_slot"])
    assert ({"b": 2}, 5) == (bound["nvext"], bound["id_slot"])
    assert ({"c": 3}, 0) == (called["nvext"], called["id_slot"])


def test_a_fallback_to_a_plain_provider_succeeds(kv, llama, chat_openai):
    """What the first endpoint was told is not told to the second, which would refuse it."""
    llama.fault = "html"
    with StrictServer() as plain, kv.task("a", final=False):
        model = chat_openai(llama.url).with_fallbacks([chat_openai(plain.url)])
        assert "ok" == model.invoke("hello").content
        assert 0 == plain.rejected
