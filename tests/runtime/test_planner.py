"""The planner on a manual clock, with a policy and an engine that write down what they are asked."""

from __future__ import annotations

import pytest

from agentkv.clock import ManualClock
from agentkv.core.forecast import Forecast
from agentkv.core.hint import ToolStatus
from agentkv.core.residency import Action, Decision, Move, Outcome, Receipt, Residency, Tier
from agentkv.engine.scripted import ScriptedEngine
from agentkv.hints.forecaster import Forecaster
from agentkv.runtime.planner import PERSON, PERSON_S, Planner


class RecordingEngine(ScriptedEngine):
    """A scripted engine that has one known session and remembers moves and expectations."""

    def __init__(self, *, known: str = "t#1") -> None:
        super().__init__([])
        self.known = known
        self.moves: list[Move] = []
        self.expected: list[tuple[str, float | None]] = []
        self.broken = False

    def residency(self, session: str) -> Residency | None:
        if self.broken:
            raise RuntimeError("lost the device")
        if session != self.known:
            return None
        return Residency(session=session, tokens=640, block_bytes=1024, total_blocks=40, device_blocks=40)

    def apply(self, move, on_receipt=None):
        self.moves.append(move)
        if on_receipt is not None:
            on_receipt(Receipt(move=move, outcome=Outcome.DONE, blocks=40))
        return True

    def expect(self, session, at_s, forecast=None, started_s=None):
        self.expected.append((session, at_s))


class AskEvery:
    """A policy that writes through at each question and wants to be asked again after `step_s`."""

    def __init__(self, step_s: float | None = 1.0) -> None:
        self.step_s = step_s
        self.asked: list[tuple[float, float, float]] = []

    def __call__(self, residency: Residency, forecast: Forecast, started_s: float, now_s: float) -> Decision:
        self.asked.append((started_s, now_s, forecast.quantile_s(0.5)))
        move = Move(session=residency.session, action=Action.WRITE, to=Tier.HOST, reason="test")
        return Decision(moves=(move,), ask_again_s=None if self.step_s is None else now_s + self.step_s)


@pytest.fixture
def parts():
    engine, policy, clock, receipts = RecordingEngine(), AskEvery(), ManualClock(100.0), []
    forecaster = Forecaster()
    planner = Planner(
        engine=engine, policy=policy, forecaster=forecaster, clock=clock, on_receipt=receipts.append, threaded=False
    )
    yield planner, engine, policy, clock, receipts, forecaster
    planner.close()


TEN = Forecast(remaining_s=(10.0,), n=5, source="history")
THIRTY = Forecast(remaining_s=(30.0,), n=5, source="history")


def test_the_first_decision_and_submission_happen_in_the_call(parts):
    """No thread hop lies between the tool's start and the moves."""
    planner, engine, policy, _, receipts, _ = parts
    planner.tool_started("t#1", "c1", "pytest", "", TEN)
    assert [(100.0, 100.0, 10.0)] == policy.asked
    assert [Action.WRITE] == [move.action for move in engine.moves]
    assert 1 == len(receipts)
    assert [("t#1", 110.0)] == engine.expected


def test_the_policy_is_asked_again_when_it_said_so_and_not_before(parts):
    """The heap wakes at the due time with the true elapsed time."""
    planner, _, policy, clock, _, _ = parts
    planner.tool_started("t#1", "c1", "pytest", "", TEN)
    clock.advance(0.9)
    assert planner.tick() == pytest.approx(0.1)
    assert 1 == len(policy.asked)
    clock.advance(0.2)
    planner.tick()
    assert (100.0, 101.1, 10.0) == pytest.approx(policy.asked[-1])


def test_after_the_end_of_the_tool_nothing_is_asked(parts):
    """A due time of a wait that is over is void."""
    planner, _, policy, clock, _, _ = parts
    planner.tool_started("t#1", "c1", "pytest", "", TEN)
    planner.tool_ended("t#1", "c1")
    planner.turn_started("t#1")
    clock.advance(60)
    assert planner.tick() is None
    assert 1 == len(policy.asked)


