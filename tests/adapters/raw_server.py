"""A server that sends whatever bytes a test likes: what no HTTP library would send, real ones behind broken proxies do."""

from __future__ import annotations

import contextlib
import socket
import threading
import zlib
from collections.abc import Callable, Iterator
from typing import Self

CHUNKED = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"


def whole(body: bytes, *, status: str = "200 OK", length: int | None = None, more: str = "") -> bytes:
    """An answer with a length, right or wrong."""
    size = len(body) if length is None else length
    return (
        f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {size}\r\n{more}\r\n".encode() + body
    )


def forever(
    piece: bytes, pause_s: float = 0.0, *, after: bytes = b""
) -> Callable[[bytes, threading.Event], Iterator[bytes]]:
    """The same piece again and again."""

    def script(_request: bytes, over: threading.Event) -> Iterator[bytes]:
        yield after
        while not over.wait(pause_s):
            yield piece

    return script


def once(answer: bytes) -> Callable[[bytes, threading.Event], Iterator[bytes]]:
    """This, and the end of the connection."""
    return lambda _request, _over: iter([answer])


def bomb(size: int = 200 * 2**20) -> bytes:
    """Some hundred kilobytes that unpack to `size`."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    packed = b"".join(packer.compress(b" " * 2**20) for _ in range(size >> 20)) + packer.flush()
    return whole(packed, more="content-encoding: gzip\r\n")


class RawServer:
    """Answers every request with what `script(request, over)` yields. `asked`: the requests' bytes."""

    def __init__(self, script: Callable[[bytes, threading.Event], Iterator[bytes]]) -> None:
        self.script = script
        self.asked: list[bytes] = []
        self._over = threading.Event()
        self._listens = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listens.getsockname()[1]}/v1"

    def __enter__(self) -> Self:
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        with contextlib.suppress(OSError):
            self._listens.shutdown(socket.SHUT_RDWR)
        self._listens.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                line, _ = self._listens.accept()
                threading.Thread(target=self._answer, args=(line,), daemon=True).start()

    def _answer(self, line: socket.socket) -> None:
        with line, contextlib.suppress(OSError):
            request = b""
            while b"\r\n\r\n" not in request:
                request += line.recv(65_536)
            head, _, body = request.partition(b"\r\n\r\n")
            length = next(
                (int(h.split(b":")[1]) for h in head.split(b"\r\n") if h.lower().startswith(b"content-length")), 0
            )
            while len(body) < length:
                body += line.recv(65_536)
            self.asked.append(head + b"\r\n\r\n" + body)
            for piece in self.script(self.asked[-1], self._over):
                line.sendall(piece)
