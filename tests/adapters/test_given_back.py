"""What a request was given is given back, once, whatever becomes of its call: cancelled, timed out, dropped unread."""

from __future__ import annotations

import asyncio
import gc
import threading
import time

import anyio
import openai
import pytest

from agentkv import AgentKV, ScriptedEngine
from agentkv.adapters.inject import Extra, Injector, injecting_async_client, injecting_client
from agentkv.adapters.strict import StrictServer

MESSAGES = [{"role": "user", "content": "hello"}]
ANSWER = {
    "id": "c", "object": "chat.completion", "created": 0, "model": "m",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "ok"}}],
}  # fmt: skip


class Slots:
    """Gives what is to be given back; a call waits until `goes_on`."""

    def __init__(self):
        self.taken, self.given_back = 0, 0
        self.asks, self.goes_on = threading.Event(), threading.Event()
        self.injector = Injector(self.extra, ended=self.ended, may_wait=lambda _: True)

    def extra(self, _request):
        self.asks.set()
        self.goes_on.wait(60)
        self.taken += 1
        return Extra(headers={"X-Session-ID": "s"})

    def ended(self, _request, _extra, _tokens, _cached_tokens):
        self.given_back += 1


@pytest.fixture
def slots():
    made = Slots()
    yield made
    made.goes_on.set()


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    """A loaded machine is slow to say what it is."""
    monkeypatch.setattr("agentkv.adapters.found.PROBE_S", 20.0)


def until(condition, seconds=20.0):
    ends = time.monotonic() + seconds
    while not condition() and time.monotonic() < ends:
        gc.collect()
        time.sleep(0.01)
    assert condition()


async def cancelled(call, asks):
    task = asyncio.create_task(call)
    await asyncio.to_thread(asks.wait, 20)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def timed_out(call, asks):
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await call
    assert asks.is_set()


async def moved_on(call, asks):
    with anyio.move_on_after(0.3) as scope:
        await call
    assert scope.cancelled_caught
    assert asks.is_set()


@pytest.mark.parametrize("ends", [cancelled, timed_out, moved_on])
def test_a_call_that_is_cancelled_while_it_waits_leaves_nothing_taken(slots, ends):
    """What its thread still gets afterwards is nobody's; the caller does not wait for that."""

    async def run(server):
        async with openai.AsyncOpenAI(
            base_url=server.url, api_key="k", max_retries=0, http_client=injecting_async_client(slots.injector)
        ) as client:
            await ends(client.chat.completions.create(model="m", messages=MESSAGES), slots.asks)
            assert 0 == slots.taken
            slots.goes_on.set()
            await asyncio.to_thread(until, lambda: slots.given_back)

    with StrictServer() as server:
        asyncio.run(run(server))
        assert [] == server.asked
    assert 1 == slots.taken == slots.given_back


def test_a_cancelled_call_does_not_keep_a_slot(kv_on, llama):
    """The only one: the next call of the session that had it is routed there again."""
    del llama.slots[1]
    goes_on = threading.Event()

    def slow(_body):
        goes_on.wait(60)
        return 200, ANSWER

    async def run(kv):
        async with openai.AsyncOpenAI(
            base_url=llama.url, api_key="k", max_retries=0, http_client=kv.async_http_client()
        ) as client:

            async def call(name):
                with kv.task(name, final=False):
                    await client.chat.completions.create(model="m", messages=MESSAGES)

            await call("a")
            llama.routes["POST /v1/chat/completions"] = slow
            first = asyncio.create_task(call("a"))
            await asyncio.to_thread(until, lambda: len(llama.asked) and len(chats(llama)) > 1)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(call("b"), 0.5)
            goes_on.set()
            await first
            del llama.routes["POST /v1/chat/completions"]
            await asyncio.wait_for(call("a"), 20)

    asyncio.run(run(kv_on))
    assert [0, 0, 0] == [one.body["id_slot"] for one in chats(llama)]


def chats(server):
    return [one for one in server.asked if one.path.endswith("completions")]


@pytest.fixture
def kv_on():
    with AgentKV.with_engine(ScriptedEngine(["ok"]), ledger="memory") as made:
        yield made


@pytest.mark.parametrize("reads", [False, True])
def test_a_stream_that_is_dropped_is_over(slots, reads):
    """Whether or not somebody had begun to read it."""
    slots.goes_on.set()
    with (
        StrictServer() as server,
        openai.OpenAI(base_url=server.url, api_key="k", http_client=injecting_client(slots.injector)) as client,
    ):
        stream = client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
        if reads:
            next(iter(stream))
        assert (1, 0) == (slots.taken, slots.given_back)
        del stream
        until(lambda: slots.given_back)
    assert 1 == slots.given_back


@pytest.mark.parametrize("reads", [False, True])
def test_an_asynchronous_stream_that_is_dropped_is_over(slots, reads):
    """Nobody closes it: its event loop may be gone."""
    slots.goes_on.set()

    async def run(server):
        async with openai.AsyncOpenAI(
            base_url=server.url, api_key="k", http_client=injecting_async_client(slots.injector)
        ) as client:
            stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
            if reads:
                await anext(aiter(stream))
            del stream
            await asyncio.to_thread(until, lambda: slots.given_back)

    with StrictServer() as server:
        asyncio.run(run(server))
    assert 1 == slots.given_back


def test_a_stream_that_was_dropped_does_not_keep_its_slot(kv_on, llama):
    """The session's next call goes where its context is."""
    with (
        kv_on.task("a", final=False),
        openai.OpenAI(base_url=llama.url, api_key="k", max_retries=0, http_client=kv_on.http_client()) as client,
    ):
        routed = []

        def is_routed():
            if not routed[-1]:  # asked again only until it is: each answer is dropped and takes its time
                opened()
            return routed[-1]

        def opened():
            client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
            routed.append("id_slot" in chats(llama)[-1].body)

        opened()
        assert routed[-1]
        for _ in range(2):
            opened()
            until(is_routed)
        gc.collect()  # the last one, too
