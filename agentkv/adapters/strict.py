"""StrictServer: an OpenAI-compatible server for tests that rejects every field which it does not know, by name.

Covers chat completions, streamed and whole, on a loopback port, what was asked of it, and the faults of real servers. The
answers are scripted. Further routes of a foreign engine are functions given in `routes`. For tests, yours too; not for
serving. What is refused, and in which words, is in `strict_rules.py`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal, Self

from agentkv.adapters.strict_rules import CHAT_FIELDS, Dialect, refusal

__all__ = ["CHAT_FIELDS", "Asked", "Dialect", "Fault", "Route", "StrictServer"]
Fault = Literal["", "hang", "html", "close", "endless", "drip", "nonsense", "lie"]
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
    answer says which. `dialect`: "dynamo" and "vllm" refuse what those engines refuse, as they say it, and say who they
    are where they are asked; `priorities`: vLLM with priority scheduling. `fault`: what every answer is like from now on
    (only on paths that hold `fault_at`): a hanging connection, an HTML page, a closed socket, an answer without end or
    drop by drop, JSON of another shape, or usage that cannot be true.
    """

    accepts: Iterable[str] = CHAT_FIELDS
    answer: str = "ok"
    status: int = 400
    names_fields: bool = True
    dialect: Dialect = "openai"
    priorities: bool = False
    fault: Fault = ""
    fault_at: str = ""
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
        path = http.path
        if self.fault not in ("", "lie") and self.fault_at in path:
            return self._faulty(http)
        route = self.routes.get(f"{method} {path}") or self.routes.get(f"{method} {path.partition('?')[0]}")
        route = route or _IDENTITY.get((self.dialect, f"{method} {path}"))
        if route is not None:
            return _send(http, *route(body))
        if method == "POST" and path.endswith("/chat/completions"):
            return self._chat(http, body, headers)
        return _send(http, 404, {"error": {"message": f"no route {method} {path}"}})

    def _chat(self, http: BaseHTTPRequestHandler, body: Mapping[str, Any], headers: Mapping[str, str]) -> None:
        refused = refusal(
            self.dialect, body, headers, accepts=frozenset(self.accepts), priorities=self.priorities,
            names_fields=self.names_fields,
        )  # fmt: skip
        if refused is not None:
            self.rejected += 1
            return _send(http, self.status, refused)
        prompt = len(json.dumps(body.get("messages"))) // 4
        usage = {"prompt_tokens": prompt, "completion_tokens": 1, "total_tokens": prompt + 1}
        if self.fault == "lie":
            usage |= {"prompt_tokens": -5, "prompt_tokens_details": {"cached_tokens": 10**12}}  # type: ignore[dict-item]
        shared = {"id": "c-1", "created": 0, "model": body.get("model", "strict")}
        if self.dialect == "dynamo" and "extra_fields" in (body.get("nvext") or {}):
            timing = {"ttft_ms": 4.0, "kv_hit_rate": 0.5, "router_queue_depth": 0}
            shared |= {"nvext": {"worker_id": {"decode_worker_id": 7}, "timing": timing}}
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
        elif self.fault == "nonsense":
            _send(http, 200, [None, {"choices": {"0": 1}, "usage": [-1], "data": "x", "endpoints": 7}, 1e308])
        elif self.fault == "hang":
            self._over.wait(60)
        elif self.fault in ("endless", "drip"):
            http.send_response(200)
            http.send_header("content-type", "application/json")
            http.end_headers()
            drop, pause_s = (b" ", 0.05) if self.fault == "drip" else (b'"' + b"a" * 65_536, 0.0)
            while not self._over.wait(pause_s):
                http.wfile.write(drop)


_IDENTITY: Mapping[tuple[Dialect, str], Route] = {
    ("dynamo", "GET /health"): lambda _: (
        200,
        {"status": "healthy", "endpoints": ["dyn://d.b.generate"], "instances": []},
    ),
    ("dynamo", "GET /v1/models"): lambda _: (200, {"object": "list", "data": [{"id": "m", "object": "model"}]}),
    ("vllm", "GET /version"): lambda _: (200, {"version": "0.33.0"}),
    ("vllm", "GET /v1/models"): lambda _: (200, {"object": "list", "data": [{"id": "m", "object": "model"}]}),
}


def _send(http: BaseHTTPRequestHandler, status: int, answer: Any) -> None:
    _raw(http, status, "application/json", json.dumps(answer).encode())


def _raw(http: BaseHTTPRequestHandler, status: int, kind: str, body: bytes) -> None:
    http.send_response(status)
    http.send_header("content-type", kind)
    http.send_header("content-length", str(len(body)))
    http.end_headers()
    http.wfile.write(body)
