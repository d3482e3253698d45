"""Forecaster: waits learnt from the calls that ended."""

import json
import math
import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentkv import AgentKV, ScriptedEngine, log
from agentkv.clock import ManualClock
from agentkv.core.curve import EDGES_S, MAX_WAIT_S, POINTS
from agentkv.core.hint import ToolStatus
from agentkv.hints import hazards
from agentkv.hints.forecaster import MAX_KEYS, MAX_SESSION_KEYS, Forecaster, progress_forecast

JUNK = [math.nan, math.inf, -math.inf, -1.0, None, "3", True, 10**400]
junk = st.sampled_from(JUNK)
statuses = st.sampled_from(list(ToolStatus))
BIN = 1.5
"""Two durations within a bin of each other are as good as equal."""


def learnt(*durations, tool="bash", command="pytest"):
    forecaster = Forecaster()
    for duration in durations:
        forecaster.learn(tool, command, duration)
    return forecaster


def rows(forecaster):
    return sorted(forecaster.to_json()["keys"], key=repr)


def near(expected, actual, factor=BIN):
    assert expected / factor <= actual <= expected * factor, f"{actual} is not within x{factor} of {expected}"


def test_nothing_known_gives_the_documented_prior():
    """Log-uniform from 50 ms to 400 s with a median of 4.5 s, from no call at all."""
    forecast = Forecaster().forecast("mystery", "frobnicate")
    assert ("prior", 0, "unknown") == (forecast.source, forecast.n, forecast.state)
    near(4.47, forecast.quantile_s(0.5), 1.1)
    near(0.05, forecast.quantile_s(0.01))
    near(400.0, forecast.quantile_s(0.95))


def test_a_tool_whose_class_is_known_starts_from_published_waits():
    """Nobody has to learn that reading a file is faster than a test run, and a person slower than both."""
    forecaster = Forecaster()
    medians = [forecaster.forecast(tool).quantile_s(0.5) for tool in ("read_file", "pytest", "subagent", "person")]
    for published, median in zip((0.03, 1.7, 62.0, 127.0), medians, strict=True):
        near(published, median, 1.1)


def test_history_of_the_command_is_preferred_to_the_tools():
    """pytest and ls are both bash calls, and differ."""
    forecaster = learnt(*[60.0] * 10)
    for _ in range(10):
        forecaster.learn("bash", "ls", 0.1)
    near(60.0, forecaster.forecast("bash", "pytest").quantile_s(0.5))
    near(0.1, forecaster.forecast("bash", "ls").quantile_s(0.5))


def test_a_sub_command_is_told_apart_and_falls_back_to_its_word():
    """`git clone` is no `git diff`; `git log` is somewhere between, until it is seen."""
    forecaster = Forecaster()
    for _ in range(20):
        forecaster.learn("bash", "git diff", 0.05)
        forecaster.learn("bash", "git clone", 20.0)
    near(0.05, forecaster.forecast("bash", "git diff").quantile_s(0.5))
    near(20.0, forecaster.forecast("bash", "git clone").quantile_s(0.5))
    assert 40 == forecaster.forecast("bash", "git log").n


def test_an_unknown_command_falls_back_to_its_tool_and_an_unknown_tool_to_its_class():
    """Each level says how many calls stand behind it."""
    forecaster = learnt(*[30.0] * 8, tool="frob", command="")
    tool = forecaster.forecast("frob", "make")
    near(30.0, tool.quantile_s(0.5))
    assert (8, "history") == (tool.n, tool.source)
    other = forecaster.forecast("zorch")
    assert (8, "history") == (other.n, other.source)
    near(30.0, other.quantile_s(0.5), 2.0)


def test_the_size_of_the_arguments_tells_calls_of_a_command_apart():
    """Writing a long file is not writing a short one."""
    forecaster = Forecaster()
    for _ in range(20):
        forecaster.learn("frob", "", 0.1, arg_bytes=100)
        forecaster.learn("frob", "", 30.0, arg_bytes=100_000)
    near(0.1, forecaster.forecast("frob", arg_bytes=90).quantile_s(0.5))
    near(30.0, forecaster.forecast("frob", arg_bytes=90_000).quantile_s(0.5))


