"""Rounds of a loop: retry, reflection, correction. Each has its own cap, counted over the whole task.

Covers the scope around one round. The counting is `account.py`'s; what happens beyond a cap is up to whoever opens it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Self

from agentkv.errors import ConfigError


class Round(AbstractContextManager["Round"], AbstractAsyncContextManager["Round"]):
    """`with kv.budgets.loop("reflection", limit=3):` one round, in sync and async code alike; it may be entered again.

    Entering counts the round and raises BudgetExceeded beyond the cap, or what else the task's budget says; where that
    queues, `async with` waits without blocking the event loop. `allowed` tells whether one more would pass.
    """

    def __init__(
        self, kind: str, limit: int | None, *, enter: Callable[[], object], leave: Callable[[object], None],
        left: Callable[[], int | None], let_in: Callable[[], Awaitable[None]],
    ) -> None:  # fmt: skip
        if not isinstance(kind, str) or not kind:
            raise ConfigError(f"loop({kind!r}): a name such as 'retry', 'reflection' or 'correction' is needed")
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 0):
            raise ConfigError(f"loop(limit={limit!r}): a whole number >= 0 is needed, or None for no cap")
        self.kind = kind
        self.limit = limit
        self._enter = enter
        self._leave = leave
        self._left = left
        self._let_in = let_in
        self._tokens: list[object] = []

    @property
    def allowed(self) -> bool:
        """Whether one more round is within the cap."""
        left = self._left()
        return left is None or left > 0

    def __enter__(self) -> Self:
        self._tokens.append(self._enter())
        return self

    def __exit__(self, *_: object) -> None:
        self._leave(self._tokens.pop())

    async def __aenter__(self) -> Self:
        await self._let_in()
        return self.__enter__()

    async def __aexit__(self, *_: object) -> None:
        self.__exit__()
