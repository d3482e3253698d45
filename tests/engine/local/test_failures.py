"""What goes wrong inside a step, a load or a process: every call ends once, nobody spins, no wrong token.

Covers the engine's own failures. Copies and disks that fail are `tests/kv/`, damage between turns `test_kv_cases.py`.
"""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from agentkv.core.residency import Action, Move, Outcome, Tier
from agentkv.engine.local.answer import Answer
from agentkv.engine.local.archive import memo_of
from agentkv.engine.local.chat import Written
from agentkv.engine.local.sessions import Session
from agentkv.errors import Closed, ModelError
from agentkv.kv.streams.cpu import CpuStreams

DISK = 64 << 20
LOST = "CUDA error: an illegal memory access was encountered"


def _prompt(start, count):
    return "".join(chr(97 + (start + 7 * i) % 26) for i in range(count))


def _wait_for(ask, within_s=10.0):
    """Wait until `ask()` is true."""
    end_s = time.monotonic() + within_s
    while not ask():
        assert time.monotonic() < end_s, "it does not happen"
        time.sleep(0.002)


class LateFailure:
    """The event of a copy that raises once `gate` is set."""

    def __init__(self, gate):
        self._gate = gate

    def query(self):
        return self._gate.is_set()

    def wait(self):
        assert self._gate.wait(30)
        raise RuntimeError("the copy failed")


class LateFailingStreams(CpuStreams):
    """While there is a `gate`, copies up are issued, leave nonsense and fail when it is set; once it is, they raise.

    With `before_compute`, they have failed when compute is told to wait for them.
    """

    gate = None
    before_compute = False

    def bind(self, memory):
        self._bound = memory
        super().bind(memory)

    def copy(self, direction, runs, after):
        if direction == "d2h" or self.gate is None:
            return super().copy(direction, runs, after)
        if self.gate.is_set():
            raise RuntimeError("the copy failed")
        for run in runs:
            self._bound.pool.pool[run.device_block : run.device_block + run.n] = 3.0
        return LateFailure(self.gate)

    def compute_wait(self, event):
        if not isinstance(event, LateFailure):
            super().compute_wait(event)
        elif self.before_compute:
            self.gate.set()
            _wait_for(lambda: self.tiers._transfers.dead)


class SleepWatch(threading.Event):
    """The engine's alarm clock; `asleep` is set when it goes to sleep for good, because nobody wants anything."""

    def __init__(self):
        super().__init__()
        self.asleep = threading.Event()

    def wait(self, timeout=None):
        if timeout is None:
            self.asleep.set()
        return super().wait(timeout)


@pytest.fixture
def broken_device(start):
    """An engine, and a switch with which every mark on its compute stream raises, as after a CUDA error."""
    engine = start(blocks=128)
    engine._wake, old = SleepWatch(), engine._wake
    old.set()
    record, broken = engine.tiers.streams.record, threading.Event()

    def breaking():
        if broken.is_set():
            raise RuntimeError(LOST)
        return record()

    engine.tiers.streams.record = breaking
    yield engine, broken
    broken.clear()


def _together(engine, count):
    """The engine takes calls in only once `count` are there, so that they share each step."""
    take_in = engine._take_in

    def waiting():
        if len(engine._arrived) >= count:
            engine._take_in = take_in
            take_in()

    engine._take_in = waiting


# -- a step that fails


def test_a_call_whose_start_raises_is_ended(tiny, start, ask, park):
    """Its caller hears why, its blocks are free when their loads have ended, and the next call works."""
    streams = LateFailingStreams()
    engine = start(streams=streams)
    first = engine.submit(ask(_prompt(0, 100), 4, task="a")).result(20)
    park(engine, first.session, Tier.HOST)
    prompt = _prompt(0, 100) + first.text + " more"
    compute_wait = streams.compute_wait

    def bad_wait(_event):
        raise RuntimeError(LOST)

    streams.gate, streams.compute_wait = threading.Event(), bad_wait
    with pytest.raises(ModelError, match="illegal memory access"):
        engine.submit(ask(prompt, 4, task="a")).result(20)
    streams.gate.set()
    engine.tiers.quiesce(10)
    engine.tiers.check()
    assert 0 == engine.stats()["kv"]["device"]["pinned"]
    streams.gate, streams.compute_wait = None, compute_wait
    assert tiny.greedy(prompt, 4) == list(engine.submit(ask(prompt, 4, task="a")).result(20).token_ids)


