"""One exchange, one deadline: whatever a server sends instead of an answer, nobody waits longer, and no memory is filled."""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from raw_server import CHUNKED, RawServer, bomb, forever, once, whole

from agentkv.adapters.base import Unreachable
from agentkv.adapters.http import Endpoint
from agentkv.adapters.metrics import Hits, Load
from agentkv.adapters.replay import Kept, Sending

WITHIN_S = 0.25
MOST_S = 1.5
DRIPS = {
    "status line": forever(b"H", 0.02),
    "headers": forever(b"x: y\r\n", 0.02, after=b"HTTP/1.1 200 OK\r\n"),
    "a header": forever(b"x", 0.02, after=b"HTTP/1.1 200 OK\r\nx: "),
    "continue": forever(b"HTTP/1.1 100 Continue\r\n\r\n", 0.02),
    "chunks": forever(b"1\r\n \r\n", 0.02, after=CHUNKED),
    "a chunk's length": forever(b"0", 0.02, after=CHUNKED),
    "a long body": forever(b" ", 0.02, after=whole(b"", length=10**9)),
    "the rest of a body": forever(b"", 0.02, after=whole(b"{", length=2)),
    "nothing": forever(b"", 0.02),
}
FLOODS = {
    "headers": forever(b"x: " + b"y" * 60_000 + b"\r\n", after=b"HTTP/1.1 200 OK\r\n"),
    "a header": forever(b"x" * 65_536, after=b"HTTP/1.1 200 OK\r\nx: "),
    "chunks": forever(b"10000\r\n" + b" " * 65_536 + b"\r\n", after=CHUNKED),
    "metrics": forever(b'vllm:num_requests_waiting{e="0"} 1.0\n' * 1000, after=whole(b"", length=10**12)),
    "a chunk's length": forever(b"0" * 65_536, after=CHUNKED),
}
WRONG = {
    "a length that is too long": once(whole(b'{"a": 1}', length=100)),
    "a length that is too short": once(whole(b'{"a": 1}', length=4)),
    "a length that is no number": once(b"HTTP/1.1 200 OK\r\ncontent-length: many\r\n\r\n"),
    "chunks that break off": once(CHUNKED + b"8\r\n{"),
    "a page": once(whole(b"<html>Sign in</html>")),
    "no HTTP": once(b"SSH-2.0-OpenSSH_9.9\r\n"),
    "nothing at all": once(b""),
    "gzip that nobody asked for": once(bomb()),
    "an unknown encoding": once(whole(b"{}", more="content-encoding: zstd\r\n")),
    "a redirect": once(whole(b"{}", status="302 Found", more="location: http://127.0.0.1:9/\r\n")),
    "a number without end": once(whole(b"[" + b"9" * 100_000 + b"]")),
    "deep JSON": once(whole(b"[" * 1_000_000)),
}


def ways(url):
    """Everything that asks a server something beside calls."""
    endpoint = Endpoint(url, api_key="secret")
    kept = Kept(url=f"{url}/chat/completions", headers=(("authorization", "Bearer secret"),), body=b"{}")
    yield lambda: endpoint.get("/slots", WITHIN_S)
    yield lambda: endpoint.post("/x", {"a": 1}, WITHIN_S)
    yield lambda: Sending().run(kept, b"{}", WITHIN_S)
    endpoint.close()


@pytest.mark.parametrize("script", DRIPS.values(), ids=DRIPS)
def test_an_answer_that_drips_ends_at_the_deadline(script):
    """A time-out for each read would start again with every byte."""
    with RawServer(script) as server:
        for ask in ways(server.url):
            began_s = time.monotonic()
            with pytest.raises(Unreachable):
                ask()
            assert time.monotonic() - began_s < MOST_S


@pytest.mark.parametrize("script", FLOODS.values(), ids=FLOODS)
def test_an_answer_that_floods_fills_no_memory(script):
    """Some megabytes show that it does not end."""
    with RawServer(script) as server:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for ask in ways(server.url):
            with pytest.raises(Unreachable):
                ask()
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024


@pytest.mark.parametrize("script", WRONG.values(), ids=WRONG)
def test_what_is_no_answer_is_unreachable(script):
    """And the next exchange of the same endpoint is a new beginning."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with RawServer(script) as server:
        for ask in ways(server.url):
            with pytest.raises(Unreachable):
                ask()
        endpoint = Endpoint(server.url)
        with pytest.raises(Unreachable):
            endpoint.get("/slots", WITHIN_S)
        server.script = once(whole(b'{"a": 1}'))
        assert {"a": 1} == endpoint.get("/slots", 5.0)
        endpoint.close()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024


def test_a_redirect_is_not_followed_and_carries_no_key():
    """Whoever it points to hears nothing, least of all the key."""
    with RawServer(once(whole(b"{}"))) as other:
        moved = whole(
            b"{}", status="307 Temporary Redirect", more=f"connection: close\r\nlocation: {other.url}/stolen\r\n"
        )
        with RawServer(once(moved)) as server:
            for ask in ways(server.url):
                with pytest.raises(Unreachable, match="307"):
                    ask()
            assert all(b"secret" in asked for asked in server.asked)
        assert [] == other.asked


def test_metrics_without_end_say_nothing():
    """Neither load nor hits wait for them."""
    with RawServer(FLOODS["metrics"]) as server:
        endpoint = Endpoint(server.url)
        began_s = time.monotonic()
        assert "does not end" in (Load(endpoint).busy(2.0) or "")
        hits = Hits(endpoint)
        hits.start()
        assert hits.of_call(0) is None
        assert time.monotonic() - began_s < 5
        endpoint.close()


def test_a_kept_connection_that_the_server_closed_is_no_failure():
    """Neither for what is asked nor for what is told: that it is closed is seen before anything is sent."""
    with RawServer(once(whole(b'{"a": 1}'))) as server:
        endpoint = Endpoint(server.url)
        for _ in range(3):
            assert {"a": 1} == endpoint.get("/slots", 5.0)
            time.sleep(0.02)
            assert {"a": 1} == endpoint.post("/x", {}, 5.0)
            time.sleep(0.02)
        endpoint.close()
    assert 6 == len(server.asked)


@pytest.mark.parametrize("ask", [Endpoint.get, Endpoint.text])
def test_what_is_asked_on_a_connection_that_goes_just_then_is_asked_again(ask):
    """What is told is not: the server may have heard it."""

    def script(_request, over):
        yield whole(b"{}")
        over.wait(0.3)  # it closes with the next request unread

    with RawServer(script) as server:
        endpoint = Endpoint(server.url)
        assert ask(endpoint, "/slots", 5.0) in ({}, "{}")
        assert ask(endpoint, "/slots", 5.0) in ({}, "{}")
        with pytest.raises(Unreachable):
            endpoint.post("/x", {}, 5.0)
        endpoint.close()
    assert 2 == len(server.asked)
