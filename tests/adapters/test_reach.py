"""Reach: the queue between an agent and an engine that may be slow, broken or gone."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from recorder import end, hint, until

from agentkv import AgentKV, Message, Request, Sampling, ScriptedEngine
from agentkv.adapters.base import DeliveryReceipt, Outcome, Unreachable, receipted
from agentkv.adapters.found import Found, probe
from agentkv.adapters.strict import StrictServer
from agentkv.clock import ManualClock, SystemClock
from agentkv.core.hint import HintKind, SessionFacts
from agentkv.runtime import reach as reach_module

KV_STATS_KEYS = {"adapter", "applied", "advisory", "unsupported", "failed", "queued", "away", "last"}


def carried(found, session):
    extra = found.carries(SessionFacts(session=session))
    return None if extra is None else extra.body


def test_hints_are_delivered_in_order_each_once(reach, recorder):
    """And each has its receipt."""
    for name in range(20):
        reach.tell(hint(name))
    until(lambda: len(reach.receipts()) == 20)
    assert [str(name) for name in range(20)] == recorder.told == [receipt.hint for receipt in reach.receipts()]
    assert set(reach.stats()) == KV_STATS_KEYS
    assert 20 == reach.stats()["applied"]


def test_telling_never_waits_for_the_adapter(reach, recorder):
    """An adapter that hangs costs the caller an append."""
    recorder.gate.clear()
    began_s = time.perf_counter()
    for name in range(200):
        reach.tell(hint(name))
    assert time.perf_counter() - began_s < 5


def test_a_full_queue_refuses_what_is_new_but_the_end_of_a_session(reach, recorder):
    """What is refused has a receipt; a session's end is never lost, for it frees memory."""
    recorder.gate.clear()
    reach.tell(hint("first"))
    until(lambda: reach.stats()["queued"] == 0)
    for name in range(reach_module.MOST_QUEUED + 10):
        reach.tell(hint(name))
    reach.tell(hint("end", HintKind.SESSION_END))
    assert reach_module.MOST_QUEUED == reach.stats()["queued"]
    assert 11 == reach.stats()["failed"]
    recorder.gate.set()
    until(lambda: "end" in recorder.told)


def test_a_hint_that_waited_too_long_is_not_told(reach, recorder, clock):
    """50 ms, unless the adapter is more patient; the end of a session is told all the same."""
    recorder.gate.clear()
    reach.tell(hint("first"))
    until(lambda: reach.stats()["queued"] == 0)
    reach.tell(hint("late"))
    reach.tell(hint("end", HintKind.SESSION_END))
    clock.advance(0.06)
    recorder.gate.set()
    until(lambda: len(reach.receipts()) == 3)
    assert ["first", "end"] == recorder.told
    assert (Outcome.FAILED, "too late") == (reach.receipts()[1].outcome, reach.receipts()[1].detail)


@pytest.mark.parametrize("error", [OSError("gone"), ValueError("nonsense"), RecursionError()])
def test_an_adapter_that_raises_is_a_failed_receipt(reach, recorder, error):
    """Nothing reaches the agent, and the thread lives on."""
    recorder.error = error
    reach.tell(hint(1))
    until(lambda: reach.stats()["failed"] == 1)
    recorder.error = None
    reach.tell(hint(2))
    until(lambda: reach.stats()["applied"] == 1)


def test_an_engine_that_is_away_is_left_alone_and_learned_again(reach, recorder, clock):
    """Three failures in a row; a second later it is tried again, with nothing believed of what was known."""
    recorder.outcome = Outcome.FAILED
    for name in range(6):
        reach.tell(hint(name))
    until(lambda: len(reach.receipts()) == 6)
    assert ["0", "1", "2"] == recorder.told
    assert reach.stats()["away"]
    clock.advance(1.1)
    recorder.outcome = Outcome.APPLIED
    reach.tell(hint("again"))
    until(lambda: len(reach.receipts()) == 7)
    assert 1 == recorder.resets
    assert "again" == recorder.told[-1]
    assert not reach.stats()["away"]


def test_an_engine_that_stays_away_is_asked_ever_more_rarely(reach, recorder, clock):
    """1 s, 2 s, 4 s, ... 30 s."""
    recorder.outcome = Outcome.FAILED
    for step in range(200):
        reach.tell(hint(step))
        until(lambda step=step: len(reach.receipts()) == step + 1)
        clock.advance(1.0)
    assert 8 <= len(recorder.told) <= 14


def test_refusals_of_an_engine_that_is_there_do_not_make_it_away(reach, recorder):
    """It said no, each with its receipt; a disk that is full is no engine that is gone."""
    recorder.outcome, recorder.refused = Outcome.FAILED, True
    for name in range(8):
        reach.tell(hint(name))
    reach.tell(end("a"))
    until(lambda: len(reach.receipts()) == 9)
    assert 9 == reach.stats()["failed"]
    assert not reach.stats()["away"]
    assert 0 == recorder.resets
    assert 1 == recorder.told.count("end a")  # what was refused is not asked again


