"""What the tasks are doing right now: written by the threads that run them, read by the view."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from agentkv.core.residency import Residency
from agentkv.core.task import Caller

PHASES = {
    "plan": "planning",
    "run_tool": "running a tool",
    "read_result": "reading the result",
    "decide": "deciding",
    "report": "reporting",
}


@dataclass(slots=True)
class Line:
    """One task. `spent_tokens` is input plus output of all its calls; `seen` holds the tiers its blocks were in."""

    key: str
    title: str
    phase: str = "waiting to start"
    tool: str = ""
    tools_done: int = 0
    tools_total: int = 0
    context_tokens: int = 0
    spent_tokens: int = 0
    budget_tokens: int = 0
    ended: bool = False
    error: str = ""

    def doing(self) -> str:
        """The phase in words, with the tool where one runs."""
        return f"{self.phase}: {self.tool}" if self.tool else self.phase


@dataclass(slots=True)
class Board:
    """All tasks of one run."""

    lines: list[Line]
    news: list[str] = field(default_factory=list)
    """Sentences for the plain view, oldest first; the view takes them out."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def entered(self, line: Line, node: str, tool: str = "") -> None:
        """The task is now in this node."""
        line.phase = PHASES.get(node, node)
        line.tool = tool
        if node != "decide":
            self.tell(f"{line.title}: {line.doing()}")

    def answered(self, line: Line, message: Any) -> None:
        """A model answer with its usage."""
        usage = message.usage_metadata
        line.context_tokens = usage["total_tokens"]
        line.spent_tokens += usage["total_tokens"]

    def over(self, line: Line, error: str = "") -> None:
        """The task has ended."""
        line.ended, line.error, line.tool = True, error, ""
        line.phase = error or "done"
        self.tell(f"{line.title}: {line.phase}")

    def tell(self, sentence: str) -> None:
        """A sentence for the plain view."""
        with self._lock:
            self.news.append(sentence)

    def take_news(self) -> list[str]:
        """What was told since the last time."""
        with self._lock:
            news, self.news = self.news, []
            return news


def residency_of(kv: Any, key: str) -> Residency | None:
    """Where the blocks of the task's main session are; None without one, or for an engine without tiers."""
    last_session = getattr(kv.engine, "last_session", None)
    if last_session is None or not hasattr(kv.engine, "residency"):
        return None
    session = last_session(Caller(task=key))
    return None if session is None else kv.engine.residency(session)


def where_blocks_are(residency: Residency | None) -> str:
    """For people: blocks with a copy in each tier (one block may have several), and those that have none."""
    if residency is None:
        return "-"
    parts = (
        ("device", residency.device_blocks),
        ("host", residency.host_blocks),
        ("disk", residency.disk_blocks),
        ("lost", residency.missing_blocks),
    )
    return " · ".join(f"{name} {count}" for name, count in parts if count) or "-"
