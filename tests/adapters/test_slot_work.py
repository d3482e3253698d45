"""A slot action that is never answered costs its own session a receipt; everybody else goes on, and the slot is learned again."""

from __future__ import annotations

import time

import pytest

from agentkv.adapters.base import Outcome
from agentkv.adapters.llamacpp import LlamaCpp
from agentkv.clock import SystemClock
from agentkv.core.forecast import Forecast
from agentkv.core.hint import Hint, HintKind, ToolFacts

QUICK_S = 8.0
"""Anything that waits for no action takes less than this, on a loaded machine too; an action that hangs has longer."""
HANGS_S = 60.0
SOON_S = 0.2


@pytest.fixture
def bounds(monkeypatch):
    """How long things may take, set while a test goes on: what hangs is waited for shortly, what is answered is not hurried."""

    def put(**seconds):
        for name, value_s in seconds.items():
            monkeypatch.setattr(f"agentkv.adapters.llamacpp.{name}", value_s)

    put(ACTION_S=HANGS_S, CALL_S=QUICK_S, TOGETHER_S=QUICK_S)
    monkeypatch.setattr("agentkv.adapters.slot_work.FIRST_LOOK_S", 0.05)
    return put


@pytest.fixture
def adapter(llama, bounds):
    made = LlamaCpp(llama.url, clock=SystemClock(), room_s=HANGS_S)
    yield made
    llama.goes_on.set()
    bounds(CLOSE_S=0.1)
    made.close()


def tell(adapter, kind, session, wait_s=20.0):
    call = ToolFacts(call_id="c", tool="pytest") if kind.startswith("tool") else None
    wait = Forecast(remaining_s=(wait_s,), n=9, source="history") if kind == "tool_start" else None
    hint = Hint(id="h", kind=HintKind(kind), at_s=0.0, ts_ms=0, task=session, session=session, call=call, wait=wait)
    return adapter.deliver(hint, 5.0)


def deeds_until(adapter, found, most_s=10.0):
    """Receipts of deeds, until `found` of them is true."""
    deeds, ends_s = [], time.monotonic() + most_s
    while not found(deeds):
        assert time.monotonic() < ends_s, deeds
        deeds += adapter.tick()[0]
        time.sleep(0.01)
    return deeds


def failed(deeds):
    return [(deed.kind, deed.session) for deed in deeds if deed.outcome is Outcome.FAILED]


def hangs(adapter, llama, bounds, *sessions, gives_up_s=HANGS_S):
    """The saves of these sessions, in slots 0, 1, ..., are asked for and not answered."""
    llama.hung = {("save", slot) for slot in range(len(sessions))}
    bounds(TOGETHER_S=SOON_S, ACTION_S=gives_up_s)
    told = [tell(adapter, "tool_start", session) for session in sessions]
    while len([deed for deed, *_ in llama.deeds if deed == "save"]) < len(sessions):
        time.sleep(0.01)
    bounds(TOGETHER_S=QUICK_S, ACTION_S=HANGS_S)
    return told


def test_hints_of_others_do_not_wait_for_an_action_that_hangs(adapter, llama, bounds):
    """Each is delivered at once, also while the hanging one has a minute."""
    llama.turn(adapter, "a")
    llama.turn(adapter, "b")
    (first,) = hangs(adapter, llama, bounds, "a")
    assert Outcome.ADVISORY is first.outcome
    assert "under way: save slot 0" in first.detail
    began_s = time.monotonic()
    assert Outcome.APPLIED is tell(adapter, "tool_start", "b").outcome
    tell(adapter, "tool_end", "b")
    bounds(TOGETHER_S=SOON_S)
    tell(adapter, "tool_end", "a")
    assert time.monotonic() - began_s < QUICK_S


def test_an_action_that_hangs_costs_its_own_session_a_receipt(adapter, llama, bounds):
    """And nobody else, whatever is done meanwhile."""
    llama.turn(adapter, "a")
    llama.turn(adapter, "b")
    hangs(adapter, llama, bounds, "a", gives_up_s=0.6)
    tell(adapter, "tool_start", "b")
    tell(adapter, "tool_end", "b")
    assert [("save", "a")] == failed(deeds_until(adapter, failed))
    adapter._pool.check()


def test_calls_of_others_do_not_wait_for_an_action_that_hangs(adapter, llama, bounds):
    """They have the other slot, at once and again and again."""
    llama.turn(adapter, "a")
    llama.turn(adapter, "b")
    hangs(adapter, llama, bounds, "a")
    began_s = time.monotonic()
    for _ in range(3):
        assert {"id_slot": 1} == llama.turn(adapter, "b")
    assert time.monotonic() - began_s < QUICK_S


