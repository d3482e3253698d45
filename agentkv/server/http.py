"""HttpServer: an ASGI app on a socket, with uvicorn: bound early, drained on SIGTERM, usable from a thread.

Covers the address and what is refused about it, signals, draining within a deadline. Does not cover: what the app does.
The extra `serve` brings uvicorn.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Self

from agentkv import log
from agentkv.errors import ConfigError, ExtraMissing
from agentkv.server.admission import Life

if TYPE_CHECKING:
    import uvicorn

DRAIN_S = 30.0
BACKLOG = 2048
HIGHEST_PORT = 65_535


def bind(host: str, port: int, *, guarded: bool) -> socket.socket:
    """A socket at that address, not listening yet. `guarded`: callers need a key.

    Raises ConfigError where the port is taken or not allowed, the address is none of this machine, or everybody could
    call without a key.
    """
    if not 0 <= port <= HIGHEST_PORT:
        raise ConfigError(f"port={port} is none; give one from 0 (any free one) to {HIGHEST_PORT}")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"host={host!r} is no address of this machine: {error}") from error
    family, kind, protocol, _, address = found[0]
    if not guarded and not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
        raise ConfigError(
            f"{host} can be reached from other machines, and without an API key everybody there could use this server: give "
            "--keys FILE or set AGENTKV_API_KEY, or stay on 127.0.0.1"
        )
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise ConfigError(_why(host, port, error)) from error
    return sock


def _why(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} at {host} is in use; choose another one with --port (0 takes any free one)"
    if error.errno == errno.EACCES:
        return f"port {port} at {host} is not allowed for this user; choose one from 1024 on"
    return f"{host}:{port} cannot be used: {error.strerror}"


def address_of(sock: socket.socket) -> str:
    """The address as clients write it."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class HttpServer:
    """Serves `app` on `sock` until it is stopped. Owns the socket.

    `run()` blocks; on the main thread SIGTERM and SIGINT drain it: new calls get 503, those under way have `drain_s`
    seconds to end, then they are cancelled. A second signal ends it at once. In a `with` block it runs on a thread.
    """

    def __init__(self, app: Any, sock: socket.socket, *, life: Life, drain_s: float = DRAIN_S) -> None:
        try:
            import uvicorn
        except ImportError as missing:
            raise ExtraMissing("this needs uvicorn: pip install 'agentkv-sdk[serve]'") from missing
        self.url = address_of(sock)
        self._sock = sock
        self._life = life
        self._drain_s = drain_s
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            ws="none",
            backlog=BACKLOG,
            timeout_graceful_shutdown=1,
        )
        self._server = _Server(config, self)
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started = threading.Event()
        self.on_ready: Callable[[], object] = lambda: None
        """Called once, when connections are taken."""
        self._signals = 0
        self._draining: asyncio.Task[None] | None = None

    def run(self) -> None:
        """Serve until stopped."""
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            await self._server.serve(sockets=[self._sock])
        finally:
            self._sock.close()
            self._started.set()  # whoever waits for a server that could not start

    def ready(self) -> None:
        """Connections are taken from now on."""
        self._started.set()
        self.on_ready()

    def stop(self) -> None:
        """Begin to drain; from any thread, idempotent, and before the start too."""
        self._life.draining = True
        if self._loop is None:
            self._server.should_exit = True
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed: it has stopped
            self._loop.call_soon_threadsafe(self._begin_to_drain)

    def _begin_to_drain(self) -> None:
        if self._draining is None:
            self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        left = self._life.active
        if not await self._life.idle(self._drain_s):
            log.failed("serve_cut_off", calls=self._life.active, of=left, after_s=self._drain_s)
        self._server.should_exit = True

    def signalled(self) -> None:
        """A signal came: the first drains, the second does not wait."""
        self._signals += 1
        self._life.draining = True
        if self._signals > 1:
            self._server.should_exit = self._server.force_exit = True
        elif self._loop is not None:
            self._loop.call_soon_threadsafe(self._begin_to_drain)

    # -- on a thread

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self.run, name="agentkv-http", daemon=True)
        self._thread.start()
        self._started.wait()
        if not self._server.started:
            self._thread.join()
            raise ConfigError(f"the server at {self.url} could not start; its log says why")
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        if self._thread is not None:
            self._thread.join()


def _server_class() -> Any:
    import uvicorn

    class Server(uvicorn.Server):
        """uvicorn's server, whose signals are ours."""

        def __init__(self, config: uvicorn.Config, owner: HttpServer) -> None:
            super().__init__(config)
            self._owner = owner

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            self._owner.ready()

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            if threading.current_thread() is not threading.main_thread():
                yield
                return
            before = {
                number: signal.signal(number, lambda *_: self._owner.signalled())
                for number in (signal.SIGINT, signal.SIGTERM)
            }
            try:
                yield
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)

    return Server


def _Server(config: Any, owner: HttpServer) -> Any:  # noqa: N802  the class exists only where uvicorn does
    return _server_class()(config, owner)