def test_the_same_session_weighs_most():
    """This project's test suite takes a minute, whatever other projects' take."""
    forecaster = learnt(*[2.0] * 40)
    for _ in range(6):
        forecaster.learn("bash", "pytest", 60.0, session="here")
    near(60.0, forecaster.forecast("bash", "pytest", session="here").quantile_s(0.5))
    near(2.0, forecaster.forecast("bash", "pytest", session="elsewhere").quantile_s(0.5))


def test_a_users_own_key_stands_in_for_the_command():
    """Whoever knows what decides the duration may say so."""
    forecaster = Forecaster()
    for _ in range(10):
        forecaster.learn("bash", "make", 100.0, duration_key="make/release")
        forecaster.learn("bash", "make", 1.0, duration_key="make/debug")
    near(100.0, forecaster.forecast("bash", "make", duration_key="make/release").quantile_s(0.5))
    near(1.0, forecaster.forecast("bash", "make", duration_key="make/debug").quantile_s(0.5))


def test_old_calls_are_forgotten():
    """Fifty calls of 1000 s, then two hundred of 3 s: the tool became fast."""
    forecast = learnt(*[1000.0] * 50, *[3.0] * 200).forecast("bash", "pytest")
    near(3.0, forecast.quantile_s(0.5))
    near(3.0, forecast.quantile_s(0.9))


def test_one_call_is_not_certainty():
    """After one call the prior is still seen; the spread shrinks with every one."""
    widths = []
    for n in range(1, 9):
        forecast = learnt(*[10.0] * n).forecast("bash", "pytest")
        widths.append(math.log(forecast.quantile_s(0.9) / forecast.quantile_s(0.1)))
    assert widths[0] > math.log(10)
    assert sorted(widths, reverse=True) == widths
    assert widths[-1] < math.log(4)


def test_one_absurd_call_does_not_move_the_median():
    """Ten hours among twenty calls of 3 s: the expectation stays."""
    near(3.0, learnt(*[3.0] * 20, 36_000.0).forecast("bash", "pytest").quantile_s(0.5))


def test_a_declared_time_is_believed_within_a_factor_of_two():
    """Without history the declaration is all there is."""
    forecast = Forecaster().forecast("deploy", expect_s=100.0)
    assert ("declared", "expected") == (forecast.source, forecast.state)
    assert (50.0, 100.0, 200.0) == (forecast.remaining_s[0], forecast.quantile_s(0.5), forecast.remaining_s[-1])


def test_a_declared_time_is_blended_with_history():
    """Half each: declared 100 s against a history of 10 s, and whoever outlives 30 s was the declared one."""
    forecast = learnt(*[10.0] * 30).forecast("bash", "pytest", expect_s=100.0)
    assert ("declared", 30) == (forecast.source, forecast.n)
    assert 10.0 < forecast.quantile_s(0.5) < 100.0
    near(70.0, forecast.after(30.0).quantile_s(0.5))


def test_a_time_out_is_the_end():
    """Nothing takes longer than its declared time-out, and what would is expected to end right there."""
    forecast = learnt(*[60.0] * 10).forecast("bash", "pytest", timeout_s=30.0)
    assert 30.0 == forecast.quantile_s(0.9)
    assert 30.0 >= forecast.remaining_s[-1]
    assert 1.0 == forecast.probability_within(30.0)
    assert 10.0 == forecast.after(20.0).quantile_s(0.9)
    assert 0.0 == forecast.never
    assert forecast.after(31.0).quantile_s(0.5) > 1.0  # it was none


def test_a_declared_time_beyond_the_time_out_ends_at_the_time_out():
    """Both are the caller's words; the harder one wins."""
    forecast = Forecaster().forecast("deploy", expect_s=100.0, timeout_s=50.0)
    assert ("declared", 50.0) == (forecast.source, forecast.quantile_s(0.5))
    near(30.0, Forecaster().forecast("deploy", expect_s=30.0, timeout_s=50.0).quantile_s(0.5))


