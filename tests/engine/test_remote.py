"""The remote engine against real HTTP on loopback: our own app, and servers with the faults of real ones."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time

import pytest

from agentkv.core.message import Message, ToolCall, ToolSpec
from agentkv.core.task import Caller
from agentkv.core.usage import Usage
from agentkv.engine.base import Request, Sampling
from agentkv.engine.loop import LoopThread
from agentkv.engine.remote import RemoteEngine, estimate_tokens
from agentkv.engine.scripted import Reply, ScriptedEngine
from agentkv.errors import Closed, ConfigError, GenerationCancelled, RemoteError, RequestInvalid
from agentkv.server.app import create_app

KEY = "sk-very-secret-key"
CALLS = tuple(ToolCall(id=f"call_{n}", name="read", arguments=f'{{"path":  "{n}.py"}}') for n in range(3))


class Loopback:
    """A small HTTP/1.1 server for one ASGI app: one request a connection, chunked replies, hang-ups noticed."""

    def __init__(self, app) -> None:
        self.app = app
        self._loop = LoopThread("test-loopback")
        self._ready = threading.Event()
        self._loop.spawn(self._serve)
        assert self._ready.wait(5)

    async def _serve(self) -> None:
        async with await asyncio.start_server(self._connected, "127.0.0.1", 0) as server:
            self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
            self._ready.set()
            await asyncio.Event().wait()

    async def _connected(self, reader, writer) -> None:
        try:
            head, *lines = (await reader.readuntil(b"\r\n\r\n")).rstrip().split(b"\r\n")
            method, path, _ = head.decode().split(" ")
            headers = [(name.lower(), value.strip()) for name, _, value in (line.partition(b":") for line in lines)]
            body = await reader.readexactly(int(dict(headers).get(b"content-length", b"0")))
            parts = iter([{"type": "http.request", "body": body, "more_body": False}])

            async def receive():
                for part in parts:
                    return part
                await reader.read()
                return {"type": "http.disconnect"}

            async def send(message):
                if message["type"] == "http.response.start":
                    writer.write(b"HTTP/1.1 %d X\r\nconnection: close\r\n" % message["status"])
                    kept = [(k, v) for k, v in message.get("headers", []) if k.lower() != b"content-length"]
                    writer.writelines([k + b": " + v + b"\r\n" for k, v in kept])
                    writer.write(b"transfer-encoding: chunked\r\n\r\n")
                else:
                    if message.get("body"):
                        writer.write(b"%x\r\n%s\r\n" % (len(message["body"]), message["body"]))
                    if not message.get("more_body"):
                        writer.write(b"0\r\n\r\n")
                await writer.drain()

            scope = {"type": "http", "asgi": {"version": "3.0"}, "method": method, "path": path, "headers": headers}
            await self.app({**scope, "query_string": b"", "root_path": "", "scheme": "http"}, receive, send)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    def close(self) -> None:
        self._loop.close()


class Peculiar:
    """A server with a will of its own: replies from a list, and a note of every body that came."""

    def __init__(self, *replies, rejects: str | None = None) -> None:
        self.replies = list(replies)
        self.rejects = rejects
        self.bodies: list[dict] = []
        self.headers: list[dict] = []
        self.hung_up = threading.Event()

    async def __call__(self, scope, receive, send) -> None:
        body = json.loads((await receive())["body"])
        self.bodies.append(body)
        self.headers.append(dict(scope["headers"]))
        if self.rejects and self.rejects in body:
            await _send(send, 400, {"error": {"message": f"unknown field {self.rejects}"}})
            return
        reply = self.replies.pop(0)
        if reply == "hang":
            await receive()
            self.hung_up.set()
        elif isinstance(reply, tuple):
            await _send(send, *reply)
        else:
            lines = "".join(f"data: {json.dumps(each)}\n\n" for each in reply) + "data: [DONE]\n\n"
            await _send(send, 200, lines)


async def _send(send, status: int, body) -> None:
    text = body if isinstance(body, str) else json.dumps(body)
    kind = b"text/event-stream" if isinstance(body, str) else b"application/json"
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})
    await send({"type": "http.response.body", "body": text.encode()})


def chunk(delta=None, finish=None, **more) -> dict:
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish}]
    return {"id": "x", "object": "chat.completion.chunk", "choices": choices, **more}


SAID = [chunk({"content": "one"}), chunk({"content": " two"}), chunk({}, "stop")]
REPORTED = chunk(usage={"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11})


def ask(text: str = "hello there", **sampling) -> Request:
    return Request(
        messages=(Message(role="user", content=text),), caller=Caller(task="t"), sampling=Sampling(**sampling)
    )


def until(condition, within_s: float = 5) -> None:
    end_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end_s, "it never happened"
        time.sleep(0.002)


@pytest.fixture
def remote_of(monkeypatch):
    """RemoteEngines on loopback servers; no thread may outlive the test."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    before = set(threading.enumerate())
    opened = []

    def make(app, **options) -> RemoteEngine:
        server = Loopback(app)
        options = {"base_url": server.url, "model": "scripted", "max_retries": 0, **options}
        remote = RemoteEngine(**options)
        opened.extend([remote, server])
        return remote

    yield make
    for each in opened:
        each.close()
    assert set() == set(threading.enumerate()) - before


