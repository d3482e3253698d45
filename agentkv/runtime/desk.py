"""The desk that tool scopes report to: forecast, plan, tell, learn, record.

Only a budget may raise, and only at the start. Whatever else fails becomes a log line and a counter.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

from agentkv import log
from agentkv.clock import Clock
from agentkv.core.forecast import Forecast
from agentkv.core.hint import HintKind, ToolStatus
from agentkv.core.host import Host
from agentkv.core.task import Caller
from agentkv.hints.forecaster import Forecaster, progress_forecast
from agentkv.runtime.books import Books
from agentkv.runtime.emit import Emitter
from agentkv.runtime.gate import Gate
from agentkv.runtime.planner import Planner
from agentkv.runtime.tools import ToolScope

MAX_ATTEMPTS = 4096
"""Calls of which it is remembered how often they ran; a call that comes back is a new attempt."""


class ToolDesk:
    """Implements `tools.Switchboard`."""

    def __init__(
        self,
        *,
        planner: Planner | None,
        forecaster: Forecaster,
        books: Books,
        gate: Gate,
        emitter: Emitter,
        clock: Clock,
        caller: Callable[[], Caller],
        last_session: Callable[[Caller], str | None],
        host: Host,
        waits: Callable[[Caller, Forecast | None], None] | None = None,
        slim: Callable[..., str] | None = None,
    ) -> None:
        self._planner = planner
        self._forecaster = forecaster
        self._books = books
        self._gate = gate
        self._emitter = emitter
        self._clock = clock
        self.caller = caller
        self.session_of = last_session
        self.is_control_flow = host.is_control_flow
        self.is_pause = host.is_pause
        self._alive = host.alive
        self._attempts: OrderedDict[tuple[str, str], int] = OrderedDict()
        self._lock = threading.Lock()
        self._waits = waits
        self._slim = slim

    async def tool_let_in(self) -> None:
        """A tool call is about to start in an event loop: it waits here for its budget, if that queues."""
        await self._gate.tool_call_let_in(self.caller())

    def tool_started(self, scope: ToolScope) -> None:
        """A tool call starts now, on this thread."""
        caller = self.caller()
        self._gate.tool_call(caller)
        try:
            scope.task, scope.branch, scope.node = caller.task, caller.branch, caller.node
            scope.started_s = self._clock.now_s()
            scope.attempt = self._attempts.get((scope.task, scope.call_id), 0) + 1
            if scope.session is None:
                scope.session = self.session_of(caller)
            scope.forecast = self._forecaster.forecast(
                scope.tool,
                scope.command,
                scope.expect_s,
                session=scope.session or "",
                arg_bytes=scope.arg_bytes,
                timeout_s=scope.timeout_s,
                duration_key=scope.duration_key,
            )
            if self._planner is not None and scope.session is not None:
                self._planner.tool_started(scope.session, scope.call_id, scope.tool, scope.command, scope.forecast)
            self._emitter.tool(HintKind.TOOL_START, scope, scope.forecast)
            if self._waits is not None:
                self._waits(caller, scope.forecast)
        except Exception as error:
            log.failed("tool_start_failed", tool=scope.tool, error=repr(error))

    def slimmed(self, text: str, scope: ToolScope) -> str:
        """The output of this call, as it may enter the context."""
        return text if self._slim is None else self._slim(text, tool=scope.tool, command=scope.command)

    def tool_progressed(self, scope: ToolScope) -> None:
        """The running call told how far it is."""
        if scope.started_s is None or scope.progress_share is None:
            return
        try:
            self._alive()
            elapsed_s = self._clock.now_s() - scope.started_s
            forecast = progress_forecast(elapsed_s, scope.progress_share, scope.forecast)
            if forecast is None:
                return
            if self._planner is not None and scope.session is not None:
                self._planner.tool_progressed(scope.session, scope.call_id, forecast)
            self._emitter.tool(HintKind.TOOL_UPDATE, scope, forecast)
        except Exception as error:
            log.failed("tool_progress_failed", tool=scope.tool, error=repr(error))

    def tool_ended(self, scope: ToolScope) -> None:
        """The call is over; a finish without a start is a no-op."""
        if scope.started_s is None:
            return
        try:
            actual_s = max(0.0, self._clock.now_s() - scope.started_s)
            if self._planner is not None and scope.session is not None:
                self._planner.tool_ended(scope.session, scope.call_id)
            self._forecaster.learn(
                scope.tool,
                scope.command,
                actual_s,
                scope.status,
                session=scope.session or "",
                arg_bytes=scope.arg_bytes,
                duration_key=scope.duration_key,
                call_id=scope.call_id,
            )
            failed = scope.status is ToolStatus.FAILED
            self._emitter.tool(HintKind.TOOL_ERROR if failed else HintKind.TOOL_END, scope)
            scope.started_s = None
            if scope.status is ToolStatus.PAUSED:  # it goes on later
                self._gate.tool(scope.task).give_back()
            else:
                self._ran((scope.task, scope.call_id), scope.attempt)
            self._books.tool_call(scope, actual_s=actual_s)
        except Exception as error:
            log.failed("tool_end_failed", tool=scope.tool, error=repr(error))

    def _ran(self, call: tuple[str, str], attempt: int) -> None:
        with self._lock:
            self._attempts[call] = attempt
            self._attempts.move_to_end(call)
            if len(self._attempts) > MAX_ATTEMPTS:
                self._attempts.popitem(last=False)