def test_the_session_whose_restore_hangs_calls_without_its_slot(adapter, llama, bounds):
    """After a small bound, and at once the next time; the server computes its context wherever it likes."""
    llama.turn(adapter, "a")
    llama.turn(adapter, "b")
    tell(adapter, "tool_start", "a")
    llama.turn(adapter, "c")
    llama.hung = {("restore", 0), ("restore", 1)}
    bounds(CALL_S=SOON_S, ACTION_S=0.6)
    began_s = time.monotonic()
    assert {} == adapter.fields("a")
    assert {} == adapter.fields("a")
    assert time.monotonic() - began_s < QUICK_S
    deeds_until(adapter, lambda deeds: ("restore", "a") in failed(deeds))
    assert "" == adapter._pool.sessions["a"].file


def test_a_slot_of_which_nobody_knows_what_it_holds_is_erased_before_it_is_used(adapter, llama, bounds):
    """Once the server answers for it: never restored into blindly."""
    llama.turn(adapter, "a", 1111)
    llama.turn(adapter, "b")
    hangs(adapter, llama, bounds, "a", gives_up_s=0.6)
    deeds_until(adapter, failed)
    llama.hung = set()
    llama.goes_on.set()
    deeds = deeds_until(adapter, lambda deeds: any(deed.kind == "erase" for deed in deeds))
    assert Outcome.APPLIED is deeds[-1].outcome
    assert 0 == llama.slots[0]
    assert {"id_slot": 0} == llama.turn(adapter, "c")
    assert ["save", "erase"] == [deed for deed, slot, _ in llama.deeds if slot == 0]


def test_a_slot_that_computes_is_not_learned_again(adapter, llama, bounds):
    """Its action may still be queued behind what it computes."""
    processing = [True]
    llama.turn(adapter, "a")
    llama.turn(adapter, "b")
    llama.routes["GET /slots"] = lambda _: (200, [{"id": slot, "is_processing": processing[0]} for slot in llama.slots])
    hangs(adapter, llama, bounds, "a", gives_up_s=0.6)
    deeds_until(adapter, failed)
    asked = len(llama.asked)
    while len([one for one in llama.asked[asked:] if one.path == "/slots"]) < 2:
        time.sleep(0.01)
    assert [] == adapter._pool.free_slots()
    processing[0] = False
    deeds_until(adapter, lambda deeds: any(deed.kind == "erase" for deed in deeds))
    assert [0] == adapter._pool.free_slots()


def test_with_every_slot_hanging_calls_go_without_one(adapter, llama, bounds):
    """They do not wait for room as they do while others compute."""
    llama.turn(adapter, "a")
    llama.turn(adapter, "b")
    hangs(adapter, llama, bounds, "a", "b")
    bounds(CALL_S=SOON_S)
    began_s = time.monotonic()
    assert {} == adapter.fields("c")
    assert time.monotonic() - began_s < QUICK_S


def test_the_end_of_a_session_that_moves_leaves_nothing_behind(adapter, llama, bounds):
    """It is erased when what it waits for has been answered."""
    llama.turn(adapter, "a", 1111)
    llama.turn(adapter, "b")
    hangs(adapter, llama, bounds, "a")
    bounds(TOGETHER_S=SOON_S)
    tell(adapter, "session_end", "a")
    llama.goes_on.set()
    deeds_until(adapter, lambda deeds: [d.kind for d in deeds if d.session == "a"] == ["save", "erase", "save"])
    assert 0 == llama.slots[0]
    assert {0} == set(llama.files.values())


def test_closing_does_not_wait_for_what_hangs(adapter, llama, bounds):
    """A moment for what is nearly done, and no more."""
    llama.turn(adapter, "a")
    llama.turn(adapter, "b")
    hangs(adapter, llama, bounds, "a")
    began_s = time.monotonic()
    adapter.close()
    assert time.monotonic() - began_s < QUICK_S


def test_a_call_does_not_ask_again_what_was_just_asked_in_vain(adapter, llama, monkeypatch):
    """A server that hangs costs the first call a moment, and the next ones nothing."""
    monkeypatch.setattr("agentkv.adapters.llamacpp.CONNECT_S", 0.2)
    llama.fault = "hang"
    assert {} == adapter.fields("a")
    asked = len(llama.asked)
    assert {} == adapter.fields("b")
    assert asked == len(llama.asked)
    llama.fault = ""
    tell(adapter, "tool_start", "a")
    assert {"id_slot": 0} == adapter.fields("a")


def test_a_server_that_came_back_with_fewer_slots_is_counted_again(adapter, llama):
    """No call is sent to a slot that there is not."""
    llama.turn(adapter, "a")
    llama.turn(adapter, "b")
    llama.slots = {0: 0}
    adapter.reset()
    assert {"id_slot": 0} == llama.turn(adapter, "b")
    assert 1 == adapter._pool.slots
