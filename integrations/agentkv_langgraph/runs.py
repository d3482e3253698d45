"""The chain runs that a callback sees: what each belongs to, and whose task it is.

LangChain's callbacks show a run's thread but neither `agentkv_task_id` nor a scope around it. So the task of a run is
remembered as soon as it is seen, for calls that know no more of the run than its id (from a user's own threads).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from uuid import UUID


@dataclass(slots=True)
class _Run:
    root: UUID
    parent: UUID | None
    place: str  # the checkpoint namespace of the node that it is, or lies in
    task: str | None


class Runs:
    """Those that are under way. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: dict[UUID, _Run] = {}

    def __len__(self) -> int:
        return len(self._runs)

    def start(self, run_id: UUID, parent: UUID | None, *, place: str, task: str | None) -> None:
        """A run starts, for `task` if a scope around it says so."""
        with self._lock:
            above = None if parent is None else self._runs.get(parent)
            root = above.root if above is not None else run_id if parent is None else parent
            self._runs[run_id] = _Run(root=root, parent=parent, place=place, task=task)

    def end(self, run_id: UUID) -> None:
        with self._lock:
            self._runs.pop(run_id, None)

    def root_of(self, run_id: UUID) -> UUID | None:
        """The outermost run around it; None for a run that was not seen to start."""
        with self._lock:
            run = self._runs.get(run_id)
        return None if run is None else run.root

    def task_of(self, run_id: UUID | None) -> str | None:
        """The task of the run, or of the nearest one around it whose task is known."""
        with self._lock:
            while run_id is not None and (run := self._runs.get(run_id)) is not None:
                if run.task is not None:
                    return run.task
                run_id = run.parent
        return None

    def seen(self, run_id: UUID | None, task: str) -> None:
        """The run was seen to call for `task`: so does the graph whose node it is. Graphs around that one may not."""
        place = None
        with self._lock:
            while run_id is not None and (run := self._runs.get(run_id)) is not None:
                place = run.place if place is None else place
                run.task = run.task or task
                if run.place != place:
                    return
                run_id = run.parent
