"""The plug-in without vLLM: its books on a manual clock, and its classes on top of fakes that behave."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import fake_vllm
from agentkv_vllm import side
from agentkv_vllm.sessions import Sessions

from agentkv.clock import ManualClock
from agentkv.hints.wire import read


@pytest.fixture
def clock():
    return ManualClock(start_s=100.0, wall_ms=10**12)


@pytest.fixture
def sessions(clock):
    return Sessions(clock=clock)


@pytest.fixture
def socket_path():
    """Short enough for a Unix socket, in a folder of our own."""
    with tempfile.TemporaryDirectory(prefix="akv") as folder:
        os.chmod(folder, 0o700)  # noqa: PTH101
        yield Path(folder) / "v.sock"


@pytest.fixture
def vllm(monkeypatch):
    """The plug-in's modules over the fakes; a new side for each test."""
    modules = fake_vllm.install(monkeypatch)
    side.start_anew()
    yield modules
    side.start_anew()
    for name in fake_vllm.OURS:
        sys.modules.pop(f"agentkv_vllm.{name}", None)


@pytest.fixture
def wired(clock):
    """`wired("tool_start", "ada", p10=2.0)`: a hint as it comes in, with a wait in seconds."""

    def make(kind, session, *, p10=None, p50=None, p90=None, call="c", late_s=0.0, **more):
        body = {
            "v": "agentkv.hint/1", "id": "h", "kind": kind, "session": session,
            "ts_ms": clock.wall_ms() - round(1000 * late_s), "call": {"id": call, "tool": "pytest"}, **more,
        }  # fmt: skip
        if p10 is not None:
            quantiles = (p10, p50 or p10, p90 or p50 or p10)
            body["wait"] = {f"p{n}_ms": round(1000 * s) for n, s in zip((10, 50, 90), quantiles, strict=True)}
        hint = read(body)
        assert hint is not None
        return hint

    return make