@pytest.mark.parametrize(
    ("status", "refused"),
    [(None, False), (200, False), (302, False), (400, True), (404, True), (429, True), (500, False), (501, True), (503, False)],
)  # fmt: skip
def test_what_counts_as_the_engines_own_no(status, refused):
    """No answer, another's answer and a server's own failure do not."""

    def act():
        raise Unreachable("x", status=status)

    receipt = receipted("x", hint(1), act, ManualClock(0.0))
    assert (Outcome.FAILED, refused) == (receipt.outcome, receipt.refused)


def test_what_an_adapter_does_later_has_a_receipt_too(reach, recorder):
    """Its timed deeds are listed among the others."""
    recorder.due = [[DeliveryReceipt(adapter="r", hint="", kind="restore", session="s", outcome=Outcome.APPLIED)]]
    reach.tell(hint(1))
    until(lambda: len(reach.receipts()) == 2)
    assert {"restore", "tool_start"} == {receipt.kind for receipt in reach.receipts()}


def test_closing_tells_the_ends_of_sessions_and_nothing_else(reach, recorder):
    """Then the adapter is closed, once."""
    recorder.gate.clear()
    reach.tell(hint("first"))
    until(lambda: reach.stats()["queued"] == 0)
    reach.tell(hint("second"))
    reach.tell(hint("end", HintKind.SESSION_END))
    threading.Timer(0.05, recorder.gate.set).start()
    reach.close()
    reach.close()
    assert ["first", "end"] == recorder.told
    assert 1 == recorder.closed
    reach.tell(hint("after"))
    assert ["first", "end"] == recorder.told


def test_an_engine_of_our_own_has_nobody_to_reach():
    """The embedded engine is the planner's; no thread is started and nobody subscribes."""
    with AgentKV.with_engine(ScriptedEngine(["ok"])) as kv:
        assert {} == kv.stats()["reach"]
        assert not kv._emitter._bus.has_subscribers


def test_what_answers_is_asked_once(llama):
    """A llama.cpp server is known by its own words."""
    assert "llama.cpp" == probe(llama.url)
    found = Found(llama.url, clock=SystemClock())
    assert {"id_slot": 0} == carried(found, "a")
    found.ended("a", tokens=5, cached_tokens=None)
    carried(found, "b")
    assert 2 == sum(asked.path == "/props" for asked in llama.asked)
    found.close()


def test_an_unknown_server_is_left_alone():
    """Hints are unsupported, requests stay as they are."""
    with StrictServer() as server:
        found = Found(server.url, clock=SystemClock())
        assert Outcome.UNSUPPORTED is found.deliver(hint(1), 1.0).outcome
        assert None is carried(found, "a")
        probed = len(server.asked)
        found.deliver(hint(2), 1.0)
        assert probed == len(server.asked)
        assert {"GET"} == {asked.method for asked in server.asked}


@pytest.mark.parametrize(
    ("host", "engine"),
    [
        ("api.openai.com", "openai"),
        ("eu.api.anthropic.com", "anthropic"),
        ("x.openai.azure.com", ""),
        ("notopenai.com.invalid", ""),
        ("agentkv-nowhere.local", None),
    ],
)
def test_hosted_endpoints_are_never_probed(host, engine):
    """Their address says what they are, and it is not our business to knock."""
    if engine is None:
        with pytest.raises(Unreachable):
            probe(f"https://{host}/v1", within_s=0.001)
    else:
        assert engine == probe(f"https://{host}/v1", within_s=0.001)


def test_a_server_that_does_not_answer_yet_is_asked_again(llama, clock):
    """It may be starting. Hints ask it, ever more rarely; no call waits for that a second time."""
    found = Found(llama.url, clock=clock)
    llama.fault = "close"
    assert Outcome.FAILED is found.deliver(hint(1), 1.0).outcome
    assert None is carried(found, "a")
    llama.fault = ""
    assert Outcome.FAILED is found.deliver(hint(2), 1.0).outcome  # not so soon
    assert None is carried(found, "a")
    clock.advance(1.1)
    assert None is carried(found, "a")  # a call does not ask, hints do
    found.deliver(hint(3), 1.0)
    assert {"id_slot": 0} == carried(found, "a")
    found.close()


def test_an_agent_on_a_llama_server_is_routed_and_hinted(llama):
    """The whole way through AgentKV: id_slot in the body, receipts for hints, slots and files empty at the end."""
    with AgentKV.remote(base_url=llama.url, model="m", ledger="memory", api_key="k") as kv:
        for task in ("a", "b", "c"):
            with kv.task(task, final=False):
                messages = (Message(role="user", content="hi"),)
                kv.submit(Request(messages=messages, sampling=Sampling(max_tokens=4))).result(20)
                with kv.tool("pytest", expect_s=20):
                    pass
        for task in ("a", "b", "c"):
            kv.finish(task)
        until(
            lambda: (
                kv.stats()["reach"]["queued"] == 0 and any("session_end c" in r for r in kv.stats()["reach"]["last"])
            )
        )
        counts = kv.stats()["reach"]
    assert set(counts) == KV_STATS_KEYS
    assert {0} == set(llama.slots.values()) | set(llama.files.values())
    slots = [asked.body["id_slot"] for asked in llama.asked if asked.path.endswith("completions")]
    assert 3 == len(slots)
    assert {0, 1} == set(slots)
    assert (0, 0) == (counts["failed"], llama.rejected)
    assert counts["advisory"] + counts["applied"] >= 12