def test_parallel_calls_wait_for_the_last_of_them(parts):
    """Two tools of 10 and 30 s are one wait of 30 s; when the long one ends early the short one counts."""
    planner, _, policy, clock, _, _ = parts
    planner.tool_started("t#1", "c1", "pytest", "", TEN)
    planner.tool_started("t#1", "c2", "build", "", THIRTY)
    assert 30.0 == policy.asked[-1][2]
    clock.advance(4)
    planner.tool_ended("t#1", "c2")
    assert 6.0 == policy.asked[-1][2]


def test_progress_replaces_the_forecast(parts):
    """A tool that says how far it is knows better than history."""
    planner, _, policy, clock, _, _ = parts
    planner.tool_started("t#1", "c1", "pytest", "", TEN)
    clock.advance(4)
    planner.tool_progressed("t#1", "c1", THIRTY)
    assert (104.0, 104.0, 26.0) == policy.asked[-1]


def test_silence_becomes_a_wait_on_a_person_and_is_learnt(parts):
    """A finished run leaves KV that waits for a human turn, under its own name."""
    planner, _, policy, clock, _, forecaster = parts
    planner.turn_ended("t#1")
    assert planner.tick() == pytest.approx(2.0)
    assert [] == policy.asked
    clock.advance(2.5)
    planner.tick()
    assert 1 == len(policy.asked)
    clock.advance(57.5)
    assert policy.asked[0][2] == pytest.approx(PERSON_S - 2.5)
    before = forecaster.forecast(PERSON, "").n
    planner.turn_started("t#1")
    assert before + 1 == forecaster.forecast(PERSON, "").n
    assert forecaster.forecast(PERSON, "").quantile_s(0.5) == pytest.approx(
        60.0, rel=0.3
    )  # one sample does not say it all


def test_many_short_calls_leave_one_entry_and_silence_counts_from_the_last(parts):
    """The thread that waits for silence is not woken once for every call; the person's wait begins when all was quiet."""
    planner, _, policy, clock, _, _ = parts
    policy.step_s = None
    for number in range(50):
        planner.tool_started("t#1", f"c{number}", "ls", "", TEN)
        planner.tool_ended("t#1", f"c{number}")
        clock.advance(0.1)
    assert 1 == len(planner._heap)
    asked = len(policy.asked)
    clock.advance(1.7)
    assert planner.tick() == pytest.approx(0.2)
    assert asked == len(policy.asked)
    clock.advance(0.25)
    planner.tick()
    assert asked + 1 == len(policy.asked)
    assert policy.asked[-1][2] == pytest.approx(PERSON_S - 2.05)


def test_an_unknown_session_and_a_finish_without_a_start_are_no_ops(parts):
    """Hints about sessions that nobody knows cost nothing."""
    planner, engine, policy, _, _, _ = parts
    planner.tool_started("other#1", "c1", "pytest", "", TEN)
    planner.tool_ended("t#1", "never-started")
    planner.forget(["nobody"])
    assert [] == policy.asked
    assert [] == engine.moves


def test_an_engine_that_fails_is_counted_and_never_raises(parts):
    """The flow of hints may not break the agent."""
    planner, engine, _, _, _, _ = parts
    engine.broken = True
    planner.tool_started("t#1", "c1", "pytest", "", TEN)
    planner.tool_ended("t#1", "c1")


def test_a_paused_wait_goes_on_as_a_wait_for_a_person(parts):
    """An interrupt inside a tool ends the tool's wait; the session then waits for whoever was asked."""
    planner, _, policy, clock, _, forecaster = parts
    planner.tool_started("t#1", "c1", "ask", "", TEN)
    forecaster.learn("ask", "", 0.1, ToolStatus.PAUSED)
    planner.tool_ended("t#1", "c1")
    clock.advance(3)
    planner.tick()
    assert 2 == len(policy.asked)
