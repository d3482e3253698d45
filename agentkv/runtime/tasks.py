"""The scope of one task: what `with kv.task("task-1")` returns."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, Protocol, Self

from agentkv.budget.limits import Budget
from agentkv.core.task import PriorityClass
from agentkv.runtime import identity


class TaskOwner(Protocol):
    """Whose task it is; AgentKV implements it."""

    def enter_task(self, key: str, *, budget: Budget | None, priority: PriorityClass | None) -> None: ...
    def leave_task(self, key: str, *, final: bool) -> None: ...


class TaskScope(AbstractContextManager["TaskScope"], AbstractAsyncContextManager["TaskScope"]):
    """What `kv.task(...)` returns: enter it with `with` or `async with`, one at a time.

    Scopes of one key may nest or run side by side; the last one to leave ends the task, if it is final.
    """

    def __init__(
        self, owner: TaskOwner, key: str, *, budget: Budget | None, priority: PriorityClass | None, final: bool
    ) -> None:
        self._owner = owner
        self.key = key
        self._budget = budget
        self._priority = priority
        self._final = final
        self._token: Any = None

    def __enter__(self) -> Self:
        self._owner.enter_task(self.key, budget=self._budget, priority=self._priority)
        self._token = identity.push(owner=self._owner, task=self.key)
        return self

    def __exit__(self, *_: object) -> None:
        identity.pop(self._token)
        self._owner.leave_task(self.key, final=self._final)

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(self, *_: object) -> None:
        self.__exit__()
