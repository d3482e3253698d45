"""Clients with a way of their own to a server: nothing of ours goes around it, with their key or without."""

from __future__ import annotations

import http.client
import ssl
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import anthropic
import httpx2
import openai
import pytest

from agentkv import AgentKV, ScriptedEngine
from agentkv.adapters import keepalive
from agentkv.adapters.inject_clients import is_direct
from agentkv.adapters.strict import StrictServer
from agentkv.runtime.ways import is_proxied

MESSAGES = [{"role": "user", "content": "hello"}]
ANSWER = {
    "id": "m", "type": "message", "role": "assistant", "model": "c", "content": [{"type": "text", "text": "ok"}],
    "stop_reason": "end_turn", "stop_sequence": None, "usage": {"input_tokens": 1, "output_tokens": 1},
}  # fmt: skip


@pytest.fixture
def kv():
    with AgentKV.with_engine(ScriptedEngine(["ok"]), ledger="memory") as made:
        yield made


@pytest.fixture
def proxy():
    """A proxy for plain HTTP, and what went through it."""
    via = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            via.append(self.path)
            body = self.rfile.read(int(self.headers["content-length"]))
            host = self.path.split("/")[2]
            onward = http.client.HTTPConnection(host)
            onward.request("POST", self.path.split(host, 1)[1], body, {"content-type": "application/json"})
            answer = onward.getresponse()
            read = answer.read()
            onward.close()
            self.send_response(answer.status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(read)))
            self.end_headers()
            self.wfile.write(read)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    server.via = via
    server.url = f"http://127.0.0.1:{server.server_port}"
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def chat(kv, server, **options):
    with (
        openai.OpenAI(
            base_url=server.url, api_key="sk-secret", max_retries=0, http_client=kv.http_client(**options)
        ) as client,
        kv.task("t", final=False),
    ):
        return client.chat.completions.create(model="m", messages=MESSAGES).choices[0].message.content


@pytest.mark.parametrize("named", ["by the client", "by the environment"])
def test_nothing_goes_around_a_proxy(kv, proxy, monkeypatch, named):
    """The one request that reaches the server is the user's, and it came through the proxy."""
    options = {"keep_alive": True}
    if named == "by the client":
        options["proxy"] = proxy.url
    else:
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        monkeypatch.setenv("http_proxy", proxy.url)
    with StrictServer() as server:
        assert "ok" == chat(kv, server, **options)
        with kv.task("t", final=False), kv.tool("pytest", expect_s=0.5):
            time.sleep(0.5)
        assert ["POST /v1/chat/completions"] == [f"{one.method} {one.path}" for one in server.asked]
        assert 1 == len(proxy.via)


def test_without_one_the_server_is_asked_what_it_is(kv):
    """What the test above forbids happens here."""
    with StrictServer() as server:
        assert "ok" == chat(kv, server)
        assert {"GET"} < {one.method for one in server.asked}


def test_one_clients_own_way_is_not_anothers(kv, proxy, llama):
    """The other is told what it always was, and by hints as well; the same address may be another server by each way."""
    chat(kv, llama, proxy=proxy.url)
    chat(kv, llama)
    chat(kv, llama, proxy=proxy.url)
    calls = [one for one in llama.asked if one.path.endswith("completions")]
    assert [False, True, False] == ["id_slot" in one.body for one in calls]


def test_a_provider_is_known_by_its_address_and_paid_for_nothing(kv, monkeypatch):
    """Marks go with its requests; a keep-alive would go around the transport."""
    monkeypatch.setattr(keepalive, "MARGIN_S", 3600.0)
    seen, sent = [], []
    monkeypatch.setattr("agentkv.adapters.replay.Sending.run", lambda *_: sent.append(1) or {})

    def answered(request):
        seen.append("cache_control" in request.content.decode())
        return httpx2.Response(200, json=ANSWER)

    client = kv.http_client(keep_alive=True, transport=httpx2.MockTransport(answered))
    with anthropic.Anthropic(api_key="k", max_retries=0, http_client=client) as asked, kv.task("t", final=False):
        asked.messages.create(
            model="claude-haiku-4-5", max_tokens=5, messages=[{"role": "user", "content": "word " * 2000}]
        )
        with kv.tool("sleep", expect_s=400):
            time.sleep(0.5)
    assert ([True], []) == (seen, sent)


@pytest.mark.parametrize(
    ("options", "direct"),
    [
        ({}, True), ({"timeout": 3, "verify": True, "proxy": None, "headers": {"a": "b"}}, True),
        ({"proxy": "http://p"}, False), ({"transport": object()}, False), ({"mounts": {}}, False), ({"cert": "c"}, False),
        ({"verify": False}, False), ({"verify": ssl.create_default_context()}, False),
    ],
)  # fmt: skip
def test_what_makes_a_way_its_own(options, direct):
    """Whatever decides who is at the other end."""
    assert direct is is_direct(options)


@pytest.mark.parametrize(
    ("environment", "place", "proxied"),
    [
        ({}, "http://h:8000", False), ({"HTTP_PROXY": "http://p"}, "http://h:8000", True),
        ({"HTTP_PROXY": "http://p"}, "https://h:", False), ({"ALL_PROXY": "http://p"}, "https://h:", True),
        ({"HTTP_PROXY": "http://p", "NO_PROXY": "h"}, "http://h:8000", False),
    ],
)  # fmt: skip
def test_the_environments_proxy_is_one_too(monkeypatch, environment, place, proxied):
    """As HTTP libraries read it."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
        monkeypatch.setenv(name.lower(), value)
    assert proxied is is_proxied(place)
