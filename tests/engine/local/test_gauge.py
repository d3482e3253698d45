"""The gauge of the engine: the fit finds the quadratic, and the timings are of the real runner."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentkv.core.rates import Prefill
from agentkv.engine.local.gauge import PrefillMeter, Timing, _places, device_name, fit, measure_prefill, time_chunks
from agentkv.engine.local.runner import Runner, Span
from agentkv.errors import ConfigError

prefills = st.builds(
    Prefill,
    quadratic_s=st.just(0.0) | st.floats(1e-10, 1e-6),
    linear_s=st.floats(1e-6, 1e-2),
    constant_s=st.just(0.0) | st.floats(1e-4, 1.0),
)
lengths = st.sampled_from([600, 1024, 4096, 8192, 32_768])


def timings_of(truth, limit, *, noise=0.0, rounds=1, seed=0):
    chance = random.Random(seed)
    return [
        Timing(start, end, truth.extend_s(start, end) * (1 + chance.uniform(-noise, noise)))
        for _ in range(rounds)
        for start, end in _places(limit, 512)
    ]


def close(truth, found, limit, *, rel):
    for tokens in (64, 512, limit // 2, limit):
        assert pytest.approx(truth.recompute_s(tokens), rel=rel) == found.recompute_s(tokens)


@given(prefills, lengths)
def test_without_noise_the_fit_is_the_truth(truth, limit):
    """From chunks alone, at every length up to the longest."""
    close(truth, fit(timings_of(truth, limit)), limit, rel=1e-5)


@given(prefills, lengths, st.integers(0, 10**6))
@settings(max_examples=60)
def test_under_noise_of_five_percent_the_fit_stays_within_fifteen(truth, limit, seed):
    """Seconds at any length, which is what prices are made of; coefficients are never negative."""
    close(truth, fit(timings_of(truth, limit, noise=0.05, rounds=3, seed=seed)), limit, rel=0.15)


@given(prefills, st.integers(0, 10**6))
def test_one_interrupted_run_does_no_harm(truth, seed):
    """A place counts by its fastest run."""
    timings = timings_of(truth, 8192, rounds=3)
    at = seed % len(timings)
    timings[at] = timings[at]._replace(seconds=timings[at].seconds * 20)
    close(truth, fit(timings), 8192, rel=1e-5)


def test_long_contexts_do_not_hide_short_ones():
    """Errors are relative: a short context's ten milliseconds weigh what a long one's minute does."""
    truth = Prefill(quadratic_s=1e-8, linear_s=1e-3, constant_s=0.01)
    timings = timings_of(truth, 32_768)
    timings = [each._replace(seconds=each.seconds * 1.1) if each.start > 10_000 else each for each in timings]
    assert pytest.approx(truth.recompute_s(64), rel=0.03) == fit(timings).recompute_s(64)


def test_a_fit_of_one_timing_is_a_line_and_of_none_an_error():
    """Three unknowns from one number: the simplest that explains it."""
    assert pytest.approx(0.5) == fit([Timing(0, 512, 0.5)]).recompute_s(512)
    with pytest.raises(ConfigError, match="no timing"):
        fit([])


@pytest.mark.parametrize("limit", [1, 7, 512, 513, 700, 1024, 2048, 8192, 32_768])
def test_places_lie_within_the_context(limit):
    """For models of any length; the first three tell the three coefficients apart where the length allows it."""
    places = _places(limit, 512)
    assert all(0 <= start < end <= limit and end - start <= 512 for start, end in places)
    assert len(set(places)) == len(places)
    if limit >= 1024:
        assert [(0, 64), (0, 512), (limit - 512, limit)] == places[:3]


def test_the_runner_is_timed_at_every_place(tiny, monkeypatch):
    """Short contexts whole, long ones by their last chunk; the pool is the gauge's own."""
    seen = []
    forward = Runner.forward

    def watched(self, spans):
        seen.extend((span.start, span.end) for span in spans)
        return forward(self, spans)

    monkeypatch.setattr(Runner, "forward", watched)
    timings = time_chunks(tiny.loaded, seconds=0.2, chunk_tokens=128)
    assert {(0, 16), (0, 128), (896, 1024), (512, 640), (256, 384), (0, 64)} == {each[:2] for each in timings}
    assert seen[1:] == [each[:2] for each in timings]
    assert all(each.seconds > 0 for each in timings)