@pytest.mark.parametrize("status", [ToolStatus.CANCELLED, ToolStatus.PAUSED])
def test_a_censored_call_counts_as_survived_and_not_as_ended(status):
    """Ten calls given up after 50 s say that pytest takes longer than 50 s, not that it takes 50 s."""
    forecaster = learnt(*[60.0] * 5)
    before = forecaster.forecast("bash", "pytest").probability_within(40.0)
    for _ in range(10):
        forecaster.learn("bash", "pytest", 50.0, status)
    after = forecaster.forecast("bash", "pytest")
    assert after.probability_within(40.0) < before
    assert after.quantile_s(0.5) > 50.0


def test_a_call_that_is_given_up_at_once_teaches_nothing():
    """An interrupt after a hundredth of a second is no short call."""
    forecaster = learnt(*[60.0] * 5)
    before = forecaster.forecast("bash", "pytest").quantile_s(0.5)
    forecaster.learn("bash", "pytest", 0.0001, ToolStatus.PAUSED)
    assert before == forecaster.forecast("bash", "pytest").quantile_s(0.5)


def test_a_call_that_runs_still_is_evidence_already():
    """Told twice at 10 and 100 s and then at its end, it counts once, and exactly like a call told at its end."""
    told, whole = learnt(*[3.0] * 10), learnt(*[3.0] * 10)
    before = told.forecast("bash", "pytest").probability_within(50.0)
    told.learn("bash", "pytest", 10.0, ToolStatus.RUNNING, call_id="c1")
    told.learn("bash", "pytest", 10.1, ToolStatus.RUNNING, call_id="c1")
    told.learn("bash", "pytest", 100.0, ToolStatus.RUNNING, call_id="c1")
    assert told.forecast("bash", "pytest").probability_within(50.0) < before
    assert 11 == told.forecast("bash", "pytest").n
    told.learn("bash", "pytest", 130.0, call_id="c1")
    whole.learn("bash", "pytest", 130.0)
    assert rows(whole) == rows(told)


def test_a_running_call_without_a_name_teaches_nothing():
    """Its end would count it twice."""
    forecaster = Forecaster()
    forecaster.learn("bash", "pytest", 60.0, ToolStatus.RUNNING)
    assert [] == rows(forecaster)


def test_waits_that_never_ended_show_as_mass_at_infinity():
    """Half of the people never come back: the mass is told, quantiles beyond it are thirty days, all is finite."""
    forecaster = Forecaster()
    for _ in range(40):
        forecaster.learn("person", "", 100.0)
        forecaster.never("person")
    forecast = forecaster.forecast("person")
    assert 0.4 < forecast.never < 0.6
    near(100.0, forecast.quantile_s(0.25))
    assert MAX_WAIT_S == forecast.quantile_s(0.9)
    assert forecast.after(3600.0).never > 0.9


def test_a_failed_call_ended_the_wait_and_is_learnt():
    """The agent goes on after a failure just the same."""
    forecaster = Forecaster()
    for _ in range(10):
        forecaster.learn("bash", "pytest", 7.0, ToolStatus.FAILED)
    near(7.0, forecaster.forecast("bash", "pytest").quantile_s(0.5))


@pytest.mark.parametrize("bad", JUNK)
def test_nonsense_is_ignored_and_counted(bad):
    """Neither a duration nor a declaration nor a time-out that is no time changes a forecast."""
    names = ("forecast_bad_duration", "forecast_bad_expect", "forecast_bad_timeout")
    before = [log.counters[name] for name in names]
    forecast = learnt(bad).forecast("bash", "pytest", expect_s=bad, timeout_s=bad)
    assert Forecaster().forecast("bash", "pytest") == forecast
    asked = bad is not None
    assert [1, asked, asked] == [log.counters[name] - was for name, was in zip(names, before, strict=True)]


