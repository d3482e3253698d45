"""Endpoint: short JSON exchanges with a server that may hang, drip, lie, answer HTML or be gone.

Covers a deadline for the whole exchange and a bound on the answer. Does not cover model calls: those are the engine's.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from typing import Any

from agentkv.adapters.base import Unreachable

MOST_BYTES = 4 * 2**20
_OK = 200


class Endpoint:
    """One server. Thread-safe; connections are kept. `base_url` may end in `/v1`: paths here are from the root."""

    def __init__(self, base_url: str, *, api_key: str = "") -> None:
        self._root = base_url.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._lock = threading.Lock()
        self._client: Any = None

    def get(self, path: str, within_s: float) -> Any:
        """The JSON answer; Unreachable for anything else. A kept connection that the server has closed is no failure."""
        ends_s = time.monotonic() + within_s
        try:
            return self._exchange("GET", path, None, within_s)
        except Unreachable as error:
            left_s = ends_s - time.monotonic()
            if not error.dropped or left_s <= 0:
                raise
        return self._exchange("GET", path, None, left_s)

    def post(
        self, path: str, body: Mapping[str, Any], within_s: float, *, headers: Mapping[str, str] | None = None
    ) -> Any:
        """The JSON answer; Unreachable for anything else."""
        return self._exchange("POST", path, body, within_s, headers)

    def close(self) -> None:
        """Close the connections. Idempotent; a later exchange opens new ones."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def text(self, path: str, within_s: float) -> str:
        """The answer as text; Unreachable for none, and for a status that is not 200."""
        status, read = self._bytes("GET", path, None, within_s)
        if status != _OK:
            raise Unreachable(f"{path}: {status}", status=status)
        return read.decode("utf-8", "replace")

    def _exchange(
        self, method: str, path: str, body: Mapping[str, Any] | None, within_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> Any:  # fmt: skip
        status, read = self._bytes(method, path, body, within_s, headers)
        try:
            answer = json.loads(read)
        except (ValueError, RecursionError):
            raise Unreachable(f"{path}: {status}, and no JSON", status=status) from None
        if status != _OK:
            raise Unreachable(f"{path}: {status} {_words(answer)}", status=status)
        return answer

    def _bytes(
        self, method: str, path: str, body: Mapping[str, Any] | None, within_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, bytes]:  # fmt: skip
        import httpx

        client = self._opened()  # the first time it takes a moment that is not the server's
        ends_s = time.monotonic() + within_s
        read = bytearray()
        try:
            timeout = max(within_s, 1e-3)
            with client.stream(method, self._root + path, json=body, headers=headers, timeout=timeout) as response:
                for piece in response.iter_bytes():
                    read += piece
                    if len(read) > MOST_BYTES:
                        raise Unreachable(f"{path}: the answer does not end")
                    if time.monotonic() > ends_s:
                        raise Unreachable(f"{path}: the answer was not there after {within_s:.3g} s")
                status = response.status_code
        except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError) as error:
            raise Unreachable(f"{path}: {type(error).__name__}", dropped=not read) from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError, RuntimeError) as error:
            raise Unreachable(f"{path}: {type(error).__name__}") from None
        return status, bytes(read)

    def _opened(self) -> Any:
        import httpx

        with self._lock:
            if self._client is None:
                plain = self._root.startswith("http://")  # no certificates are read for it
                self._client = httpx.Client(headers=self._headers, trust_env=False, verify=not plain)
            return self._client


def _words(answer: Any) -> str:
    error = answer.get("error") if isinstance(answer, Mapping) else None
    message = error.get("message") if isinstance(error, Mapping) else error
    return message[:200] if isinstance(message, str) else ""
