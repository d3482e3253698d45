"""Admission: caps by type, queues that tell their length, priority, fairness, and no place lost."""

from __future__ import annotations

import asyncio
import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from agentkv.budget.admission import Admission
from agentkv.clock import ManualClock
from agentkv.errors import ConfigError, QueueFull


def admission(**limits):
    clock = ManualClock()
    made = Admission(now_s=clock.now_s)
    made.limit("review", **limits)
    return made, clock


def held(places):
    return [place.held for place in places]


def test_a_type_without_a_limit_needs_no_place():
    """Nor does a task without a type."""
    made, _ = admission(tasks=1)
    for task_type in ("", "other"):
        made.place("a", task_type=task_type).wait()
        made.place("b", task_type=task_type).wait()
    assert made.running() == 0


def test_a_full_queue_answers_with_its_length_and_the_expected_wait():
    """Of two places and a queue of one, the fourth task is told; tasks took 10 s so far."""
    made, clock = admission(tasks=2, queue=1)
    first = [made.place(key, task_type="review") for key in "ab"]
    clock.advance(10)
    first[0].leave()
    made.place("c", task_type="review")
    made.place("d", task_type="review")
    with pytest.raises(QueueFull, match=r"2 tasks of type 'review' run and 1 wait; .* in 10.0 s") as caught:
        made.place("e", task_type="review")
    error = caught.value
    assert ("review", 1, 1, 10.0) == (error.task_type, error.waiting, error.limit, error.expected_wait_s)
    made.check()


def test_the_highest_priority_goes_first_then_the_oldest():
    """A person before agents before summaries."""
    made, _ = admission(tasks=1)
    running = made.place("run", task_type="review")
    waiting = [made.place(f"t{i}", task_type="review", priority=p) for i, p in enumerate((0, 1, 2, 1))]
    order = []
    for _ in waiting:
        running.leave()
        running = next(place for place in waiting if place.held)
        order.append(waiting.index(running))
    assert [2, 1, 3, 0] == order


def test_a_tenant_with_many_tasks_holds_up_nobody():
    """Ten of one tenant wait already; one of another is the next but one at the latest."""
    made, _ = admission(tasks=1)
    running = made.place("run", task_type="review", tenant="many")
    many = [made.place(f"m{i}", task_type="review", tenant="many") for i in range(10)]
    one = made.place("one", task_type="review", tenant="few")
    for _ in range(2):
        running.leave()
        running = next(place for place in (*many, one) if place.held)
        if running is one:
            break
    assert one.held


def test_types_share_the_places_of_all():
    """A cap on "*" holds over types, and a type that is full does not block the others."""
    made, _ = admission(tasks=1)
    made.limit("*", tasks=2)
    first = made.place("a", task_type="review")
    second = made.place("b", task_type="review")
    third = made.place("c", task_type="write")
    fourth = made.place("d", task_type="write")
    assert [True, False, True, False] == held([first, second, third, fourth])
    first.leave()
    assert [True, False] == held([second, fourth])
    made.check()


def test_scopes_of_one_task_share_its_place():
    """It is free with the last of them."""
    made, _ = admission(tasks=1)
    outer, inner = (made.place("a", task_type="review") for _ in range(2))
    other = made.place("b", task_type="review")
    outer.leave()
    outer.leave()
    assert [True, False] == held([inner, other])
    inner.leave()
    assert other.held


def test_a_task_inside_a_task_needs_no_place_of_its_own():
    """With one place for both, they would wait for each other for ever."""
    made, _ = admission(tasks=1)
    outer = made.place("outer", task_type="review")
    outer.wait()
    made.place("inner", task_type="review").wait()
    assert made.running() == 1
    outer.leave()


def test_waiting_ends_after_its_time_and_leaves_the_queue():
    """In a thread and in a coroutine alike."""
    made, _ = admission(tasks=1, wait_s=0.01)
    made.place("a", task_type="review")
    with pytest.raises(QueueFull, match=r"within 0\.01 s"):
        made.place("b", task_type="review").wait()
    with pytest.raises(QueueFull, match=r"within 0\.01 s"):
        asyncio.run(made.place("c", task_type="review").wait_async())
    assert made.waiting("review") == 0
    made.check()


async def test_a_coroutine_waits_without_blocking_the_loop_and_can_be_cancelled():
    """Others run meanwhile; who is cancelled is out of the queue."""
    made, _ = admission(tasks=1)
    first = made.place("a", task_type="review")
    second = asyncio.create_task(made.place("b", task_type="review").wait_async())
    third = asyncio.create_task(made.place("c", task_type="review").wait_async())
    await asyncio.sleep(0)
    assert made.waiting() == 2
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    first.leave()
    await third
    assert (0, 1) == (made.waiting(), made.running())
    made.check()


def test_a_thread_that_waits_goes_on_when_a_place_is_free():
    """Told by whoever leaves."""
    made, _ = admission(tasks=1)
    first, went = made.place("a", task_type="review"), threading.Event()

    def second():
        made.place("b", task_type="review").wait()
        went.set()

    thread = threading.Thread(target=second)
    thread.start()
    while not made.waiting():
        threading.Event().wait(0.001)
    assert not went.is_set()
    first.leave()
    assert went.wait(10)
    thread.join()


@pytest.mark.parametrize("bad", [{"tasks": 0}, {"tasks": 1.5}, {"queue": -1}, {"wait_s": float("nan")}])
def test_a_limit_that_cannot_be_is_refused(bad):
    """It names the field."""
    with pytest.raises(ConfigError, match=next(iter(bad))):
        admission(**bad)


class Places(RuleBasedStateMachine):
    """Tasks of two types and tenants come and go; nobody waits who could run, and no cap is passed."""

    places = Bundle("places")

    def __init__(self):
        super().__init__()
        self.clock = ManualClock()
        self.admission = Admission(now_s=self.clock.now_s)
        self.admission.limit("a", tasks=2, queue=3)
        self.admission.limit("*", tasks=3)

    @rule(
        target=places,
        key=st.integers(0, 12),
        kind=st.sampled_from("ab"),
        tenant=st.sampled_from("xy"),
        p=st.integers(0, 2),
    )
    def come(self, key, kind, tenant, p):
        try:
            return self.admission.place(f"{kind}{key}", task_type=kind, tenant=tenant, priority=p)
        except QueueFull:
            return None

    @rule(place=consumes(places), seconds=st.floats(0, 9))
    def go(self, place, seconds):
        self.clock.advance(seconds)
        if place is not None:
            place.leave()
            place.leave()

    @rule(tasks=st.integers(1, 4))
    def change(self, tasks):
        if tasks >= self.admission.running():
            self.admission.limit("*", tasks=tasks)

    @invariant()
    def counts_agree(self):
        self.admission.check()


TestPlaces = Places.TestCase
TestPlaces.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
