"""Link: one direction of a copy path with its queue. Urgent jobs overtake the others; a job in service is set aside.

Covers service times and who is next. Does not cover what a job's bytes are: its owner is told when the job has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class Job:
    """`size_bytes` to carry; `done` is called with the job when the last byte has arrived."""

    __slots__ = ("done", "left_bytes", "size_bytes", "urgent")

    def __init__(self, size_bytes: float, done: Callable[[Job], None], *, urgent: bool) -> None:
        self.size_bytes = self.left_bytes = float(size_bytes)
        self.done = done
        self.urgent = urgent


class Link:
    """One server of `bytes_s`. `at(time_s, call)` is the simulator's calendar, `now_s()` its clock."""

    def __init__(
        self, bytes_s: float, *, at: Callable[[float, Callable[[], None]], None], now_s: Callable[[], float]
    ) -> None:
        self._bytes_s = bytes_s
        self._at = at
        self._now_s = now_s
        self._urgent: deque[Job] = deque()
        self._background: deque[Job] = deque()
        self._serving: Job | None = None
        self._since_s = 0.0
        self._version = 0
        self.carried_bytes = 0.0
        self.busy_s = 0.0

    @property
    def jobs(self) -> int:
        """Jobs that wait or are carried."""
        return len(self._urgent) + len(self._background) + (self._serving is not None)

    def submit(self, job: Job) -> None:
        """Queue a job."""
        (self._urgent if job.urgent else self._background).append(job)
        serving = self._serving
        if serving is None:
            self._next()
        elif job.urgent and not serving.urgent:
            self._set_aside(serving)
            self._next()

    def hurry(self, job: Job) -> None:
        """Somebody waits for this job now."""
        if job.urgent:
            return
        job.urgent = True
        if job is self._serving or job not in self._background:
            return
        self._background.remove(job)
        self.submit(job)

    def wait_s(self) -> float:
        """Until an urgent job that comes now would begin."""
        ahead = sum(job.left_bytes for job in self._urgent) / self._bytes_s
        serving = self._serving
        if serving is not None and serving.urgent:
            ahead += serving.left_bytes / self._bytes_s - (self._now_s() - self._since_s)
        return max(0.0, ahead)

    def _set_aside(self, job: Job) -> None:
        ran_s = self._now_s() - self._since_s
        job.left_bytes = max(0.0, job.left_bytes - ran_s * self._bytes_s)
        self.busy_s += ran_s
        self._background.appendleft(job)

    def _next(self) -> None:
        queue = self._urgent or self._background
        self._version += 1
        if not queue:
            self._serving = None
            return
        job = self._serving = queue.popleft()
        self._since_s = self._now_s()
        version = self._version
        self._at(self._since_s + job.left_bytes / self._bytes_s, lambda: self._ended(version))

    def _ended(self, version: int) -> None:
        job = self._serving
        if version != self._version or job is None:
            return
        self.busy_s += self._now_s() - self._since_s
        self.carried_bytes += job.size_bytes
        self._next()
        job.done(job)
