"""The model call: who is calling, what it may cost, the engine, and the books. Read `submit` first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from agentkv.budget.account import Account, Reservation
from agentkv.core.hint import HintKind
from agentkv.core.task import Caller, PriorityClass
from agentkv.engine.base import Engine, Generation, Request, Stream, changed
from agentkv.engine.deferred import deferred
from agentkv.runtime.books import Books
from agentkv.runtime.emit import Emitter
from agentkv.runtime.planner import Planner
from agentkv.runtime.prefixes import Prefixes

if TYPE_CHECKING:
    from agentkv.runtime.shape import Shaper


class ModelCalls:
    """Carries requests to the engine. Thread-safe."""

    def __init__(
        self,
        *,
        engine: Engine,
        planner: Planner | None,
        books: Books,
        emitter: Emitter,
        prefixes: Prefixes,
        shaper: Shaper | None,
        caller: Callable[[], Caller],
        last_session: Callable[[Caller], str | None],
        as_is: Callable[[], bool],
        now_s: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._planner = planner
        self._books = books
        self._emitter = emitter
        self._prefixes = prefixes
        self._shaper = shaper
        self._caller = caller
        self._last_session = last_session
        self._as_is = as_is
        self._now_s = now_s

    def submit(self, request: Request) -> Stream:
        """Start a call; see `AgentKV.submit`."""
        request = self._identified(request)
        if self._shaper is None or request.as_is or request.messages is None or self._as_is():
            return self._send(request)
        turn = self._shaper.turn(request)
        if turn.request is not None:
            return self._send(turn.request)
        return deferred(turn.ready, self._send, "agentkv-context")

    def ask(self, request: Request, timeout_s: float) -> Generation:
        """Make a call that is the runtime's own, through the same budget and books, and wait for its answer."""
        with self._send(self._identified(request)) as stream:
            return stream.result(timeout_s)

    def _send(self, request: Request) -> Stream:
        input_tokens = self._engine.count_tokens(request)
        request, reservation = self._reserved(request, input_tokens)
        try:
            stream = self._engine.submit(request)
        except BaseException:
            reservation.release()
            raise
        self._books.watch(stream, request, reservation, input_tokens)
        self._tell_turn(stream, request)
        return stream

    def _identified(self, request: Request) -> Request:
        caller = self._caller() if request.caller == Caller() else request.caller
        chosen = request.priority is not PriorityClass.STEP
        priority = request.priority if chosen else self._books.priority(caller.task)
        return changed(request, caller=caller, priority=priority)

    def _reserved(self, request: Request, input_tokens: int) -> tuple[Request, Reservation]:
        """The worst case set aside. A call without `max_tokens` may write what is left of the budget, and no more."""
        account: Account = self._books.account(request.caller.task)
        most = request.sampling.max_tokens
        if request.forced_ids is not None:
            most = min(len(request.forced_ids), most or len(request.forced_ids))
        if most is not None or account.budget.tokens is None:
            return request, account.reserve(input_tokens + (most or 0))
        context_tokens = getattr(self._engine, "context_tokens", None)
        reservation = account.reserve_rest(input_tokens + 1, context_tokens)
        sampling = replace(request.sampling, max_tokens=max(1, reservation.tokens - input_tokens))
        return changed(request, sampling=sampling), reservation

    def _tell_turn(self, stream: Stream, request: Request) -> None:
        if request.purpose != "answer":
            return
        caller = request.caller
        session = request.session or self._last_session(caller) or ""
        self._emitter.turn(HintKind.TURN_START, task=caller.task, session=session, node=caller.node)
        if self._planner is not None and session:
            self._planner.turn_started(session)

        def ended(generation: Generation | None, _error: BaseException | None) -> None:
            used = generation.session if generation is not None else session
            if generation is not None:
                if self._shaper is not None:
                    self._shaper.answered(request, generation)
                self._prefixes.saw(used, request, generation, self._now_s())
            self._emitter.turn(HintKind.TURN_END, task=caller.task, session=used, node=caller.node)
            if self._planner is not None and used:
                self._planner.turn_ended(used)

        stream.on_end(ended)
