"""Model calls to servers that never come to an end: a typed error in time, no filled memory, and long answers still arrive."""

from __future__ import annotations

import gzip
import json
import resource
import sys
import time
from pathlib import Path

import pytest

from agentkv import AgentKV, Budget, Message, Request, Sampling
from agentkv.core.task import Caller
from agentkv.engine import bounded
from agentkv.engine.remote import RemoteEngine
from agentkv.errors import RemoteError

sys.path.insert(0, str(Path(__file__).parents[1] / "adapters"))

from raw_server import RawServer, bomb, forever, once, whole

WITHIN_S = 0.4
MOST_S = 6.0
EVENTS = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
ERROR = b"HTTP/1.1 500 Oh\r\ncontent-type: application/json\r\n\r\n"
JSON = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n"


def event(delta=None, finish=None, **more):
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish}]
    body = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "m", "choices": choices, **more}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


REPORT = {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10}
END = event({}, "stop") + event(usage=REPORT) + b"data: [DONE]\n\n"
DRIPS = {
    "status line": forever(b"H", 0.02),
    "headers": forever(b"x: y\r\n", 0.02, after=b"HTTP/1.1 200 OK\r\n"),
    "comments": forever(b": working\n\n", 0.02, after=EVENTS),
    "half an event": forever(b"d", 0.02, after=EVENTS),
    "empty chunks": forever(event(), 0.02, after=EVENTS),
    "empty words": forever(event({"content": ""}), 0.02, after=EVENTS),
    "comments after the answer": forever(b":\n\n", 0.02, after=EVENTS + event({"content": "ok"})),
    "its end": forever(event({}, "stop"), 0.02, after=EVENTS + event({"content": "ok"})),
    "its usage": forever(event(usage=REPORT), 0.02, after=EVENTS + event({"content": "ok"}, "stop")),
    "an error": forever(b" ", 0.02, after=ERROR),
    "an answer that is no stream": forever(b" ", 0.02, after=JSON),
}
FLOODS = {
    "headers": forever(b"x: " + b"y" * 60_000 + b"\r\n", after=b"HTTP/1.1 200 OK\r\n"),
    "comments": forever(b": working\n\n" * 5000, after=EVENTS),
    "one line": forever(b"x" * 65_536, after=EVENTS),
    "words": forever(event({"content": "word " * 1000}), after=EVENTS),
    "calls": forever(
        event({"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": "x" * 1000}}]}),
        after=EVENTS,
    ),
    "an error": forever(b" " * 65_536, after=ERROR),
    "an answer that is no stream": forever(b" " * 65_536, after=JSON),
    "gzip": once(bomb()),
    "gzip of an error": once(bomb().replace(b"200 OK", b"400 Bad")),
}


@pytest.fixture(autouse=True)
def small_bounds(monkeypatch):
    """A megabyte instead of hundreds."""
    monkeypatch.setattr(bounded, "MOST_BYTES", 2**20)
    monkeypatch.setattr(bounded, "LONGEST_LINE_BYTES", 2**19)
    monkeypatch.setattr(bounded, "MOST_ERROR_BYTES", 2**18)


def ask(text="hello there", task="t"):
    message = Message(role="user", content=text)
    return Request(messages=(message,), caller=Caller(task=task), sampling=Sampling(max_tokens=4))


def remote(server, **options):
    return RemoteEngine(base_url=server.url, model="m", **{"max_retries": 0, "timeout_s": WITHIN_S, **options})


def answered(server, seconds=20.0, **options):
    engine = remote(server, **options)
    try:
        return engine.submit(ask()).result(seconds)
    finally:
        engine.close()


@pytest.mark.parametrize("script", DRIPS.values(), ids=DRIPS)
def test_an_answer_that_drips_is_a_typed_error_in_time(script):
    """Within the user's own time-out of nothing said, whatever arrives meanwhile."""
    with RawServer(script) as server:
        engine = remote(server)
        began_s = time.monotonic()
        with pytest.raises(RemoteError):
            engine.submit(ask()).result(20)
        assert time.monotonic() - began_s < MOST_S
        engine.close()


