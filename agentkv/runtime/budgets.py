"""What `kv.budgets` is: grant more, ask what is left, cap loops, limit types of tasks."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from agentkv.budget.account import Account
from agentkv.budget.limits import Budget, checked_budget
from agentkv.budget.loops import Round
from agentkv.clock import Clock
from agentkv.core.host import Host
from agentkv.core.task import Caller, PriorityClass
from agentkv.errors import BudgetExceeded
from agentkv.runtime.books import Books
from agentkv.runtime.gate import Gate, in_loop, notice

if TYPE_CHECKING:
    from agentkv.budget.admission import Admission, Place


class Budgets:
    """The budgets of one AgentKV. Thread-safe."""

    def __init__(self, *, books: Books, host: Host, caller: Callable[[], Caller], clock: Clock) -> None:
        self._books = books
        self.gate = Gate(host=host, account=books.account, pool=books.pool, worst_usd=books.worst_usd)
        self._caller = caller
        self._clock = clock
        self._admission: Admission | None = None
        self._lock = threading.Lock()
        self._pools: dict[str, Account] = {}

    def grant(self, task: str, **amounts: Any) -> None:
        """So much more for the task: `kv.budgets.grant("task-1", tokens=5000, usd="0.10")`, or rounds of a loop by its
        kind. Calls that wait go on. A limit that the task does not have stays none. `task` may be "type:review".

        Raises ConfigError for what is no amount.
        """
        self._named(task).grant(amounts)

    def left(self, task: str | None = None) -> dict[str, Any]:
        """What is left of each limit that the task has (by default the caller's), by name; {} without a budget."""
        return self._account().left() if task is None else self._named(task).left()

    def loop(self, kind: str, limit: int | None = None) -> Round:
        """`with kv.budgets.loop("reflection", limit=3):` one round of a loop of the calling task; see `Round`.

        Rounds are counted by kind over the whole task, and model calls inside are billed under it.
        """

        def enter() -> object:
            over: BudgetExceeded | None = self.gate.round(self._caller(), kind, limit)
            outer = in_loop.get()
            in_loop.set((kind, over))
            return outer

        def leave(outer: Any) -> None:
            in_loop.set(outer)

        def let_in() -> Awaitable[None]:
            return self.gate.round_let_in(self._caller(), kind, limit)

        def left() -> int | None:
            return self._account().rounds_left(kind, limit)

        return Round(kind, limit, enter=enter, leave=leave, left=left, let_in=let_in)

    def limit(
        self,
        task_type: str,
        *,
        tasks: int | None = None,
        queue: int | None = None,
        wait_s: float = 600.0,
        budget: Budget | None = None,
        budget_per: Budget | None = None,
    ) -> None:
        """How many tasks of a type run at once, how many may wait, and what they may spend.

        `kv.task(key, type="review")` waits for a place, and raises QueueFull where `queue` wait already, or after
        `wait_s`. The type "*" stands for all tasks that have a type. `budget_per` is what a task gets that brings no
        budget; `budget` is for all tasks of the type together, and calls beyond it wait for a grant to "type:review".
        """
        checked_budget(budget), checked_budget(budget_per)
        with self._lock:
            if self._admission is None:
                from agentkv.budget.admission import Admission  # 2 ms that `import agentkv` must not pay

                self._admission = Admission(now_s=self._clock.now_s)
        self._admission.limit(task_type, tasks=tasks, queue=queue, wait_s=wait_s, budget_per=budget_per)
        if budget is not None:
            queued = replace(budget, on_exceeded="queue")
            pool = self._pools.get(task_type)
            if pool is None:
                self._pools[task_type] = Account(f"type:{task_type}", queued, clock=self._clock)
            else:
                pool.budget = queued

    def waiting(self, task_type: str = "*") -> int:
        """How many tasks wait for a place."""
        return 0 if self._admission is None else self._admission.waiting(task_type)

    # -- for the runtime and its hosts

    def finishes(self, task: str) -> bool:
        """Whether the task is to end by itself where its budget does."""
        return self._named(task).budget.on_exceeded == "finish"

    def notice(self, caller: Caller) -> str:
        """What the caller's model is to be told once at the soft mark; "" if nothing."""
        return notice(self._books.account(caller.task), caller.branch)

    def place(self, key: str, *, task_type: str, tenant: str, priority: PriorityClass) -> Place | None:
        """A place for a task, to be waited for; None where none is needed. Raises QueueFull."""
        if self._admission is None:
            return None
        return self._admission.place(key, task_type=task_type, tenant=tenant, priority=int(priority))

    def budget_per(self, task_type: str) -> Budget | None:
        """What a task of the type gets that brings no budget."""
        return None if self._admission is None else self._admission.budget_per(task_type)

    def hold_to(self, task_type: str, account: Account) -> None:
        """From now on tasks of the type spend from this account together."""
        with self._lock:
            self._pools[task_type] = account

    def pool(self, task_type: str) -> Account | None:
        """What all tasks of the type may spend together."""
        return self._pools.get(task_type)

    def _named(self, task: str) -> Account:
        name = task.removeprefix("type:")
        return self._pools[name] if task.startswith("type:") and name in self._pools else self._books.account(task)

    def _account(self) -> Account:
        return self._books.account(self._caller().task)