@pytest.mark.parametrize("name", [None, 7, "x" * 10_000, "\ud800", ""])
def test_odd_names_are_no_error(name):
    """A tool may be called anything; what is kept is short."""
    forecaster = Forecaster()
    forecaster.learn(name, name, 1.0, arg_bytes=-5)
    assert forecaster.forecast(name, name, arg_bytes="many").n == 1
    assert max(len(str(part)) for key, *_ in rows(forecaster) for part in key) <= 64


@given(
    st.lists(st.tuples(st.floats(0, 1e9) | st.integers(0, 10**12) | junk, statuses), max_size=60),
    st.none() | st.floats(0, 1e308) | junk,
    st.none() | st.floats(0, 1e6) | junk,
    st.floats(0, 1e8),
)
def test_every_forecast_is_finite_rising_and_conditionable(calls, expect_s, timeout_s, elapsed_s):
    """Whatever was learnt and declared, at any elapsed time: finite, >= 0, monotone."""
    forecaster = Forecaster()
    for number, (duration, status) in enumerate(calls):
        forecaster.learn("bash", "pytest", duration, status, session="s", call_id=f"c{number % 3}")
    forecast = forecaster.forecast("bash", "pytest", expect_s, session="s", timeout_s=timeout_s)
    for told in (forecast, forecast.after(elapsed_s)):
        assert 1 <= len(told.remaining_s) <= POINTS
        quantiles = [told.quantile_s(q / 20) for q in range(21)]
        assert 0 <= quantiles[0]
        assert quantiles[-1] <= MAX_WAIT_S
        assert all(a <= b * (1 + 1e-9) for a, b in pairwise(quantiles))
        within = [told.probability_within(x) for x in (0.0, 0.01, 1.0, 100.0, 1e5, 1e9)]
        assert all(0 <= a <= b + 1e-9 <= 1 + 1e-8 for a, b in pairwise(within))
        assert 0 <= told.never <= 1


@given(st.lists(st.floats(0, 1e5), min_size=1, max_size=50), st.floats(0.01, 1e4), st.floats(0.01, 1e4))
def test_after_is_the_conditional_distribution(durations, elapsed_s, horizon_s):
    """P(within x | still running after t) = (P(t + x) - P(t)) / (1 - P(t)), and quantiles invert it."""
    forecast = learnt(*durations).forecast("bash", "pytest")
    left = forecast.after(elapsed_s)
    alive = 1 - forecast.probability_within(elapsed_s)
    expected = 1 - (1 - forecast.probability_within(elapsed_s + horizon_s)) / alive
    assert left.probability_within(horizon_s) == pytest.approx(expected, abs=1e-9)
    again_s = left.quantile_s(left.probability_within(horizon_s))
    assert left.probability_within(again_s) == pytest.approx(left.probability_within(horizon_s), abs=1e-6)


def test_the_tail_is_not_lost_to_elapsed_time():
    """One call in fifty takes ten minutes: who still runs after a minute is expected to be that one."""
    forecaster = Forecaster(forgets=False)
    for _ in range(4):
        for _ in range(49):
            forecaster.learn("frob", "", 3.0)
        forecaster.learn("frob", "", 600.0)
    late = forecaster.forecast("frob").after(60.0)
    assert late.overdue
    assert 200 < late.quantile_s(0.5) < 700


@pytest.mark.parametrize(
    "history", [[], [5.0], [5.0, 6.0], [5.0] * 30, [5.0] * 20 + [36_000.0], [math.nan, 5.0]],
    ids=["none", "one", "two", "constant", "one of ten hours", "not a number"],
)  # fmt: skip
def test_an_overdue_tool_has_a_finite_guess(history):
    """An hour into a five-second tool: finite, positive, of the order of the time waited; and it is said."""
    forecast = learnt(*history, tool="frob", command="").forecast("frob")
    late = forecast.after(3600.0)
    assert ("unknown" if not history else "expected") == forecast.state
    assert "overdue" == late.state
    assert 360 < late.quantile_s(0.5) < 36_000


