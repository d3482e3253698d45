"""Replay: the last request of a session once more, for its prompt only.

Covers keeping requests (bounded; they are prompts and keys, so only in memory), making the short form that reads a prompt
and writes as good as nothing, and sending it so that it can be broken off from another thread. Does not cover when that
is worth while (`prewarm.py`, `keepalive.py`).
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from agentkv.adapters.base import Unreachable
from agentkv.adapters.timed import Connection

MOST_SESSIONS = 64
MOST_BYTES = 4 * 2**20
MOST_ANSWER_BYTES = 2**20
_OK = 200
_NOT_SENT_AGAIN = frozenset(
    ["host", "content-length", "transfer-encoding", "connection", "accept-encoding", "x-stainless-retry-count"]
)
_LEFT_OUT = ("stream", "stream_options", "n", "logprobs", "top_logprobs", "store", "background")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A request as it was accepted. Holds the prompt and the key."""

    url: str
    headers: tuple[tuple[str, str], ...]
    body: bytes

    @classmethod
    def of(cls, request: Any) -> Kept | None:
        """What an HTTP library's request says; None for one that is too large to keep."""
        body = request.read()
        if len(body) > MOST_BYTES:
            return None
        headers = tuple((name, value) for name, value in request.headers.items() if name.lower() not in _NOT_SENT_AGAIN)
        return cls(url=str(request.url), headers=headers, body=body)

    @property
    def path(self) -> str:
        """The route."""
        return urlsplit(self.url).path


class Keep:
    """The last request of each of the sessions used last. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Kept] = OrderedDict()

    def put(self, session: str, request: Any) -> None:
        """Keep what was sent; a request that is too large makes the session one without."""
        kept = Kept.of(request)
        with self._lock:
            self._kept.pop(session, None)
            if kept is not None:
                self._kept[session] = kept
            while len(self._kept) > MOST_SESSIONS:
                self._kept.popitem(last=False)

    def get(self, session: str) -> Kept | None:
        """The session's last request."""
        with self._lock:
            return self._kept.get(session)

    def drop(self, session: str) -> None:
        """The session is over."""
        with self._lock:
            self._kept.pop(session, None)


def shortened(kept: Kept, *, fields: Mapping[str, Any] | None = None) -> bytes:
    """The same prompt with next to nothing to answer. Raises ValueError or TypeError for what has no such form.

    `fields`: how this server is told to write nothing; without them one token, which is the least that every server takes.
    """
    body = json.loads(kept.body)
    if not isinstance(body, dict):
        raise TypeError("no JSON object")
    for name in _LEFT_OUT:
        body.pop(name, None)
    if kept.path.endswith("/messages") and has_budget(body):
        raise ValueError("it thinks with a budget, and the answer must have room for that")
    for name, value in (fields or {_longest(kept.path, body): 1}).items():
        before = body.get(name)
        body[name] = {**before, **value} if isinstance(before, Mapping) and isinstance(value, Mapping) else value
    body["stream"] = False
    return json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()


def _longest(path: str, body: Mapping[str, Any]) -> str:
    """The field that says how long the answer may be."""
    if path.endswith("/responses"):
        return "max_output_tokens"
    return "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"


def has_budget(body: Mapping[str, Any]) -> bool:
    """Whether a body of Anthropic's asks for thoughts with a budget, which must be less than the longest answer."""
    thinking = body.get("thinking")
    return isinstance(thinking, Mapping) and (thinking.get("type") == "enabled" or "budget_tokens" in thinking)


class Sending:
    """One request on its way. `run` on one thread; `cancel` from any, at any time, and it ends at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self.cancelled = False

    def run(self, kept: Kept, body: bytes, within_s: float) -> Mapping[str, Any]:
        """The JSON answer. Raises Unreachable, also for what was cancelled."""
        parts = urlsplit(kept.url)
        connection = Connection(parts)
        with self._lock:
            if self.cancelled:
                raise Unreachable("cancelled")
            self._connection = connection
        path = parts.path + (f"?{parts.query}" if parts.query else "")
        try:
            status, read = connection.exchange(
                "POST", path, body=body, headers=dict(kept.headers), ends_s=time.monotonic() + within_s,
                most_bytes=MOST_ANSWER_BYTES,
            )  # fmt: skip
        except Unreachable:
            if self.cancelled:
                raise Unreachable("cancelled") from None
            raise
        finally:
            connection.close()
        if self.cancelled:
            raise Unreachable("cancelled")
        try:
            answer = json.loads(read)
        except (ValueError, RecursionError):
            raise Unreachable(f"{status}, and no JSON", status=status) from None
        if status != _OK or not isinstance(answer, Mapping):
            raise Unreachable(f"{status}", status=status)
        return answer

    def cancel(self) -> None:
        """Break it off: the server sees a closed connection."""
        with self._lock:
            self.cancelled = True
            connection = self._connection
        held = None if connection is None else connection.sock
        if held is not None:
            with contextlib.suppress(OSError):
                held.shutdown(socket.SHUT_RDWR)
