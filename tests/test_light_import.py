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

STANDARD = (
    "asyncio, unittest.mock, http.server, xml.dom.minidom, multiprocessing.pool, sqlite3, urllib.request, logging.handlers, "
    "argparse, csv, zipfile, concurrent.futures, smtplib, imaplib"
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
    """The minimum of 15 runs in fresh interpreters, so that a noisy machine does not decide; on one that needs longer for
    everything, 1.3 times what 200 modules of the standard library cost it.
    """
    timed = "import time; t = time.perf_counter(); {}; print(time.perf_counter() - t)"
    ours, theirs = timed.format("import agentkv; from agentkv import AgentKV"), timed.format(f"import {STANDARD}")
    runs = [(float(_run(ours)), float(_run(theirs))) for _ in range(15)]
    least, standard = (min(times) for times in zip(*runs, strict=True))
    assert least <= max(0.060, 1.3 * standard)


def test_all_names_what_can_be_reached():
    """Every public name loads, and nothing is listed twice."""
    assert len(set(agentkv.__all__)) == len(agentkv.__all__)
    for name in agentkv.__all__:
        assert getattr(agentkv, name) is not None
    assert set(agentkv.__all__) == set(agentkv._HOMES)