@pytest.fixture
def pair_of(remote_of):
    """A scripted engine behind our own app behind HTTP, and the RemoteEngine that calls it."""
    engines = []

    def make(*answers, **options) -> tuple[ScriptedEngine, RemoteEngine]:
        engine = ScriptedEngine(answers, **options)
        engines.append(engine)
        return engine, remote_of(create_app(engine.submit, model=engine.model, count_tokens=engine.count_tokens))

    yield make
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("answer", ["Hello to you", "", Reply(text="I look.", tool_calls=CALLS), CALLS[0]], ids=str)
def test_remote_answer_equals_the_local_one(pair_of, answer):
    """Text, calls, finish reason and usage survive the wire."""
    engine, remote = pair_of(answer, answer)
    far = remote.submit(ask()).result(5)
    engine.finish_task("unattributed")
    near = engine.submit(ask()).result(5)
    for name in ("text", "tool_calls", "finish_reason", "usage", "model"):
        assert getattr(near, name) == getattr(far, name)
    assert not far.estimated


def test_request_arrives_as_it_was(pair_of):
    """Every message kind, the tools and the sampling; arguments byte for byte."""
    engine, remote = pair_of("x", "x")
    request = Request(
        messages=(
            Message(role="system", content="rules"),
            Message(role="user", content="go", name="eva"),
            Message(role="assistant", tool_calls=CALLS[:1]),
            Message(role="tool", content="done", tool_call_id="call_0"),
        ),
        tools=(ToolSpec(name="read", description="a file", parameters={"type": "object"}),),
        sampling=Sampling(max_tokens=7, temperature=0.5, top_p=0.9, stop=("end",), seed=3),
    )
    remote.submit(request).result(5)
    assert request == engine.requests[0]
    raw = Request(prompt="once", sampling=Sampling(max_tokens=5))
    assert "x" == remote.submit(raw).result(5).text
    assert raw == engine.requests[1]


def test_cached_tokens_are_reported(pair_of):
    """The second turn's bill shows the reused prefix."""
    _, remote = pair_of("one", "two")
    remote.submit(ask()).result(5)
    assert 3 == remote.submit(ask()).result(5).usage.cached_tokens


def test_first_chunk_arrives_before_the_last_word_is_made(pair_of):
    """Nothing between the two engines buffers."""
    gate = threading.Event()
    engine, remote = pair_of("one two", before_chunk=lambda request, index: index == 0 or gate.wait(5))
    stream = remote.submit(ask())
    chunks = iter(stream)
    assert "one" == next(chunks).text
    assert 1 == engine.stats()["running"]
    gate.set()
    assert [" two"] == [each.text for each in chunks]
    assert 0 < stream.result(5).timing.ttft_s <= stream.result(5).timing.total_s


