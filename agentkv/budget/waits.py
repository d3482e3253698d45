"""Who waits for a shared budget in which process: rows beside the tally, so that nobody is overtaken from outside.

Covers the order among processes: priority, then since when one waits. Within a process it is `line.py`'s, and the same.
A process that died is waited for until its lease is over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentkv.budget.shared import SharedPurses


class Waits:
    """The waiting steps of one task. All of it inside a transaction."""

    def __init__(self, purses: SharedPurses, digest: str) -> None:
        self._purses = purses
        self._digest = digest

    def join(self, line: str, priority: int) -> str:
        """One more waits, from now on; its key. Rows of processes that died go."""
        purses = self._purses
        key, owner, until_ms = purses.new_hold()
        now_ms = purses.now_ms()
        purses.run(
            "DELETE FROM agentkv_budget_wait WHERE digest = :digest AND (until_ms <= :now OR until_ms > :most)",
            digest=self._digest, now=now_ms, most=until_ms,
        )  # fmt: skip
        purses.run(
            "INSERT INTO agentkv_budget_wait (id, digest, line, owner, until_ms, priority, since_ms) "
            "VALUES (:id, :digest, :line, :owner, :until, :priority, :since)",
            id=key, digest=self._digest, line=line, owner=owner, until=until_ms, priority=priority, since=now_ms,
        )  # fmt: skip
        return key

    def left(self, key: str) -> None:
        """This one does not wait any more."""
        self._purses.run("DELETE FROM agentkv_budget_wait WHERE id = :id", id=key)

    def are_ahead(self, line: str, priority: int, key: str) -> bool:
        """Whether somebody in another process is before a newcomer of this priority, or before the one that waits as `key`."""
        purses = self._purses
        rows = purses.run(
            "SELECT id, owner, priority, since_ms FROM agentkv_budget_wait "
            "WHERE digest = :digest AND line = :line AND until_ms > :now",
            digest=self._digest, line=line, now=purses.now_ms(),
        )  # fmt: skip
        places = [(-int(row[2]), int(row[3]), str(row[1])) for row in rows]
        mine = next((place for place, row in zip(places, rows, strict=True) if row[0] == key), None)
        others = [place for place in places if place[2] != purses.owner]
        return any(place < mine if mine is not None else -place[0] >= priority for place in others)
