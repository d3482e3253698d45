"""The scopes of one task and of its segments: what `with kv.task("task-1")` and `with task.segment("plan")` return."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, Self

from agentkv.budget.limits import Budget, checked_budget
from agentkv.core.host import Host
from agentkv.core.task import PriorityClass
from agentkv.errors import ConfigError
from agentkv.runtime import identity

if TYPE_CHECKING:
    from agentkv.budget.admission import Place
    from agentkv.runtime.budgets import Budgets


class TaskOwner(Protocol):
    """Whose task it is; AgentKV implements it."""

    host: Host

    @property
    def budgets(self) -> Budgets: ...
    def enter_task(
        self, key: str, *, budget: Budget | None, priority: PriorityClass | None, task_type: str = ""
    ) -> None: ...
    def leave_task(self, key: str, *, final: bool) -> None: ...
    def leave_segment(self, key: str, name: str, *, carry: bool) -> str: ...


class _Scope(AbstractContextManager["_Scope"], AbstractAsyncContextManager["_Scope"]):
    """The same scope for `with` and `async with`."""

    def __enter__(self) -> Self:
        self._enter()
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()

    async def __aenter__(self) -> Self:
        self._enter()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._leave()

    def _enter(self) -> None:
        raise NotImplementedError

    def _leave(self) -> None:
        raise NotImplementedError


class TaskScope(_Scope):
    """What `kv.task(...)` returns: enter it with `with` or `async with`, one at a time.

    Scopes of one key may nest or run side by side; the last one to leave ends the task, if it is final.
    """

    def __init__(
        self, owner: TaskOwner, key: str, *, budget: Budget | None, priority: PriorityClass | None, final: bool,
        task_type: str = "", tenant: str = "",
    ) -> None:  # fmt: skip
        self._owner = owner
        self.key = key
        self._budget = checked_budget(budget)
        self._priority = priority
        self._final = final
        self._type = task_type
        self._tenant = tenant
        self._place: Place | None = None
        self._token: Any = None

    def segment(self, name: str, *, carry: bool = True) -> SegmentScope:
        """`with task.segment("plan"):` a part of the task with sessions of its own.

        When it ends, their KV is freed and only a structured summary (with the handles of raw tool outputs) is left:
        it is told to the first call of every later segment, and it is the scope's `summary`. With carry=False nothing
        is told on. Raises ConfigError for a name that is empty or holds a `|`.
        """
        return SegmentScope(self._owner, self.key, name, carry=carry)

    def __enter__(self) -> Self:
        place = self._new_place()
        if place is not None:
            place.wait()
        return self._entered(place)

    async def __aenter__(self) -> Self:
        place = self._new_place()
        if place is not None:
            await place.wait_async()
        return self._entered(place)

    def _new_place(self) -> Place | None:
        priority = PriorityClass.STEP if self._priority is None else self._priority
        return self._owner.budgets.place(self.key, task_type=self._type, tenant=self._tenant, priority=priority)

    def _entered(self, place: Place | None) -> Self:
        try:
            budget = self._owner.budgets.budget_per(self._type) if self._budget is None else self._budget
            self._owner.enter_task(self.key, budget=budget, priority=self._priority, task_type=self._type)
        except BaseException:
            if place is not None:
                place.leave()
            raise
        self._place = place
        self._token = identity.push(owner=self._owner, task=self.key, outside=self._owner.host.caller() is None)
        return self

    def _leave(self) -> None:
        identity.pop(self._token)
        try:
            self._owner.leave_task(self.key, final=self._final)
        finally:
            if self._place is not None:
                self._place.leave()


class SegmentScope(_Scope):
    """What `task.segment(...)` returns. `summary` is there once it has ended; "" where nothing was said."""

    def __init__(self, owner: TaskOwner, key: str, name: str, *, carry: bool) -> None:
        if not name or "|" in name:
            raise ConfigError(f"segment({name!r}): a name is a text without |, and not empty")
        self._owner = owner
        self.task = key
        self.name = name
        self.summary = ""
        self._carry = carry
        self._token: Any = None

    def _enter(self) -> None:
        self._token = identity.push(owner=self._owner, task=self.task, segment=self.name)

    def _leave(self) -> None:
        identity.pop(self._token)
        self.summary = self._owner.leave_segment(self.task, self.name, carry=self._carry)
