"""Who a call is for: task, session, priority class, caller.

Task: what is billed and budgeted, one user goal. Session: one growing context inside a task, hence one KV
residency; sub-agents have their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

UNATTRIBUTED = "unattributed"


class PriorityClass(IntEnum):
    """Who waits for the answer; a higher class goes first."""

    BATCH = 0
    """Nobody: summaries, archive, precompute."""
    STEP = 1
    """An agent, inside a task."""
    FOREGROUND = 2
    """A person."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who is calling: the task, and inside it the branch, node and attempt, where the host knows them.

    `branch` names one line of control inside a task (a LangGraph checkpoint namespace, a thread); it decides
    which session a prompt joins, so it may change cost, never an answer.
    """

    task: str = UNATTRIBUTED
    branch: str = ""
    node: str = ""
    attempt: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A registered task."""

    key: str
    priority: PriorityClass = PriorityClass.STEP