def test_cancel_in_mid_stream_reaches_the_far_engine(pair_of):
    """The connection is closed, and the other side stops."""
    engine, remote = pair_of("one two three", "next", before_chunk=lambda request, index: time.sleep(0.01))
    with remote.submit(ask()) as stream:
        next(iter(stream))
    until(lambda: engine.cancelled)
    assert 1 <= stream.partial_tokens
    assert "next" == remote.submit(ask()).result(5).text


def test_cancel_before_the_first_byte_closes_the_connection(remote_of):
    """During a long prefill too."""
    server = Peculiar("hang")
    stream = remote_of(server).submit(ask())
    until(lambda: server.bodies)
    stream.cancel()
    with pytest.raises(GenerationCancelled):
        stream.result(1)
    assert server.hung_up.wait(5)


def test_cancel_at_once_and_in_the_queue_is_fine(remote_of):
    """A call that has not begun never goes out."""
    server = Peculiar("hang", SAID)
    remote = remote_of(server, max_parallel=1)
    first = remote.submit(ask())
    until(lambda: server.bodies)
    queued = remote.submit(ask())
    queued.cancel()
    third = remote.submit(ask())
    first.cancel()
    assert "one two" == third.result(5).text
    assert 2 == len(server.bodies)
    assert third.result().timing.queued_s > 0


def test_missing_usage_is_counted_here_and_said_so(remote_of):
    """A server that streams no usage does not make a bill of zero."""
    remote = remote_of(Peculiar(SAID, [*SAID, chunk(usage={"prompt_tokens": 0, "completion_tokens": 0})]), count=len)
    for _ in range(2):
        generation = remote.submit(ask("x" * 100)).result(5)
        assert generation.estimated
        assert Usage(input_tokens=108, output_tokens=7, calls=1) == generation.usage
    assert 2 == remote.stats()["estimated_calls"]


def test_server_that_rejects_the_usage_question_is_asked_once_without(remote_of):
    """The rejection is remembered, and the answers come."""
    server = Peculiar(SAID, SAID, rejects="stream_options")
    remote = remote_of(server)
    assert ["one two"] * 2 == [remote.submit(ask()).result(5).text for _ in range(2)]
    assert [True, False, False] == ["stream_options" in body for body in server.bodies]


def test_usage_question_is_kept_after_a_bad_request_for_another_reason(remote_of):
    """A 400 that has nothing to do with it neither hides its own message nor ends the bills."""
    server = Peculiar(
        (400, {"error": {"message": "too long"}}), (400, {"error": {"message": "other"}}), [*SAID, REPORTED]
    )
    remote = remote_of(server)
    with pytest.raises(RemoteError, match="too long"):
        remote.submit(ask()).result(5)
    generation = remote.submit(ask()).result(5)
    assert (False, 9) == (generation.estimated, generation.usage.input_tokens)
    server.replies = [(400, {"error": {"message": "too long again"}})]
    with pytest.raises(RemoteError, match="too long again"):
        remote.submit(ask()).result(5)
    assert 4 == len(server.bodies)


def test_only_what_was_asked_for_is_sent(remote_of):
    """Plain endpoints reject fields they don't know: defaults stay at home."""
    server = Peculiar([*SAID, REPORTED], [*SAID, REPORTED])
    remote = remote_of(server, max_tokens_field="max_completion_tokens")
    remote.submit(ask()).result(5)
    remote.submit(ask(max_tokens=5)).result(5)
    assert {"model", "messages", "stream", "stream_options", "temperature"} == server.bodies[0].keys()
    assert 5 == server.bodies[1]["max_completion_tokens"]


def parts(*calls) -> list[dict]:
    return [chunk({"tool_calls": [call]}) for call in calls]


