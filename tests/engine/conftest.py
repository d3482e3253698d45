"""Real HTTP on loopback for the remote engine: a small server, and applications with the faults of real servers."""

from __future__ import annotations

import asyncio
import json
import threading
import time

import pytest

from agentkv.engine.loop import LoopThread
from agentkv.engine.remote import RemoteEngine


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
def peculiar():
    """The class of servers with a will of their own."""
    return Peculiar


@pytest.fixture
def until():
    """Wait for something that another thread is about to do."""

    def wait(condition, within_s: float = 20) -> None:
        end_s = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < end_s, "it never happened"
            time.sleep(0.002)

    return wait
