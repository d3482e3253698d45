"""Restores seen from the engine: verified by the tokens they saved, and computed behind without waiting for their end."""

from __future__ import annotations

import threading
import time

import pytest

from agentkv.core.residency import Action, Move, Tier
from agentkv.kv.streams import HostEvent
from agentkv.kv.streams.cpu import CpuStreams


def _prompt(start, count):
    return "".join(chr(97 + (start + 7 * i) % 26) for i in range(count))


def _vacate(engine, session, *tiers):
    """The session's copies in these tiers go, last ones too."""
    engine.tiers.quiesce(10)
    with engine.tiers._locked():
        for block in reversed(engine.tiers._book.holdings[session].chain):
            for tier in tiers:
                if block.evictable(tier):
                    engine.tiers._transfers.evict(block, tier)


def _parked(engine, session):
    """On the host only."""
    engine.apply(Move(session=session, action=Action.WRITE, to=Tier.HOST, reason="test"))
    _vacate(engine, session, Tier.DEVICE)


def test_a_restore_that_saved_what_it_should_is_verified(tiny, start, ask):
    """219 tokens of context, none computed again."""
    engine = start()
    first = engine.submit(ask(_prompt(0, 200), 20, task="t")).result(60)
    _parked(engine, first.session)
    engine.submit(ask(_prompt(0, 200) + first.text + "!", 4, task="t")).result(60)
    restored = engine.stats()["restored"]
    assert (1, 0, 0, 0) == tuple(restored[name] for name in ("verified", "short", "useless", "recomputed_tokens"))


def test_a_restore_behind_a_hole_is_short_and_named(tiny, start, ask):
    """Blocks from the middle on are gone: the call says how much it computed again, and why."""
    engine = start()
    first = engine.submit(ask(_prompt(0, 200), 20, task="t")).result(60)
    _parked(engine, first.session)
    with engine.tiers._locked():
        block = engine.tiers._book.holdings[first.session].chain[5]
        engine.tiers._transfers.evict(block, Tier.HOST)
    prompt = _prompt(0, 200) + first.text + "!"
    second = engine.submit(ask(prompt, 4, task="t")).result(60)
    restored = engine.stats()["restored"]
    assert (1, 1, 0) == (restored["verified"], restored["short"], restored["useless"])
    assert {
        "session": first.session,
        "expected_tokens": 219,
        "recomputed_tokens": 219 - 80,
        "reason": "blocks had been given up",
    } == restored["last_short"]
    assert 80 == second.usage.cached_tokens
    assert tiny.greedy(prompt, 4) == list(second.token_ids)


def test_a_prefetch_that_did_not_help_is_useless_and_warned_about(start, ask):
    """Blocks were fetched ahead, and gone again when the call came: all was computed again."""
    engine = start()
    first = engine.submit(ask(_prompt(0, 200), 20, task="t")).result(60)
    _parked(engine, first.session)
    came = threading.Event()
    engine.apply(Move(session=first.session, action=Action.PREFETCH, reason="test"), lambda _receipt: came.set())
    assert came.wait(10)
    _vacate(engine, first.session, Tier.DEVICE, Tier.HOST)
    engine.submit(ask(_prompt(0, 200) + first.text + "!", 4, task="t")).result(60)
    assert 1 == engine.stats()["restored"]["useless"]
    assert engine.stats()["kv"]["prefetched"]["wasted"] > 0


def test_a_call_that_moved_nothing_is_no_restore(start, ask):
    """A context that stayed on the device is not counted."""
    engine = start()
    first = engine.submit(ask(_prompt(0, 200), 4, task="t")).result(60)
    engine.submit(ask(_prompt(0, 200) + first.text + "!", 4, task="t")).result(60)
    assert 0 == engine.stats()["restored"]["verified"]


