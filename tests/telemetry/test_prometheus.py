"""The text of a metrics endpoint: counted from facts, with labels that stay few."""

import pytest

pytest.importorskip("prometheus_client", reason="no prometheus-client: pip install 'agentkv-sdk[prometheus]'")

import prometheus_client
from prometheus_client.parser import text_string_to_metric_families

from agentkv.budget.bill import Bill
from agentkv.budget.facts import ModelCall
from agentkv.budget.ledger import Ledger
from agentkv.core.usage import Timing
from agentkv.telemetry.prometheus import Prometheus


def scraped(facts, **options):
    ledger = Ledger()
    with Prometheus(ledger, **options) as counted:
        for fact in facts:
            ledger.append(fact)
        return counted.text()


def samples(text):
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def test_the_counts_are_those_of_the_bill(facts):
    """Calls, tokens, money, tools, moves, outcomes."""
    values = {(s.name, frozenset(s.labels.values())): s.value for s in samples(scraped(facts))}

    def found(name, *labels):
        return values[name, frozenset(labels)]

    bill = Bill.from_facts("t", facts)
    for kind, expected in (("input", bill.usage.input_tokens), ("cached", bill.usage.cached_tokens)):
        assert expected == found("agentkv_tokens_total", "m", kind)
    assert float(bill.cost_usd) == pytest.approx(found("agentkv_cost_usd_total", "m"))
    assert (1, 1) == (found("agentkv_unpriced_calls_total", "m"), found("agentkv_served_locally_total", "m"))
    assert (3, 1) == tuple(found("agentkv_model_calls_total", "m", status) for status in ("ok", "failed"))
    assert (4.0, 1.0) == tuple(found("agentkv_tool_seconds_sum", "pytest", s) for s in ("succeeded", "failed"))
    assert 1000 == found("agentkv_moved_bytes_total", "host", "done")
    assert 1 == found("agentkv_outcomes_total", "fix", "yes")
    assert 1 == found("agentkv_context_events_total", "break", "clock")


def test_no_label_names_a_task_a_session_or_a_branch(facts):
    """Their number has no bound."""
    labels = {name for sample in samples(scraped(facts)) for name in sample.labels}
    assert {
        "model",
        "status",
        "kind",
        "tool",
        "action",
        "to",
        "outcome",
        "event",
        "cause",
        "task_type",
        "completed",
        "le",
    } == labels


def test_what_went_wrong_and_the_room_of_each_tier_are_read_at_every_scrape(facts):
    """From `kv.stats`."""
    stats = {"counters": {"kv_move_failed": 3}, "engine": {"kv": {"device": {"blocks": 70}, "host": None}}}
    text = scraped(facts, stats=lambda: stats)
    assert 'agentkv_events_total{event="kv_move_failed"} 3.0' in text
    assert 'agentkv_blocks{tier="device"} 70.0' in text
    assert 'tier="host"' not in text


def test_facts_that_are_not_saved_yet_are_a_gauge(facts):
    """An alarm on a database that takes nothing."""
    assert "agentkv_ledger_unsaved 12.0" in scraped(facts, stats=lambda: {"ledger": {"unsaved": 12}})


def test_a_duration_that_is_no_number_does_not_spoil_a_sum(facts):
    """NaN in a histogram's sum stays there for ever."""
    text = scraped([*facts, ModelCall(task="t", timing=Timing(total_s=float("nan")))])
    assert "nan" not in text.lower()


def test_hostile_names_are_escaped(facts):
    """A model name with a quote and a line break is one label."""
    from dataclasses import replace

    text = scraped([replace(facts[1], model='m"} 1\nevil_total 9')])
    assert "evil_total" not in {sample.name for sample in samples(text)}


def test_an_applications_registry_takes_one_after_another():
    """A server that makes its AgentKV anew; one's own registry keeps what was counted."""
    registry = prometheus_client.CollectorRegistry()
    for _ in range(2):
        with Prometheus(Ledger(), registry=registry, stats=dict) as metrics:
            assert "agentkv_model_calls" in metrics.text()
        metrics.close()
    assert "agentkv" not in metrics.text()
    with Prometheus(Ledger()) as own:
        pass
    assert "agentkv_model_calls" in own.text()
