"""The scope around one tool call: `with kv.tool("pytest", args=...)`, the same object in sync and async code."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self

from agentkv import log
from agentkv.core.forecast import Forecast
from agentkv.core.hint import ToolStatus


class Switchboard(Protocol):
    """Who hears about a tool call; AgentKV implements it."""

    def tool_started(self, scope: ToolScope) -> None: ...
    def tool_progressed(self, scope: ToolScope) -> None: ...
    def tool_ended(self, scope: ToolScope) -> None: ...
    def is_control_flow(self, error: BaseException) -> bool: ...


class ToolScope:
    """One tool call, from start to end.

    Entering may raise BudgetExceeded (a tool-call limit); nothing else that happens to hints or moves reaches the
    tool. What the body raises passes through; the call is then closed as failed, as cancelled (CancelledError,
    KeyboardInterrupt, GeneratorExit) or as paused (the framework's control flow, such as an interrupt).
    """

    __slots__ = (
        "_board", "branch", "call_id", "command", "expect_s", "forecast", "node", "progress_share", "session", "started_s",
        "status", "task", "tool",
    )  # fmt: skip

    def __init__(
        self, board: Switchboard, *, tool: str, command: str, expect_s: float | None, call_id: str, session: str | None
    ) -> None:
        self._board = board
        self.tool = tool
        self.command = command
        self.expect_s = expect_s
        self.call_id = call_id
        self.session = session
        self.task = self.branch = self.node = ""
        self.started_s: float | None = None
        self.forecast: Forecast | None = None
        self.progress_share: float | None = None
        self.status = ToolStatus.RUNNING

    def progress(self, share: float) -> None:
        """Tell that `share` (0 < share <= 1) of the work is done; anything else is counted and ignored."""
        if not 0 < share <= 1:
            log.count("progress_ignored")
            return
        self.progress_share = share
        self._board.tool_progressed(self)

    def __enter__(self) -> Self:
        self._board.tool_started(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.status = self._status_after(error)
        self._board.tool_ended(self)

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, traceback)

    def _status_after(self, error: BaseException | None) -> ToolStatus:
        if error is None:
            return ToolStatus.SUCCEEDED
        import asyncio  # 20 ms that `import agentkv` must not pay

        if isinstance(error, asyncio.CancelledError | KeyboardInterrupt | GeneratorExit):
            return ToolStatus.CANCELLED
        if self._board.is_control_flow(error):
            return ToolStatus.PAUSED
        return ToolStatus.FAILED
