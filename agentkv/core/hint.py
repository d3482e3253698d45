"""Hint: a fact about the near future or the present of a session, told by whoever knows it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from agentkv.core.forecast import Forecast
from agentkv.core.task import UNATTRIBUTED


class HintKind(StrEnum):
    """What happened (design section 8)."""

    TURN_START = "turn_start"
    TURN_END = "turn_end"
    TOOL_START = "tool_start"
    TOOL_UPDATE = "tool_update"
    TOOL_END = "tool_end"
    TOOL_ERROR = "tool_error"
    SESSION_END = "session_end"


class ToolStatus(StrEnum):
    """How a tool call stands. PAUSED: the host interrupted it (a person is asked); it may start again."""

    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    PAUSED = "paused"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFacts:
    """What is said about a tool call. Never its arguments: `command` is at most the first command word and a sub-command.

    `n_parallel`: how many calls of its session run now, this one included.
    """

    call_id: str
    tool: str
    command: str = ""
    attempt: int = 1
    status: ToolStatus = ToolStatus.RUNNING
    expect_s: float | None = None
    progress: float | None = None
    elapsed_s: float = 0.0
    n_parallel: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFacts:
    """What is known of a session and of its next call.

    `parent`: the session that it was sent from. `turn` counts its calls, `tokens` is its context after the last one.
    `priority` is -100..100, higher is more important. `osl`: output tokens to expect, None before a first answer.
    `load_s`: how long its context takes to compute anew, None where no call has shown it. `purpose`: of the call.
    `within_s`: so long the call may be held up before it is sent, None for as long as the engine's adapter thinks fit.
    """

    session: str
    task: str = UNATTRIBUTED
    parent: str = ""
    turn: int = 0
    tokens: int = 0
    model: str = ""
    salt: str = ""
    priority: int = 0
    osl: int | None = None
    load_s: float | None = None
    purpose: str = "answer"
    within_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Hint:
    """One hint. `at_s` is monotonic (for durations), `ts_ms` wall time (for records)."""

    id: str
    kind: HintKind
    at_s: float
    ts_ms: int
    task: str
    session: str = ""
    node: str = ""
    call: ToolFacts | None = None
    wait: Forecast | None = None
    final: bool = False
    about: SessionFacts | None = None
