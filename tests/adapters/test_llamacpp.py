"""LlamaCpp against a server that keeps slots and files as the real one does: hints, calls, faults, restarts."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from recorder import until

from agentkv.adapters.base import Outcome
from agentkv.adapters.llamacpp import LlamaCpp
from agentkv.clock import ManualClock
from agentkv.core.forecast import Forecast
from agentkv.core.hint import Hint, HintKind, ToolFacts
from agentkv.runtime.reach import Reach


@pytest.fixture
def adapter(llama):
    made = LlamaCpp(llama.url, clock=ManualClock(100.0), room_s=5.0)
    yield made
    made.close()


def hint(kind, session, *, wait_s=(10.0, 20.0, 30.0), call_id="c"):
    call = wait = None
    if kind.startswith("tool"):
        call = ToolFacts(call_id=call_id, tool="pytest")
        wait = Forecast(remaining_s=wait_s, n=3, source="history") if "start" in kind or "update" in kind else None
    return Hint(id="h", kind=HintKind(kind), at_s=0.0, ts_ms=0, task=session, session=session, call=call, wait=wait)


def tell(adapter, *args, **options):
    return adapter.deliver(hint(*args, **options), 1.0)


def test_each_session_is_routed_to_its_own_slot(adapter, llama):
    """And comes back to it."""
    assert {"id_slot": 0} == llama.turn(adapter, "a")
    assert {"id_slot": 1} == llama.turn(adapter, "b")
    assert {"id_slot": 0} == llama.turn(adapter, "a")
    assert [] == llama.deeds


def test_with_a_free_slot_nothing_moves(adapter, llama):
    """A move needs a reason."""
    llama.turn(adapter, "a")
    assert Outcome.ADVISORY is tell(adapter, "tool_start", "a").outcome
    assert [] == llama.deeds


def test_a_waiting_context_is_written_ahead_when_slots_are_short(adapter, llama):
    """So that it can give way at once; the next session finds the slot without a copy."""
    llama.turn(adapter, "a")
    llama.turn(adapter, "b")
    assert Outcome.APPLIED is tell(adapter, "tool_start", "a").outcome
    assert [("save", 0)] == [deed[:2] for deed in llama.deeds]
    assert {"id_slot": 0} == llama.turn(adapter, "c")
    assert 1 == len(llama.deeds)


def test_a_context_that_gave_way_is_back_before_its_next_call(adapter, llama):
    """The call goes to the slot that the file was restored into, and its tokens are there."""
    llama.turn(adapter, "a", 1111)
    llama.turn(adapter, "b")
    tell(adapter, "tool_start", "a")
    llama.turn(adapter, "c", 333)
    tell(adapter, "tool_start", "c", wait_s=(500.0,))
    slot = adapter.fields("a")["id_slot"]
    assert 1111 == llama.slots[slot]


def test_it_is_restored_ahead_when_a_slot_is_free(adapter, llama):
    """The policy asks again in time, and the tick brings the context back without a call."""
    llama.turn(adapter, "a", 1111)
    llama.turn(adapter, "b")
    tell(adapter, "tool_start", "a")
    llama.turn(adapter, "c")
    tell(adapter, "session_end", "c")
    adapter._clock.advance(40.0)
    deeds, _ = adapter.tick()
    assert ("restore", Outcome.APPLIED) in [(deed.kind, deed.outcome) for deed in deeds]
    assert 1111 == llama.slots[0]


def test_the_end_of_a_tool_brings_the_context_back(adapter, llama):
    """Its call will come at once; whoever is due later gives way."""
    llama.turn(adapter, "a", 1111)
    llama.turn(adapter, "b")
    tell(adapter, "tool_start", "a")
    llama.turn(adapter, "c")
    tell(adapter, "tool_start", "c", wait_s=(500.0,))
    assert Outcome.APPLIED is tell(adapter, "tool_end", "a").outcome
    assert 1111 in llama.slots.values()


def test_a_context_waits_for_the_last_of_its_tools(adapter, llama):
    """The end of one of two is no end of the wait."""
    llama.turn(adapter, "a")
    llama.turn(adapter, "b")
    tell(adapter, "tool_start", "a", call_id="1")
    tell(adapter, "tool_start", "a", call_id="2", wait_s=(60.0,))
    llama.turn(adapter, "c")
    tell(adapter, "tool_start", "c", wait_s=(500.0,))
    assert "restore" not in tell(adapter, "tool_end", "a", call_id="1").detail
    assert "restore" in tell(adapter, "tool_end", "a", call_id="2").detail


def test_a_call_ends_every_wait_of_its_session(adapter, llama):
    """Where the end of a tool was too late to be told, nothing is planned any more for a wait that is over."""
    llama.turn(adapter, "a")
    llama.turn(adapter, "b")
    tell(adapter, "tool_start", "a")
    llama.turn(adapter, "a")
    llama.deeds.clear()
    adapter._clock.advance(1000.0)
    adapter.tick()
    assert [] == llama.deeds


def test_the_end_of_a_session_leaves_nothing_behind(adapter, llama):
    """Slot and file are empty afterwards."""
    llama.turn(adapter, "a", 1111)
    llama.turn(adapter, "b")
    tell(adapter, "tool_start", "a")
    assert 1111 in llama.files.values()
    assert Outcome.APPLIED is tell(adapter, "session_end", "a").outcome
    assert 0 == llama.slots[0]
    assert [0] == list(llama.files.values())


def test_a_call_waits_until_a_slot_is_idle(adapter, llama):
    """With every slot computing, the third call goes when the first ends, and meanwhile nothing is asked of busy slots."""
    adapter.fields("a")
    adapter.fields("b")
    found = []
    thread = threading.Thread(target=lambda: found.append(adapter.fields("c")))
    thread.start()
    thread.join(0.1)
    assert [] == found
    adapter.ended("a", tokens=10, cached_tokens=0)
    thread.join(5)
    assert [{"id_slot": 0}] == found
    assert [("save", 0)] == [deed[:2] for deed in llama.deeds]


@pytest.mark.parametrize("waits_for", ["a slot", "a deed"])
def test_a_call_waits_no_longer_than_its_own_time_out(llama, monkeypatch, waits_for):
    """Then it goes without a slot, and leaves nothing taken."""
    monkeypatch.setattr("agentkv.adapters.llamacpp.CALL_S", 60.0)
    adapter = LlamaCpp(llama.url, clock=ManualClock(100.0), room_s=60.0)
    adapter.fields("a")
    adapter.fields("b")
    if waits_for == "a deed":
        adapter.ended("b", tokens=10, cached_tokens=0)
        llama.hung.add(("save", 1))
    began_s = time.monotonic()
    assert {} == adapter.fields("c", within_s=0.2)
    assert time.monotonic() - began_s < 20
    llama.goes_on.set()
    adapter.ended("a", tokens=10, cached_tokens=0)
    assert "id_slot" in adapter.fields("c")
    adapter.close()


def test_closing_lets_go_of_calls_that_wait(adapter):
    """They go without a slot, at once."""
    adapter.fields("a")
    adapter.fields("b")
    found = []
    thread = threading.Thread(target=lambda: found.append(adapter.fields("c")))
    thread.start()
    thread.join(0.05)
    adapter.close()
    thread.join(2)
    assert [{}] == found


def test_a_second_call_of_a_busy_session_is_not_routed(adapter, llama):
    """Branches of one task may call at the same time."""
    adapter.fields("a")
    assert {} == adapter.fields("a")


def test_calls_of_nobody_are_not_routed(adapter):
    """What is attributed to no task has no context of its own."""
    assert {} == adapter.fields("unattributed")


@pytest.mark.parametrize("deed", ["save", "restore"])
def test_a_refused_deed_costs_a_receipt_and_nothing_else(adapter, llama, deed):
    """The calls go on, to a slot that computes the context again."""
    llama.broken = {deed}
    llama.turn(adapter, "a")
    llama.turn(adapter, "b")
    tell(adapter, "tool_start", "a")
    llama.turn(adapter, "c")
    assert "id_slot" in llama.turn(adapter, "a")
    outcomes = {(receipt.kind, receipt.outcome) for receipt in adapter.tick()[0]}
    assert (deed, Outcome.FAILED) in outcomes
    adapter._pool.check()


def through_reach(adapter, clock, *hints):
    """The hints, told one after the other; the Reach."""
    reach = Reach(adapter, clock=clock)
    for number, one in enumerate(hints):
        reach.tell(one)
        until(lambda number=number: sum(bool(r.hint) for r in reach.receipts()) > number)
    return reach


def test_a_full_disk_does_not_make_the_server_away(adapter, llama):
    """Every save is refused: contexts stay in their slots, and their calls find them there."""
    llama.broken = {"save"}
    llama.turn(adapter, "a", 1111)
    llama.turn(adapter, "b", 500)
    hints = [hint("tool_start", "ab"[number % 2], call_id=str(number), wait_s=(900.0,)) for number in range(6)]
    reach = through_reach(adapter, adapter._clock, *hints, hint("tool_end", "a", call_id="0"))
    assert not reach.stats()["away"]
    assert reach.stats()["failed"] >= 3
    assert {0: 1111, 1: 500} == llama.slots
    assert [{"id_slot": 1}, {"id_slot": 0}] == [adapter.fields("b"), adapter.fields("a")]
    assert not [deed for deed in llama.deeds if deed[0] in ("erase", "restore")]
    reach.close()


@pytest.mark.parametrize(("session", "other"), ["ab", "ba"])
def test_a_session_that_ends_while_the_server_is_away_leaves_nothing_behind(adapter, llama, session, other):
    """Its slot and its file are emptied when the server answers again, without another hint: only the way there was broken."""
    for name in "ab":
        llama.turn(adapter, name, 1111 if name == session else 500)
    tell(adapter, "tool_start", session)
    adapter.reset()  # the next hint asks the server again
    llama.fault = "close"
    starts = [hint("tool_start", other, call_id=str(number)) for number in range(3)]
    reach = through_reach(adapter, adapter._clock, *starts, hint("session_end", session))
    assert reach.stats()["away"]
    assert 1111 in llama.files.values()
    llama.fault = ""
    adapter._clock.advance(1.1)
    until(lambda: {0} == set(llama.files.values()))
    until(lambda: {0, 500} == set(llama.slots.values()))
    assert session not in adapter._pool.sessions
    reach.close()


@pytest.mark.parametrize("slots", [1, 3])
def test_after_a_restart_with_other_slots_nothing_is_forgotten(adapter, llama, slots):
    """Contexts come from their files, ends empty them, and no two sessions ever have one file's name."""
    llama.turn(adapter, "a", 1111)
    llama.turn(adapter, "b", 500)
    tell(adapter, "tool_start", "a")
    tell(adapter, "tool_start", "b")
    names = set(llama.files)
    llama.restart(slots)
    adapter.reset()
    assert 1111 == llama.slots[adapter.fields("a")["id_slot"]]
    adapter.ended("a", tokens=1200, cached_tokens=1111)
    for name in "cde":
        llama.turn(adapter, name)
        tell(adapter, "tool_start", name)
    for name in "abcde":
        tell(adapter, "session_end", name)
    until(lambda: not adapter._work.under_way)
    assert names < set(llama.files)
    assert {0} == set(llama.slots.values()) | set(llama.files.values())
    assert slots == adapter._pool.slots
    adapter._pool.check()


