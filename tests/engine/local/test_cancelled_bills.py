"""What a call used that was cancelled, wherever it was: the ledger, the budget and the engine count the same tokens."""

from __future__ import annotations

import threading
import time

import pytest

from agentkv import AgentKV, Budget
from agentkv.core.residency import Action, Move, Tier
from agentkv.core.task import Caller
from agentkv.engine.base import Request, Sampling
from agentkv.errors import GenerationCancelled, ModelError
from agentkv.kv.streams.cpu import CpuStreams
from agentkv.runtime import books

TEXT = "The tool ran for a while. Its output follows: line one, line two, and so on until the end of the file. "
JOB = Caller(task="job")


class Gate:
    """Lets an engine's steps through one by one. `inside()`: a step is being computed, and its end waits for `let()`."""

    def __init__(self, engine) -> None:
        self.open, self._arrived, self._forward = False, threading.Semaphore(0), engine._runner.forward
        self._let = threading.Semaphore(0)
        engine._runner.forward = self

    def __call__(self, spans):
        self._arrived.release()
        if not self.open:
            assert self._let.acquire(timeout=20)
        return self._forward(spans)

    def inside(self) -> None:
        assert self._arrived.acquire(timeout=20)

    def let(self) -> None:
        self._let.release()

    def free(self) -> None:
        self.open = True
        self._let.release()


class HeldLoads(CpuStreams):
    """Nothing comes back to the device before it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may, self.asked = threading.Event(), threading.Event()

    def copy(self, direction, runs, after):
        if direction == "h2d":
            self.asked.set()
            assert self.may.wait(20)
        return super().copy(direction, runs, after)


@pytest.fixture
def served(start):
    """An engine with its gate, and an AgentKV over it."""
    made = []

    def make(**options):
        engine = start(**{"speculate": False, **options})
        gate = Gate(engine)
        made.append((gate, AgentKV.with_engine(engine, context=None)))
        return engine, gate, made[-1][1]

    yield make
    for gate, kv in made:
        gate.free()
        kv.close()


def _asked(text=TEXT, *, forced=None, n=1, most=None, caller=JOB):
    return Request(prompt=text, forced_ids=forced, n=n, sampling=Sampling(max_tokens=most), caller=caller)


def _billed(kv, task="job"):
    """What the bill says of the task's last call."""
    call = kv.report(task).calls[-1]
    assert ("aborted", 1, False) == (call.status, call.usage.calls, call.estimated)
    return call.usage.input_tokens, call.usage.cached_tokens, call.usage.output_tokens


def _spent(kv, task="job"):
    account = kv._books.account(task)
    assert (0, 0) == (account.reserved.tokens, account.reserved.model_calls)
    return account.used


def test_in_the_queue_nothing_was_used(served, tiny):
    """Not even the prompt was read: no tokens, no device time, one call."""
    _, gate, kv = served(max_batch=1)
    kv.submit(_asked(forced=tuple(tiny.ids("x" * 9)), caller=Caller(task="other")))
    gate.inside()
    with kv.task("job", budget=Budget(tokens=4000), final=False):
        stream = kv.submit(_asked(most=50))
        stream.cancel()
        gate.free()
        assert (0, 0, 0) == _billed(kv)
    assert (0, 1, 0.0) == (_spent(kv).tokens, _spent(kv).model_calls, _spent(kv).device_seconds)


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_in_prefill_the_part_of_the_prompt_that_was_computed_is_used(served, steps):
    """With the chunk that was under way at the moment of the cancel: its computing ended all the same."""
    engine, gate, kv = served(chunk_tokens=8)  # twice as many while nobody decodes
    stream = kv.submit(_asked(most=50))
    for _ in range(steps - 1):
        gate.inside()
        gate.let()
    gate.inside()
    stream.cancel()
    gate.free()
    assert (16 * steps, 0, 0) == _billed(kv)
    assert 16 * steps == engine.stats()["prefill_tokens"]
    assert _spent(kv).device_seconds > 0
    assert 16 * steps == _spent(kv).tokens


@pytest.mark.parametrize("seen", [0, 1, 2, 7])
def test_in_decode_the_step_under_way_is_used(served, tiny, seen):
    """The reader has seen so many tokens; one more was computed when he left, and is on the bill."""
    engine, gate, kv = served()
    stream = kv.submit(_asked(forced=tuple(tiny.ids("y" * 30))))
    for _ in range(seen):
        gate.inside()
        gate.let()
    gate.inside()
    assert seen == len(stream.partial)
    stream.cancel()
    with pytest.raises(GenerationCancelled):
        stream.result(20)
    gate.free()
    prompt = len(tiny.ids(TEXT))
    assert (prompt, 0, seen + 1) == _billed(kv)
    assert seen + 1 == engine.stats()["output_tokens"]
    assert prompt + seen + 1 == _spent(kv).tokens


