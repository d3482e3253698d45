"""Hints on their way out: built only when somebody listens, stamped by the clock, delivered by the bus."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from agentkv.clock import Clock
from agentkv.core.forecast import Forecast
from agentkv.core.hint import Hint, HintKind, ToolFacts, ToolStatus
from agentkv.core.task import Caller
from agentkv.engine.base import Generation, Request
from agentkv.hints.bus import Bus
from agentkv.runtime.sessions import SessionBook
from agentkv.runtime.tools import ToolScope


class Emitter:
    """The one place that makes Hints, with what `book` knows of their sessions."""

    def __init__(self, *, clock: Clock, book: SessionBook | None = None) -> None:
        self.book = book or SessionBook()
        self._bus = Bus()
        self._clock = clock
        self._ids = itertools.count(1)

    def subscribe(self, subscriber: Callable[[Hint], None]) -> Callable[[], None]:
        """Deliver every hint to `subscriber`, in order; returns the way to stop."""
        return self._bus.subscribe(subscriber)

    def turn(
        self, kind: HintKind, *, task: str, session: str, node: str, request: Request | None = None,
        generation: Generation | None = None,
    ) -> None:  # fmt: skip
        """A model call starts (with its `request`) or ends (with its `generation`, if there is one)."""
        if not self._bus.has_subscribers:
            return
        if kind is HintKind.TURN_START and not self.book.routed:
            caller = Caller(task=task) if request is None else request.caller
            self.book.begun(session or task, caller, priority=None if request is None else request.priority)
        if generation is not None:
            self.book.ended(session or task, generation.usage, generation.timing, model=generation.model)
        self._publish(kind, task=task, session=session, node=node)

    def session_end(self, *, task: str, session: str) -> None:
        """A session is destroyed."""
        self._publish(HintKind.SESSION_END, task=task, session=session, node="", final=True)
        self.book.forget(session)

    def tool(self, kind: HintKind, scope: ToolScope, forecast: Forecast | None = None) -> None:
        """A tool call starts, tells its progress, or ends."""
        if not self._bus.has_subscribers:
            return
        n_parallel = self.book.tools(
            scope.session or scope.task, scope.call_id, runs=scope.status is ToolStatus.RUNNING
        )
        facts = ToolFacts(
            call_id=scope.call_id,
            tool=scope.tool,
            command=scope.command,
            attempt=scope.attempt,
            status=scope.status,
            expect_s=scope.expect_s,
            progress=scope.progress_share,
            elapsed_s=0.0 if scope.started_s is None else max(0.0, self._clock.now_s() - scope.started_s),
            n_parallel=n_parallel,
        )
        self._publish(kind, task=scope.task, session=scope.session or "", node=scope.node, call=facts, wait=forecast)

    def _publish(
        self,
        kind: HintKind,
        *,
        task: str,
        session: str,
        node: str,
        call: ToolFacts | None = None,
        wait: Forecast | None = None,
        final: bool = False,
    ) -> None:
        if not self._bus.has_subscribers:
            return
        self._bus.publish(
            Hint(
                id=f"hint-{next(self._ids)}",
                kind=kind,
                at_s=self._clock.now_s(),
                ts_ms=self._clock.wall_ms(),
                task=task,
                session=session,
                node=node,
                call=call,
                wait=wait,
                final=final,
                about=self.book.facts(session or task, task=task),
            )
        )