def test_a_server_without_a_folder_for_slots_is_unsupported(adapter, llama):
    """After its first refusal it is not asked again, and calls are left alone."""
    llama.saves = False
    llama.turn(adapter, "a")
    llama.turn(adapter, "b")
    assert Outcome.FAILED is tell(adapter, "tool_start", "a").outcome
    assert Outcome.UNSUPPORTED is tell(adapter, "tool_start", "b").outcome
    assert 1 == len(llama.deeds)
    assert {} == adapter.fields("a")


def test_after_a_restart_contexts_come_from_their_files(adapter, llama):
    """Slots are empty then; what was saved is not lost."""
    llama.turn(adapter, "a", 1111)
    llama.turn(adapter, "b")
    tell(adapter, "tool_start", "a")
    llama.slots = dict.fromkeys(llama.slots, 0)
    adapter.reset()
    assert 1111 == llama.slots[adapter.fields("a")["id_slot"]]


def test_a_slot_that_somebody_else_used_is_noticed_by_the_next_call(adapter, llama):
    """Its usage says that little was reused; contexts come from their files until they are known again."""
    llama.turn(adapter, "a", 1111)
    llama.turn(adapter, "b")
    tell(adapter, "tool_start", "a")
    adapter.fields("b")
    llama.slots = dict.fromkeys(llama.slots, 7)
    adapter.ended("b", tokens=1000, cached_tokens=7)
    assert 1111 == llama.slots[adapter.fields("a")["id_slot"]]


