"""OpenAI's own clients on the app in this process: no socket, nothing buffered, nothing left behind."""

from __future__ import annotations

import asyncio
import contextvars
import socket
import threading
import time

import httpx
import httpx2
import openai
import pytest

from agentkv.core.message import ToolCall
from agentkv.core.task import Caller
from agentkv.errors import BudgetExceeded

ASK = {"model": "scripted", "messages": [{"role": "user", "content": "hello there"}]}
CALL = ToolCall(id="call_1", name="read", arguments='{"path":  "a.py"}')


class Gate:
    """Lets an engine say its first word and holds the others until it is opened."""

    def __init__(self) -> None:
        self.open = threading.Event()

    def __call__(self, request, index: int) -> None:
        if index > 0:
            assert self.open.wait(10), "nobody opened the gate"


def until(condition, within_s: float = 20) -> None:
    """Wait for something that another thread is about to do."""
    end_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end_s, "it never happened"
        time.sleep(0.002)


def words(stream) -> list[str]:
    return [chunk.choices[0].delta.content for chunk in stream if chunk.choices and chunk.choices[0].delta.content]


def test_sync_client_chats_without_a_socket(door_of, monkeypatch):
    """The real openai client, and no socket is ever made."""
    door = door_of("Hello to you", "x")
    client = door.doors.openai()
    door.chat()  # the loop thread has its own wake-up socket pair; it exists from here on
    monkeypatch.setattr(socket, "socket", None)
    reply = client.chat.completions.create(**ASK)
    assert "x" == reply.choices[0].message.content
    assert (4, 3, 1) == (
        reply.usage.prompt_tokens,
        reply.usage.prompt_tokens_details.cached_tokens,
        reply.usage.completion_tokens,
    )


def test_sync_stream_gives_the_first_word_before_the_last_is_made(door_of):
    """The engine is held after its first word; the client has that word."""
    gate = Gate()
    door = door_of("one two three", before_chunk=gate)
    chunks = iter(door.doors.openai().chat.completions.create(**ASK, stream=True))
    assert ["", "one"] == [next(chunks).choices[0].delta.content for _ in range(2)]
    assert 1 == door.engine.stats()["running"]
    gate.open.set()
    assert [" two", " three"] == words(chunks)


async def test_async_stream_gives_the_first_word_before_the_last_is_made(door_of):
    """The same on the test's own event loop."""
    gate = Gate()
    door = door_of("one two three", before_chunk=gate)
    chunks = await door.doors.async_openai().chat.completions.create(**ASK, stream=True)
    assert ["", "one"] == [(await anext(chunks)).choices[0].delta.content for _ in range(2)]
    assert 1 == door.engine.stats()["running"]
    gate.open.set()
    assert [" two", " three"] == [c.choices[0].delta.content async for c in chunks if c.choices[0].delta.content]


def test_breaking_out_of_a_stream_cancels_the_call(door_of):
    """The closed response is a hang-up that reaches the engine."""
    door = door_of("one two three", "next", latency_s=0.01)
    client = door.doors.openai()
    with client.chat.completions.create(**ASK, stream=True) as stream:
        for chunk in stream:
            if chunk.choices[0].delta.content == "one":
                break
    until(lambda: door.engine.cancelled)
    assert "next" == client.chat.completions.create(**ASK).choices[0].message.content


async def test_breaking_out_of_an_async_stream_cancels_the_call(door_of):
    """The same for async."""
    door = door_of("one two three", before_chunk=lambda request, index: time.sleep(0.01))
    async with await door.doors.async_openai().chat.completions.create(**ASK, stream=True) as stream:
        async for chunk in stream:
            if chunk.choices[0].delta.content == "one":
                break
    await asyncio.to_thread(until, lambda: door.engine.cancelled)


@pytest.mark.parametrize("stream", [False, True])
async def test_cancelling_the_awaiting_task_cancels_the_call(door_of, stream):
    """A client task that is cancelled while it waits hangs up, streaming or not."""
    door = door_of("one two", latency_s=30)
    opened = asyncio.Event()

    async def read() -> None:
        reply = await door.doors.async_openai().chat.completions.create(**ASK, stream=stream)
        async for _ in reply:
            opened.set()

    task = asyncio.create_task(read())
    await asyncio.to_thread(until, lambda: door.engine.requests)
    if stream:
        await opened.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(until, lambda: door.engine.cancelled)


def test_read_timeout_hangs_up(door_of):
    """The client's own timeout is kept, and the engine does not go on for nobody."""
    door = door_of("one", latency_s=30)
    with pytest.raises(openai.APITimeoutError):
        door.doors.openai(timeout=0.05).chat.completions.create(**ASK)
    until(lambda: door.engine.cancelled)


async def test_async_read_timeout_hangs_up(door_of):
    """The same for async."""
    door = door_of("one", latency_s=30)
    with pytest.raises(openai.APITimeoutError):
        await door.doors.async_openai(timeout=0.05).chat.completions.create(**ASK)
    await asyncio.to_thread(until, lambda: door.engine.cancelled)


