"""Endpoint: short JSON exchanges with a server that may hang, drip, lie, answer HTML or be gone.

Covers kept connections, JSON in and out, and one deadline and one bound for each exchange (`timed.py`). Does not cover model
calls: those are the engine's.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from agentkv.adapters.base import Unreachable
from agentkv.adapters.timed import Connection

MOST_BYTES = 4 * 2**20
MOST_KEPT = 8
_OK = 200


class Endpoint:
    """One server. Thread-safe; connections are kept. `base_url` may end in `/v1`: paths here are from the root.

    The key goes to this server alone: a redirect is an answer like others, and no JSON that anybody could use.
    """

    def __init__(self, base_url: str, *, api_key: str = "") -> None:
        self._place = urlsplit(base_url.rstrip("/").removesuffix("/v1"))
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._closed = 0

    def get(self, path: str, within_s: float) -> Any:
        """The JSON answer; Unreachable for anything else."""
        return self._exchange("GET", path, None, within_s)

    def post(
        self, path: str, body: Mapping[str, Any], within_s: float, *, headers: Mapping[str, str] | None = None
    ) -> Any:
        """The JSON answer; Unreachable for anything else."""
        return self._exchange("POST", path, body, within_s, headers)

    def close(self) -> None:
        """Close the connections. Idempotent; a later exchange opens new ones."""
        with self._lock:
            idle, self._idle = self._idle, []
            self._closed += 1
        for connection in idle:
            connection.close()

    def text(self, path: str, within_s: float) -> str:
        """The answer as text; Unreachable for none, and for a status that is not 200."""
        status, read = self._bytes("GET", path, None, within_s, {})
        if status != _OK:
            raise Unreachable(f"{path}: {status}", status=status)
        return read.decode("utf-8", "replace")

    def _exchange(
        self, method: str, path: str, body: Mapping[str, Any] | None, within_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> Any:  # fmt: skip
        status, read = self._bytes(method, path, body, within_s, headers or {})
        try:
            answer = json.loads(read)
        except (ValueError, RecursionError):
            raise Unreachable(f"{path}: {status}, and no JSON", status=status) from None
        if status != _OK:
            raise Unreachable(f"{path}: {status} {_words(answer)}", status=status)
        return answer

    def _bytes(
        self, method: str, path: str, body: Mapping[str, Any] | None, within_s: float, headers: Mapping[str, str]
    ) -> tuple[int, bytes]:
        """Status and body. A question is asked again if a kept connection had been closed; what changes something is not."""
        ends_s = time.monotonic() + within_s
        try:
            return self._once(method, path, body, headers, ends_s)
        except Unreachable as error:
            if method != "GET" or not error.dropped or time.monotonic() >= ends_s:
                raise
        return self._once(method, path, body, headers, ends_s)

    def _once(
        self, method: str, path: str, body: Mapping[str, Any] | None, headers: Mapping[str, str], ends_s: float
    ) -> tuple[int, bytes]:
        said = {**self._headers, **headers}
        content = None if body is None else json.dumps(body, separators=(",", ":")).encode()
        if content is not None:
            said["Content-Type"] = "application/json"
        connection, closed = self._taken()
        try:
            return connection.exchange(
                method, self._place.path + path, body=content, headers=said, ends_s=ends_s, most_bytes=MOST_BYTES
            )
        finally:
            self._given_back(connection, closed)

    def _taken(self) -> tuple[Connection, int]:
        """A connection, and how often this was closed until now."""
        with self._lock:
            if self._idle:
                return self._idle.pop(), self._closed
            closed = self._closed
        try:
            return Connection(self._place), closed
        except (ValueError, OSError) as error:  # a port that is no number
            raise Unreachable(f"{self._place.netloc}: {type(error).__name__}") from None

    def _given_back(self, connection: Connection, closed: int) -> None:
        with self._lock:
            if closed == self._closed and len(self._idle) < MOST_KEPT:
                self._idle.append(connection)
                return
        connection.close()


def _words(answer: Any) -> str:
    error = answer.get("error") if isinstance(answer, Mapping) else None
    message = error.get("message") if isinstance(error, Mapping) else error
    return message[:200] if isinstance(message, str) else ""
