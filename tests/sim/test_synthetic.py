"""The generator: its marginals are the published ones, and the same seed gives the same trace."""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import pairwise

import pytest

from agentkv.errors import ConfigError
from agentkv.sim.mix import COMMANDS
from agentkv.sim.synthetic import requests, synthetic


@pytest.fixture(scope="module")
def steps():
    """Waits of a large trace, parallel calls as one."""
    return [wait for session in synthetic(sessions=1200).sessions for wait in session]


@pytest.fixture(scope="module")
def calls():
    """Single tool calls of a large trace."""
    return [wait for wait in synthetic(sessions=1200).waits() if wait.kind == "tool"]


def quantile(values, p):
    ordered = sorted(values)
    return ordered[int(p * len(ordered))]


def spread_of_log(calls, key):
    groups = defaultdict(list)
    for call in calls:
        groups[key(call)].append(math.log(call.duration_s))
    squares = 0.0
    for group in groups.values():
        mean = sum(group) / len(group)
        squares += sum((x - mean) ** 2 for x in group)
    return math.sqrt(squares / len(calls))


def test_the_same_seed_gives_the_same_trace_and_another_another():
    """A benchmark can be run again."""
    assert synthetic(seed=1, sessions=9) == synthetic(seed=1, sessions=9)
    assert synthetic(seed=1, sessions=9).sessions != synthetic(seed=2, sessions=9).sessions
    assert requests(seed=1, sessions=9) == requests(seed=1, sessions=9)


def test_more_sessions_begin_with_the_same_ones():
    """Each session has its own random numbers."""
    assert synthetic(seed=4, sessions=3).sessions == synthetic(seed=4, sessions=8).sessions[:3]


def test_the_shares_of_tools_add_up():
    """To one."""
    assert 1 == pytest.approx(sum(command.share for command in COMMANDS))


def test_calls_have_the_published_lengths(calls):
    """TraceLab: 60.9 % below 1 s, 27.3 % to 10 s, 7.8 % to 60 s, 4.0 % above, which hold 84.7 % of the time."""
    lengths = [call.duration_s for call in calls]
    edges = (0, 1, 10, 60, math.inf)
    shares = [sum(low <= x < high for x in lengths) / len(lengths) for low, high in pairwise(edges)]
    assert [0.609, 0.273, 0.078, 0.040] == pytest.approx(shares, abs=0.035)
    assert 0.847 == pytest.approx(sum(x for x in lengths if x > 60) / sum(lengths), abs=0.13)


@pytest.mark.parametrize(
    ("tool", "command", "published"),
    [
        ("read", "", (0.03, 0.11, 0.4)),
        ("edit", "", (0.03, 0.07, 0.11)),
        ("grep", "", (0.05, 0.13, 0.14)),
        ("agent", "", (62, 98, 192)),
        ("bash", "pytest", (1.7, 9.6, 92)),
        ("bash", "pip install", (1.8, 6.8, 40)),
        ("bash", "git diff", (0.1, 0.17, 0.23)),
    ],
)
def test_a_tool_has_its_published_quantiles(calls, tool, command, published):
    """P50 within 20 %, P90 and P99 within 40 % (sessions differ, and a session's calls are alike)."""
    lengths = [call.duration_s for call in calls if (call.tool, call.command) == (tool, command)]
    found = [quantile(lengths, p) for p in (0.5, 0.9, 0.99)]
    assert published[0] == pytest.approx(found[0], rel=0.2)
    assert published[1:] == pytest.approx(found[1:], rel=0.4)


def test_people_take_as_long_as_published(steps):
    """P50 127 s, P90 1,540 s, 13 % of the waits."""
    lengths = [wait.duration_s for wait in steps if wait.kind == "human"]
    assert 127 == pytest.approx(quantile(lengths, 0.5), rel=0.15)
    assert 1540 == pytest.approx(quantile(lengths, 0.9), rel=0.25)
    assert 0.134 == pytest.approx(len(lengths) / len(steps), abs=0.01)


def test_contexts_grow_and_are_compacted_as_published(steps):
    """Context P5 / P50 / P95 of 30K / 103K / 298K, 713 new tokens, reuse P50 99 %, P5 88 %, P1 17 %."""
    contexts = [wait.prompt_tokens for wait in steps]
    assert [30_000, 103_000, 298_000] == pytest.approx([quantile(contexts, p) for p in (0.05, 0.5, 0.95)], rel=0.25)
    assert 713 == pytest.approx(quantile([w.next_prompt_tokens - w.reuse_tokens for w in steps], 0.5), rel=0.1)
    reuse = [wait.reuse_tokens / wait.next_prompt_tokens for wait in steps]
    assert [0.175, 0.884, 0.993] == pytest.approx([quantile(reuse, p) for p in (0.01, 0.05, 0.5)], abs=0.06)
    compactions = sum(wait.next_prompt_tokens < 0.6 * wait.prompt_tokens for wait in steps)
    assert 0.002 < compactions / len(steps) < 0.015


