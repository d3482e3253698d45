"""Hint: a fact about the near future or the present of a session, told by whoever knows it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from agentkv.core.forecast import Forecast


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
    """What is said about a tool call. Never its arguments: `command` is at most the first command word and a sub-command."""

    call_id: str
    tool: str
    command: str = ""
    attempt: int = 1
    status: ToolStatus = ToolStatus.RUNNING
    expect_s: float | None = None
    progress: float | None = None
    elapsed_s: float = 0.0


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
