"""Reach and the ends of sessions: one that could not be told is told when the engine answers, so that nothing stays behind."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from recorder import end, hint, until

from agentkv.adapters.base import Outcome
from agentkv.core.hint import HintKind
from agentkv.runtime import reach as reach_module


def away(reach, recorder):
    """Three failures, and the engine counts as away."""
    recorder.outcome = Outcome.FAILED
    for name in range(3):
        reach.tell(hint(f"fails {name}"))
    until(lambda: reach.stats()["away"])
    recorder.outcome = Outcome.APPLIED


def test_sessions_that_end_while_the_engine_is_away_are_told_when_it_is_back(reach, recorder, clock):
    """By itself, in order, each once; nothing else needs to happen."""
    away(reach, recorder)
    for name in "abc":
        reach.tell(end(name))
    until(lambda: len(reach.receipts()) == 6)
    assert "the engine is away; it is told again" == reach.receipts()[-1].detail
    clock.advance(1.1)
    until(lambda: len(reach.receipts()) == 9)
    assert ["end a", "end b", "end c"] == recorder.told[3:]
    assert not reach.stats()["away"]
    assert 1 == recorder.resets


def test_the_end_that_itself_finds_nobody_is_told_again(reach, recorder, clock):
    """One failure is no engine that is away, and no next hint may ever come."""
    recorder.outcome = Outcome.FAILED
    reach.tell(end("a"))
    until(lambda: len(reach.receipts()) == 1)
    recorder.outcome = Outcome.APPLIED
    clock.advance(1.1)
    until(lambda: len(reach.receipts()) == 2)
    assert ["end a"] * 2 == recorder.told


def test_the_next_success_tells_what_is_owed_at_once(reach, recorder):
    """The clock stands still: not the time that passes but the answer does it."""
    recorder.outcome = Outcome.FAILED
    reach.tell(end("a"))
    until(lambda: len(reach.receipts()) == 1)
    recorder.outcome = Outcome.APPLIED
    reach.tell(hint("works"))
    until(lambda: recorder.told == ["end a", "works", "end a"])


def test_an_end_is_not_told_of_a_session_that_lives_again(reach, recorder, clock):
    """Its next call came first."""
    away(reach, recorder)
    reach.tell(end("a"))
    reach.tell(end("b"))
    reach.tell(hint("turn", HintKind.TURN_START, "a"))
    until(lambda: len(reach.receipts()) == 6)
    clock.advance(1.1)
    until(lambda: "end b" in recorder.told)
    assert "end a" not in recorder.told


def test_an_end_that_gave_way_in_a_full_queue_is_told_too(reach, recorder, clock):
    """A queue full of ends loses none."""
    recorder.gate.clear()
    reach.tell(hint("first"))
    until(lambda: reach.stats()["queued"] == 0)
    names = [str(name) for name in range(reach_module.MOST_QUEUED + 20)]
    for name in names:
        reach.tell(end(name))
    recorder.gate.set()
    until(lambda: reach.stats()["queued"] == 0)
    clock.advance(1.1)
    until(lambda: len(recorder.told) == len(names) + 1)
    assert {f"end {name}" for name in names} == set(recorder.told) - {"first"}


def test_ends_that_wait_are_bounded(reach, recorder, clock, monkeypatch):
    """The oldest gives way."""
    monkeypatch.setattr(reach_module, "MOST_ENDS", 5)
    away(reach, recorder)
    for name in range(9):
        reach.tell(end(str(name)))
    until(lambda: len(reach.receipts()) == 12)
    clock.advance(1.1)
    until(lambda: len(recorder.told) == 8)
    assert [f"end {name}" for name in range(4, 9)] == recorder.told[3:]


def test_an_end_that_always_fails_is_given_up_and_keeps_nobody_from_the_engine(reach, recorder, clock):
    """An engine that answers others is not away."""
    recorder.ends_fail = True
    reach.tell(end("a"))
    for step in range(300):
        reach.tell(hint(step))
        until(lambda step=step: str(step) in recorder.told)
        clock.advance(1.0)
    assert not reach.stats()["away"]
    assert 300 == reach.stats()["applied"]
    assert 3 <= recorder.told.count("end a") <= 8


@pytest.mark.parametrize("error", [ValueError("nonsense"), RecursionError()])
def test_an_end_that_breaks_the_adapter_is_not_told_again(reach, recorder, clock, error):
    """It would break it again."""
    recorder.error = error
    reach.tell(end("a"))
    until(lambda: len(reach.receipts()) == 1)
    recorder.error = None
    reach.tell(hint("next"))
    clock.advance(5.0)
    reach.tell(hint("and next"))
    until(lambda: "and next" in recorder.told)
    assert 1 == recorder.told.count("end a")


def test_closing_tells_the_ends_that_are_owed(reach, recorder):
    """An engine that is away is asked once more, now."""
    away(reach, recorder)
    for name in "ab":
        reach.tell(end(name))
    until(lambda: len(reach.receipts()) == 5)
    reach.close()
    assert ["end a", "end b"] == recorder.told[3:]


def test_closing_does_not_try_every_end_on_an_engine_that_is_still_away(reach, recorder):
    """One says it for all."""
    away(reach, recorder)
    recorder.outcome = Outcome.FAILED
    for name in range(50):
        reach.tell(end(str(name)))
    until(lambda: len(reach.receipts()) == 53)
    reach.close()
    assert 4 == len(recorder.told)