def test_a_model_too_slow_for_the_time_is_timed_in_small_chunks(tiny):
    """Three chunks at least, but of half the size: the clock here says that each forward takes a second."""
    ticks = iter(range(1000))
    timings = time_chunks(tiny.loaded, seconds=1.0, timer=lambda: float(next(ticks)))
    assert [(0, 32), (0, 256), (768, 1024)] == [each[:2] for each in timings]


def test_a_real_prefill_costs_what_the_fit_says(tiny):
    """Within a factor of three, on a noisy machine: a whole context through the engine against the quadratic."""
    from agentkv.core.task import Caller
    from agentkv.engine.base import Request, Sampling
    from agentkv.engine.local.engine import LocalEngine

    prefill = measure_prefill(tiny.loaded, seconds=1.0)
    with LocalEngine(tiny.loaded, device_memory=4 << 20, host_memory=0) as engine:
        from agentkv.core.message import Message

        request = Request(
            messages=(Message(role="user", content="x" * 900),), sampling=Sampling(max_tokens=1), caller=Caller()
        )
        tokens = engine.count_tokens(request)
        began_s = time.perf_counter()
        engine.submit(request).result(30)
        spent_s = time.perf_counter() - began_s
    assert prefill.recompute_s(tokens) / 5 < spent_s < 5 * prefill.recompute_s(tokens) + 0.05


def test_the_device_is_named(tiny):
    """The CPU by that word."""
    assert "cpu" == device_name(tiny.loaded)


def spans(*places):
    return [Span(token_ids=[0] * (end - start), start=start, blocks=[], sample=False) for start, end in places]


def test_the_meter_holds_real_steps_against_the_fit():
    """Twice as slow as expected shows as twice; short steps and shared ones say nothing of the fit."""
    prefill = Prefill(quadratic_s=1e-6, linear_s=1e-3, constant_s=0.1)
    meter = PrefillMeter(prefill)
    for start in range(0, 2048, 512):
        meter.step(spans((start, start + 512)), 512, 2 * prefill.extend_s(start, start + 512))
    meter.step(spans((2048, 2058)), 10, 100.0)
    meter.step(spans((0, 256), (0, 256)), 512, 100.0)
    stats = meter.stats()
    assert 2048 == stats["tokens"]
    assert pytest.approx(2.0) == stats["spent_s"] / stats["expected_s"]
    assert pytest.approx(prefill.recompute_s(2048)) == stats["expected_s"]


def test_the_meters_rate_forgets_slowly():
    """The first step counts whole, a later one a fifth; steps of mostly decode, or of no time, not at all."""
    meter = PrefillMeter(None)
    assert meter.tokens_s is None
    meter.step(spans((0, 512)), 512, 1.0)
    assert 512.0 == meter.tokens_s
    meter.step(spans((0, 512)), 512, 0.5)
    assert pytest.approx(0.8 * 512 + 0.2 * 1024) == meter.tokens_s
    meter.step(spans((0, 100)), 100, 0.001)
    meter.step(spans(*[(0, 1)] * 200), 150, 0.001)
    meter.step(spans((0, 512)), 512, 0.0)
    assert pytest.approx(0.8 * 512 + 0.2 * 1024) == meter.tokens_s


def test_a_meter_without_a_fit_expects_nothing():
    """Before any calibration."""
    meter = PrefillMeter(None)
    meter.step(spans((0, 512)), 512, 1.0)
    assert {"tokens": 0, "spent_s": 0.0, "expected_s": 0.0} == meter.stats()