def test_a_call_whose_partial_block_cannot_be_reopened_is_ended(tiny, start, ask):
    """With its spare block: nothing stays pinned or private."""
    engine = start()
    first = engine.submit(ask(_prompt(0, 100), 4, task="a")).result(20)
    prompt = _prompt(0, 100) + first.text + " more"
    reopen = engine.tiers.reopen

    def bad_reopen(*_):
        raise ValueError("device block 3 is not leased")

    engine.tiers.reopen = bad_reopen
    with pytest.raises(ModelError, match="not leased"):
        engine.submit(ask(prompt, 4, task="a")).result(20)
    engine.tiers.reopen = reopen
    engine.tiers.check()
    assert 0 == engine.stats()["kv"]["device"]["pinned"]
    assert tiny.greedy(prompt, 4) == list(engine.submit(ask(prompt, 4, task="a")).result(20).token_ids)


def test_a_call_that_ended_in_a_step_that_then_failed_is_settled_once(start, ask, monkeypatch):
    """Two calls share each step: the first has its last token when the second raises."""
    engine = start()
    add = Answer.add

    def bad_add(answer, token, logprob=None):
        if answer._max_tokens == 7 and len(answer.token_ids) == 4:
            raise RuntimeError("no such token")
        return add(answer, token, logprob)

    monkeypatch.setattr(Answer, "add", bad_add)
    _together(engine, 2)
    good = engine.submit(ask(_prompt(0, 40), 5, task="a", forced_ids=(70,) * 5))
    bad = engine.submit(ask(_prompt(3, 40), 7, task="b", forced_ids=(70,) * 7))
    with pytest.raises(ModelError, match="no such token"):
        bad.result(20)
    assert 5 == len(good.result(20).token_ids)
    assert 0 == engine._sessions.get(good.result(20).session).calls
    assert 0 == engine._sessions.get(engine.last_session(ask("", task="b").caller)).calls


def test_a_call_that_cannot_be_settled_does_not_spin_the_engine(tiny, broken_device, ask):
    """It is in no list any more: the engine sleeps until somebody comes, and works when the device does."""
    engine, broken = broken_device
    running = engine.submit(ask(_prompt(9, 40), 500, task="a", forced_ids=(70,) * 500))
    _wait_for(lambda: len(running.partial) >= 5)
    engine._wake.asleep.clear()
    broken.set()
    with pytest.raises(ModelError, match="illegal memory access"):
        running.result(20)
    assert engine._wake.asleep.wait(5)
    assert (0, 0, 0) == tuple(engine.stats()[name] for name in ("running", "loading", "waiting"))
    with pytest.raises(ModelError, match="illegal memory access"):
        engine.submit(ask(_prompt(1, 40), 4, task="b")).result(20)
    broken.clear()
    assert tiny.greedy(_prompt(1, 40), 4) == list(engine.submit(ask(_prompt(1, 40), 4, task="c")).result(20).token_ids)


def test_a_first_step_that_cannot_be_settled_does_not_spin_the_engine(broken_device, ask):
    """Nor does a call that fails before its first token."""
    engine, broken = broken_device
    engine.submit(ask(_prompt(0, 40), 4)).result(20)
    assert engine._wake.asleep.wait(5)
    engine._wake.asleep.clear()
    broken.set()
    with pytest.raises(ModelError, match="illegal memory access"):
        engine.submit(ask(_prompt(9, 40), 4)).result(20)
    assert engine._wake.asleep.wait(5)


# -- a load that fails late


def test_the_tail_of_a_load_that_nobody_confirmed_is_not_kept(tiny, start, ask, park):
    """The load fails while a step computes on its blocks, and then the step: the call's partial block is nonsense, and
    the next call must not find it.
    """
    streams = LateFailingStreams()
    engine = start(streams=streams)
    first = engine.submit(ask(_prompt(0, 100), 4, task="a")).result(20)
    park(engine, first.session, Tier.HOST)
    streams.gate = threading.Event()
    forward = engine._runner.forward

    def bad_forward(_spans):
        streams.gate.set()
        _wait_for(lambda: engine.tiers._transfers.dead)
        raise RuntimeError("out of memory in this step")

    engine._runner.forward = bad_forward
    prompt = _prompt(0, 100) + first.text + " more"
    with pytest.raises(ModelError, match="out of memory"):
        engine.submit(ask(prompt, 6, task="a")).result(20)
    streams.gate, engine._runner.forward = None, forward
    again = engine.submit(ask(prompt, 6, task="a")).result(20)
    assert tiny.greedy(prompt, 6) == list(again.token_ids)


def test_a_load_that_fails_between_its_issue_and_the_start_is_computed_again(tiny, start, ask, park):
    """The partial block that it was to fill cannot be reopened any more; the call does not hear of it."""
    streams = LateFailingStreams()
    engine = start(streams=streams)
    streams.tiers = engine.tiers
    first = engine.submit(ask(_prompt(0, 100), 4, task="a")).result(20)
    park(engine, first.session, Tier.HOST)
    streams.gate, streams.before_compute = threading.Event(), True
    prompt = _prompt(0, 100) + first.text + " more"
    call = engine.submit(ask(prompt, 6, task="a"))
    assert streams.gate.wait(10)
    streams.gate = None
    assert tiny.greedy(prompt, 6) == list(call.result(20).token_ids)
    assert 0 == engine.stats()["kv"]["device"]["pinned"]


