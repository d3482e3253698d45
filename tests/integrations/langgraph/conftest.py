"""One AgentKV for all cells, and the helper modules of this folder on the path."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from agentkv_langgraph import LangGraphHost

from agentkv import AgentKV, ScriptedEngine

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def shared_kv() -> Iterator[AgentKV]:
    """Answers "ok" for ever; shared, because what a cell compares is the host's behaviour and not the books."""
    with AgentKV.with_engine(ScriptedEngine(itertools.repeat("ok")), host=LangGraphHost()) as kv:
        yield kv


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """A database on the same kind of server as the ledger's tests use; skipped, with the reason, where there is none."""
    path = Path(__file__).parents[2] / "budget" / "conftest.py"
    spec = importlib.util.spec_from_file_location("ledger_tests_server", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for server in module._server():
        yield server.new_database()