def test_what_is_called_tells_how_long_it_takes(calls):
    """Spread of ln(duration): overall > within a tool > a command > a session's command, at the measured ratio."""
    overall = spread_of_log(calls, lambda call: 0)
    tool = spread_of_log(calls, lambda call: call.tool)
    command = spread_of_log(calls, lambda call: (call.tool, call.command))
    own = spread_of_log(calls, lambda call: (call.session, call.tool, call.command))
    assert 2.30 == pytest.approx(overall, abs=0.3)
    assert 1.37 == pytest.approx(tool, abs=0.2)
    assert command < 0.8 * tool
    assert 0.41 / 0.69 == pytest.approx(own / command, abs=0.1)


def test_time_outs_are_spikes_of_censored_calls(calls):
    """A call that would have taken longer is cut at exactly its time-out, and says so; no other is."""
    for call in calls:
        assert (call.timeout_s is not None and call.duration_s >= call.timeout_s) == call.censored
    spikes = {call.duration_s for call in calls if call.censored}
    assert {30.0, 120.0} == spikes


def test_a_wait_for_parallel_calls_is_for_the_last(steps):
    """And carries them all."""
    together = [wait for wait in steps if wait.parallel > 1]
    assert 0.08 < len(together) / len(steps) < 0.14
    for wait in together:
        assert wait.parallel == len(wait.calls)
        assert wait.duration_s == max(call.duration_s for call in wait.calls)
        assert {wait.start_s} == {call.start_s for call in wait.calls}


def test_a_session_holds_together(steps):
    """Each prompt is the one announced; each wait begins when the model call after the last wait has ended."""
    sessions = synthetic(seed=7, sessions=30).sessions
    for session in sessions:
        for before, after in pairwise(session):
            assert before.next_prompt_tokens == after.prompt_tokens
            assert after.start_s == pytest.approx(before.start_s + before.duration_s + after.llm_s, abs=1e-3)
            assert before.reuse_tokens <= min(before.prompt_tokens, before.next_prompt_tokens)


def test_waits_can_be_left_out():
    """Only tools, only people, a fixed number of steps."""
    assert {"tool"} == {wait.kind for wait in synthetic(humans=False, sessions=20).waits()}
    assert {"human"} == {wait.kind for wait in synthetic(tools=False, sessions=20).waits()}
    assert {5} == {len(session) for session in synthetic(sessions=20, steps=5).sessions}


def test_arrivals_have_the_rate_that_was_asked_for():
    """Poisson: the mean gap is 1 / rate, its deviation equal to it; a burst keeps the rate and raises the deviation."""
    for burst in (1.0, 5.0):
        arrivals = requests(sessions=8000, arrivals_per_s=4.0, burst=burst).arrivals_s
        gaps = [b - a for a, b in pairwise(arrivals)]
        mean = sum(gaps) / len(gaps)
        deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
        assert 0.25 == pytest.approx(mean, rel=0.1)
        assert math.sqrt(2 * burst - 1) == pytest.approx(deviation / mean, rel=0.1)


def test_chat_requests_have_the_published_mean_lengths():
    """Mooncake's conversation trace: 12,000 tokens in, 343 out, on average; each session ends with its last request."""
    trace = requests(sessions=4000)
    every = [wait for session in trace.sessions for wait in session]
    assert 12_000 == pytest.approx(sum(wait.prompt_tokens for wait in every) / len(every), rel=0.15)
    assert 343 == pytest.approx(sum(wait.output_tokens for wait in every) / len(every), rel=0.15)
    assert all(session[-1].ends for session in trace.sessions)


@pytest.mark.parametrize(
    "options",
    [
        {"sessions": -1},
        {"steps": 0},
        {"tools": False, "humans": False},
        {"arrivals_per_s": 0},
        {"arrivals_per_s": math.inf},
    ],
)
def test_what_describes_no_trace_is_refused(options):
    """With the numbers."""
    with pytest.raises(ConfigError):
        synthetic(**options)


@pytest.mark.parametrize("options", [{"arrivals_per_s": 0}, {"burst": 0.5}, {"sessions": -1}, {"prompt_tokens": 0}])
def test_what_describes_no_load_is_refused(options):
    """Likewise."""
    with pytest.raises(ConfigError):
        requests(**options)
