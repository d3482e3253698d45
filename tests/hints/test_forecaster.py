"""Forecaster: waits learnt from the calls that ended."""

import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentkv import log
from agentkv.core.hint import ToolStatus
from agentkv.hints.forecaster import (
    KEPT_CALLS,
    MAX_KEYS,
    MAX_POINTS,
    MAX_WAIT_S,
    PRIOR_S,
    Forecaster,
    progress_forecast,
)

junk = st.sampled_from([math.nan, math.inf, -math.inf, -1.0, None, "3", True, 10**400])


def learnt(*durations, tool="bash", command="pytest"):
    forecaster = Forecaster()
    for duration in durations:
        forecaster.learn(tool, command, duration)
    return forecaster


def test_nothing_known_gives_the_documented_prior():
    """Log-spaced from 50 ms to 400 s with a median of 4.5 s, from no call at all."""
    forecast = Forecaster().forecast("bash", "pytest")
    assert forecast.source == "prior"
    assert forecast.n == 0
    assert forecast.quantile_s(0.5) == pytest.approx(4.47, abs=0.01)
    assert (forecast.remaining_s[0], forecast.remaining_s[-1]) == pytest.approx((0.05, 400.0))


def test_history_of_the_command_is_preferred_to_the_tools():
    """pytest and ls are both bash calls, and differ."""
    forecaster = learnt(*[60.0] * 10)
    for _ in range(10):
        forecaster.learn("bash", "ls", 0.1)
    assert forecaster.forecast("bash", "pytest").quantile_s(0.5) == 60.0
    assert forecaster.forecast("bash", "ls").quantile_s(0.5) == pytest.approx(0.1)


def test_an_unknown_command_falls_back_to_its_tool_and_an_unknown_tool_to_all_with_the_prior():
    """Each level says how many calls stand behind it."""
    forecaster = learnt(*[30.0] * 8)
    tool = forecaster.forecast("bash", "make")
    assert (tool.quantile_s(0.5), tool.n, tool.source) == (30.0, 8, "history")
    everybody = forecaster.forecast("browser")
    assert (everybody.n, everybody.source) == (8, "history")
    assert everybody.remaining_s[-1] > 100  # the prior is still in it


def test_median_and_quantiles_are_those_of_the_last_64_calls():
    """Older calls are forgotten, and at most 21 points tell the rest."""
    forecast = learnt(*[1000.0] * 50, *range(1, 65)).forecast("bash", "pytest")
    assert forecast.n == KEPT_CALLS
    assert len(forecast.remaining_s) == MAX_POINTS
    assert (forecast.remaining_s[0], forecast.remaining_s[-1]) == (1.0, 64.0)
    assert forecast.quantile_s(0.5) == pytest.approx(32.5)


def test_one_call_is_not_certainty():
    """A single sample is spread by a factor of two; the spread shrinks with every call."""
    widths = []
    for n in range(1, 6):
        forecast = learnt(*[10.0] * n).forecast("bash", "pytest")
        assert forecast.quantile_s(0.5) == pytest.approx(10.0)
        widths.append(forecast.remaining_s[-1] - forecast.remaining_s[0])
    assert widths[0] == 15.0
    assert widths == sorted(widths, reverse=True)
    assert widths[-1] == 0.0


def test_one_absurd_call_does_not_move_the_median():
    """Ten hours among twenty calls of 3 s: the expectation stays."""
    assert learnt(*[3.0] * 20, 36_000.0).forecast("bash", "pytest").quantile_s(0.5) == 3.0


def test_a_declared_time_is_believed_within_a_factor_of_two():
    """Without history the declaration is all there is."""
    forecast = Forecaster().forecast("deploy", expect_s=100.0)
    assert forecast.source == "declared"
    assert (forecast.remaining_s[0], forecast.quantile_s(0.5), forecast.remaining_s[-1]) == (50.0, 100.0, 200.0)


def test_a_declared_time_is_blended_with_history():
    """Half of the points each: declared 100 s against a history of 10 s lands between."""
    forecast = learnt(*[10.0] * 30).forecast("bash", "pytest", expect_s=100.0)
    assert (forecast.source, forecast.n) == ("declared", 30)
    assert 10.0 < forecast.quantile_s(0.5) < 100.0


@pytest.mark.parametrize("status", [ToolStatus.CANCELLED, ToolStatus.PAUSED, ToolStatus.RUNNING])
def test_a_censored_call_teaches_no_duration(status):
    """It would have run longer, nobody knows how much."""
    forecaster = learnt(*[60.0] * 5)
    forecaster.learn("bash", "pytest", 0.01, status)
    assert forecaster.forecast("bash", "pytest").remaining_s[0] == 60.0


