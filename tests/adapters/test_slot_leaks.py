"""Calls whose end nobody tells: a client that vanished must not keep its slot for ever."""

from __future__ import annotations

import threading
import time

import pytest

from agentkv.adapters import slot_work
from agentkv.adapters.llamacpp import LlamaCpp
from agentkv.clock import SystemClock
from agentkv.core.hint import Hint, HintKind

LONG_S = 60.0


@pytest.fixture
def computes(llama, monkeypatch):
    """Which slots the server says that it computes; what is overdue is so at once."""
    told = dict.fromkeys(llama.slots, False)
    llama.routes["GET /slots"] = lambda _: (200, [{"id": slot, "is_processing": one} for slot, one in told.items()])
    monkeypatch.setattr(slot_work, "LEAK_S", 0.0)
    monkeypatch.setattr(slot_work, "LEAK_LOOK_S", 0.05)
    monkeypatch.setattr("agentkv.adapters.llamacpp._LOOK_S", 0.05)
    return told


@pytest.fixture
def adapter(llama):
    made = LlamaCpp(llama.url, clock=SystemClock(), room_s=LONG_S)
    yield made
    made.close()


def looks(llama):
    return sum(asked.path == "/slots" for asked in llama.asked)


def until(condition, most_s=30.0):
    ends_s = time.monotonic() + most_s
    while not condition():
        assert time.monotonic() < ends_s
        time.sleep(0.01)


def called(adapter, session):
    """A call that asks for its slot on a thread of its own; what it was given, once it was."""
    found = []
    threading.Thread(target=lambda: found.append(adapter.fields(session)), daemon=True).start()
    return found


def test_a_slot_whose_client_vanished_is_given_to_a_call_that_waits(adapter, llama, computes):
    """The server says that it computes nothing there."""
    adapter.fields("a")
    adapter.fields("b")
    computes[0] = True
    found = called(adapter, "c")
    until(lambda: found)
    assert [{"id_slot": 1}] == found
    assert adapter._pool.sessions["a"].busy
    assert not adapter._pool.sessions["b"].sure


@pytest.mark.parametrize("word", [True, 1, None, "false", "missing"])
def test_a_slot_that_computes_or_of_which_nobody_says_it_is_left(adapter, llama, computes, word):
    """Only a plain no gives it back."""
    adapter.fields("a")
    adapter.fields("b")
    for slot in computes:
        computes[slot] = word
    if word == "missing":
        llama.routes["GET /slots"] = lambda _: (200, [{"id": slot} for slot in llama.slots])
    before = looks(llama)
    found = called(adapter, "c")
    until(lambda: looks(llama) >= before + 4)
    assert [] == found
    assert all(held.busy for held in adapter._pool.sessions.values())


def test_a_slot_that_is_idle_for_a_moment_is_left(adapter, llama, computes):
    """A client that tries again computes at the second look."""
    words = iter([False, True] * 500)

    def told(_):
        word = next(words)
        return 200, [{"id": slot, "is_processing": word} for slot in llama.slots]

    adapter.fields("a")
    adapter.fields("b")
    llama.routes["GET /slots"] = told
    before = looks(llama)
    found = called(adapter, "c")
    until(lambda: looks(llama) >= before + 8)
    assert [] == found


def test_a_session_whose_client_vanished_has_its_slot_again(adapter, llama, computes):
    """Its next call goes without one and disturbs nobody for longer than that."""
    adapter.fields("a")
    assert {} == adapter.fields("a")
    until(lambda: not adapter._pool.sessions["a"].busy)
    assert {"id_slot": 0} == adapter.fields("a")


def test_a_session_that_is_over_does_not_linger_in_a_call_that_nobody_ends(adapter, llama, computes):
    """Nobody waits for its slot, and it is erased all the same."""
    llama.turn(adapter, "a", 1111)
    adapter.fields("a")
    adapter.deliver(Hint(id="h", kind=HintKind.SESSION_END, at_s=0.0, ts_ms=0, task="a", session="a"), 5.0)
    assert adapter._pool.sessions
    assert adapter.tick()[1] is not None  # Reach will ask again
    until(lambda: not adapter._pool.sessions)
    until(lambda: llama.slots[0] == 0)


def test_nothing_is_asked_while_calls_are_young(adapter, llama, computes, monkeypatch):
    """Or while nobody wants a slot."""
    adapter.fields("a")
    adapter.tick()
    adapter.fields("b")
    before = looks(llama)
    monkeypatch.setattr(slot_work, "LEAK_S", LONG_S)
    found = called(adapter, "c")
    time.sleep(0.3)
    assert (before, []) == (looks(llama), found)
