"""Facts as log lines: stable names, no empty fields, and every event that is ever logged is in the docs."""

import re
from pathlib import Path

import pytest
import structlog

from agentkv.budget.codec import _KINDS
from agentkv.budget.ledger import Ledger
from agentkv.telemetry.events import log_facts
from agentkv.telemetry.names import EVENTS

ROOT = Path(__file__).parents[2]


@pytest.fixture
def lines():
    """What was logged."""
    structlog.configure(cache_logger_on_first_use=False)
    with structlog.testing.capture_logs() as captured:
        yield captured
    structlog.reset_defaults()


def test_each_fact_is_one_line_under_its_name(facts, lines):
    """With what it says and nothing that is empty; money is text."""
    ledger = Ledger()
    stop = log_facts(ledger)
    for fact in facts:
        ledger.append(fact)
    stop()
    ledger.append(facts[0])
    assert [EVENTS[fact.kind] for fact in facts] == [line["event"] for line in lines]
    assert {
        "event": "agentkv_model_call", "log_level": "info", "task": "t", "node": "plan", "attempt": 1, "model": "m",
        "at_ms": 1_780_000_000_000, "status": "ok", "priority": 1, "purpose": "answer", "cost_usd": "0.10",
        "input_tokens": 10, "output_tokens": 5, "reasoning_tokens": 2, "calls": 1,
        "ttft_s": 0.25, "restore_s": 0.125, "decode_s": 1.0, "total_s": 1.5,
        "estimated": False, "served_locally": False, "device_s": 0.0, "drafted_tokens": 0, "accepted_tokens": 0,
    } == lines[1]  # fmt: skip
    assert "started" == lines[0]["what"]


def test_every_kind_of_fact_has_a_name():
    """A kind that is added gets one."""
    assert set(_KINDS) == set(EVENTS)


def test_every_event_that_is_logged_is_in_the_docs():
    """Names are stable: they are written down in docs/observability.md."""
    call = re.compile(r"\b(?:failed|warn_once|count|warning|info)\(\s*\"([a-z][a-z0-9_]+)\"")
    modules = [*ROOT.glob("agentkv/**/*.py"), *ROOT.glob("integrations/**/*.py")]
    used = {name for module in modules for name in call.findall(module.read_text(encoding="utf-8")) if "_" in name}
    told = set(re.findall(r"`([a-z][a-z0-9_]+)`", (ROOT / "docs" / "observability.md").read_text(encoding="utf-8")))
    assert set() == (used | set(EVENTS.values())) - told
