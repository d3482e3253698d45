"""A real PostgreSQL server for the ledger's tests, in a temporary folder and on a socket that nobody else sees."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

_numbers = count(1)


def _program(name: str) -> str | None:
    """PostgreSQL's own programs are not on the path in Debian."""
    found = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), key=lambda path: int(path.parts[4]))
    return str(found[-1]) if found else shutil.which(name)


def _as_somebody() -> tuple[list[str], int, int]:
    """The server refuses to run as root: how to run it as somebody else, and who that is."""
    if os.getuid() != 0:
        return [], os.getuid(), os.getgid()
    for name in ("postgres", "nobody"):
        try:
            user = pwd.getpwnam(name)
        except KeyError:
            continue
        prefix = ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
        return prefix, user.pw_uid, user.pw_gid
    pytest.skip("PostgreSQL does not run as root, and there is neither a user postgres nor nobody")


class PostgresServer:
    """A server on a folder of its own; `start` and `stop` as often as you like."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._prefix, uid, gid = _as_somebody()
        os.chown(folder, uid, gid)
        command = [*self._prefix, _program("initdb"), "-D", str(folder / "data"), "-U", "agentkv", "-A", "trust"]
        subprocess.run([*command, "-E", "UTF8", "--locale=C", "--no-sync"], check=True, capture_output=True, cwd=folder)

    def start(self) -> None:
        options = "-c listen_addresses= -c fsync=off -c shared_buffers=16MB -c max_connections=40 -c max_wal_size=64MB"
        command = [*self._prefix, _program("postgres"), "-D", str(self.folder / "data"), "-k", str(self.folder)]
        self._process = subprocess.Popen(
            [*command, *options.split()], stderr=subprocess.PIPE, text=True, cwd=self.folder
        )
        lines = []
        for line in self._process.stderr:
            lines.append(line)
            if "ready to accept connections" in line:
                break
        else:
            pytest.fail(f"PostgreSQL did not start: {''.join(lines[-5:])}")
        self._drain = threading.Thread(target=self._process.stderr.read, daemon=True)
        self._drain.start()

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """By default without waiting for clients; SIGQUIT also leaves the data as they are."""
        self._process.send_signal(how)
        self._process.wait(30)
        self._drain.join(5)
        self._process.stderr.close()

    def new_database(self) -> str:
        import psycopg

        name = f"ledger{next(_numbers)}"
        with psycopg.connect(host=str(self.folder), user="agentkv", dbname="postgres", autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return f"postgresql://agentkv@/{name}?host={self.folder}"


def _server() -> Iterator[PostgresServer]:
    pytest.importorskip("psycopg", reason="psycopg is not installed: pip install 'agentkv-sdk[postgres]'")
    if _program("initdb") is None or _program("postgres") is None:
        missing = "PostgreSQL is not installed (Debian: apt-get install postgresql)"
        if os.environ.get("AGENTKV_REQUIRE_POSTGRES"):  # where it must be there, a skip would hide that it is not
            pytest.fail(missing)
        pytest.skip(missing)
    folder = Path(tempfile.mkdtemp(prefix="agentkv-pg-"))  # not below pytest's: a socket's path must be short
    try:
        server = PostgresServer(folder)
        server.start()
        yield server
        server.stop(signal.SIGQUIT)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """A server for all tests; skipped, with the reason, where PostgreSQL is not installed."""
    yield from _server()


@pytest.fixture
def own_postgres_server() -> Iterator[PostgresServer]:
    """A server for one test, which may stop it."""
    yield from _server()


@pytest.fixture(scope="session")
def _shared_database(postgres_server: PostgresServer) -> str:
    return postgres_server.new_database()


@pytest.fixture
def postgres_url(_shared_database: str) -> str:
    """A database without tables, for one test."""
    import psycopg

    with psycopg.connect(_shared_database, autocommit=True) as connection:
        connection.execute("DROP SCHEMA public CASCADE")
        connection.execute("CREATE SCHEMA public")
    return _shared_database


@pytest.fixture
def ledger_v1() -> str:
    """SQL of a ledger as version 1 wrote it: two runs of a task, and one with a difficult name."""
    return (Path(__file__).parent / "ledger_v1.sql").read_text(encoding="utf-8")