def test_every_choice_is_billed_for_its_step(served):
    """Three choices in one step: the prompt once, the output of all."""
    engine, gate, kv = served()
    stream = kv.submit(_asked("abc " * 9, n=3, most=40))
    gate.inside()
    gate.let()
    seen = 0
    while seen < 10:
        gate.inside()
        seen = len(stream.partial)
        gate.let()
    gate.inside()
    stream.cancel()
    gate.free()
    prompt, _, output = _billed(kv)
    assert 36 == prompt
    assert engine.stats()["output_tokens"] == output > seen


def test_guesses_that_the_model_chose_are_billed_too(served):
    """A step may write several tokens; those of the step under way are in the bill."""
    engine, gate, kv = served(speculate=True)
    log = "FAILED test_a - got 1\nFAILED test_b - got 2\nFAILED test_c - got 3\nFAILED test_d - "
    few = tuple((ord(letter) - 33, 60.0) for letter in "abc")
    stream = kv.submit(Request(prompt=log, sampling=Sampling(max_tokens=200, logit_bias=few), caller=JOB))
    for _ in range(8):
        gate.inside()
        gate.let()
    gate.inside()
    stream.cancel()
    gate.free()
    prompt, _, output = _billed(kv)
    stats = engine.stats()
    assert (len(log), stats["output_tokens"]) == (prompt, output)
    assert stats["accepted_tokens"] > 0


def test_in_a_restore_nothing_was_used(served):
    """What is on its way back was not read: the bill holds no token, whatever was reused."""
    streams = HeldLoads()
    streams.may.set()
    engine, gate, kv = served(streams=streams)
    gate.free()
    first = kv.submit(_asked(most=4)).result(20)
    done = threading.Event()
    engine.apply(
        Move(session=first.session, action=Action.DEMOTE, to=Tier.HOST, reason="test"), lambda _receipt: done.set()
    )
    assert done.wait(20)
    engine.tiers.vacate(first.session, Tier.DEVICE)
    streams.may.clear(), streams.asked.clear()
    before = engine.stats()["output_tokens"]
    stream = kv.submit(_asked(TEXT + first.text + " Go on.", most=50))
    assert streams.asked.wait(20)
    stream.cancel()
    threading.Timer(0.05, streams.may.set).start()
    assert (0, 0, 0) == _billed(kv)
    assert before == engine.stats()["output_tokens"]


def test_a_reused_prefix_is_part_of_what_was_reached(served, tiny):
    """Cancelled in decode, after a prompt that was mostly there: input whole, cached as it was."""
    _, gate, kv = served()
    gate.open = True
    kv.submit(_asked(most=2)).result(20)
    gate.open = False
    while gate._arrived.acquire(blocking=False):
        pass
    stream = kv.submit(_asked(most=30, caller=Caller(task="again")))
    gate.inside()
    gate.let()
    gate.inside()
    stream.cancel()
    gate.free()
    prompt, cached, output = _billed(kv, "again")
    assert (len(tiny.ids(TEXT)), 2) == (prompt, output)
    assert 96 == cached


def test_a_call_whose_step_fails_is_billed_with_all_its_choices(served, tiny):
    """What was computed before is known, once; the reservation is given back."""
    engine, gate, kv = served()
    stream = kv.submit(_asked(forced=tuple(tiny.ids("y" * 30)), n=2))
    for _ in range(4):
        gate.inside()
        gate.let()
    gate.inside()

    def broken(_spans):
        raise RuntimeError("no memory")

    gate._forward = broken
    gate.free()
    with pytest.raises(ModelError, match="no memory"):
        stream.result(20)
    (call,) = kv.report("job").calls
    assert ("failed", engine.stats()["output_tokens"]) == (call.status, call.usage.output_tokens)
    assert call.usage.output_tokens >= 4
    assert 0 == kv._books.account("job").reserved.model_calls


def test_a_bill_waits_for_a_call_that_was_just_cancelled(served):
    """The report that follows at once holds it, though its step is still computed; it never waits for ever."""
    _, gate, kv = served()
    stream = kv.submit(_asked(most=50))
    gate.inside()
    stream.cancel()
    threading.Timer(0.1, gate.free).start()
    began_s = time.monotonic()
    assert ["aborted"] == [call.status for call in kv.report("job").calls]
    assert time.monotonic() - began_s >= 0.05


def test_a_bill_waits_for_many_cancelled_calls_no_longer_than_for_one(served, monkeypatch):
    """Calls whose step does not end are not in it; the wait is one for all of them."""
    monkeypatch.setattr(books, "_LEAVE_S", 0.5)
    _, gate, kv = served()
    streams = [kv.submit(_asked(f"{number}. {TEXT}", most=50)) for number in range(8)]
    gate.inside()
    for stream in streams:
        stream.cancel()
    began_s = time.monotonic()
    assert () == kv.report("job").calls
    assert 0.5 <= time.monotonic() - began_s < 3.0


def test_close_bills_what_was_cancelled_and_not_settled(served):
    """A program that leaves in the middle of a step has its call in the ledger."""
    _, gate, kv = served()
    stream = kv.submit(_asked(most=50))
    gate.inside()
    stream.cancel()
    threading.Timer(0.05, gate.free).start()
    kv.close()
    assert (103, 0, 1) == _billed(kv)
