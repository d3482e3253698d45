"""StrictServer: an OpenAI-compatible server for tests that rejects every field which it does not know, by name.

Covers chat completions, streamed and whole, on a loopback port, what was asked of it, and the faults of real servers. The
answers are scripted. Further routes of a foreign engine are functions given in `routes`. For tests, yours too; not for
serving.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal, Self

CHAT_FIELDS = frozenset(
    [
        "messages",
        "model",
        "stream",
        "stream_options",
        "temperature",
        "top_p",
        "max_tokens",
        "max_completion_tokens",
        "stop",
        "seed",
        "tools",
        "tool_choice",
        "n",
        "user",
        "presence_penalty",
        "frequency_penalty",
        "response_format",
        "parallel_tool_calls",
    ]
)
"""What the oldest OpenAI-compatible servers understand."""
Fault = Literal["", "hang", "html", "close", "endless", "lie"]
Route = Callable[[Mapping[str, Any]], tuple[int, Any]]
"""A request's JSON body in, a status and a JSON answer out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request as it came in; header names are in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: Mapping[str, Any]


@dataclass(kw_only=True)
class StrictServer:
    """Use as a context manager; `url` ends in `/v1`.

    `accepts`: the fields of a chat request. `status`: what an unknown one is answered with. `names_fields`: whether that
    answer says which. `fault`: what every answer is like from now on: a hanging connection, an HTML page, a closed socket,
    an answer without end, or usage that cannot be true.
    """

    accepts: Iterable[str] = CHAT_FIELDS
    answer: str = "ok"
    status: int = 400
    names_fields: bool = True
    fault: Fault = ""
    routes: Mapping[str, Route] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    rejected: int = 0

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def __enter__(self) -> Self:
        outer = self
        self._over = threading.Event()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                """Silence."""

            def do_GET(self) -> None:
                outer._serve(self, "GET")

            def do_POST(self) -> None:
                outer._serve(self, "POST")

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True
            block_on_close = False

            def handle_error(self, *_: Any) -> None:
                """Clients that hang up are none of our business."""

        self._server = Quiet(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), name="strict", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _serve(self, http: BaseHTTPRequestHandler, method: str) -> None:
        length = int(http.headers.get("content-length") or 0)
        try:
            body = json.loads(http.rfile.read(length) or b"{}")
        except ValueError:
            body = None
        if not isinstance(body, dict):
            return _send(http, 400, {"error": {"message": "no JSON object"}})
        headers = {name.lower(): value for name, value in http.headers.items()}
        self.asked.append(Asked(method=method, path=http.path, headers=headers, body=body))
        if self.fault in ("hang", "html", "close", "endless"):
            return self._faulty(http)
        path = http.path
        route = self.routes.get(f"{method} {path}") or self.routes.get(f"{method} {path.partition('?')[0]}")
        if route is not None:
            return _send(http, *route(body))
        if method == "POST" and path.endswith("/chat/completions"):
            return self._chat(http, body)
        return _send(http, 404, {"error": {"message": f"no route {method} {path}"}})

    def _chat(self, http: BaseHTTPRequestHandler, body: Mapping[str, Any]) -> None:
        unknown = sorted(set(body) - set(self.accepts))
        if unknown:
            self.rejected += 1
            names = ", ".join(unknown) if self.names_fields else "something"
            error = {"message": f"Unrecognized request argument supplied: {names}", "type": "invalid_request_error"}
            return _send(http, self.status, {"error": error})
        prompt = len(json.dumps(body.get("messages"))) // 4
        usage = {"prompt_tokens": prompt, "completion_tokens": 1, "total_tokens": prompt + 1}
        if self.fault == "lie":
            usage |= {"prompt_tokens": -5, "prompt_tokens_details": {"cached_tokens": 10**12}}  # type: ignore[dict-item]
        shared = {"id": "c-1", "created": 0, "model": body.get("model", "strict")}
        if not body.get("stream"):
            message = {"role": "assistant", "content": self.answer}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            return _send(http, 200, shared | {"object": "chat.completion", "choices": [choice], "usage": usage})
        deltas = [{"role": "assistant", "content": self.answer}, {}]
        chunks = [
            shared
            | {
                "object": "chat.completion.chunk",
                "choices": [{"index": 0, "delta": delta, "finish_reason": None if delta else "stop"}],
            }
            for delta in deltas
        ]
        chunks.append(shared | {"object": "chat.completion.chunk", "choices": [], "usage": usage})
        text = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
        return _raw(http, 200, "text/event-stream", text.encode())

    def _faulty(self, http: BaseHTTPRequestHandler) -> None:
        http.close_connection = True
        if self.fault == "html":
            _raw(http, 200, "text/html", b"<html><body>Sign in</body></html>")
        elif self.fault == "hang":
            self._over.wait(60)
        elif self.fault == "endless":
            http.send_response(200)
            http.send_header("content-type", "application/json")
            http.end_headers()
            while not self._over.is_set():
                http.wfile.write(b'"' + b"a" * 65_536)


def _send(http: BaseHTTPRequestHandler, status: int, answer: Any) -> None:
    _raw(http, status, "application/json", json.dumps(answer).encode())


def _raw(http: BaseHTTPRequestHandler, status: int, kind: str, body: bytes) -> None:
    http.send_response(status)
    http.send_header("content-type", kind)
    http.send_header("content-length", str(len(body)))
    http.end_headers()
    http.wfile.write(body)
