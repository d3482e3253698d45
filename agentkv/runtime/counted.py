"""A tool call as it counts: with its task and, where the tasks of its type have a budget together, with that as well.

Does not cover what happens where it does not fit: that is `gate.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from agentkv.budget.account import Account


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedTool:
    """One tool call's accounts: its task's, and that of all tasks of the type."""

    account: Account
    pool: Account | None = None

    def take(self) -> None:
        """Count it. Raises BudgetExceeded, with nothing counted, where it does not fit into either."""
        self.account.tool_call()
        if self.pool is None:
            return
        try:
            self.pool.tool_call()
        except BaseException:
            self.account.tool_paused()
            raise

    def give_back(self) -> None:
        """It waits for a person, or was given up: it is counted when it goes on."""
        for account in (self.account, self.pool):
            if account is not None:
                account.tool_paused()