@pytest.mark.parametrize("step_ms", [-3_600_000, 3_600_000])
def test_a_step_of_the_wall_clock_inside_a_call_changes_nothing(step_ms):
    """Durations come from the monotonic clock: an hour back or forth is no duration."""
    clock = ManualClock(start_s=50.0, wall_ms=1_700_000_000_000)
    with AgentKV.with_engine(ScriptedEngine([]), clock=clock) as kv:
        for _ in range(10):
            with kv.task("t"), kv.tool("frob") as call:
                clock.advance(2.5)
                clock.step_wall(step_ms)
                clock.advance(2.5)
        near(5.0, call.forecast.quantile_s(0.5))
        near(5.0, call.forecast.quantile_s(0.9), 2.0)


calls_of = st.lists(
    st.tuples(st.sampled_from("ab"), st.sampled_from(["x", "x y", ""]), st.floats(0, 1e6), st.integers(0, 5000)),
    max_size=40,
)


@settings(max_examples=50, deadline=None)
@given(calls_of)
def test_state_survives_json(calls):
    """The forecaster that comes back says the same, up to the digits that are kept."""
    forecaster = Forecaster()
    for tool, command, duration, size in calls:
        forecaster.learn(tool, command, duration, arg_bytes=size)
    again = Forecaster.from_json(json.loads(json.dumps(forecaster.to_json())))
    assert rows(forecaster) == rows(again)
    for tool, command in (("a", "x"), ("b", "x y"), ("a", "z"), ("c", "")):
        mine, theirs = (f.forecast(tool, command) for f in (forecaster, again))
        assert (mine.n, mine.source) == (theirs.n, theirs.source)
        assert mine.curve.survival == pytest.approx(theirs.curve.survival, abs=1e-4)


@settings(max_examples=50, deadline=None)
@given(calls_of, calls_of)
def test_merging_is_commutative_and_adds_up(some, others):
    """Two processes' forecasters say the same whichever is added to which."""

    def of(*parts):
        forecaster = Forecaster()
        for part in parts:
            told = Forecaster()
            for tool, command, duration, size in part:
                told.learn(tool, command, duration, arg_bytes=size)
            forecaster.merge(told)
        return forecaster

    one, other = of(some, others), of(others, some)
    flat = [[key, calls, pytest.approx(risk, abs=2e-5), pytest.approx(ended, abs=2e-5)]
            for key, calls, risk, ended in rows(one)]  # fmt: skip
    assert flat == rows(other)
    assert one.forecast("a").n == sum(tool == "a" for tool, *_ in (*some, *others)) or not any(
        tool == "a" for tool, *_ in (*some, *others)
    )


def test_what_is_fresh_is_told_once_and_replays_to_the_same_state():
    """The way into a file that several processes share."""
    forecaster, copy = learnt(1.0, 2.0, 3.0), Forecaster()
    forecaster.learn("bash", "pytest", 9.0, ToolStatus.CANCELLED)
    state, fresh = forecaster.drain()
    copy.replay(fresh)
    assert rows(forecaster) == rows(copy) == sorted(state["keys"], key=repr)
    assert ({}, []) == forecaster.drain() == copy.drain()
    forecaster.undrain(fresh)
    assert fresh == forecaster.drain()[1]


def test_adopting_keeps_what_was_learnt_meanwhile():
    """While the file was written two more calls ended here: they come on top of the sum, sessions stay."""
    mine, summed, expected = Forecaster(), Forecaster(), Forecaster()
    mine.learn("bash", "ls", 5.0, session="s")
    _, drained = mine.drain()
    summed.learn("bash", "pytest", 60.0)
    summed.replay(drained)
    mine.learn("bash", "ls", 6.0)
    mine.adopt(summed)
    expected.learn("bash", "pytest", 60.0)
    expected.learn("bash", "ls", 5.0)
    expected.learn("bash", "ls", 6.0)
    assert rows(expected) == rows(mine)
    assert 1 == len(mine.drain()[1])
    assert 1 == len(mine._session_keys)


