"""Who computes next, and who has to wait outside: orders and admission as pure functions.

Covers the order of queued calls, the rule that pauses whole tasks, and the sums that it looks at. Does not cover a step's
batch (`engine/local/batch.py`) nor the queue itself. Seconds and bytes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate

from agentkv.policy.evict import Awaited, remaining_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued:
    """A call that waits for the device: `order` is its task's place in program order, `arrived_s` its own."""

    order: int
    priority: int
    arrived_s: float


TurnKey = Callable[[Queued], tuple[float, ...]]
"""key(queued): the smallest goes first."""


def first_come(queued: Queued) -> tuple[float, ...]:
    """Calls in the order of arrival, higher classes first."""
    return (-queued.priority, queued.arrived_s)


def program_order(queued: Queued) -> tuple[float, ...]:
    """The earliest task first within its class, then the earliest call."""
    return (-queued.priority, queued.order, queued.arrived_s)


SOON_S = 60.0
"""A session that is expected back within this competes for memory now; others may as well be away."""
ROOM_SHARE = 0.85
"""Contexts grow while they are in, and some come back sooner than was expected: so much of the room is given away."""

Place = tuple[float, ...]
"""A task's place in program order, the smaller first: (-priority, order)."""


def competes(held: Awaited, now_s: float, *, is_here: bool) -> bool:
    """Whether the context needs its memory now: its call is queued or computes (`is_here`), or is soon expected."""
    return is_here or remaining_s(held, now_s) <= SOON_S


class Claims:
    """What tasks claim, added up in program order. Any unit of memory."""

    def __init__(self, claims: Iterable[tuple[Place, float]]) -> None:
        ordered = sorted(claims)
        self._places = [place for place, _ in ordered]
        self._sums = [0.0, *accumulate(size for _, size in ordered)]

    def before(self, place: Place) -> float:
        """What all tasks before `place` claim together."""
        return self._sums[bisect_left(self._places, place)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """A queued call and the memory that it competes for. Bytes; 0: no such tier.

    `own_bytes`: what its context takes. `ahead_bytes`: what the contexts of the tasks before it in program order take
    that compete (`competes`). `busy`: somebody computes or loads. `started`: the task has computed before.
    """

    own_bytes: float
    ahead_bytes: float
    device_bytes: float
    host_bytes: float = 0.0
    disk_bytes: float = 0.0
    busy: bool
    started: bool


Admit = Callable[[Demand], bool]
"""admit(demand): False: the call waits outside, and is asked about again whenever something has changed.

Never False when nobody is `busy`, or nothing would go on (R11); never False for less ahead where it is True for more.
"""


def always(demand: Demand) -> bool:  # noqa: ARG001  the protocol's argument
    """Nobody waits outside."""
    return True


def without_loss(demand: Demand) -> bool:
    """A call waits outside while it and the tasks before it fill what can be kept without computing anything again.

    That is the largest tier, not the sum of them: what is on the device has its copy below. Where a disk holds
    everybody nobody is held back: a copy from there is cheaper than a task that stands still.
    """
    room = ROOM_SHARE * max(demand.device_bytes, demand.host_bytes, demand.disk_bytes)
    return not demand.busy or demand.ahead_bytes + demand.own_bytes <= room
