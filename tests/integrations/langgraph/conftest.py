"""One AgentKV for all cells, and the helper modules of this folder on the path."""

from __future__ import annotations

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
