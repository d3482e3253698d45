"""Admission: how many tasks of a type run at once, who waits for a place, and who is next.

Covers caps by type and over all ("*"), priority, fairness between types and tenants, bounded queues. In this process.
Does not cover what tasks spend (`account.py`). Among those that may start, the highest priority goes first; within it
the turns of each (type, tenant) are spaced evenly, so that one who asks for many places holds up nobody who asks for few.
"""

from __future__ import annotations

import math
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field

from agentkv.budget.limits import Budget
from agentkv.errors import ConfigError, QueueFull

ALL = "*"
_KEEP = 0.7  # of what was known about how long tasks take, when another one ends
_MAX_FLOWS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class _Limit:
    tasks: int | None = None
    queue: int | None = None
    wait_s: float = 600.0
    budget_per: Budget | None = None


@dataclass(slots=True, eq=False)
class _Ticket:
    """A task that runs or waits; `turn` is its place in the order of its priority."""

    key: str
    task_type: str
    tenant: str
    priority: int
    turn: float
    scopes: int = 0
    started_s: float | None = None
    heard: list[Callable[[], None]] = field(default_factory=list)


class Place:
    """A task's place: wait for it, then leave it. One that needs none is there at once."""

    def __init__(self, admission: Admission, ticket: _Ticket | None, wait_s: float) -> None:
        self._admission = admission
        self._ticket = ticket
        self._wait_s = wait_s

    @property
    def held(self) -> bool:
        """True from the moment at which the task may run until it has left."""
        return self._ticket is not None and self._ticket.started_s is not None

    def wait(self) -> None:
        """Block until the task may run. Raises QueueFull when that takes too long; then the place is given up."""
        if self._ticket is not None and not self.held:
            granted = threading.Event()
            self._admission.tell(self._ticket, granted.set)
            try:
                if not granted.wait(self._wait_s):
                    raise self._admission.too_late(self._ticket, self._wait_s)  # noqa: TRY301  and leaves
            except BaseException:
                self.leave()
                raise
        self._enter()

    async def wait_async(self) -> None:
        """The same without blocking the event loop; cancelled, the place is given up."""
        import asyncio  # 20 ms that `import agentkv` must not pay

        if self._ticket is not None and not self.held:
            loop, granted = asyncio.get_running_loop(), asyncio.Event()
            self._admission.tell(self._ticket, lambda: _call_in(loop, granted.set))
            try:
                await asyncio.wait_for(granted.wait(), self._wait_s)
            except TimeoutError:
                error = self._admission.too_late(self._ticket, self._wait_s)
                self.leave()
                raise error from None
            except BaseException:
                self.leave()
                raise
        self._enter()

    def _enter(self) -> None:
        if self.held:
            _inside.set(self)

    def leave(self) -> None:
        """The task is over, or does not want to wait any more. Idempotent."""
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            self._admission.leave(ticket)


_inside: ContextVar[Place | None] = ContextVar("agentkv_place", default=None)
"""The place in which the code here runs: a task inside a task needs none of its own, or both would wait for ever."""


