"""Ledger: the append-only facts of every task, from which bills are made.

Covers keeping them in memory, within bounds; a store (`store.py`) saves them as well, and has those that memory had to
let go. The facts are `facts.py`'s, their JSON is `codec.py`'s (both can be had from here), arithmetic is `bill.py`'s.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from agentkv.budget.codec import fact_from_json, fact_to_json, is_known
from agentkv.budget.facts import (
    AgentMessageFact,
    ContextFact,
    DeliveryFact,
    Fact,
    ModelCall,
    MoveFact,
    OutcomeFact,
    TaskFact,
    ToolCallFact,
)
from agentkv.errors import LedgerError
from agentkv.log import count, failed, warn_once

__all__ = [
    "AgentMessageFact",
    "ContextFact",
    "DeliveryFact",
    "Fact",
    "FactStore",
    "Ledger",
    "ModelCall",
    "MoveFact",
    "OutcomeFact",
    "TaskFact",
    "ToolCallFact",
    "fact_from_json",
    "fact_to_json",
    "is_known",
]

MAX_TASKS = 4096
"""Tasks kept in memory; beyond them the one that was silent longest goes, finished ones first (a store still has it)."""
MAX_FACTS = 200_000
"""Facts kept in memory over all tasks (half a KB each); beyond them tasks go in the same order."""
MAX_FACTS_OF_A_TASK = 100_000
"""Facts of one task kept in memory; beyond them its older half goes."""
_MAX_CUT = 100_000  # names of such tasks; a task that comes back after so many others begins anew


class FactStore(Protocol):
    """Where facts are saved. `put` neither blocks nor raises; `saved` may wait for a disk, and raise LedgerError."""

    @property
    def unsaved(self) -> int: ...
    def put(self, fact: Fact) -> None: ...
    def saved(self, task: str) -> list[Fact]: ...
    def close(self) -> None: ...


class Ledger:
    """Facts per task, in the order in which they were appended. Thread-safe."""

    def __init__(self, store: FactStore | None = None) -> None:
        self.store = store
        self._rows: OrderedDict[str, list[Fact]] = OrderedDict()  # silent longest first
        self._running: set[str] = set()  # not finished
        self._kept = 0
        self._cut: dict[int, None] = {}  # tasks whose first facts are no longer in memory
        self._lock = threading.Lock()
        self._listeners: tuple[Callable[[Fact], None], ...] = ()

    def on_fact(self, listener: Callable[[Fact], None]) -> Callable[[], None]:
        """Tell `listener` every fact from now on, on the thread that appends it; it must be quick. Returns the way to stop.

        One that fails is logged, and neither keeps the others from hearing nor reaches the agent.
        """
        with self._lock:
            self._listeners = (*self._listeners, listener)

        def stop() -> None:
            with self._lock:
                self._listeners = tuple(one for one in self._listeners if one is not listener)

        return stop

    def append(self, fact: Fact) -> None:
        """Record a fact. Never waits for a disk and never raises: a failure is a log line and a counter."""
        try:
            task = fact.task
            with self._lock:
                rows = self._rows.get(task)
                if rows is None:
                    rows = self._rows[task] = []
                    if hash(task) not in self._cut:  # else it comes late, after its end
                        self._running.add(task)
                else:
                    self._rows.move_to_end(task)
                rows.append(fact)
                self._kept += 1
                if isinstance(fact, TaskFact):
                    self._mark(fact)
                if self._kept > MAX_FACTS or len(self._rows) > MAX_TASKS or len(rows) > MAX_FACTS_OF_A_TASK:
                    self._let_go()
                if self.store is not None:
                    self.store.put(fact)  # inside, so that the store has a task's facts in the order of memory
        except Exception as error:
            failed("ledger_append_failed", error=repr(error))
        for listener in self._listeners:
            try:
                listener(fact)
            except Exception as error:
                failed("ledger_listener_failed", error=repr(error))

    def _mark(self, fact: TaskFact) -> None:
        if fact.event == "finished":
            self._running.discard(fact.task)
        else:
            self._running.add(fact.task)

    def _let_go(self) -> None:
        """Make room for a while: a tenth of the facts and of the tasks. The task that just spoke, the last, stays."""
        last = next(reversed(self._rows))
        if len(self._rows[last]) > MAX_FACTS_OF_A_TASK:
            older = len(self._rows[last]) // 2
            del self._rows[last][:older]
            self._kept -= older
            self._remember_cut(last)
        finished = [task for task in self._rows if task not in self._running and task != last]
        running = [task for task in self._rows if task in self._running and task != last]
        over = self._kept > MAX_FACTS or len(self._rows) > MAX_TASKS
        for task in (*finished, *running) if over else ():
            if self._kept <= MAX_FACTS * 0.9 and len(self._rows) <= MAX_TASKS * 0.9:
                break
            self._kept -= len(self._rows.pop(task))
            self._running.discard(task)
            self._remember_cut(task)
            count("ledger_task_forgotten")

    def _remember_cut(self, task: str) -> None:
        self._cut[hash(task)] = None
        while len(self._cut) > _MAX_CUT:
            del self._cut[next(iter(self._cut))]
        if self.store is None:
            warn_once("ledger_memory_full", advice="old tasks are forgotten; give a database to keep them")

    def rows(self, task: str) -> list[Fact]:
        """The task's facts so far in this process; [] for an unknown task.

        Facts that memory had to let go are read back from the store: that takes a disk, and where it fails, what
        memory has is the answer, with a warning.
        """
        with self._lock:
            rows, cut = list(self._rows.get(task, ())), hash(task) in self._cut
        if not cut or self.store is None:
            return rows
        try:
            return self.store.saved(task)
        except LedgerError as error:
            failed("ledger_rows_incomplete", error=str(error))
            return rows

    def tasks(self) -> list[str]:
        """Tasks with facts in memory, the one that was silent longest first."""
        with self._lock:
            return list(self._rows)

    def check(self) -> None:
        """Assert that counts and bounds hold; for tests."""
        with self._lock:
            assert self._kept == sum(len(rows) for rows in self._rows.values())
            assert self._running <= self._rows.keys()
            assert all(self._rows.values())
            assert len(self._rows) <= MAX_TASKS
            assert self._kept <= MAX_FACTS
            assert len(self._cut) <= _MAX_CUT

    @property
    def unsaved(self) -> int:
        """Facts that are not in the store yet, because it is behind or cannot take them; 0 without a store."""
        return 0 if self.store is None else self.store.unsaved

    def close(self) -> None:
        """Save what is not saved yet. Idempotent; facts appended later are kept in memory only."""
        if self.store is not None:
            self.store.close()
