"""The bill equals the truth, to the token and the last digit of the cent, however a server reports its usage."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from usage_behaviours import BEHAVIOURS, kv_for, play
from usage_server import Server

from agentkv.context.tokens import count_text


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    """Nobody's key may get near a test. What is counted in an event loop is counted with the tokeniser's table."""
    count_text("x")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.mark.parametrize("behaviour", BEHAVIOURS, ids=lambda behaviour: behaviour.name)
def test_bill_is_the_truth(behaviour):
    """Every attempt is a fact with what it really used and cost, and what was counted here says so."""
    if behaviour.name.startswith("chat"):
        pytest.importorskip("langchain_openai")
    bill, truth = play(behaviour)
    assert truth == bill


def test_tiers_of_a_servers_cache_reach_the_facts():
    """SGLang tells where the cached tokens were; others do not."""
    by_name = {behaviour.name: behaviour for behaviour in BEHAVIOURS}
    told = []
    for name in ("engine: SGLang with its tiers", "engine: final chunk without choices"):
        behaviour = by_name[name]
        with Server(replies=list(behaviour.replies)) as server, kv_for(behaviour, server.url) as kv:
            behaviour.call(kv, server.url)
            told += [call.cached_by for call in kv.report("t").calls]
    assert [{"device": 40_000, "host": 15_000, "disk": 5_000}, {"provider": 60_000}] == told
