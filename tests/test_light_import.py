"""`import agentkv` is light: it is paid by everybody who only decorates a node."""

from __future__ import annotations

import subprocess
import sys

import agentkv

HEAVY = (
    "torch",
    "transformers",
    "langgraph",
    "langchain_core",
    "openai",
    "sqlalchemy",
    "pydantic",
    "typer",
    "structlog",
)


def _run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_importing_the_public_names_loads_no_heavy_package():
    """Neither the package nor its front door brings torch, a framework or a database along."""
    code = (
        f"import sys, agentkv; from agentkv import AgentKV, Budget; print([m for m in {HEAVY!r} if m in sys.modules])"
    )
    assert "[]" == _run(code)


def test_import_costs_at_most_60_ms_more_than_a_bare_interpreter():
    """The minimum of 15 runs in fresh interpreters, so that a noisy machine does not decide."""
    code = "import time; t = time.perf_counter(); import agentkv; from agentkv import AgentKV; print(time.perf_counter() - t)"
    assert min(float(_run(code)) for _ in range(15)) <= 0.060


def test_all_names_what_can_be_reached():
    """Every public name loads, and nothing is listed twice."""
    assert len(set(agentkv.__all__)) == len(agentkv.__all__)
    for name in agentkv.__all__:
        assert getattr(agentkv, name) is not None
    assert set(agentkv.__all__) == set(agentkv._HOMES)
