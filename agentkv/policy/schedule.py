"""Who computes next, and who has to wait outside: orders and admission as pure functions.

Covers the order of queued calls and the rule that pauses whole tasks. Does not cover a step's batch
(`engine/local/batch.py`) nor the queue itself. Seconds and bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued:
    """A call that waits for the device: `order` is its task's place in program order, `arrived_s` its own."""

    order: int
    priority: int
    arrived_s: float


SOON_S = 60.0
"""A session that is expected back within this competes for memory now; others may as well be away."""

TurnKey = Callable[[Queued], tuple[float, ...]]
"""key(queued): the smallest goes first."""


def first_come(queued: Queued) -> tuple[float, ...]:
    """Calls in the order of arrival, higher classes first."""
    return (-queued.priority, queued.arrived_s)


def program_order(queued: Queued) -> tuple[float, ...]:
    """The earliest task first within its class, then the earliest call."""
    return (-queued.priority, queued.order, queued.arrived_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """A queued call and the memory that it competes for. Bytes; `fast_bytes`: device and host together.

    `own_bytes`: what its context takes. `ahead_bytes`: what the contexts of the tasks before it in program order take
    that compute or are soon back. `busy`: somebody computes or loads. `started`: the task has computed before.
    """

    own_bytes: float
    ahead_bytes: float
    fast_bytes: float
    busy: bool
    started: bool


Admit = Callable[[Demand], bool]
"""admit(demand): False: the call waits outside, and is asked about again whenever something has changed."""


def always(demand: Demand) -> bool:  # noqa: ARG001  the protocol's argument
    """Nobody waits outside."""
    return True
