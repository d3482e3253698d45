"""Asking a person from within a node: LangGraph's interrupt, told apart from its own repetitions.

A resumed node runs again from its start and hands out the answers that it was given before, one for each interrupt in
turn. Which of them were taken already is remembered by the node's run, so that nothing is granted twice.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

from langchain_core.runnables.config import var_child_runnable_config
from langgraph.types import interrupt

_SCRATCHPAD = "__pregel_scratchpad"  # LangGraph's own constant for what one run of a node keeps
_MAX_KEPT = 4096


class Asked:
    """How often each run of a node has asked, and which answers were taken. Thread-safe."""

    def __init__(self) -> None:
        self._runs: OrderedDict[int, tuple[Any, int]] = OrderedDict()  # by id of the run's own object, which is held
        self._taken: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._lock = threading.Lock()

    def number(self, run: Any) -> int:
        """The number of this question in its run, from 1 on."""
        with self._lock:
            number = self._runs.pop(id(run), (run, 0))[1] + 1
            self._runs[id(run)] = (run, number)
            while len(self._runs) > _MAX_KEPT:
                self._runs.popitem(last=False)
            return number

    def taken(self, place: str, number: int) -> bool:
        """Take the answer to question `number` at `place`; True if that has happened before."""
        with self._lock:
            before = (place, number) in self._taken
            self._taken[place, number] = None
            self._taken.move_to_end((place, number))
            while len(self._taken) > _MAX_KEPT:
                self._taken.popitem(last=False)
            return before


_asked = Asked()


def ask(question: dict[str, Any], refused: Exception) -> Any:
    """The answer of whoever resumes; {} for one that was taken before. Raises `refused` outside of a graph's node."""
    conf = (var_child_runnable_config.get() or {}).get("configurable") or {}
    run = conf.get(_SCRATCHPAD)
    if run is None:
        raise refused
    number = _asked.number(run)
    answer = interrupt(question)
    place = f"{conf.get('thread_id')}|{conf.get('checkpoint_ns')}"
    return {} if _asked.taken(place, number) else answer
