"""Line: who is next among those that wait for one budget.

The highest priority first; within it flows take turns, and within a flow it is first come, first served. Only the one
at the front may try, so that a large step is never overtaken by small ones. Does not cover what they wait for.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from agentkv.budget.reservation import again
from agentkv.errors import BudgetExceeded, LedgerError
from agentkv.log import failed

_MAX_FLOWS = 4096
_LOOK_S = 0.25


@dataclass(slots=True, eq=False)
class Turn:
    """One that waits; `refused` says for what."""

    priority: int
    turn: float
    number: int
    refused: BudgetExceeded
    key: str = ""


class Line:
    """Those that wait, in order. Thread-safe."""

    def __init__(self, join: Callable[[int], str], left: Callable[[str], None]) -> None:
        """`join(priority)` tells other processes that one more waits, `left(key)` that it does not any more."""
        self._join, self._left = join, left
        self._changed = threading.Condition()
        self._waiting: list[Turn] = []
        self._turns: OrderedDict[str, float] = OrderedDict()
        self._turn = 0.0
        self._number = 0
        self._serving: dict[int, Turn] = {}  # threads whose turn it is

    def __len__(self) -> int:
        return len(self._waiting)

    def ahead_of(self, priority: int) -> BudgetExceeded | None:
        """For what the front waits, if a newcomer of this priority has to wait behind it; never for the front itself."""
        if not self._waiting or threading.get_ident() in self._serving:
            return None
        front = self._front()  # without the lock: whoever asks holds the tally, and who joins may want that too
        return front.refused if front is not None and front.priority >= priority else None

    def wait(
        self,
        step: Callable[[], Any],
        refused: BudgetExceeded,
        *,
        pause: Callable[[float], None],
        timeout_s: float,
        gone: Callable[[], bool],
        priority: int = 0,
        flow: str = "",
    ) -> Any:
        """What `step` brings once it is its turn and it fits; None as soon as `gone()`. Blocks.

        `pause(seconds)` waits for something to be given back. What `step` raises for another task's budget passes;
        for this one's, only after `timeout_s`.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._joined(refused, priority=priority, flow=flow) as mine:
            while not gone():
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise again(mine.refused, f" Waited {timeout_s:g} s for more.")
                if not self._is_front(mine, min(left_s, _LOOK_S)):
                    continue
                try:
                    with self._served(mine):
                        return step()
                except BudgetExceeded as error:
                    if error.task != refused.task:
                        raise
                    mine.refused = error
                pause(max(0.0, min(deadline_s - time.monotonic(), _LOOK_S)))
        return None

    @property
    def key(self) -> str:
        """What other processes know the one by whose turn it is on this thread; "" for a newcomer."""
        turn = self._serving.get(threading.get_ident())
        return "" if turn is None else turn.key

    @contextmanager
    def _joined(self, refused: BudgetExceeded, *, priority: int, flow: str) -> Generator[Turn]:
        """Inside, one waits."""
        with self._changed:
            turn = max(self._turn, self._turns.get(flow, 0.0)) + 1.0
            self._turns[flow] = turn
            self._turns.move_to_end(flow)
            while len(self._turns) > _MAX_FLOWS:
                self._turns.popitem(last=False)
            self._number += 1
            mine = Turn(priority=priority, turn=turn, number=self._number, refused=refused)
            mine.key = self._join(priority)  # under the lock: the order among processes is the same
            self._waiting.append(mine)
        try:
            yield mine
        finally:
            with self._changed:
                self._waiting.remove(mine)
                self._turn = max(self._turn, mine.turn - 1.0)
                self._changed.notify_all()
            try:
                self._left(mine.key)
            except LedgerError as error:  # it lapses
                failed("budget_wait_left_later", error=str(error))

    def _is_front(self, mine: Turn, timeout_s: float) -> bool:
        """Whether `mine` is next by then."""
        with self._changed:
            return self._changed.wait_for(lambda: self._front() is mine, timeout_s)

    @contextmanager
    def _served(self, mine: Turn) -> Generator[None]:
        """Inside, this thread is the front's."""
        self._serving[threading.get_ident()] = mine
        try:
            yield
        finally:
            self._serving.pop(threading.get_ident(), None)

    def _front(self) -> Turn | None:
        return min(tuple(self._waiting), key=lambda one: (-one.priority, one.turn, one.number), default=None)