GOOD = [["tool", "bash"], 2, [2, 1], [1, 1]]


@pytest.mark.parametrize(
    "state",
    [None, [], {}, {"v": "agentkv.forecaster/9", "keys": []}, {"v": "agentkv.forecaster/1", "calls": [["a", "b", [1]]]},
     {"v": "agentkv.forecaster/2", "keys": 3}, {"v": "agentkv.forecaster/2"}],
)  # fmt: skip
def test_state_that_cannot_be_read_is_no_error(state):
    """A broken file, or one of another version, costs what was learnt, not the agent."""
    before = log.counters["forecast_state_unreadable"]
    assert "prior" == Forecaster.from_json(state).forecast("bash").source
    assert before + 1 == log.counters["forecast_state_unreadable"]


@pytest.mark.parametrize(
    "row",
    [7, [], None, [["tool"], 1, [1], [1]], [["tool", 7], 1, [1], [1]], [["tool", "x" * 65], 1, [1], [1]],
     [["nonsense", "x"], 1, [1], [1]], [["size", "a", "b", "c"], 1, [1], [1]], [["tool", "b"], -1, [1], [1]],
     [["tool", "b"], 1.5, [1], [1]], [["tool", "b"], 1, [1], [2]], [["tool", "b"], 1, [1], [math.nan]],
     [["tool", "b"], 1, [math.inf], [1]], [["tool", "b"], 1, [1, 2], [0, 0]], [["tool", "b"], 1, [1] * 47, [0] * 47],
     [["tool", "b"], 1, [1], []], [["tool", "b"], 1, ["1"], [0]], [["tool", "b"], 1, 1, 1], [[["tool"], "b"], 1, [], []]],
)  # fmt: skip
def test_a_row_that_cannot_be_is_left_out_and_the_rest_is_used(row):
    """One odd line does not cost the others."""
    before = log.counters["forecast_state_bad_row"]
    forecaster = Forecaster.from_json({"v": "agentkv.forecaster/2", "keys": [row, GOOD]})
    assert [GOOD] == rows(forecaster)
    assert before + 1 == log.counters["forecast_state_bad_row"]


def test_invented_commands_do_not_grow_the_memory():
    """A model that makes up a new command each time is bounded, and so are sessions."""
    forecaster = Forecaster()
    for i in range(MAX_KEYS + 500):
        forecaster.learn("bash", f"command-{i}", 1.0, session=f"s{i}")
    assert MAX_KEYS == len(forecaster.to_json()["keys"])
    assert MAX_SESSION_KEYS == len(forecaster._session_keys)
    assert "history" == forecaster.forecast("bash", "new").source


def test_the_error_shrinks_with_samples():
    """The median of a log-normal tool is found: after 50 calls within 45 %, closer than after one."""
    rng = random.Random(7)
    draws = [math.exp(rng.gauss(math.log(20), 0.6)) for _ in range(400)]

    def error(calls):
        return abs(math.log(learnt(*calls, tool="frob", command="").forecast("frob").quantile_s(0.5) / 20))

    one = [error([draw]) for draw in draws[:50]]
    five = [error(draws[i : i + 5]) for i in range(0, 250, 5)]
    many = [error(draws[i : i + 50]) for i in range(0, 350, 10)]
    assert sum(many) / len(many) < 0.8 * sum(five) / len(five) < sum(one) / len(one)
    assert max(many) < math.log(1.45)


def test_a_progress_report_says_when_the_whole_will_be_done():
    """40 % after 4 s: ten seconds in all, six to go."""
    forecast = progress_forecast(4.0, 0.4)
    assert forecast is not None
    assert forecast.after(4.0).quantile_s(0.5) == pytest.approx(6.0)
    assert "declared" == forecast.source


