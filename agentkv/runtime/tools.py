"""The scope around one tool call: `with kv.tool("pytest", args=...)`, the same object in sync and async code."""

from __future__ import annotations

from contextvars import ContextVar
from types import TracebackType
from typing import Protocol, Self

from agentkv import log
from agentkv.core.forecast import Forecast
from agentkv.core.hint import ToolStatus
from agentkv.core.task import Caller

_innermost: ContextVar[ToolScope | None] = ContextVar("agentkv_tool", default=None)
"""The scope that was opened last in this context; scopes know the one around them."""


class Switchboard(Protocol):
    """Who hears about a tool call; AgentKV implements it."""

    def caller(self) -> Caller: ...
    def session_of(self, caller: Caller) -> str | None: ...
    async def tool_let_in(self) -> None: ...
    def tool_started(self, scope: ToolScope) -> None: ...
    def tool_progressed(self, scope: ToolScope) -> None: ...
    def tool_ended(self, scope: ToolScope) -> None: ...
    def slimmed(self, text: str, scope: ToolScope) -> str: ...
    def is_control_flow(self, error: BaseException) -> bool: ...
    def is_pause(self, error: BaseException) -> bool: ...


class ToolScope:
    """One tool call, from start to end.

    Entering may raise BudgetExceeded (a tool-call limit); nothing else that happens to hints or moves reaches the
    tool. What the body raises passes through; the call is then closed as failed, as cancelled (CancelledError,
    KeyboardInterrupt, GeneratorExit), as paused (the framework runs it again: an interrupt) or as succeeded (it handed
    over to another part of the graph).
    """

    __slots__ = (
        "_announced", "_around", "_board", "_open", "arg_bytes", "attempt", "branch", "call_id", "command", "duration_key",
        "expect_s", "forecast", "joined", "node", "progress_share", "session", "started_s", "status", "task", "timeout_s",
        "tool",
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
        self.attempt = 1
        self.joined: ToolScope | None = None
        self._around: ToolScope | None = None
        self._announced = False
        self._open = False

    def announce(self) -> Self:
        """Enter for a whole tool: scopes that are opened inside, by whomever, join this one instead of counting.

        For frameworks' callbacks and wrappers; the end is `__exit__` as ever.
        """
        self._announced = True
        return self.__enter__()

    async def announce_async(self) -> Self:
        """The same in an event loop, which is not blocked where the task's budget makes the call wait."""
        self._announced = True
        return await self.__aenter__()

    def _outer(self, around: ToolScope | None) -> ToolScope | None:
        """The announced call that this scope is a part of: running, of the same desk, task, branch and context.

        An agent that runs as a tool has a context of its own as soon as it asks a model: its tools are its own calls.
        """
        while around is not None and not (around._announced and around._open and around._board is self._board):
            around = around._around
        if around is None:
            return None
        outer = around.joined or around
        if outer.started_s is None:
            return None
        caller = self._board.caller()
        if (outer.task, outer.branch) != (caller.task, caller.branch):
            return None
        session = self._board.session_of(caller) if self.session is None else self.session
        return outer if session == outer.session else None

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
        self._around = around = _still_open(_innermost.get())
        self.joined = None if around is None else self._outer(around)
        if self.joined is None:
            self._board.tool_started(self)
        self._open = True
        _innermost.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end(self._status_after(error))

    def end(self, status: ToolStatus) -> None:
        """Close the call as `status`: for a tool that answers with its failure instead of raising it."""
        self.status = status
        self._open = False
        if _innermost.get() is self:
            _innermost.set(_still_open(self._around))
        if self.joined is None:
            self._board.tool_ended(self)

    async def __aenter__(self) -> Self:
        around = _still_open(_innermost.get())
        if around is None or self._outer(around) is None:
            await self._board.tool_let_in()
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
        if self._board.is_pause(error):
            return ToolStatus.PAUSED
        return ToolStatus.SUCCEEDED if self._board.is_control_flow(error) else ToolStatus.FAILED


def innermost(board: Switchboard) -> ToolScope | None:
    """The call of this desk that runs here: the one that was opened last in this context and is still open."""
    scope = _innermost.get()
    while scope is not None and not (scope._open and scope._board is board):
        scope = scope._around
    return scope


def _still_open(scope: ToolScope | None) -> ToolScope | None:
    """The innermost scope that is open: what is over is not held on to, in whatever order scopes end."""
    while scope is not None and not scope._open:
        scope = scope._around
    return scope
