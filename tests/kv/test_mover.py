"""Lanes: order, overtaking, failures. Rates."""

from __future__ import annotations

import threading

import pytest

from agentkv.kv.mover import Job, Lane, Rate
from agentkv.kv.streams import DONE, HostEvent


class Recorder:
    """Work that notes what began and ended; some jobs fail, some have nothing to do, some wait."""

    def __init__(self):
        self.began = []
        self.ended = []
        self.events = {}
        self.broken = set()
        self.empty = set()

    def begin(self, job):
        name = job.blocks[0]
        self.began.append(name)
        if name in self.broken:
            raise OSError("no")
        if name in self.empty:
            return None
        return self.events.get(name, DONE)

    def end(self, job):
        self.ended.append((job.blocks[0], bool(job.failed)))


def jobs(*names):
    return [Job(lane="h2d", blocks=[name]) for name in names]


@pytest.fixture
def work():
    return Recorder()


@pytest.fixture
def lane(work):
    return Lane("h2d", work, Rate(1e9), threads=0)


def run(lane):
    while lane.turn():
        pass


def test_urgent_jobs_overtake_the_background(lane, work):
    """A restore that somebody waits for starts before write-backs and prefetches queued earlier."""
    lane.put(jobs("b1", "b2"), urgent=False)
    lane.put(jobs("u1", "u2"), urgent=True)
    run(lane)
    assert ["u1", "u2", "b1", "b2"] == work.began


def test_a_background_job_can_be_hastened(lane, work):
    """A prefetch that somebody waits for now becomes urgent."""
    lane.put(jobs("b1", "b2", "b3"), urgent=False)
    lane.hasten(lambda job: job.blocks[0] == "b3")
    run(lane)
    assert ["b3", "b1", "b2"] == work.began


def test_at_most_two_jobs_are_in_flight(lane, work):
    """So that an urgent one never stands behind a long queue of the device's own."""
    for name in ("a", "b", "c"):
        work.events[name] = HostEvent()
    lane.put(jobs("a", "b", "c"), urgent=False)
    run(lane)
    assert ["a", "b"] == work.began
    work.events["a"].set()
    run(lane)
    assert ["a", "b", "c"] == work.began
    assert [("a", False)] == work.ended


def test_a_copy_that_cannot_start_ends_as_failed(lane, work):
    """The next one is carried out."""
    work.broken.add("a")
    lane.put(jobs("a", "b"), urgent=False)
    run(lane)
    assert [("a", True), ("b", False)] == work.ended


def test_a_job_with_nothing_left_to_do_has_no_end(lane, work):
    """All its blocks were called off."""
    work.empty.add("a")
    lane.put(jobs("a", "b"), urgent=False)
    run(lane)
    assert [("b", False)] == work.ended


def test_threads_are_ready_before_the_first_job_and_end_with_close(work):
    """Starting one while others compute would cost a tool call milliseconds."""
    lane = Lane("read", work, Rate(1e9), threads=3)
    assert 3 == len(lane._threads)
    ended = threading.Event()
    work.end = lambda job: ended.set() if job.blocks[0] == "z" else None
    lane.put(jobs("x", "y", "z"), urgent=True)
    assert ended.wait(10)
    threads = list(lane._threads)
    lane.close()
    assert not any(thread.is_alive() for thread in threads)


def test_an_event_that_raises_is_a_failed_copy(work):
    """As CUDA does when an earlier kernel went wrong; the lane's thread survives it."""

    class Broken:
        def query(self):
            return True

        def wait(self):
            raise RuntimeError("device lost")

    work.events["a"] = Broken()
    lane = Lane("h2d", work, Rate(1e9), threads=1)
    done = threading.Event()
    end = work.end
    work.end = lambda job: (end(job), done.set() if job.blocks[0] == "b" else None)
    lane.put(jobs("a"), urgent=True)
    lane.put(jobs("b"), urgent=True)
    assert done.wait(10)
    lane.close()
    assert {("a", True), ("b", False)} == set(work.ended)


def test_a_rate_starts_at_its_prior_and_follows_what_is_measured():
    """A second of copying outweighs the prior; an idle hour between copies does not count."""
    rate = Rate(1e9)
    assert 1e9 == pytest.approx(rate.bytes_s)
    for start in (0.0, 3600.0):
        rate.start(start)
        rate.finish(start + 1.0, 4_000_000_000)
    assert 3.9e9 < rate.bytes_s < 4e9


def test_copies_at_the_same_time_share_the_clock():
    """Two threads that each move 1 GB in the same second make 2 GB/s."""
    rate = Rate(2e9)
    rate.start(0.0)
    rate.start(0.0)
    rate.finish(1.0, 1_000_000_000)
    rate.finish(1.0, 1_000_000_000)
    assert 2e9 == pytest.approx(rate.bytes_s, rel=0.01)