def test_tool_calls_arrive_on_both_routes(door_of):
    """As openai's own objects, arguments byte for byte."""
    client = door_of(CALL, CALL).doors.openai()
    (whole,) = client.chat.completions.create(**ASK).choices[0].message.tool_calls
    streamed = [
        call
        for chunk in client.chat.completions.create(**ASK, stream=True)
        for call in chunk.choices[0].delta.tool_calls or []
    ]
    assert [(0, "call_1", "read", CALL.arguments)] == [
        (call.index, call.id, call.function.name, call.function.arguments) for call in streamed
    ]
    assert ("call_1", "read", CALL.arguments) == (whole.id, whole.function.name, whole.function.arguments)


def test_own_reply_can_be_sent_back_as_it_is(door_of):
    """An agent loop appends the client's message object, nulls and all."""
    door = door_of(CALL, "done")
    client = door.doors.openai()
    reply = client.chat.completions.create(**ASK).choices[0].message
    messages = [*ASK["messages"], reply.model_dump(), {"role": "tool", "tool_call_id": "call_1", "content": "ok"}]
    again = client.chat.completions.create(model="scripted", messages=messages)
    assert "done" == again.choices[0].message.content
    assert (CALL,) == door.engine.requests[1].messages[1].tool_calls


def test_errors_are_openais_own_types(door_of):
    """400 and 404 and, at the first try, 429."""
    tries = []

    def poor(engine):
        def submit(request):
            tries.append(request)
            raise BudgetExceeded("used up", task="t", limit="tokens", allowed=1, used=1, asked=1)

        return submit

    door = door_of("x", submit=poor)
    client = door.doors.openai(max_retries=2)
    with pytest.raises(openai.BadRequestError, match="n=0 is not allowed") as caught:
        client.chat.completions.create(**ASK, n=0)
    assert "n" == caught.value.param
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**ASK | {"model": "other"})
    with pytest.raises(openai.RateLimitError) as caught:
        client.chat.completions.create(**ASK)
    assert ("budget_exceeded", 1) == (caught.value.code, len(tries))


def test_error_in_a_stream_reaches_its_reader(door_of):
    """openai raises what comes as an event."""
    client = door_of(ValueError("x")).doors.openai()
    with pytest.raises(openai.APIError, match="the engine failed"):
        list(client.chat.completions.create(**ASK, stream=True))


def test_caller_is_looked_up_where_the_call_is_made(door_of):
    """A context variable of the calling thread or task is seen, though the app runs elsewhere."""
    task = contextvars.ContextVar("task", default="nobody")
    places = set()

    def identify() -> Caller:
        places.add(threading.get_ident())
        return Caller(task=task.get(), node="n")

    door = door_of(*["x"] * 6, identify=identify)
    client, async_client = door.doors.openai(), door.doors.async_openai()

    def call(name: str) -> None:
        task.set(name)
        client.chat.completions.create(**ASK)

    async def acall(name: str) -> None:
        task.set(name)
        await async_client.chat.completions.create(**ASK)

    async def both() -> None:
        await asyncio.gather(acall("c"), acall("d"))

    threads = [threading.Thread(target=contextvars.copy_context().run, args=(call, name)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    asyncio.run(both())
    client.chat.completions.create(**ASK)
    assert ["a", "b", "c", "d", "nobody"] == sorted(request.caller.task for request in door.engine.requests)
    assert threading.get_ident() in places
    assert not any(thread.ident in places for thread in threading.enumerate() if thread.name == "agentkv-doors")


def test_broken_identify_does_not_break_the_call(door_of):
    """Who calls is a hint; the call goes on as nobody's."""

    def identify():
        raise KeyError("lost")

    door = door_of("x", identify=identify)
    assert "x" == door.doors.openai().chat.completions.create(**ASK).choices[0].message.content
    assert Caller() == door.engine.requests[0].caller


def test_sixteen_threads_stream_at_once(door_of):
    """One client shared by all; nobody gets another's words."""
    door = door_of(*[lambda request: request.messages[0].content] * 160)
    client = door.doors.openai()
    wrong, errors = [], []

    def work(number: int) -> None:
        try:
            for turn in range(10):
                text = f"words of {number} in turn {turn}"
                stream = client.chat.completions.create(
                    model="scripted", messages=[{"role": "user", "content": text}], stream=True
                )
                if text != "".join(words(stream)):
                    wrong.append(text)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ([], []) == (wrong, errors)


@pytest.mark.parametrize("library", [httpx, httpx2], ids=lambda library: library.__name__)
async def test_transports_serve_both_http_libraries(door_of, library):
    """httpx and httpx2, sync and async, and openai on either."""
    door = door_of("one", "two")
    doors = door.doors
    with library.Client(transport=doors.transport(library), base_url="http://x") as client:
        assert 200 == client.get("/health").status_code
        assert (
            "one"
            == openai.OpenAI(http_client=client, api_key="k", base_url="http://x/v1")
            .chat.completions.create(**ASK)
            .choices[0]
            .message.content
        )
    async with library.AsyncClient(transport=doors.async_transport(library), base_url="http://x") as client:
        assert 404 == (await client.get("/nothing?a=1")).status_code
        with pytest.raises(library.ReadTimeout):
            await client.post("/v1/chat/completions", json=ASK, timeout=0.0)