@pytest.mark.parametrize(("cached", "believed"), [(7, False), (0, False), (None, True), (900, True)])
def test_the_number_that_a_call_tells_decides_what_is_believed_of_the_others(adapter, llama, cached, believed):
    """Little: somebody else was there. None: nobody told."""
    llama.turn(adapter, "a", 1111)
    llama.turn(adapter, "b")
    adapter.fields("b")
    adapter.ended("b", tokens=1000, cached_tokens=cached)
    assert believed is adapter._pool.sessions["a"].sure
    assert adapter._pool.sessions["b"].sure


def test_a_context_that_could_not_be_brought_back_accuses_nobody(adapter, llama):
    """Its call computes it again, and that little was found is no surprise."""
    llama.turn(adapter, "a", 1111)
    llama.turn(adapter, "b")
    tell(adapter, "tool_start", "a")
    llama.turn(adapter, "c")
    llama.broken = {"restore"}
    adapter.fields("a")
    adapter.ended("a", tokens=1200, cached_tokens=0)
    assert all(held.sure for held in adapter._pool.sessions.values())


@pytest.mark.parametrize("fault", ["hang", "html", "close", "endless"])
def test_a_broken_server_is_a_failed_receipt(adapter, llama, fault):
    """Whatever it does instead of an answer, within the time that was given."""
    llama.fault = fault
    receipt = adapter.deliver(hint("tool_start", "a"), 0.2)
    assert Outcome.FAILED is receipt.outcome
    llama.fault = ""
    assert {"id_slot": 0} == adapter.fields("a")


def test_names_of_files_say_nothing_of_a_session(adapter, llama):
    """Hostile session names never reach the server's folder."""
    name = "../../etc/passwd\r\nX: 1"
    llama.turn(adapter, name)
    llama.turn(adapter, "b")
    tell(adapter, "tool_start", name)
    (deed,) = llama.deeds
    assert deed[2].replace("-", "").replace(".", "").isalnum()
