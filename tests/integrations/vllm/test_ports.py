"""The ports of the server that an engine computes for: its own, its parent's, or what the variable says."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
from agentkv_vllm import ports as module
from agentkv_vllm.ports import ports


@pytest.fixture(autouse=True)
def _unset(monkeypatch):
    monkeypatch.delenv(module.PORT_VARIABLE, raising=False)


@pytest.fixture(params=[("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)])
def listener(request):
    """A server's socket."""
    try:
        made = socket.create_server((request.param[0], 0), family=request.param[1])
    except OSError as error:
        pytest.skip(f"no such address here: {error}")
    yield made
    made.close()


def test_a_server_in_the_engines_own_process_is_found(listener):
    """While it listens."""
    port = listener.getsockname()[1]
    assert port in ports()
    listener.close()
    assert port not in ports()


@pytest.mark.parametrize("generations", [1, 2])
def test_an_engine_that_is_a_child_finds_its_servers_port(listener, generations):
    """As vLLM starts it: the API server listens, and its child computes."""
    child = [sys.executable, "-c", "from agentkv_vllm.ports import ports; print(ports())"]
    if generations == 2:
        child = [sys.executable, "-c", f"import subprocess; print(subprocess.run({child!r}, capture_output=True, text=True).stdout)"]  # fmt: skip
    told = subprocess.run(child, capture_output=True, text=True, check=True, timeout=120, env=os.environ)
    assert listener.getsockname()[1] in [int(port) for port in told.stdout.strip(" []\n").split(",")]


@pytest.mark.parametrize(
    ("given", "found"),
    [("8000", [8000]), ("9000,8000 8000", [8000, 9000]), (" 1 ", [1]), ("80000, 443", [443])],
)
def test_the_variable_counts_where_it_is_set(monkeypatch, given, found):
    """Behind a proxy, or under a port that a container publishes."""
    monkeypatch.setenv(module.PORT_VARIABLE, given)
    assert found == ports()


def test_where_nobody_can_know_no_port_is_told(monkeypatch):
    """A part of the ports would be worse than none."""
    with socket.create_server(("127.0.0.1", 0)):
        monkeypatch.setattr(os, "getppid", lambda: 2**22 + 1)
        assert [] == ports()
