"""Fixtures of more than one module here."""

import itertools

import pytest

from agentkv import AgentKV, Context, ScriptedEngine


@pytest.fixture
def make_kv():
    """AgentKVs over a scripted engine, closed at the end."""
    made: list[AgentKV] = []

    def make(context: Context | None = None, answers=None, **options) -> AgentKV:
        engine = ScriptedEngine(itertools.repeat("ok") if answers is None else answers)
        made.append(AgentKV.with_engine(engine, context=context or Context(), **options))
        return made[-1]

    yield make
    for kv in made:
        kv.close()
