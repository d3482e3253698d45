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
from contextlib import contextmanager
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


@contextmanager
def serving(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A server on `folder`/data, with its socket in `folder`, until the block ends."""
    prefix, _, _ = _as_somebody()
    options = "-c listen_addresses= -c fsync=off -c shared_buffers=16MB -c max_connections=40 -c max_wal_size=64MB"
    command = [*prefix, _program("postgres"), "-D", str(folder / "data"), "-k", str(folder), *options.split()]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=folder)
    lines = []
    for line in server.stderr:
        lines.append(line)
        if "ready to accept connections" in line:
            break
    else:
        pytest.fail(f"PostgreSQL did not start: {''.join(lines[-5:])}")
    drain = threading.Thread(target=server.stderr.read, daemon=True)
    drain.start()
    try:
        yield server
    finally:
        server.send_signal(signal.SIGINT)  # without waiting for clients
        server.wait(30)
        drain.join(5)
        server.stderr.close()


@pytest.fixture(scope="session")
def postgres_folder() -> Iterator[Path]:
    """An initialised data folder; skipped, with the reason, where PostgreSQL is not installed."""
    pytest.importorskip("psycopg", reason="psycopg is not installed: pip install 'agentkv-sdk[postgres]'")
    if _program("initdb") is None or _program("postgres") is None:
        pytest.skip("PostgreSQL is not installed (Debian: apt-get install postgresql)")
    prefix, uid, gid = _as_somebody()
    folder = Path(tempfile.mkdtemp(prefix="agentkv-pg-"))  # not below pytest's: a socket's path must be short
    try:
        os.chown(folder, uid, gid)
        initdb = [*prefix, _program("initdb"), "-D", str(folder / "data"), "-U", "agentkv", "-A", "trust"]
        subprocess.run([*initdb, "-E", "UTF8", "--locale=C", "--no-sync"], check=True, capture_output=True, cwd=folder)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def postgres_server(postgres_folder: Path) -> Iterator[Path]:
    """A server that runs for all tests; gives the folder of its socket."""
    with serving(postgres_folder):
        yield postgres_folder


@pytest.fixture
def postgres_url(postgres_server: Path) -> str:
    """An empty database of its own for one test."""
    import psycopg

    name = f"ledger{next(_numbers)}"
    with psycopg.connect(host=str(postgres_server), user="agentkv", dbname="postgres", autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return f"postgresql://agentkv@/{name}?host={postgres_server}"


@pytest.fixture
def ledger_v1() -> str:
    """SQL of a ledger as version 1 wrote it: two runs of a task, and one with a difficult name."""
    return (Path(__file__).parent / "ledger_v1.sql").read_text(encoding="utf-8")