@pytest.mark.parametrize("script", FLOODS.values(), ids=FLOODS)
def test_an_answer_that_floods_is_a_typed_error_and_fills_no_memory(script):
    """Not even packed: two hundred megabytes of blanks are two hundred kilobytes on the way."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with RawServer(script) as server, pytest.raises(RemoteError):
        answered(server, timeout_s=30.0)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024


def test_a_slow_answer_arrives_however_long_it_takes():
    """As long as it says something now and then; the time-out is none for the whole answer."""

    def words(_request, over):
        yield EVENTS
        for number in range(10):
            over.wait(0.25)
            yield event({"content": f"{number} "})
        yield END

    with RawServer(words) as server:
        answer = answered(server, timeout_s=1.0)
    assert "0 1 2 3 4 5 6 7 8 9 " == answer.text
    assert answer.timing.total_s > 2.0


def test_reasoning_and_calls_are_something_said():
    """Neither is text, and each keeps an answer alive."""

    def thoughts(_request, over):
        yield EVENTS
        for number in range(8):
            over.wait(0.25)
            call = {"index": 0, "id": "c", "function": {"name": "f" if number == 4 else "", "arguments": " " * number}}
            yield event({"reasoning_content": "hm"} if number < 4 else {"tool_calls": [call]})
        yield event({}, "tool_calls") + END

    with RawServer(thoughts) as server:
        assert "f" == answered(server, timeout_s=1.0).tool_calls[0].name


def test_comments_before_the_first_word_are_waited_out():
    """Gateways send them while a model is queued; the time-out is for the word."""

    def queued(_request, over):
        yield EVENTS
        for _ in range(4):
            over.wait(0.05)
            yield b": in the queue\n\n"
        yield event({"content": "ok"}) + END

    with RawServer(queued) as server:
        assert "ok" == answered(server, timeout_s=5.0).text


def test_an_answer_that_is_packed_though_nobody_asked_is_read():
    """Some proxies pack whatever they pass on; others are refused by name."""
    packed = gzip.compress(event({"content": "ok"}) + END)
    with RawServer(once(EVENTS[:-2] + b"content-encoding: gzip\r\n\r\n" + packed)) as server:
        assert "ok" == answered(server, timeout_s=5.0).text
        assert b"accept-encoding: identity" in server.asked[0].lower()
        server.script = once(EVENTS[:-2] + b"content-encoding: br\r\n\r\nxx")
        with pytest.raises(RemoteError):
            answered(server)


@pytest.mark.parametrize(
    "answer",
    [
        EVENTS + event({"content": "half an ans"}),
        whole(event({"content": "half"}), length=10_000, more="x: y\r\n").replace(
            b"application/json", b"text/event-stream"
        ),
        b"HTTP/1.1 200 OK\r\ncontent-length: many\r\n\r\n",
        whole(b"<html>Sign in</html>"),
        b"",
    ],
    ids=["no end", "a wrong length", "no length", "a page", "nothing"],
)
def test_an_answer_that_breaks_off_is_a_typed_error(answer):
    """Half an answer is none."""
    with RawServer(once(answer)) as server, pytest.raises(RemoteError):
        answered(server)


def test_a_redirect_elsewhere_takes_no_key_along():
    """Where it is followed at all, whoever is there does not learn who we are."""
    with RawServer(once(EVENTS + event({"content": "ok"}) + END)) as other:
        moved = whole(b"", status="307 Temporary Redirect", more=f"location: {other.url}/chat/completions\r\n")
        with RawServer(once(moved)) as server:
            answered(server, api_key="sk-secret-key", timeout_s=5.0)
        assert b"sk-secret-key" in server.asked[0]
        assert other.asked
        assert not any(b"sk-secret-key" in asked for asked in other.asked)


@pytest.mark.parametrize("name", ["comments", "headers", "empty words", "comments after the answer"])
def test_after_an_answer_without_end_the_budget_is_settled_and_the_agent_goes_on(name):
    """What was set aside is free again, less what may have been spent; the bill has the call, and the next one is answered."""
    with RawServer(DRIPS[name]) as server:
        kv = AgentKV.with_engine(remote(server), ledger="memory")
        with kv, kv.task("t", budget=Budget(tokens=100), final=False):
            with pytest.raises(RemoteError):
                kv.submit(ask()).result(20)
            account = kv._books.account("t")
            account.check()
            assert 0 == account.reserved.tokens
            assert 0 < account.used.tokens < 40
            server.script = once(EVENTS + event({"content": "ok"}) + END)
            for _ in range(3):
                assert "ok" == kv.submit(ask()).result(20).text
