"""Redirects: what was added for one server is not carried to another, and the user's call is answered all the same."""

from __future__ import annotations

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import openai
import pytest

from agentkv import AgentKV, Message, Request
from agentkv.adapters.inject import Extra, Injector, injecting_async_client, injecting_client
from agentkv.adapters.strict import CHAT_FIELDS, StrictServer

MESSAGES = [{"role": "user", "content": "hello"}]
EXTRA = Extra(body={"nvext": {"a": 1}}, headers={"X-Dynamo-Session-ID": "run-7"})


class Sends:
    """A server that sends every request on to `where(path)`; `paths` are those that were asked."""

    def __init__(self, where, status=307):
        self.asked = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                outer.asked.append((self.path, "x-dynamo-session-id" in self.headers, "nvext" in body))
                self.send_response(status)
                self.send_header("location", where(self.path))
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    @property
    def url(self):
        return f"http://127.0.0.1:{self._server.server_port}/v1"

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture(params=["sync", "async"])
def ask(request):
    """`ask(url, **options of the client)`: one chat that carries EXTRA."""

    def call(url, **options):
        injector = Injector(lambda _: EXTRA)
        shared = {"base_url": url, "api_key": "k", "max_retries": 0}
        if request.param == "sync":
            with openai.OpenAI(http_client=injecting_client(injector, **options), **shared) as client:
                return client.chat.completions.create(model="m", messages=MESSAGES).choices[0].message.content

        async def run():
            async with openai.AsyncOpenAI(http_client=injecting_async_client(injector, **options), **shared) as client:
                answer = await client.chat.completions.create(model="m", messages=MESSAGES)
                return answer.choices[0].message.content

        return asyncio.run(run())

    return call


def carried(asked):
    return ("x-dynamo-session-id" in asked.headers, "nvext" in asked.body)


@pytest.mark.parametrize("status", [307, 308])
def test_another_server_gets_the_users_own_request(ask, status):
    """Neither our headers nor our fields, and a key only as far as the HTTP library takes it."""
    with (
        StrictServer(accepts=CHAT_FIELDS | {"nvext"}) as other,
        Sends(lambda path: f"http://localhost:{other.url.split(':')[2][:-3]}{path}", status) as server,
    ):
        assert "ok" == ask(server.url)
        assert [(False, False)] == [carried(one) for one in other.asked]
        assert "authorization" not in other.asked[0].headers


class Moved(StrictServer):
    """One of its routes has moved."""

    def _serve(self, http, method):
        if http.path != "/v1/old/chat/completions":
            return super()._serve(http, method)
        http.rfile.read(int(http.headers["content-length"]))
        http.send_response(307)
        http.send_header("location", "/v1/chat/completions")
        http.send_header("content-length", "0")
        return http.end_headers()


def test_the_same_server_gets_what_is_its_own(ask):
    """It only moved the route."""
    with Moved(accepts=CHAT_FIELDS | {"nvext"}) as server:
        assert "ok" == ask(f"{server.url}/old")
        assert ["/v1/chat/completions"] == [one.path for one in server.asked]
        assert [(True, True)] == [carried(one) for one in server.asked]


def test_a_circle_ends_as_it_does_without_us(ask):
    """The HTTP library's own error."""
    with Sends(lambda path: path) as server, pytest.raises(openai.APIConnectionError) as caught:
        ask(server.url)
    assert "TooManyRedirects" in type(caught.value.__cause__).__name__
    assert len(server.asked) < 60


def test_whoever_follows_none_gets_the_redirect(ask):
    """It is asked once."""
    with Sends(lambda _: "http://localhost:1/x") as server:
        with pytest.raises(openai.APIStatusError) as caught:
            ask(server.url, follow_redirects=False)
        assert 307 == caught.value.status_code
        assert [("/v1/chat/completions", True, True)] == server.asked


def test_a_remote_engines_calls_neither():
    """The same through the product."""
    with (
        StrictServer() as other,
        Sends(lambda path: f"http://localhost:{other.url.split(':')[2][:-3]}{path}") as server,
        AgentKV.remote(base_url=server.url, model="m", ledger="memory", speaks="dynamo", salt="tenant") as kv,
        kv.task("t", final=False),
    ):
        assert "ok" == kv.submit(Request(messages=(Message(role="user", content="hi"),))).result(20).text
        assert (True, True) == server.asked[0][1:]
        assert [(False, False)] == [carried(one) for one in other.asked]
