"""Timed: one HTTP exchange with a deadline for all of it, whatever the server does.

Covers connections whose every wait ends at the deadline (a server that drips its headers resets any time-out for each read),
a bound on the answer, answers that break off, and encodings that nobody asked for: a few bytes could unpack to gigabytes.
Redirects are answers like others: nobody is told a key but the server that it is for. Does not cover model calls.
"""

from __future__ import annotations

import http.client
import selectors
import socket
import ssl
import time
from collections.abc import Mapping
from functools import cache
from typing import Any, cast
from urllib.parse import SplitResult

from agentkv.adapters.base import Unreachable

_PIECE_BYTES = 65_536


def _left_s(ends_s: float) -> float:
    left_s = ends_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s


class _Plain(socket.socket):
    """Over TCP. Every wait for something to read ends at `ends_s`, on the monotonic clock."""

    ends_s = 0.0

    def recv_into(self, *args: Any, **options: Any) -> int:
        self.settimeout(_left_s(self.ends_s))
        return super().recv_into(*args, **options)


class _Secure(ssl.SSLSocket):
    """Over TLS, the same."""

    ends_s = 0.0

    def recv_into(self, *args: Any, **options: Any) -> int:
        self.settimeout(_left_s(self.ends_s))
        return super().recv_into(*args, **options)


class Connection:
    """To one server. Not thread-safe; `close()` is idempotent, and the next exchange opens anew."""

    def __init__(self, place: SplitResult) -> None:
        self._kept = False
        if place.scheme == "https":
            self._http: http.client.HTTPConnection = http.client.HTTPSConnection(
                place.hostname or "", place.port, context=_context()
            )
        else:
            self._http = http.client.HTTPConnection(place.hostname or "", place.port)

    @property
    def sock(self) -> socket.socket | None:
        """The open socket, for whoever breaks it off from another thread."""
        return cast("socket.socket | None", self._http.sock)

    def exchange(
        self, method: str, path: str, *, body: bytes | None, headers: Mapping[str, str], ends_s: float, most_bytes: int
    ) -> tuple[int, bytes]:
        """Status and body. Unreachable where there is no whole answer by then; the connection is closed after that.

        `dropped` is set where a connection that had been kept was closed.
        """
        try:
            kept = self._opened(ends_s)
            try:
                status, read, keeps = self._exchanged(method, path, body, headers, most_bytes)
            except TimeoutError:
                raise Unreachable(f"{path}: the answer was not there in time") from None
            except (http.client.RemoteDisconnected, ConnectionError) as error:
                raise Unreachable(f"{path}: {type(error).__name__}", dropped=kept) from None
            except (OSError, http.client.HTTPException, ValueError, AttributeError) as error:  # the last: broken off
                raise Unreachable(f"{path}: {type(error).__name__}") from None
        except BaseException:
            self.close()
            raise
        if not keeps:
            self.close()
        self._kept = keeps
        return status, read

    def close(self) -> None:
        self._kept = False
        self._http.close()

    def _exchanged(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str], most_bytes: int
    ) -> tuple[int, bytes, bool]:
        """Status, body, and whether the connection can be used again."""
        self._http.request(method, path, body=body, headers={"Accept-Encoding": "identity", **headers})
        read = bytearray()
        with self._http.getresponse() as response:
            if response.getheader("content-encoding", "identity").strip().lower() not in ("", "identity"):
                raise Unreachable(f"{path}: an encoding that was not asked for")
            while piece := response.read1(_PIECE_BYTES):
                read += piece
                if len(read) > most_bytes:
                    raise Unreachable(f"{path}: the answer does not end")
            if response.length:
                raise Unreachable(f"{path}: the answer broke off")
            return response.status, bytes(read), not response.will_close

    def _opened(self, ends_s: float) -> bool:
        """Whether it was open; a kept connection that the server has closed is not."""
        held = self._http.sock
        if isinstance(held, _Plain | _Secure) and self._kept and not _has_news(held):
            held.ends_s = ends_s
            held.settimeout(max(1e-3, ends_s - time.monotonic()))
            return True
        self._http.close()
        self._http.timeout = max(1e-3, ends_s - time.monotonic())
        try:
            self._http.connect()
        except (OSError, ValueError, UnicodeError) as error:
            raise Unreachable(f"{self._http.host}:{self._http.port}: {type(error).__name__}") from None
        made: Any = self._http.sock
        if not isinstance(made, _Plain | _Secure):
            made = self._http.sock = _Plain(made.family, made.type, made.proto, fileno=made.detach())
        made.ends_s = ends_s
        made.settimeout(max(1e-3, ends_s - time.monotonic()))
        return False


def _has_news(held: Any) -> bool:
    """An idle connection has something to read where the server has closed it, or speaks unasked."""
    with selectors.DefaultSelector() as look:
        look.register(held, selectors.EVENT_READ)
        return bool(look.select(0))


@cache
def _context() -> ssl.SSLContext:
    try:
        import certifi

        context = ssl.create_default_context(cafile=certifi.where())
    except (ImportError, OSError):
        context = ssl.create_default_context()
    context.sslsocket_class = _Secure
    return context