@pytest.mark.parametrize(
    "pieces",
    [
        parts(
            {"index": 0, "id": "a", "function": {"name": "f", "arguments": '{"x"'}},
            {"index": 1, "id": "b", "function": {"name": "g", "arguments": "{"}},
            {"index": 0, "function": {"arguments": ": 1}"}},
            {"index": 1, "function": {"arguments": "}"}},
        ),
        parts(
            {"index": 0, "id": "a", "function": {"name": "f", "arguments": '{"x": 1}'}},
            {"index": 0, "id": "b", "function": {"name": "g", "arguments": "{"}},
            {"index": 0, "function": {"arguments": "}"}},
        ),
        parts(
            {"id": "a", "function": {"name": "f", "arguments": '{"x": 1}'}},
            {"id": "b", "function": {"name": "g", "arguments": "{"}},
            {"function": {"arguments": "}"}},
        ),
    ],
    ids=["interleaved by index", "every index 0", "no index"],
)
@pytest.mark.parametrize("finish", ["tool_calls", "stop"])
def test_tool_call_pieces_are_put_together(remote_of, pieces, finish):
    """By index as the standard says, and right where servers get the index wrong."""
    generation = remote_of(Peculiar([*pieces, chunk({}, finish), REPORTED])).submit(ask()).result(5)
    expected = (ToolCall(id="a", name="f", arguments='{"x": 1}'), ToolCall(id="b", name="g", arguments="{}"))
    assert (expected, "tool_calls") == (generation.tool_calls, generation.finish_reason)


def test_call_cut_by_the_token_limit_is_no_call(remote_of):
    """Half an argument must not be acted on; the whole call before it stands."""
    pieces = parts(
        {"index": 0, "id": "a", "function": {"name": "f", "arguments": "{}"}},
        {"index": 1, "id": "b", "function": {"name": "g", "arguments": '{"path": "/imp'}},
    )
    generation = remote_of(Peculiar([*pieces, chunk({}, "length"), REPORTED])).submit(ask()).result(5)
    assert ("length", ["a"]) == (generation.finish_reason, [call.id for call in generation.tool_calls])


def test_answer_without_model_name_carries_ours(remote_of):
    """A bill needs a name."""
    assert "scripted" == remote_of(Peculiar([*SAID, REPORTED])).submit(ask()).result(5).model
    named = [{**each, "model": "their-name"} for each in SAID]
    assert "their-name" == remote_of(Peculiar([*named, REPORTED])).submit(ask()).result(5).model


def test_cached_tokens_beyond_the_input_are_cut(remote_of):
    """A server's wrong sum is no reason to lose the answer."""
    usage = {"prompt_tokens": 5, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 9}}
    generation = remote_of(Peculiar([*SAID, chunk(usage=usage)])).submit(ask()).result(5)
    assert Usage(input_tokens=5, cached_tokens=5, output_tokens=1, calls=1) == generation.usage


def test_stream_that_breaks_off_is_an_error(remote_of):
    """Half an answer never passes for a whole one."""
    stream = remote_of(Peculiar(SAID[:1])).submit(ask())
    with pytest.raises(RemoteError, match="broke off"):
        stream.result(5)
    assert ["one"] == [stream._chunks[0].text]


@pytest.mark.parametrize("status", [400, 401, 404, 429, 500, 503])
def test_errors_carry_the_status_and_the_servers_words(remote_of, status):
    """What the server said, where, and with which status."""
    remote = remote_of(Peculiar(*[(status, {"error": {"message": "because"}})] * 2))
    with pytest.raises(RemoteError, match="because") as caught:
        remote.submit(ask()).result(5)
    assert status == caught.value.status
    assert "127.0.0.1" in str(caught.value)
    assert 1 == remote.stats()["failed"]


