"""The mover: lanes of threads that carry out copies, urgent ones first. It knows slots, not sessions.

Covers Job, Lane, Rate. What is copied and what follows from it is `transfers.py`.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from agentkv.kv.block import Block
from agentkv.kv.streams import DONE, Event
from agentkv.log import failed

LaneName = Literal["h2d", "d2h", "read", "write"]
_IN_FLIGHT = 2
"""Jobs that a lane's thread has submitted and not seen end: enough to keep a stream busy, few enough that an
urgent job never waits long."""


@dataclass(eq=False, slots=True, kw_only=True)
class Job:
    """Blocks to be copied in one go; `blocks` may shrink before it starts, when somebody forgets some of them.

    A job with a `plan` copies nothing itself: it is called, and again after the jobs that are queued then, until it
    returns False. So a move of thousands of blocks costs its caller nothing, and an urgent copy overtakes it.
    """

    lane: LaneName
    blocks: list[Block] = field(default_factory=list)
    plan: Callable[[], bool] | None = None
    size_bytes: int = 0
    failed: set[int] = field(default_factory=set)
    """ids of blocks whose copy went wrong."""
    urgent: bool = False
    due_s: float = math.inf
    """When a disk copy counts as stalled (monotonic)."""
    abandoned: bool = False
    """Stalled: nobody waits for it any more; `stuck` are the slots that it may still write to."""
    stuck: list[int] = field(default_factory=list)


class Work(Protocol):
    """What the lanes call, without any lock held."""

    def begin(self, job: Job) -> Event | None:
        """Start the job. None: nothing is left to do, `end` is not wanted."""
        ...

    def end(self, job: Job) -> None:
        """The job's event has happened, or `begin` raised (then every block is in `failed`)."""
        ...


class Rate:
    """Bytes per second while a lane is busy, with a prior worth a twentieth of a second; old samples fade."""

    _HORIZON_S = 2.0

    def __init__(self, prior_bytes_s: float) -> None:
        self._lock = threading.Lock()
        self._busy_s = 0.05
        self._bytes = prior_bytes_s * self._busy_s
        self._running = 0
        self._mark_s = 0.0

    @property
    def bytes_s(self) -> float:
        """The estimate."""
        return self._bytes / self._busy_s

    def start(self, now_s: float) -> None:
        """A copy starts."""
        with self._lock:
            if self._running == 0:
                self._mark_s = now_s
            self._running += 1

    def finish(self, now_s: float, size_bytes: int) -> None:
        """A copy has ended; `size_bytes` 0 if it failed."""
        with self._lock:
            self._running -= 1
            self._busy_s += max(now_s - self._mark_s, 1e-6)
            self._bytes += size_bytes
            self._mark_s = now_s
            if self._busy_s > self._HORIZON_S:
                self._busy_s *= 0.5
                self._bytes *= 0.5


class Lane:
    """Two queues and some daemon threads, ready before the first job: starting one costs the caller milliseconds while
    others compute. With `threads=0`, `turn()` is the thread.
    """

    def __init__(self, name: LaneName, work: Work, rate: Rate, *, threads: int) -> None:
        self.name = name
        self.rate = rate
        self._work = work
        self._ready = threading.Condition()
        self._urgent: deque[Job] = deque()
        self._background: deque[Job] = deque()
        self._closed = False
        self._stepped: deque[tuple[Job, Event]] = deque()
        self._threads = [
            threading.Thread(target=self._run, name=f"agentkv-{name}-{i}", daemon=True) for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, jobs: Sequence[Job], *, urgent: bool) -> None:
        """Queue `jobs`."""
        for job in jobs:
            job.urgent = urgent
        with self._ready:
            (self._urgent if urgent else self._background).extend(jobs)
            self._ready.notify(len(jobs))

    def hasten(self, wanted: Callable[[Job], bool]) -> None:
        """Make the queued background jobs that are `wanted` urgent."""
        with self._ready:
            moved = [job for job in self._background if wanted(job)]
            for job in moved:
                self._background.remove(job)
                job.urgent = True
            self._urgent.extend(moved)

    def withdraw(self) -> list[Job]:
        """Take back every queued job that copies."""
        with self._ready:
            jobs = [job for queue in (self._urgent, self._background) for job in queue if job.plan is None]
            for queue in (self._urgent, self._background):
                left = [job for job in queue if job.plan is not None]
                queue.clear()
                queue.extend(left)
        return jobs

    def turn(self) -> bool:
        """One step without a thread: start a job, or see one end. False if there was nothing to do."""
        with self._ready:
            job = self._pop() if len(self._stepped) < _IN_FLIGHT else None
        if job is not None:
            event = self._begin(job)
            if event is not None:
                self._stepped.append((job, event))
            return True
        if self._stepped and self._stepped[0][1].query():
            self._end(self._stepped.popleft()[0])
            return True
        return False

    def _pop(self) -> Job | None:
        if self._urgent:
            return self._urgent.popleft()
        return self._background.popleft() if self._background else None

    def _run(self) -> None:
        running: deque[tuple[Job, Event]] = deque()
        while True:
            with self._ready:
                job = self._pop() if len(running) < _IN_FLIGHT else None
                if job is None and not running:
                    if self._closed:
                        return
                    self._ready.wait()
                    continue
            if job is not None:
                event = self._begin(job)
                if event is DONE:
                    self._end(job)
                elif event is not None:
                    running.append((job, event))
                continue
            job, event = running.popleft()
            try:
                event.wait()
            except Exception as error:
                self._failed(job, error)
            self._end(job)

    def _begin(self, job: Job) -> Event | None:
        if job.plan is not None:
            self._think(job, job.plan)
            return None
        self.rate.start(time.monotonic())
        try:
            event = self._work.begin(job)
        except Exception as error:
            self._failed(job, error)
            return DONE
        if event is None:
            self.rate.finish(time.monotonic(), 0)
        return event

    def _think(self, job: Job, plan: Callable[[], bool]) -> None:
        try:
            more = plan()
        except Exception as error:
            failed("kv_plan_failed", lane=self.name, error=repr(error))
            return
        if more:
            self.put([job], urgent=job.urgent)

    def _failed(self, job: Job, error: Exception) -> None:
        failed("kv_copy_failed", lane=self.name, blocks=len(job.blocks), error=repr(error))
        job.failed = {id(block) for block in job.blocks}

    def _end(self, job: Job) -> None:
        self.rate.finish(time.monotonic(), 0 if job.failed else job.size_bytes)
        try:
            self._work.end(job)
        except Exception as error:
            failed("kv_commit_failed", lane=self.name, error=repr(error))

    def close(self, timeout_s: float | None = None) -> bool:
        """Drop what is queued, end what runs, stop the threads. False if some still run after `timeout_s`."""
        with self._ready:
            self._closed = True
            self._urgent.clear()
            self._background.clear()
            self._ready.notify_all()
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(None if until_s is None else max(0.0, until_s - time.monotonic()))
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        return not self._threads
