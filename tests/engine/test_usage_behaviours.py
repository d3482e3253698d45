"""The bill equals the truth, to the token and the last digit of the cent, however a server reports its usage."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from usage_behaviours import BEHAVIOURS, play


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    """Nobody's key may get near a test."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.mark.parametrize("behaviour", BEHAVIOURS, ids=lambda behaviour: behaviour.name)
def test_bill_is_the_truth(behaviour):
    """Every attempt is a fact with what it really used and cost, and what was counted here says so."""
    if behaviour.name.startswith("chat"):
        pytest.importorskip("langchain_openai")
    bill, truth = play(behaviour)
    assert truth == bill
