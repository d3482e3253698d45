"""The model call: who is calling, what it may cost, the engine, and the books. Read `submit` first."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from functools import partial
from typing import TYPE_CHECKING

from agentkv.budget.account import Account, Both, Reservation, again
from agentkv.budget.limits import ZERO
from agentkv.core.hint import HintKind
from agentkv.core.task import Caller, PriorityClass
from agentkv.core.usage import Usage
from agentkv.engine.attempts import repeating
from agentkv.engine.base import Engine, Generation, Request, changed
from agentkv.engine.deferred import deferred
from agentkv.engine.stream import Stream
from agentkv.errors import BudgetExceeded, Closed
from agentkv.runtime.books import Books
from agentkv.runtime.emit import Emitter
from agentkv.runtime.gate import Gate, closing_turn, in_loop, waiting, warn_without_price
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
        gate: Gate,
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
        self._gate = gate
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
        here = contextvars.copy_context()  # a framework's interrupt needs it, on whichever thread the call is sent
        return deferred(turn.ready, lambda ready: here.run(self._send, ready), "agentkv-context")

    def ask(self, request: Request, timeout_s: float) -> Generation:
        """Make a call that is the runtime's own, through the same budget and books, and wait for its answer.

        A session that it opened is closed again: nobody goes on with it.
        """
        with self._send(self._identified(request)) as stream:
            answer = stream.result(timeout_s)
        finish_sessions = getattr(self._engine, "finish_sessions", None)
        if finish_sessions is not None and answer.session not in self._books.sessions(request.caller.task):
            finish_sessions([answer.session])
        return answer

    def _send(self, request: Request) -> Stream:
        input_tokens = self._engine.count_tokens(request)
        kind, over = in_loop.get() or ("", None)

        def reserved() -> tuple[Request, Reservation | Both]:
            if self._gate.closed:
                raise Closed("this AgentKV was closed while the call waited for its budget")
            if over is not None:
                raise again(over)
            return self._reserved(request, input_tokens)

        def started(passed: tuple[Request, Reservation | Both]) -> Stream:
            return self._started(*passed, input_tokens, kind)

        while True:
            try:
                passed = reserved()
            except BudgetExceeded as refused:
                stream = self._refused(request, refused, over is not None, reserved, started)
                if stream is not None:
                    return stream
            else:
                return started(passed)

    def _refused(
        self,
        request: Request,
        refused: BudgetExceeded,
        is_over: bool,
        reserved: Callable[[], tuple[Request, Reservation | Both]],
        started: Callable[[tuple[Request, Reservation | Both]], Stream],
    ) -> Stream | None:
        """What a call becomes that does not fit; None if there is more to spend by now. Raises where it is to raise."""
        if request.purpose != "answer":
            raise refused  # nobody asked for this call: it is left out
        account = self._account_of(request.caller.task, refused)
        decision = "finish" if is_over else self._gate.refused(account, request.caller, refused)
        if decision == "finish":
            return closing_turn(request, refused, self._engine.model)
        if decision != "queue":
            return None

        def elsewhere(other: BudgetExceeded) -> Stream | None:
            return self._refused(request, other, is_over, reserved, started)

        caller = request.caller
        flow = caller.task if account is self._books.pool(caller.task) else ""
        priority = int(request.priority)
        return waiting(account, refused, reserved, started, elsewhere, priority=priority, flow=flow)

    def _account_of(self, task: str, refused: BudgetExceeded) -> Account:
        """The account that refused: the task's, or that of all tasks of its type."""
        pool = self._books.pool(task)
        return pool if pool is not None and pool.task == refused.task else self._books.account(task)

    def _started(self, request: Request, reservation: Reservation | Both, input_tokens: int, loop: str) -> Stream:
        asked_again = repeating.set(self._gate.repeating(request.caller, reservation))
        try:
            stream = self._engine.submit(request)
        except BaseException:
            reservation.release()
            raise
        finally:
            repeating.reset(asked_again)
        self._books.watch(stream, request, reservation, input_tokens, loop=loop)
        self._tell_turn(stream, request)
        return stream

    def _identified(self, request: Request) -> Request:
        caller = self._caller() if request.caller == Caller() else request.caller
        chosen = request.priority is not PriorityClass.STEP
        priority = request.priority if chosen else self._books.priority(caller.task)
        return changed(request, caller=caller, priority=priority)

    def _reserved(self, request: Request, input_tokens: int) -> tuple[Request, Reservation | Both]:
        """The worst case set aside. A call without `max_tokens` may write what is left of the budget, and no more."""
        caller = request.caller
        account, pool = self._books.account(caller.task), self._books.pool(caller.task)
        account.attempt(caller.branch, caller.node, caller.attempt)
        budget = account.budget
        priced = budget.usd is not None or (pool is not None and pool.budget.usd is not None)
        device_s = account.longest_device_s
        priority = int(request.priority)
        tier = request.extra_body.get("service_tier")

        def cost(tokens: int) -> Decimal:
            usage = Usage(input_tokens=input_tokens, output_tokens=max(0, tokens - input_tokens), calls=1)
            usd = self._books.worst_usd(usage, device_s=device_s, tier=tier if isinstance(tier, str) else "")
            if usd is None:
                warn_without_price(self._engine.model)
            return ZERO if usd is None else usd

        most = request.sampling.max_tokens
        if request.forced_ids is not None:
            most = min(len(request.forced_ids), most or len(request.forced_ids))
        if most is not None or (budget.tokens is None and budget.usd is None):
            tokens = input_tokens + request.n * (most or 0)
            reservation = account.reserve(tokens, usd=cost(tokens) if priced else ZERO, priority=priority)
        else:
            context_tokens = getattr(self._engine, "context_tokens", None)
            reservation = account.reserve_rest(
                input_tokens + 1, context_tokens, cost=cost if priced else None, priority=priority
            )
            if budget.tokens is not None or reservation.usd:
                room = (reservation.tokens - input_tokens) // request.n
                sampling = replace(request.sampling, max_tokens=max(1, room))
                request = changed(request, sampling=sampling)
        if pool is None:
            return request, reservation
        try:
            return request, Both(reservation, pool.reserve(reservation.tokens, usd=reservation.usd, priority=priority))
        except BaseException:
            reservation.release()
            raise

    def _tell_turn(self, stream: Stream, request: Request) -> None:
        if request.purpose != "answer":
            return
        caller = request.caller
        session = request.session or self._last_session(caller) or ""
        tell = partial(self._emitter.turn, task=caller.task, node=caller.node)
        tell(HintKind.TURN_START, session=session, request=request)
        if self._planner is not None and session:
            self._planner.turn_started(session)

        def ended(generation: Generation | None, _error: BaseException | None) -> None:
            used = generation.session if generation is not None else session
            if generation is not None:
                if self._shaper is not None:
                    self._shaper.answered(request, generation)
                self._prefixes.saw(used, request, generation, self._now_s())
            tell(HintKind.TURN_END, session=used, generation=generation)
            if self._planner is not None and used:
                self._planner.turn_ended(used)

        stream.on_end(ended)