def test_a_call_whose_blocks_cannot_be_given_back_after_a_failed_load_is_ended(tiny, start, ask, park):
    """It was to compute them again: its caller hears of the error instead, and the next call works."""
    streams = LateFailingStreams()
    engine = start(streams=streams)
    first = engine.submit(ask(_prompt(0, 100), 4, task="a")).result(20)
    park(engine, first.session, Tier.HOST)
    release = engine.tiers.release

    def bad_release(*_args, **_options):
        engine.tiers.release = release
        raise RuntimeError(LOST)

    streams.gate, engine.tiers.release = threading.Event(), bad_release
    streams.gate.set()
    prompt = _prompt(0, 100) + first.text + " more"
    with pytest.raises(ModelError, match="illegal memory access"):
        engine.submit(ask(prompt, 6, task="a")).result(20)
    streams.gate = None
    assert tiny.greedy(prompt, 6) == list(engine.submit(ask(prompt, 6, task="a")).result(20).token_ids)


# -- ends


def test_finishing_a_task_after_close_is_harmless(start, ask, tmp_path):
    """Also where its blocks had gone to disk; so are the other things that a host may still do."""
    engine = start(disk=tmp_path, disk_memory=DISK)
    session = engine.submit(ask(_prompt(0, 100), 4, task="a")).result(20).session
    receipts, written = [], threading.Event()
    engine.apply(Move(session=session, action=Action.WRITE, to=Tier.DISK, reason="test"), lambda _: written.set())
    assert written.wait(10)
    engine.close()
    engine.finish_task("a")
    engine.expect(session, None)
    engine.tiers.drop(session)
    engine.tiers.tick()
    assert 0 == engine.tiers.vacate(session, Tier.HOST)
    assert not engine.apply(Move(session=session, action=Action.DROP, reason="test"), receipts.append)
    assert [Outcome.FAILED] == [receipt.outcome for receipt in receipts]


def _told_in_a_child(fn, within_s=10):
    """What `fn` gives in a forked child, as text; "" if it hangs."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(within_s)
        try:
            os.write(writer, fn().encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as told:
        text = told.read()
    os.waitpid(child, 0)
    return text


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize(
    "door", ["submit", "finish_task", "residency", "expect", "stats", "count_tokens", "last_session"]
)
def test_a_door_of_the_parents_engine_raises_in_a_forked_child(start, ask, door):
    """Though threads of the parent held locks when it was forked (E26)."""
    engine = start()
    session = engine.submit(ask(_prompt(0, 60), 4, task="a")).result(20).session
    doors = {
        "submit": lambda: engine.submit(ask(_prompt(0, 60), 4, task="a")),
        "finish_task": lambda: engine.finish_task("a"),
        "residency": lambda: engine.residency(session),
        "expect": lambda: engine.expect(session, None),
        "stats": engine.stats,
        "count_tokens": lambda: engine.count_tokens(ask("abc")),
        "last_session": lambda: engine.last_session(ask("", task="a").caller),
    }

    def child():
        try:
            doors[door]()
        except Closed as error:
            return str(error)
        return "nothing"

    with engine.tiers._lock, engine._sessions._lock:
        told = _told_in_a_child(child)
    assert f"process {os.getpid()}" in told
    assert session == engine.last_session(ask("", task="a").caller)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("action", list(Action))
def test_a_move_that_a_forked_child_applies_has_failed_at_once(start, ask, action):
    """`apply` never raises; it does not hang either."""
    engine = start()
    session = engine.submit(ask(_prompt(0, 60), 4, task="a")).result(20).session

    def child():
        receipts = []
        handed_over = engine.apply(Move(session=session, action=action, reason="test"), receipts.append)
        return f"{handed_over} {[receipt.outcome.value for receipt in receipts]}"

    with engine.tiers._lock:
        assert "False ['failed']" == _told_in_a_child(child)


# -- a note is written while the engine works


class GrowingDict(dict):
    """Somebody adds to it whenever it is walked."""

    def __iter__(self):
        return self._grown(super().__iter__())

    def items(self):
        return self._grown(super().items())

    def _grown(self, items):
        for number, one in enumerate(items):
            self[f"new{number}"] = None
            yield one


def test_a_session_is_described_while_its_calls_change_it():
    """The note's thread walks what the engine's thread adds to."""
    written = Written(raw="raw", content="content", calls=())
    calls = GrowingDict({f"call{i}": written for i in range(3)})
    session = Session(key="k", task="t", raw_by_call=calls, branches=GrowingDict({"": None, "b": None}))
    memo = memo_of(session, "model")
    assert ["", "b"] == memo["branches"]
    assert ["call0", "call1", "call2"] == list(memo["raw_by_call"])