class Admission:
    """Places for tasks. Thread-safe; `check()` recomputes its counts."""

    def __init__(self, *, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._lock = threading.Lock()
        self._limits: dict[str, _Limit] = {}
        self._known: dict[str, _Ticket] = {}
        self._running: Counter[str] = Counter()
        self._queue: list[_Ticket] = []
        self._turns: OrderedDict[tuple[str, str], float] = OrderedDict()
        self._turn = 0.0
        self._took_s: dict[str, float] = {}

    def limit(
        self,
        task_type: str,
        *,
        tasks: int | None = None,
        queue: int | None = None,
        wait_s: float = 600.0,
        budget_per: Budget | None = None,
    ) -> None:
        """Set the limits of a type; None is no limit. Tasks that wait and fit now start. Raises ConfigError."""
        if not task_type:
            raise ConfigError("limit(''): name a type of tasks, or '*' for all")
        for name, value, low in (("tasks", tasks, 1), ("queue", queue, 0)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < low):
                raise ConfigError(f"limit({name}={value!r}): a whole number >= {low} is needed, or None for no limit")
        if isinstance(wait_s, bool) or not isinstance(wait_s, int | float) or not 0 <= wait_s < math.inf:
            raise ConfigError(f"limit(wait_s={wait_s!r}): seconds >= 0 are needed")
        with self._lock:
            self._limits[task_type] = _Limit(tasks=tasks, queue=queue, wait_s=wait_s, budget_per=budget_per)
            self._start_waiting()

    def budget_per(self, task_type: str) -> Budget | None:
        """What a task of this type gets that brings no budget."""
        own = self._limits.get(task_type)
        return own.budget_per if own is not None else None

    def waiting(self, task_type: str = ALL) -> int:
        """How many tasks wait."""
        with self._lock:
            return self._waiting(task_type)

    def running(self, task_type: str = ALL) -> int:
        """How many tasks have a place."""
        with self._lock:
            return self._running[task_type]

    def place(self, key: str, *, task_type: str, tenant: str = "", priority: int = 1) -> Place:
        """A place for the task, there at once or to be waited for. A task that has one shares it with its other scopes.

        Raises QueueFull, with nothing changed, where no place is free and the queue is full.
        """
        limits = [one for name in (task_type, ALL) if task_type and (one := self._limits.get(name)) is not None]
        outer = _inside.get()
        if not limits or (outer is not None and outer.held and outer._admission is self):
            return Place(self, None, 0.0)
        wait_s = min(one.wait_s for one in limits)
        with self._lock:
            ticket = self._known.get(key)
            if ticket is None:
                ticket = self._new(key, task_type, tenant, priority)
            ticket.scopes += 1
            return Place(self, ticket, wait_s)

    def _new(self, key: str, task_type: str, tenant: str, priority: int) -> _Ticket:
        flow = (task_type, tenant)
        turn = max(self._turn, self._turns.get(flow, 0.0)) + 1.0
        ticket = _Ticket(key=key, task_type=task_type, tenant=tenant, priority=priority, turn=turn)
        self._queue.append(ticket)
        if self._next() is ticket:
            self._start(ticket)
        else:
            for name in (task_type, ALL):
                own = self._limits.get(name)
                if own is not None and own.queue is not None and self._waiting(name) > own.queue:
                    self._queue.remove(ticket)
                    raise self._full(name, own)
        self._turns[flow] = turn
        self._turns.move_to_end(flow)
        while len(self._turns) > _MAX_FLOWS:
            self._turns.popitem(last=False)
        self._known[key] = ticket
        return ticket

    def tell(self, ticket: _Ticket, heard: Callable[[], None]) -> None:
        """Call `heard` once the task may run; at once if it may already."""
        with self._lock:
            if ticket.started_s is None:
                ticket.heard.append(heard)
                return
        heard()

    def leave(self, ticket: _Ticket) -> None:
        """One scope of the task is over; with the last one its place is free for another task."""
        with self._lock:
            ticket.scopes -= 1
            if ticket.scopes > 0:
                return
            del self._known[ticket.key]
            if ticket.started_s is None:
                self._queue.remove(ticket)
            else:
                took_s = max(0.0, self._now_s() - ticket.started_s)
                for name in (ticket.task_type, ALL):
                    self._running[name] -= 1
                    before_s = self._took_s.get(name, took_s)
                    self._took_s[name] = _KEEP * before_s + (1 - _KEEP) * took_s
            self._start_waiting()

    def too_late(self, ticket: _Ticket, wait_s: float) -> QueueFull:
        """What a task hears that has waited for too long."""
        with self._lock:
            error = self._full(ticket.task_type, self._limits.get(ticket.task_type) or _Limit())
            return QueueFull(
                f"task {ticket.key!r:.200} found no place within {wait_s:g} s. {error}",
                task_type=error.task_type,
                waiting=error.waiting,
                limit=error.limit,
                expected_wait_s=error.expected_wait_s,
            )

    def check(self) -> None:
        """Recompute the counts and assert that they agree, and that nobody waits who could run; for tests."""
        with self._lock:
            running = [ticket for ticket in self._known.values() if ticket.started_s is not None]
            assert self._running[ALL] == len(running)
            for task_type in {ticket.task_type for ticket in self._known.values()}:
                assert self._running[task_type] == sum(ticket.task_type == task_type for ticket in running)
            for name, own in self._limits.items():
                assert own.tasks is None or self._running[name] <= own.tasks
            assert {id(ticket) for ticket in self._queue} == {
                id(ticket) for ticket in self._known.values() if ticket.started_s is None
            }
            assert self._next() is None

    # -- who is next; the lock is held

    def _waiting(self, task_type: str) -> int:
        return sum(task_type in (ALL, ticket.task_type) for ticket in self._queue)

    def _fits(self, ticket: _Ticket) -> bool:
        limits = ((name, self._limits.get(name)) for name in (ticket.task_type, ALL))
        return all(own is None or own.tasks is None or self._running[name] < own.tasks for name, own in limits)

    def _next(self) -> _Ticket | None:
        able = [ticket for ticket in self._queue if self._fits(ticket)]
        return min(able, key=lambda ticket: (-ticket.priority, ticket.turn), default=None)

    def _start_waiting(self) -> None:
        while (ticket := self._next()) is not None:
            self._start(ticket)

    def _start(self, ticket: _Ticket) -> None:
        self._queue.remove(ticket)
        ticket.started_s = self._now_s()
        self._turn = max(self._turn, ticket.turn - 1.0)
        for name in (ticket.task_type, ALL):
            self._running[name] += 1
        for heard in ticket.heard:
            heard()

    def _full(self, name: str, own: _Limit) -> QueueFull:
        waiting, took_s = self._waiting(name), self._took_s.get(name)
        wait_s = None if took_s is None else took_s * math.ceil((waiting + 1) / (own.tasks or self._running[name] or 1))
        expected = "" if wait_s is None else f"; a place is to be expected in {wait_s:,.1f} s"
        which = "tasks" if name == ALL else f"tasks of type {name!r:.200}"
        return QueueFull(
            f"{self._running[name]:,} {which} run and {waiting:,} wait{expected}. "
            "Try again later, or raise limit(tasks=..., queue=...).",
            task_type=name,
            waiting=waiting,
            limit=own.queue,
            expected_wait_s=wait_s,
        )


def _call_in(loop: object, heard: Callable[[], None]) -> None:
    """Call `heard` in the event loop, if that still runs."""
    try:
        loop.call_soon_threadsafe(heard)  # type: ignore[attr-defined]
    except RuntimeError:
        return
