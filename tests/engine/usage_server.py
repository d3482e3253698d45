"""A scripted OpenAI-compatible HTTP server that knows what each of its answers really used.

Covers chat completions, streamed and whole, over real sockets: every reply is one HTTP request's script (status, chunks,
where the connection breaks) with its truth. Where a reply reports nothing, the server counts with a tokeniser of its
own reading of the request.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from agentkv.context.tokens import count_text


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What the server does with one request.

    `chunks`: bodies of a stream's events; `body`: the answer of a whole one. `status` >= 400 answers with an error,
    0 closes the connection before any answer. `cut`: the connection breaks after that many chunks (or in the middle of
    the body), `hold` keeps it open until `release`. `wrote`: the answer's text, where the truth is what the server counts
    itself.
    """

    status: int = 200
    chunks: tuple[dict[str, Any], ...] = ()
    body: dict[str, Any] | None = None
    cut: int | None = None
    wrote: str | None = None
    hold: bool = False


@dataclass(kw_only=True)
class Server:
    """Plays its replies, one per request, in order; the last one again and again where `again`."""

    replies: list[Reply]
    again: bool = False
    bodies: list[dict[str, Any]] = field(default_factory=list)
    counted: list[tuple[int, int]] = field(default_factory=list)
    _released: threading.Event = field(default_factory=threading.Event)

    def release(self) -> None:
        """Let the replies that hold their connection go on."""
        self._released.set()

    def __enter__(self) -> Self:
        outer = self
        lock = threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                """Silence."""

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with lock:
                    outer.bodies.append(body)
                    reply = outer.replies[0] if outer.again else outer.replies.pop(0)
                    if reply.wrote is not None:
                        outer.counted.append((tokens_of(body), count_text(reply.wrote, body["model"])))
                self.close_connection = True
                if reply.status == 0:
                    return
                if reply.status >= 400:
                    self._whole(reply.status, json.dumps({"error": {"message": "no", "type": "no"}}))
                elif body.get("stream"):
                    self._stream(reply)
                else:
                    self._whole(200, json.dumps(reply.body), cut=reply.cut is not None)

            def _whole(self, status: int, text: str, *, cut: bool = False) -> None:
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("retry-after-ms", "1")
                self.send_header("connection", "close")
                self.send_header("content-length", str(len(text)))
                self.end_headers()
                self.wfile.write(text[: len(text) // 2 if cut else None].encode())

            def _stream(self, reply: Reply) -> None:
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.send_header("transfer-encoding", "chunked")
                self.send_header("connection", "close")
                self.end_headers()
                events = [json.dumps(chunk) for chunk in reply.chunks[: reply.cut]]
                done = [] if reply.hold or reply.cut is not None else ["[DONE]"]
                for event in [*events, *done]:
                    line = f"data: {event}\n\n".encode()
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
                if reply.hold:
                    outer._released.wait(30)
                if reply.cut is None and not reply.hold:
                    self.wfile.write(b"0\r\n\r\n")

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._http.block_on_close = False
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}/v1"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


def tokens_of(body: dict[str, Any]) -> int:
    """A chat request's input, by a real tokeniser and four tokens of template around each message."""
    messages = body["messages"]
    texts = [message.get("content") or "" for message in messages]
    texts += [
        call["function"]["name"] + call["function"]["arguments"]
        for message in messages
        for call in message.get("tool_calls") or ()
    ]
    texts += [json.dumps(tool) for tool in body.get("tools") or ()]
    return sum(count_text(text, body["model"]) for text in texts) + 4 * (len(messages) + 1)


def chunk(
    content: str | None = None, *, finish: str | None = None, delta: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    """A stream's event; without content, delta and finish it has no choices."""
    made: dict[str, Any] = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "hosted"}
    choices: list[dict[str, Any]] = []
    if content is not None or finish is not None or delta is not None:
        part = delta if delta is not None else ({} if content is None else {"content": content})
        choices = [{"index": 0, "delta": part, "finish_reason": finish}]
    made = {**made, "choices": choices, **more}
    return {name: value for name, value in made.items() if value != "absent"}


def whole(content: str = "one two", *, finish: str = "stop", **more: Any) -> dict[str, Any]:
    """An answer in one piece."""
    message = {"role": "assistant", "content": content}
    made = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": "hosted",
        "choices": [{"index": 0, "message": message, "finish_reason": finish}],
        **more,
    }
    return {name: value for name, value in made.items() if value != "absent"}
