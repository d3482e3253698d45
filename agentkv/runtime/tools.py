"""The scope around one tool call: `with kv.tool("pytest", args=...)`, the same object in sync and async code."""

from __future__ import annotations

from contextvars import ContextVar
from types import TracebackType
from typing import Protocol, Self

from agentkv import log
from agentkv.core.forecast import Forecast
from agentkv.core.hint import ToolStatus
from agentkv.core.task import Caller

_announced: ContextVar[ToolScope | None] = ContextVar("agentkv_announced_tool", default=None)
"""The call that a framework's callback told of in this context: a scope inside it is the same wait."""


class Switchboard(Protocol):
    """Who hears about a tool call; AgentKV implements it."""

    def caller(self) -> Caller: ...
    def tool_started(self, scope: ToolScope) -> None: ...
    def tool_progressed(self, scope: ToolScope) -> None: ...
    def tool_ended(self, scope: ToolScope) -> None: ...
    def slimmed(self, text: str, scope: ToolScope) -> str: ...
    def is_control_flow(self, error: BaseException) -> bool: ...


class ToolScope:
    """One tool call, from start to end.

    Entering may raise BudgetExceeded (a tool-call limit); nothing else that happens to hints or moves reaches the
    tool. What the body raises passes through; the call is then closed as failed, as cancelled (CancelledError,
    KeyboardInterrupt, GeneratorExit) or as paused (the framework's control flow, such as an interrupt).
    """

    __slots__ = (
        "_board", "arg_bytes", "branch", "call_id", "command", "duration_key", "expect_s", "forecast", "joined", "node",
        "progress_share", "session", "started_s", "status", "task", "timeout_s", "tool",
    )  # fmt: skip

    def __init__(
        self,
        board: Switchboard,
        *,
        tool: str,
        command: str,
        arg_bytes: int = 0,
        expect_s: float | None,
        timeout_s: float | None = None,
        duration_key: str = "",
        call_id: str,
        session: str | None,
    ) -> None:
        self._board = board
        self.tool = tool
        self.command = command
        self.arg_bytes = arg_bytes
        self.expect_s = expect_s
        self.timeout_s = timeout_s
        self.duration_key = duration_key
        self.call_id = call_id
        self.session = session
        self.task = self.branch = self.node = ""
        self.started_s: float | None = None
        self.forecast: Forecast | None = None
        self.progress_share: float | None = None
        self.status = ToolStatus.RUNNING
        self.joined: ToolScope | None = None

    def announce(self) -> None:
        """Enter for a framework's callback: scopes that the tool itself opens join this one instead of counting."""
        self.__enter__()
        _announced.set(self)

    def _outer(self) -> ToolScope | None:
        """The announced call that this scope is a part of: running, of the same desk, task and branch."""
        outer = _announced.get()
        if outer is None or outer is self or outer.started_s is None or outer._board is not self._board:
            return None
        caller = self._board.caller()
        return outer if (outer.task, outer.branch) == (caller.task, caller.branch) else None

    def progress(self, share: float) -> None:
        """Tell that `share` (0 < share <= 1) of the work is done; anything else is counted and ignored."""
        if not isinstance(share, int | float) or not 0 < share <= 1:
            log.count("progress_ignored")
            return
        told = self.joined or self
        told.progress_share = share
        self._board.tool_progressed(told)

    def slim(self, text: str) -> str:
        """The call's output as it may enter the context: shorter where it is long, the same bytes for the same text.

        Never raises. What was left out can be read again, see `kv.context.reader`.
        """
        return self._board.slimmed(text, self)

    def __enter__(self) -> Self:
        self.joined = self._outer()
        if self.joined is None:
            self._board.tool_started(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.status = self._status_after(error)
        if self.joined is None:
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