def test_a_progress_report_is_blended_with_what_is_known_of_the_tool():
    """Fifty calls of about 20 s, and one that says 10 % after 10 s, so 100 in all: both are likely; at 90 % after 90 s
    the report says it all. A tool that was never seen has nothing to set against its report.
    """
    known = learnt(*[18.0, 20.0, 22.0] * 17).forecast("bash", "pytest")
    early = progress_forecast(10.0, 0.1, known)
    assert early is not None
    assert 0.3 < early.probability_within(30.0) < 0.5
    assert early.after(10.0).probability_within(100.0) > 0.7
    late = progress_forecast(90.0, 0.9, known)
    assert late is not None
    assert 95.0 < late.quantile_s(0.5) < 105.0
    assert late.quantile_s(0.9) < 120.0
    assert progress_forecast(10.0, 0.1, Forecaster().forecast("frob")) == progress_forecast(10.0, 0.1)


@given(st.floats(0.001, 1e6), st.floats(0.001, 1.0), st.lists(st.floats(0.001, 1e6), max_size=5))
def test_a_report_never_says_that_the_call_has_ended_before_now(elapsed_s, share, calls):
    """Whatever is known of the tool, the whole is at least what has passed, and the points are sorted and finite."""
    known = learnt(*calls).forecast("bash", "pytest")
    forecast = progress_forecast(elapsed_s, share, known)
    assert forecast is not None
    assert forecast.remaining_s[0] >= elapsed_s
    assert forecast.after(elapsed_s).quantile_s(0.5) >= 0


@pytest.mark.parametrize(("elapsed_s", "progress"), [(1.0, 0.0), (1.0, -1.0), (1.0, math.nan), (0.0, 0.5), (-1.0, 0.5)])
def test_a_progress_report_that_says_nothing_is_none(elapsed_s, progress):
    """Then the forecast stays what it was."""
    assert progress_forecast(elapsed_s, progress) is None


@pytest.mark.parametrize("seed", range(5))
def test_survival_is_kaplan_meiers_without_shrinkage_and_forgetting(seed):
    """At kappa = 0, at every edge of the grid, with calls that were given up at an edge (ties as Kaplan-Meier has
    them: lost after whoever ended at the same time).
    """
    lifelines = pytest.importorskip("lifelines")
    rng = random.Random(seed)
    forecaster = Forecaster(kappa=0.0, session_kappa=0.0, forgets=False)
    durations, observed = [], []
    for _ in range(300):
        duration_s, ended = rng.lognormvariate(1.5, 1.5), rng.random() < 0.7
        if not ended:
            duration_s = max(edge for edge in EDGES_S if edge <= duration_s)
        forecaster.learn(
            "frob",
            "",
            duration_s if ended else duration_s * 1.000001,
            ToolStatus.SUCCEEDED if ended else ToolStatus.CANCELLED,
        )
        durations.append(duration_s)
        observed.append(ended)
    curve = forecaster.forecast("frob").curve
    estimate = lifelines.KaplanMeierFitter().fit(durations, observed)
    told = [s for s, edge in zip(curve.survival, EDGES_S, strict=True) if edge <= max(durations)]
    expected = estimate.survival_function_at_times(EDGES_S[: len(told)]).tolist()
    assert expected == pytest.approx(told, abs=1e-9)


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 45), st.booleans()), max_size=6), max_size=5),
    st.floats(0.1, 9.0),
)
def test_the_short_way_to_a_survival_is_the_long_one(keys, kappa):
    """The Shrinker, used again and again, against shrink and survival_of."""
    quick, weights = hazards.Shrinker(), hazards.as_hazards([kappa] * 46)
    prior = hazards.as_hazards([0.01 * (index + 1) for index in range(46)])
    chain = []
    for calls in keys:
        counts = hazards.Counts()
        for last, ended in calls:
            counts.learn(hazards.step_of(0, last, ended=ended), hazards.as_factor(0.9))
        chain.append((counts, weights))
        expected = hazards.survival_of(hazards.shrink(prior, chain))
        assert expected.tolist() == quick.survival(prior, chain).tolist()
    assert pytest.approx(0.01) == prior[0]
