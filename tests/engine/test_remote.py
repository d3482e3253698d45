"""The remote engine against our own app over real HTTP on loopback."""

from __future__ import annotations

import threading
import time

import pytest

from agentkv.core.message import Message, ToolCall, ToolSpec
from agentkv.core.task import Caller
from agentkv.engine.base import Request, Sampling
from agentkv.engine.remote import RemoteEngine
from agentkv.engine.scripted import Reply, ScriptedEngine
from agentkv.errors import ConfigError, RequestInvalid
from agentkv.server.app import create_app

CALLS = tuple(ToolCall(id=f"call_{n}", name="read", arguments=f'{{"path":  "{n}.py"}}') for n in range(3))


def ask(text: str = "hello there", **sampling) -> Request:
    return Request(
        messages=(Message(role="user", content=text),), caller=Caller(task="t"), sampling=Sampling(**sampling)
    )


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
    far = remote.submit(ask()).result(20)
    engine.finish_task("unattributed")
    near = engine.submit(ask()).result(20)
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
    remote.submit(request).result(20)
    assert request == engine.requests[0]
    raw = Request(prompt="once", sampling=Sampling(max_tokens=5))
    assert "x" == remote.submit(raw).result(20).text
    assert raw == engine.requests[1]


def test_cached_tokens_are_reported(pair_of):
    """The second turn's bill shows the reused prefix."""
    _, remote = pair_of("one", "two")
    remote.submit(ask()).result(20)
    assert 3 == remote.submit(ask()).result(20).usage.cached_tokens


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
    assert 0 < stream.result(20).timing.ttft_s <= stream.result(20).timing.total_s


def test_cancel_in_mid_stream_reaches_the_far_engine(pair_of, until):
    """The connection is closed, and the other side stops."""
    engine, remote = pair_of("one two three", "next", before_chunk=lambda request, index: time.sleep(0.01))
    with remote.submit(ask()) as stream:
        next(iter(stream))
    until(lambda: engine.cancelled)
    assert 1 <= stream.partial_tokens
    assert "next" == remote.submit(ask()).result(20).text


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


def test_thirty_two_calls_at_once(pair_of):
    """More calls than places: all are answered, each with its own words, and the totals add up."""
    _, remote = pair_of(*[lambda request: request.messages[0].content] * 32)
    streams = [remote.submit(ask(f"call number {n}")) for n in range(32)]
    assert [f"call number {n}" for n in range(32)] == [stream.result(20).text for stream in streams]
    assert (32, 0, 96) == tuple(remote.stats()[name] for name in ("calls", "running", "output_tokens"))