def test_a_failed_call_ended_the_wait_and_is_learnt():
    """The agent goes on after a failure just the same."""
    forecaster = Forecaster()
    forecaster.learn("bash", "pytest", 7.0, ToolStatus.FAILED)
    assert forecaster.forecast("bash", "pytest").quantile_s(0.5) == 7.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1.0, None, "3", True, 10**400])
def test_nonsense_is_ignored_and_counted(bad):
    """Neither a duration nor a declaration that is no time changes a forecast."""
    before = log.counters["forecast_bad_duration"], log.counters["forecast_bad_expect"]
    forecaster = learnt(bad)
    forecast = forecaster.forecast("bash", "pytest", expect_s=bad)
    assert forecast.remaining_s == PRIOR_S
    asked = bad is not None
    assert log.counters["forecast_bad_duration"] == before[0] + 1
    assert log.counters["forecast_bad_expect"] == before[1] + asked


@given(
    st.lists(st.floats(0, 1e9) | st.integers(0, 10**12) | junk, max_size=100),
    st.none() | st.floats(0, 1e308) | junk,
    st.floats(0, 1e6),
)
def test_every_forecast_is_finite_small_and_conditionable(durations, expect_s, elapsed_s):
    """Whatever was learnt and declared, at any elapsed time."""
    forecast = learnt(*durations).forecast("bash", "pytest", expect_s=expect_s)
    assert 1 <= len(forecast.remaining_s) <= MAX_POINTS
    assert 0 <= forecast.remaining_s[0] <= forecast.remaining_s[-1] <= MAX_WAIT_S
    assert forecast.after(elapsed_s).quantile_s(0.5) >= 0


@settings(max_examples=30)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("xy"), st.floats(0, 1e6)), max_size=150))
def test_state_survives_json(calls):
    """The forecaster that comes back says the same."""
    forecaster = Forecaster()
    for tool, command, duration in calls:
        forecaster.learn(tool, command, duration)
    again = Forecaster.from_json(json.loads(json.dumps(forecaster.to_json())))
    for tool, command in (("a", "x"), ("b", "y"), ("a", "z"), ("c", "")):
        assert again.forecast(tool, command) == forecaster.forecast(tool, command)
    assert again.to_json() == forecaster.to_json()


@pytest.mark.parametrize(
    "state",
    [None, [], {}, {"v": "agentkv.forecaster/9", "calls": []}, {"v": "agentkv.forecaster/1", "calls": 3},
     {"v": "agentkv.forecaster/1", "calls": [7, ["a"], ["a", "b", "c"], ["a", "b", ["x", -1, None]]]}],
)  # fmt: skip
def test_state_that_cannot_be_read_is_no_error(state):
    """A broken file costs what was learnt, not the agent."""
    assert Forecaster.from_json(state).forecast("bash").source == "prior"


def test_invented_commands_do_not_grow_the_memory():
    """A model that makes up a new command each time is bounded."""
    forecaster = Forecaster()
    for i in range(MAX_KEYS + 500):
        forecaster.learn("bash", f"command-{i}", 1.0)
    assert len(forecaster.to_json()["calls"]) == MAX_KEYS
    assert forecaster.forecast("bash", "new").source == "history"


def test_the_error_shrinks_with_samples():
    """The median of a log-normal tool is found: after 50 calls within 35 %, closer than after one."""
    rng = random.Random(7)
    draws = [math.exp(rng.gauss(math.log(20), 0.6)) for _ in range(400)]
    few = [abs(math.log(learnt(d).forecast("bash", "pytest").quantile_s(0.5) / 20)) for d in draws[:50]]
    many = [
        abs(math.log(learnt(*draws[i : i + 50]).forecast("bash", "pytest").quantile_s(0.5) / 20))
        for i in range(0, 350, 10)
    ]
    assert sum(many) / len(many) < 0.5 * sum(few) / len(few)
    assert max(many) < 0.35


def test_a_progress_report_says_when_the_whole_will_be_done():
    """40 % after 4 s: ten seconds in all, six to go."""
    forecast = progress_forecast(4.0, 0.4)
    assert forecast is not None
    assert forecast.after(4.0).quantile_s(0.5) == pytest.approx(6.0)
    assert forecast.source == "declared"


@pytest.mark.parametrize(("elapsed_s", "progress"), [(1.0, 0.0), (1.0, -1.0), (1.0, math.nan), (0.0, 0.5), (-1.0, 0.5)])
def test_a_progress_report_that_says_nothing_is_none(elapsed_s, progress):
    """Then the forecast stays what it was."""
    assert progress_forecast(elapsed_s, progress) is None