def test_error_event_in_the_stream_is_an_error(remote_of):
    """After the head there is no status any more."""
    remote = remote_of(Peculiar([SAID[0], {"error": {"message": "out of memory"}}]))
    with pytest.raises(RemoteError, match="out of memory"):
        remote.submit(ask()).result(5)


def test_nobody_there_is_an_error_without_a_status(remote_of):
    """A refused connection."""
    remote = remote_of(Peculiar(), base_url="http://127.0.0.1:9/v1")
    with pytest.raises(RemoteError) as caught:
        remote.submit(ask()).result(5)
    assert caught.value.status is None


def test_slow_server_times_out(remote_of):
    """The limit is the engine's own option."""
    remote = remote_of(Peculiar("hang"), timeout_s=0.1)
    with pytest.raises(RemoteError, match=r"(?i)timed out"):
        remote.submit(ask()).result(5)


def test_key_is_sent_and_never_told(remote_of, monkeypatch, caplog, capfd):
    """From the argument or the environment; not in errors, logs or repr."""
    caplog.set_level(logging.DEBUG)
    server = Peculiar(*[(401, {"error": {"message": f"wrong key {KEY}"}})] * 2)
    remote = remote_of(server, api_key=KEY)
    with pytest.raises(RemoteError) as caught:
        remote.submit(ask()).result(5)
    assert f"Bearer {KEY}".encode() == server.headers[0][b"authorization"]
    assert "wrong key ***" in str(caught.value)
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("agentkv")]
    assert KEY not in repr(remote) + repr(caught.value.__cause__) + str(remote.stats()) + str(ours)
    assert KEY not in "".join(capfd.readouterr())
    monkeypatch.setenv("OPENAI_API_KEY", "from-the-environment")
    remote = remote_of(server)
    with pytest.raises(RemoteError):
        remote.submit(ask()).result(5)
    assert b"Bearer from-the-environment" == server.headers[1][b"authorization"]


@pytest.mark.parametrize(
    "options",
    [{"base_url": "localhost:8000"}, {"model": ""}, {"timeout_s": 0}, {"max_parallel": 0}, {"max_retries": -1}],
    ids=str,
)
def test_options_that_cannot_work_are_refused(options):
    """At construction, not at the first call."""
    with pytest.raises(ConfigError):
        RemoteEngine(**{"base_url": "http://x/v1", "model": "m", **options})


def test_forced_tokens_are_refused():
    """Only a local engine can force tokens."""
    remote = RemoteEngine(base_url="http://x/v1", model="m")
    with pytest.raises(RequestInvalid):
        remote.submit(Request(prompt="x", forced_ids=(1,)))
    remote.close()


def test_close_ends_running_calls_and_refuses_new_ones(remote_of):
    """The caller hears Closed, the server a hang-up; closing twice is fine."""
    server = Peculiar("hang")
    remote = remote_of(server)
    stream = remote.submit(ask())
    until(lambda: server.bodies)
    remote.close()
    remote.close()
    with pytest.raises(Closed):
        stream.result(1)
    assert server.hung_up.wait(5)
    with pytest.raises(Closed):
        remote.submit(ask())
    assert 0 == remote.stats()["running"]


def test_thirty_two_calls_at_once(pair_of):
    """More calls than places: all are answered, each with its own words, and the totals add up."""
    _, remote = pair_of(*[lambda request: request.messages[0].content] * 32)
    streams = [remote.submit(ask(f"call number {n}")) for n in range(32)]
    assert [f"call number {n}" for n in range(32)] == [stream.result(20).text for stream in streams]
    assert (32, 0, 96) == tuple(remote.stats()[name] for name in ("calls", "running", "output_tokens"))


def test_estimates_are_within_reason():
    """Four bytes a token: English, Chinese, and nothing at all."""
    assert 0 == estimate_tokens("")
    assert 11 == estimate_tokens("The quick brown fox jumps over a lazy dog.")
    assert 16 == estimate_tokens("敏捷的棕色狐狸跳过了一只懒狗。机器学习模型")
