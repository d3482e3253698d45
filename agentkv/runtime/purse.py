"""Purse: what is sent to an engine beside people's own calls is paid like them: from the task's budget, into its ledger.

Covers requests that compute or renew a waiting context. Does not cover when those are sent (`adapters/prewarm.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any

from agentkv import log
from agentkv.core.hint import SessionFacts
from agentkv.core.task import Caller
from agentkv.core.usage import Usage
from agentkv.errors import AgentKVError
from agentkv.runtime.books import Books


class TaskPurse:
    """Implements `adapters.prewarm.Purse` over the books. Never raises."""

    def __init__(self, books: Books) -> None:
        self._books = books

    def opens(self, task: str, model: str, usage: Usage) -> Callable[[], None] | None:
        """Set the worst case aside; None where the budget of the task, or of its type, has no room."""
        try:
            cost = self._books.worst_usd(usage, device_s=0.0, foreign=model)
            reserved = []
            for account in (self._books.account(task), self._books.pool(task)):
                if account is None:
                    continue
                try:
                    reserved.append(account.reserve(usage.total_tokens, usd=cost or Decimal(0)))
                except AgentKVError:
                    for one in reserved:
                        one.release()
                    return None
        except Exception as error:
            log.failed("prewarm_failed", error=repr(error))
            return None

        def give_back() -> None:
            for one in reserved:
                one.release()

        return give_back

    def paid(self, about: SessionFacts, usage: Usage, *, purpose: str, seconds: float, **said: Any) -> None:
        """It happened."""
        try:
            self._books.foreign_call(
                caller=Caller(task=about.task, node=purpose), model=about.model, usage=usage, total_s=seconds,
                session=about.session, purpose=purpose, **said,
            )  # fmt: skip
        except Exception as error:
            log.failed("prewarm_failed", error=repr(error))