class LateStreams(CpuStreams):
    """Loads end some time after they were issued, as on a GPU; `spoil` makes the next ones fail after that."""

    def __init__(self):
        super().__init__()
        self.waited_before_its_end = []
        self.spoil = False

    def copy(self, direction, runs, after):
        if direction == "d2h":
            return super().copy(direction, runs, after)
        event = _LateEvent(spoilt=self.spoil)
        runs = [] if self.spoil else list(runs)

        def later():
            super(LateStreams, self).copy(direction, runs, after)
            event.set()

        threading.Timer(0.05, later).start()
        return event

    def compute_wait(self, event):
        self.waited_before_its_end.append(not event.query())
        if isinstance(event, _LateEvent):
            event._set.wait()  # what compute waits for has no opinion on whether it went well
        else:
            event.wait()


class _LateEvent(HostEvent):
    def __init__(self, *, spoilt):
        super().__init__()
        self._spoilt = spoilt

    def wait(self):
        super().wait()
        if self._spoilt:
            raise RuntimeError("the copy failed")


@pytest.fixture
def late(start):
    """An engine whose loads end late."""
    streams = LateStreams()
    return start(streams=streams), streams


def test_a_call_computes_behind_its_loads_without_waiting_for_their_end(tiny, late, ask):
    """Its step is launched while the copy is under way; compute waits, the scheduler does not (R7)."""
    engine, streams = late
    first = engine.submit(ask(_prompt(0, 200), 20, task="t")).result(60)
    _parked(engine, first.session)
    engine.tiers.pool[1:].zero_()
    prompt = _prompt(0, 200) + first.text + "!"
    second = engine.submit(ask(prompt, 12, task="t")).result(60)
    assert 219 == second.usage.cached_tokens
    assert any(streams.waited_before_its_end)
    assert tiny.greedy(prompt, 12) == list(second.token_ids)


def test_a_load_that_fails_after_it_was_issued_is_computed_again(tiny, late, ask):
    """No token of the step that ran behind it is handed out."""
    engine, streams = late
    first = engine.submit(ask(_prompt(0, 200), 20, task="t")).result(60)
    _parked(engine, first.session)
    engine.tiers.pool[1:].fill_(3.0)
    streams.spoil = True
    prompt = _prompt(0, 200) + first.text + "!"
    second = engine.submit(ask(prompt, 12, task="t")).result(60)
    assert tiny.greedy(prompt, 12) == list(second.token_ids)
    assert 0 == second.usage.cached_tokens
    assert "a block could not be loaded" == engine.stats()["restored"]["last_short"]["reason"]


def test_a_call_that_is_cancelled_behind_its_loads_gives_everything_back(late, ask):
    """Its blocks are pinned until the copies into them have ended."""
    engine, _ = late
    first = engine.submit(ask(_prompt(0, 200), 20, task="t")).result(60)
    _parked(engine, first.session)
    for _ in range(5):
        stream = engine.submit(ask(_prompt(0, 200) + first.text + "!", 200, task="t"))
        next(iter(stream), None)
        stream.cancel()
        engine.tiers.quiesce(10)
        _parked(engine, first.session)
    until_s = time.monotonic() + 10
    while engine.stats()["kv"]["device"]["pinned"] and time.monotonic() < until_s:
        time.sleep(0.01)
    engine.tiers.check()
    assert 0 == engine.stats()["kv"]["device"]["pinned"]


def test_the_template_of_an_ended_task_serves_the_next(start, ask):
    """System prompt and tools are found again by another task for a short window (B11)."""
    from agentkv.core.message import Message
    from agentkv.core.task import Caller
    from agentkv.engine.base import Request, Sampling

    engine = start()
    system = Message(role="system", content=_prompt(3, 150))

    def call(task, text):
        request = Request(
            messages=[system, Message(role="user", content=text)],
            caller=Caller(task=task),
            sampling=Sampling(max_tokens=4),
        )
        return engine.submit(request).result(60)

    call("a", _prompt(1, 100))
    engine.finish_task("a")
    template = engine.stats()["kv"]["template_blocks"]
    assert 150 // 16 <= template <= 200 // 16
    assert 16 * template == call("b", _prompt(2, 100)).usage.cached_tokens
