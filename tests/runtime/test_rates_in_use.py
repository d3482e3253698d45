"""An engine starts from the rates that were measured for its model, and gives back what it saw."""

from __future__ import annotations

import time

import pytest

from agentkv import AgentKV, Message, Request, Sampling
from agentkv.core.rates import Prefill, Rates
from agentkv.core.residency import Action, Move, Tier
from agentkv.engine.local.loader import load_model
from agentkv.runtime.machine import Place
from agentkv.runtime.ratefiles import load_rates, rates_folder, save_rates

pytestmark = [pytest.mark.weights, pytest.mark.slow]

RATES = Rates(
    memcpy_bytes_s=1e9,
    h2d_bytes_s=3e9,
    d2h_bytes_s=2e9,
    read_bytes_s=5e8,
    write_bytes_s=4e8,
    prefill=Prefill(quadratic_s=1e-6, linear_s=1e-3, constant_s=0.5),
    measured_at=1.0,
)


@pytest.fixture(scope="module")
def loaded():
    return load_model("smollm2-135m")


def work(kv):
    """A context that leaves the device and comes back; its session."""
    text = "a line of a long log file " * 110  # more than 512 tokens
    first = Message(role="user", content=text)
    with kv.task("t", final=False):
        answer = kv.submit(Request(messages=(first,), sampling=Sampling(max_tokens=2))).result(100)
    return answer.session


def test_residency_is_priced_with_the_measured_rates(loaded, tmp_path):
    """Recompute by the quadratic, restores by the links, from the first moment on."""
    save_rates(Place.of(loaded, tmp_path), RATES)
    with AgentKV.local(device_memory="64MiB", host_memory="64MiB", disk=tmp_path, ledger="memory") as kv:
        session = work(kv)
        facts = kv.engine.residency(session)
        assert pytest.approx(RATES.recompute_s(facts.tokens)) == facts.recompute_s
        size_bytes = facts.total_blocks * facts.block_bytes
        assert pytest.approx(RATES.restore_host_s(size_bytes)) == facts.restore_host_s
        assert pytest.approx(RATES.restore_disk_s(size_bytes)) == facts.restore_disk_s


def test_what_a_run_saw_is_folded_in_at_its_end(loaded):
    """A prefill that takes other than expected moves the quadratic, a little."""
    place = Place.of(loaded, None)
    save_rates(place, RATES)
    with AgentKV.local(device_memory="64MiB", host_memory="64MiB", ledger="memory") as kv:
        session = work(kv)
        assert kv.engine.apply(Move(session=session, action=Action.DEMOTE, to=Tier.HOST, reason="test"))
        kv.engine.tiers.quiesce(30)
    refined = load_rates(place)
    assert (2, True) == (refined.samples, time.time() - 60 < refined.measured_at)
    assert 1.0 != refined.recompute_s(1000) / RATES.recompute_s(1000)
    assert pytest.approx(1.0, abs=0.16) == refined.recompute_s(1000) / RATES.recompute_s(1000)


def test_without_a_calibration_an_engine_neither_waits_nor_saves(loaded):
    """The first start on a machine is as quick as any."""
    with AgentKV.local(device_memory="64MiB", host_memory="64MiB", ledger="memory") as kv:
        work(kv)
    assert not rates_folder().exists()
