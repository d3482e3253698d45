"""An OpenAI-compatible server that keeps what it was asked, and refuses fields that it does not know."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

USAGE = {"prompt_tokens": 10, "completion_tokens": 4, "total_tokens": 14}


class Server(ThreadingHTTPServer):
    """`known`: fields of the body besides those of every chat completion. Answers "hi", in two pieces where streamed."""

    def __init__(self, *known: str) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.known = {"messages", "model", "stream", "stream_options", "tools", "temperature", *known}
        self.bodies: list[dict[str, Any]] = []
        self.tasks: list[str | None] = []
        self.statuses: list[int] = []
        self.url = f"http://127.0.0.1:{self.server_port}/v1"


@contextmanager
def serving(*known: str) -> Iterator[Server]:
    """A server on a thread of its own."""
    server = Server(*known)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


class _Answers(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        unknown = sorted(set(body) - self.server.known)
        self.server.bodies.append(body)
        self.server.tasks.append(self.headers.get("x-agentkv-task"))
        self.server.statuses.append(400 if unknown else 200)
        if unknown:
            self._send(json.dumps({"error": {"message": f"unknown fields {unknown}"}}))
        elif body.get("stream"):
            self._send("".join(f"data: {event}\n\n" for event in (*_pieces(), "[DONE]")), "text/event-stream")
        else:
            message = {"role": "assistant", "content": "hi"}
            self._send(_answer(message=message, finish_reason="stop"))

    def _send(self, text: str, kind: str = "application/json") -> None:
        self.send_response(self.server.statuses[-1])
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        pass


def _answer(kind: str = "chat.completion", **choice: Any) -> str:
    told = {"id": "c", "object": kind, "created": 0, "model": "m", "choices": [{"index": 0, **choice}]}
    return json.dumps({**told, "usage": USAGE} if kind == "chat.completion" else told)


def _pieces() -> Iterator[str]:
    kind = "chat.completion.chunk"
    yield _answer(kind, delta={"role": "assistant", "content": "h"})
    yield _answer(kind, delta={"content": "i"})
    yield _answer(kind, delta={}, finish_reason="stop")
    yield json.dumps({"id": "c", "object": kind, "created": 0, "model": "m", "choices": [], "usage": USAGE})


def openai(url: str, **options: Any) -> Any:
    """LangChain's own client of that server."""
    chat = pytest.importorskip("langchain_openai", reason="its releases that take openai 3 need a newer langchain-core")
    return chat.ChatOpenAI(model="m", base_url=url, api_key="none", max_retries=0, **options)
