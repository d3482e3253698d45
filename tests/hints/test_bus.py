"""Bus: hints reach everybody, in order, whatever a subscriber does."""

import asyncio
import threading
import time

import pytest

from agentkv import log
from agentkv.core.hint import Hint, HintKind
from agentkv.hints.bus import Bus


def hint(name="h", kind=HintKind.TOOL_START):
    return Hint(id=name, kind=kind, at_s=0.0, ts_ms=0, task="t")


def test_subscribers_hear_each_hint_in_the_order_of_subscription():
    """First come, first told, for every hint."""
    bus, heard = Bus(), []
    bus.subscribe(lambda h: heard.append(("a", h.id)))
    bus.subscribe(lambda h: heard.append(("b", h.id)))
    bus.publish(hint("1"))
    bus.publish(hint("2"))
    assert heard == [("a", "1"), ("b", "1"), ("a", "2"), ("b", "2")]


def test_a_failing_subscriber_is_counted_and_stops_nobody():
    """The next subscriber hears the hint, the publisher sees no exception."""
    bus, heard = Bus(), []
    before = log.counters["hint_subscriber_failed"]

    def broken(_):
        raise ValueError("broken sink")

    bus.subscribe(broken)
    bus.subscribe(heard.append)
    bus.publish(hint())
    assert len(heard) == 1
    assert log.counters["hint_subscriber_failed"] == before + 1


def test_a_subscriber_that_is_dead_does_not_flood_the_log(monkeypatch):
    """Each failure is counted; a line is written for the first, second, fourth, eighth ..."""
    bus, lines = Bus(), []
    monkeypatch.setattr("agentkv.log._write", lambda event, fields: lines.append(fields["failures"]))
    before = log.counters["hint_subscriber_failed"]

    def broken(_):
        raise ValueError("broken sink")

    bus.subscribe(broken)
    for _ in range(100):
        bus.publish(hint())
    assert [1, 2, 4, 8, 16, 32, 64] == lines
    assert before + 100 == log.counters["hint_subscriber_failed"]


@pytest.mark.parametrize("stop", [KeyboardInterrupt, asyncio.CancelledError, SystemExit])
def test_a_stop_signal_passes_and_the_bus_works_afterwards(stop):
    """KeyboardInterrupt and CancelledError are not failures to swallow."""
    bus, heard = Bus(), []

    def stops(_):
        raise stop

    leave = bus.subscribe(stops)
    bus.subscribe(heard.append)
    with pytest.raises(stop):
        bus.publish(hint("1"))
    leave()
    bus.publish(hint("2"))
    assert [h.id for h in heard] == ["2"]


def test_unsubscribing_twice_removes_one_subscription_only():
    """The same function subscribed twice is two subscriptions."""
    bus, heard = Bus(), []
    hear = heard.append
    leave = bus.subscribe(hear)
    bus.subscribe(hear)
    leave()
    leave()
    bus.publish(hint())
    assert len(heard) == 1


def test_a_hint_published_by_a_subscriber_comes_after_its_cause():
    """Everybody sees the start before the end that it provoked."""
    bus, heard = Bus(), []

    def answer(h):
        if h.id == "start":
            bus.publish(hint("end"))

    bus.subscribe(answer)
    bus.subscribe(lambda h: heard.append(h.id))
    bus.publish(hint("start"))
    assert heard == ["start", "end"]


def test_threads_subscribe_publish_and_leave_together():
    """No hint is lost to a subscriber that stays, while others come and go."""
    bus, lock, heard = Bus(), threading.Lock(), []

    def hear(h):
        with lock:
            heard.append(h.id)

    bus.subscribe(hear)

    def work(name):
        for i in range(200):
            leave = bus.subscribe(lambda _: None)
            bus.publish(hint(f"{name}-{i}"))
            leave()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(heard) == sorted(f"{n}-{i}" for n in range(4) for i in range(200))
    for n in range(4):
        own = [name for name in heard if name.startswith(f"{n}-")]
        assert own == [f"{n}-{i}" for i in range(200)]


def test_publishing_to_nobody_costs_next_to_nothing():
    """Below 10 microseconds, in the best of several rounds."""
    bus, one = Bus(), hint()
    assert not bus.has_subscribers
    best_s = float("inf")
    for _ in range(7):
        start_s = time.perf_counter()
        for _ in range(1000):
            bus.publish(one)
        best_s = min(best_s, (time.perf_counter() - start_s) / 1000)
    assert best_s < 10e-6
