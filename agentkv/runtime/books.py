"""The books: tasks and their accounts, and the facts that become a bill.

Every model call is reserved before it starts and settled when it ends, whichever way it ends; every tool call and
move leaves a fact. Appending never raises and never waits for a disk.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from itertools import islice
from typing import TYPE_CHECKING, Any

from agentkv.budget.account import Account, Both, Reservation
from agentkv.budget.ledger import ContextFact, Ledger, ModelCall, MoveFact, TaskFact, ToolCallFact
from agentkv.budget.limits import Budget
from agentkv.clock import Clock
from agentkv.core.reported import Reported
from agentkv.core.residency import Receipt
from agentkv.core.task import UNATTRIBUTED, Caller, PriorityClass, Task
from agentkv.core.usage import Timing, Usage
from agentkv.engine.base import Generation, Request
from agentkv.engine.stream import Stream
from agentkv.errors import GenerationCancelled
from agentkv.runtime.accounts import Accounts
from agentkv.runtime.pricing import Pricing
from agentkv.runtime.tools import ToolScope
from agentkv.runtime.tries import with_tries

if TYPE_CHECKING:
    from agentkv.budget.bill import Bill
    from agentkv.budget.prices import PriceTable

MAX_IDLE_TASKS = 1024
"""Tasks that nobody finished and nobody uses; beyond them the one that was idle longest is finished."""
_MAX_SESSIONS = 16_384
_MAX_CLOSED = 1024
_LEAVE_S = 2.0  # the longest that a bill waits for the step in which calls were cancelled


@dataclass(slots=True)
class _Open:
    task: Task
    account: Account
    type: str = ""
    scopes: int = 0
    pool: Account | None = None


class Books:
    """Tasks, accounts and facts of one AgentKV. Thread-safe."""

    def __init__(
        self, *, ledger: Ledger, clock: Clock, model: str, prices: PriceTable | None = None, self_hosted: bool = False
    ) -> None:
        """`self_hosted`: our own calls run on a device of the user's; `prices` None leaves costs unknown."""
        self._ledger = ledger
        self.append, self.on_fact = ledger.append, ledger.on_fact
        pricing = Pricing(prices, model=model, self_hosted=self_hosted)
        self.worst_usd, self._priced, self._elsewhere = pricing.worst_usd, pricing.priced, pricing.elsewhere
        self._clock = clock
        self._model = model
        self._lock = threading.Lock()
        self._open: OrderedDict[str, _Open] = OrderedDict()  # longest unused first
        self._closed: OrderedDict[str, Account] = OrderedDict()
        self._accounts = Accounts(ledger, clock)
        self.lasting_account = self._accounts.lasting
        self._owner_of_session: OrderedDict[str, tuple[str, str]] = OrderedDict()  # its task and branch
        self._unbilled: dict[Stream, str] = {}  # calls under way, with their tasks

    # -- tasks

    def _known(
        self, key: str, *, budget: Budget | None = None, priority: PriorityClass | None = None, task_type: str = ""
    ) -> _Open:
        """The task `key`, registered on first sight. A budget given later replaces the limits, not what is used."""
        known = self._open.get(key)
        if known is None:
            self._closed.pop(key, None)
            task = Task(key=key, priority=PriorityClass.STEP if priority is None else priority)
            known = self._open[key] = _Open(task, self._accounts.open(key, budget), task_type)
            self._ledger.append(TaskFact(task=key, at_ms=self._clock.wall_ms(), task_type=task_type))
            return known
        if task_type not in ("", known.type):
            known.type = task_type
            self._ledger.append(TaskFact(task=key, at_ms=self._clock.wall_ms(), event="typed", task_type=task_type))
        self._open.move_to_end(key)
        if budget is not None and budget.shared and known.account.shared is False:
            known.account = self._accounts.open(key, budget)
        elif budget is not None:
            known.account.budget = budget
        if priority is not None:
            known.task = Task(key=key, priority=priority)
        return known

    def enter(
        self,
        key: str,
        *,
        budget: Budget | None = None,
        priority: PriorityClass | None = None,
        pool: Account | None = None,
        task_type: str = "",
    ) -> None:
        """A scope of the task opens. What the task spends is counted against `pool` as well."""
        with self._lock:
            known = self._known(key, budget=budget, priority=priority, task_type=task_type)
            known.scopes += 1
            known.pool = pool or known.pool

    def pool(self, key: str) -> Account | None:
        """What all tasks of this one's type may spend together, if there is such a limit."""
        with self._lock:
            known = self._open.get(key)
            return None if known is None else known.pool

    def leave(self, key: str) -> bool:
        """A scope of the task closes; True if it was the last one that is open."""
        with self._lock:
            known = self._open.get(key)
            if known is None:
                return True
            known.scopes = max(0, known.scopes - 1)
            return known.scopes == 0

    def close_task(self, key: str) -> None:
        """The task is over; its facts stay, and its account for calls that come late."""
        with self._lock:
            known = self._open.pop(key, None)
            if known is not None:
                self._closed[key] = known.account
                while len(self._closed) > _MAX_CLOSED:
                    self._closed.popitem(last=False)
            for session in [session for session, (task, _) in self._owner_of_session.items() if task == key]:
                del self._owner_of_session[session]
        if known is not None:
            self._ledger.append(TaskFact(task=key, at_ms=self._clock.wall_ms(), event="finished", final=True))

    def account(self, key: str) -> Account:
        """The task's account; a call that comes after the task's end is counted where the others were."""
        with self._lock:
            closed = self._closed.get(key) if key not in self._open else None
            return closed or self._known(key).account

    def idle_too_long(self) -> list[str]:
        """Tasks to be finished because nobody else will: a run without a key of its own never comes back."""
        with self._lock:
            surplus = len(self._open) - MAX_IDLE_TASKS
            if surplus <= 0:
                return []
            idle = (k for k, one in self._open.items() if not one.scopes and not one.account.reserved.model_calls)
            return [key for key in islice(idle, surplus) if key != UNATTRIBUTED]

    def priority(self, key: str) -> PriorityClass:
        """The task's class; STEP for a task not seen yet."""
        with self._lock:
            known = self._open.get(key)
            return known.task.priority if known is not None else PriorityClass.STEP

    def sessions(self, task: str) -> dict[str, str]:
        """Sessions that this task's calls used, each with the branch that used it last."""
        with self._lock:
            return {session: branch for session, (owner, branch) in self._owner_of_session.items() if owner == task}

    def forget_sessions(self, sessions: Iterable[str]) -> None:
        """These sessions are no more."""
        with self._lock:
            for session in sessions:
                self._owner_of_session.pop(session, None)

    def prompt_sizes(self, task: str) -> dict[str, list[int]]:
        """The prompts of the task's open sessions in tokens, in order."""
        sizes: dict[str, list[int]] = {session: [] for session in self.sessions(task)}
        for fact in self._ledger.rows(task):
            if (
                isinstance(fact, ModelCall)
                and fact.session in sizes
                and (fact.status, fact.purpose) == ("ok", "answer")
            ):
                sizes[fact.session].append(fact.usage.input_tokens)
        return sizes

    # -- facts

    def watch(
        self, stream: Stream, request: Request, reservation: Reservation | Both, input_tokens: int, *, loop: str = ""
    ) -> None:
        """Settle the reservation and write the fact when the stream ends, before its consumer learns of the end."""
        at_ms = self._clock.wall_ms()
        started_s = self._clock.now_s()
        with self._lock:
            self._unbilled[stream] = request.caller.task

        def ended(generation: Generation | None, error: BaseException | None) -> None:
            told: Generation | Reported | None = generation
            if generation is not None:
                usage, timing, status = generation.usage, generation.timing, "ok"
                session, model = generation.session, generation.model or self._model
            else:
                told = None if stream.spent is None else stream.spent()
                usage = Usage(input_tokens=input_tokens, output_tokens=stream.partial_tokens, calls=1)
                usage = usage if told is None else told.usage
                timing = Timing(total_s=self._clock.now_s() - started_s)
                status = "aborted" if isinstance(error, GenerationCancelled) else "failed"
                session, model = request.session or "", self._model
            caller = request.caller
            if session and request.purpose == "answer":
                with self._lock:
                    self._owner_of_session[session] = (caller.task, caller.branch)
                    self._owner_of_session.move_to_end(session)
                    while len(self._owner_of_session) > _MAX_SESSIONS:
                        self._owner_of_session.popitem(last=False)
            call = ModelCall(
                task=caller.task,
                session=session,
                node=caller.node,
                branch=caller.branch,
                attempt=caller.attempt,
                at_ms=at_ms,
                model=model,
                usage=usage,
                timing=timing,
                status=status,
                priority=int(request.priority),
                purpose=request.purpose,
                estimated=len(stream.partial) != stream.partial_tokens if told is None else told.estimated,
                service_tier="" if told is None else told.service_tier,
                cached_by={} if told is None else dict(told.cached_by),
                worker="" if told is None else told.worker,
                expected_hit_rate=None if told is None else told.expected_hit_rate,
                device_s=stream.device_s,
                error="" if error is None else type(error).__name__,
                loop=loop,
                drafted_tokens=0 if generation is None else generation.drafted_tokens,
                accepted_tokens=0 if generation is None else generation.accepted_tokens,
            )
            facts = [self._priced(fact) for fact in with_tries(call, stream.attempts)]
            reservation.settle(
                sum((fact.usage for fact in facts), Usage()),
                usd=sum((fact.cost_usd for fact in facts if fact.cost_usd is not None), Decimal(0)),
                device_seconds=stream.device_s,
            )
            for fact in facts:
                self._ledger.append(fact)

            if generation is not None and generation.restored_blocks:
                self._loaded(caller.task, generation)

        def billed(_generation: Generation | None, _error: BaseException | None) -> None:
            with self._lock:
                self._unbilled.pop(stream, None)

        stream.on_end(ended)
        stream.on_end(billed)

    def _loaded(self, task: str, generation: Generation) -> None:
        """What was not back in time came with the call: a move that nobody had to order."""
        self._ledger.append(
            MoveFact(
                task=task,
                session=generation.session,
                at_ms=self._clock.wall_ms(),
                action="load",
                to="device",
                blocks=generation.restored_blocks,
                size_bytes=generation.restored_bytes,
                seconds=generation.timing.restore_s,
                reason="loaded on demand",
            )
        )

    def foreign_call(self, *, caller: Caller, model: str, usage: Usage, total_s: float, **about: Any) -> None:
        """A model call that did not go through us has just ended; `about` are fields of the fact."""
        tier, locally = about.get("service_tier", ""), about.get("served_locally", False)
        call = ModelCall(
            task=caller.task,
            node=caller.node,
            branch=caller.branch,
            attempt=caller.attempt,
            at_ms=self._clock.wall_ms() - round(total_s * 1000),
            model=model,
            usage=usage,
            timing=Timing(total_s=total_s),
            priority=int(self.priority(caller.task)),
            **self._elsewhere(model, usage, tier=tier, served_locally=locally),
            **about,
        )
        for account in (self.account(caller.task), self.pool(caller.task)):
            if account is not None:
                account.spend(usage, usd=call.cost_usd)
        self._ledger.append(call)

    def tool_call(self, scope: ToolScope, *, actual_s: float) -> None:
        """A tool call ended."""
        forecast = scope.forecast
        self._ledger.append(
            ToolCallFact(
                task=scope.task,
                session=scope.session or "",
                node=scope.node,
                branch=scope.branch,
                attempt=scope.attempt,
                tool=scope.tool,
                command=scope.command,
                at_ms=self._clock.wall_ms(),
                predicted_p10_s=None if forecast is None else forecast.quantile_s(0.1),
                predicted_p50_s=None if forecast is None else forecast.quantile_s(0.5),
                predicted_p90_s=None if forecast is None else forecast.quantile_s(0.9),
                actual_s=actual_s,
                status=scope.status.value,
            )
        )

    def context_event(
        self,
        task: str,
        event: str,
        *,
        before: int = 0,
        after: int = 0,
        cause: str = "",
        name: str = "",
        session: str = "",
        seconds: float = 0.0,
    ) -> None:
        """Something was done to a prompt; see ContextFact."""
        self._ledger.append(
            ContextFact(
                task=task,
                session=session,
                at_ms=self._clock.wall_ms(),
                event=event,
                name=name,
                cause=cause,
                before_tokens=before,
                after_tokens=after,
                seconds=seconds,
            )
        )

    def prefix_broken(self, task: str, session: str, cause: str, lost_tokens: int) -> None:
        """A prompt did not extend the one before."""
        self.context_event(task, "break", before=lost_tokens, cause=cause, session=session)

    def move(self, receipt: Receipt) -> None:
        """A move ended."""
        move = receipt.move
        with self._lock:
            task, _ = self._owner_of_session.get(move.session, (move.session.rpartition("#")[0], ""))
        self._ledger.append(
            MoveFact(
                task=task,
                session=move.session,
                at_ms=self._clock.wall_ms(),
                action=move.action.value,
                to="" if move.to is None else move.to.name.lower(),
                blocks=receipt.blocks,
                size_bytes=receipt.size_bytes,
                seconds=max(0.0, receipt.finished_s - receipt.submitted_s),
                outcome=receipt.outcome.value,
                reason=move.reason,
            )
        )

    def bill(self, task: str) -> Bill:
        """What the task cost so far; calls that were just cancelled have to leave their engine first."""
        from agentkv.budget.bill import Bill

        with self._lock:
            leaving = [stream for stream, owner in self._unbilled.items() if owner == task and stream.ended]
        until_s = time.monotonic() + _LEAVE_S
        for stream in leaving:
            stream.wait_settled(max(0.0, until_s - time.monotonic()))
        return Bill.from_facts(task, self._ledger.rows(task))

    @property
    def unsaved(self) -> int:
        """Facts that are not in the database yet, because it is behind or cannot take them."""
        return self._ledger.unsaved

    def close(self) -> None:
        """Flush and close the ledger."""
        self._accounts.close()
        self._ledger.close()
