"""Tickets: what somebody who waits for blocks holds in hand.

Covers Ticket (an engine waits for its blocks), Lease (blocks plus ticket), Consignment (a move until its receipt)
and Waiter (how a trip tells its end).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from agentkv.core.residency import Move, Outcome, Receipt, Tier
from agentkv.kv.streams import Event, HostEvent


class Errand(Protocol):
    """Something made of several blocks' trips. Called under the lock: `started` when a copy begins (once or more),
    `issued` when block number `index` will be where it should after `event`, `arrived` once per block.
    """

    def started(self, now_s: float) -> None: ...

    def issued(self, index: int, event: Event) -> None: ...

    def arrived(self, index: int, ok: bool) -> Callable[[], None] | None:
        """Block number `index` got where it should, or failed. Returns what is to be called without the lock."""
        ...


class Waiter(NamedTuple):
    """Who wants to know when a block is in `tier`: on its way up to it, or down."""

    errand: Errand
    number: int
    tier: Tier
    upwards: bool


class Ticket:
    """The end of a number of loads.

    Once it is `ready`, every copy is on a stream: what compute launches after waiting for `events` may read the
    blocks, and no thread needs to wait. Once it is `done`, they are there, or not: see `failed_from`.
    """

    def __init__(self, pending: int) -> None:
        self._lock = threading.Lock()
        self._pending = pending
        self._unissued = pending
        self._issued: dict[int, Event] = {}
        self._event = HostEvent()
        self._callbacks: list[Callable[[], None]] = []
        self.failed_from: int | None = None
        """Index (among the leased blocks) of the first one whose load failed: it and the rest are of no use."""
        if pending == 0:
            self._event.set()

    @property
    def event(self) -> Event:
        """Happens when the ticket is done."""
        return self._event

    @property
    def done(self) -> bool:
        """True once every load has ended, well or not."""
        return self._event.query()

    @property
    def ready(self) -> bool:
        """True once every load has ended or its last copy has been issued."""
        return self._unissued == 0

    @property
    def events(self) -> list[Event]:
        """What compute must wait for before it touches the blocks; for a ticket that is `ready`."""
        with self._lock:
            return list({id(event): event for event in self._issued.values()}.values())

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until done; False if `timeout_s` passed first."""
        return self._event._set.wait(timeout_s)

    def add_done_callback(self, fn: Callable[[], None]) -> None:
        """Call `fn` from the mover's thread when done; now, if done already."""
        with self._lock:
            if not self.done:
                self._callbacks.append(fn)
                return
        fn()

    def started(self, now_s: float) -> None:
        """A copy begins (see Errand); whoever waits for the last one does not care."""

    def issued(self, index: int, event: Event) -> None:
        """A load's last copy is on its stream (see Errand)."""
        with self._lock:
            if index not in self._issued:
                self._unissued -= 1
            self._issued[index] = event

    def arrived(self, index: int, ok: bool) -> Callable[[], None] | None:
        """A load has ended (see Errand)."""
        with self._lock:
            if not ok and (self.failed_from is None or index < self.failed_from):
                self.failed_from = index
            if self._issued.pop(index, None) is None:
                self._unissued -= 1
            self._pending -= 1
            return self._finish if self._pending == 0 else None

    def _finish(self) -> None:
        with self._lock:
            self._event.set()
            callbacks, self._callbacks = self._callbacks, []
        for fn in callbacks:
            fn()


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Pinned device blocks for one sequence, in order, from number `first` of its context on (behind a window that all
    layers have, those before are not needed); usable once the ticket is done.

    `loaded_blocks` were not on the device: `from_host` and `from_disk` of them came from there (a block that another
    session was loading already counts as loaded only).
    """

    blocks: list[int]
    ticket: Ticket
    loaded_blocks: int
    from_host: int
    from_disk: int
    first: int = 0

    @property
    def end(self) -> int:
        """So many blocks of the context need not be computed."""
        return self.first + len(self.blocks)


class Consignment:
    """The blocks that one Move sends on a trip; makes the receipt when all are planned and the last has ended its own."""

    def __init__(
        self,
        move: Move,
        *,
        block_bytes: int,
        submitted_s: float,
        deliver: Callable[[Receipt], None],
        now_s: Callable[[], float],
        known: Callable[[], bool],
    ) -> None:
        self._move = move
        self._block_bytes = block_bytes
        self._submitted_s = submitted_s
        self._deliver = deliver
        self._now_s = now_s
        self._known = known
        self._blocks = 0
        self._skipped = 0
        self._pending = 1  # the plan itself
        self._moved = 0
        self._called_off = False
        self._first_byte_s = 0.0

    def add(self, blocks: int) -> None:
        """So many more blocks are on their way."""
        self._blocks += blocks
        self._pending += blocks

    def skip(self, blocks: int) -> None:
        """So many blocks have no room where they should go."""
        self._skipped += blocks

    def call_off(self) -> Callable[[], None]:
        """The plan will not be carried out any further, and nobody waits for what it had sent. Returns what is to be
        called without the lock.
        """
        self._called_off = True
        self._pending = -1  # no arrival makes a second receipt
        return self._finish

    def sealed(self) -> Callable[[], None] | None:
        """No more blocks will come. Returns what is to be called without the lock."""
        self._pending -= 1
        return self._finish if self._pending == 0 else None

    def started(self, now_s: float) -> None:
        """A copy begins (see Errand)."""
        self._first_byte_s = self._first_byte_s or now_s

    def issued(self, index: int, event: Event) -> None:
        """See Errand; a receipt is about ends."""

    def arrived(self, index: int, ok: bool) -> Callable[[], None] | None:  # noqa: ARG002
        """A trip has ended (see Errand)."""
        self._pending -= 1
        self._moved += ok
        return self._finish if self._pending == 0 else None

    def _finish(self) -> None:
        outcome, detail = self._outcome()
        self._deliver(
            Receipt(
                move=self._move,
                outcome=outcome,
                blocks=self._moved,
                size_bytes=self._moved * self._block_bytes,
                submitted_s=self._submitted_s,
                first_byte_s=self._first_byte_s,
                finished_s=self._now_s(),
                detail=detail,
            )
        )

    def _outcome(self) -> tuple[Outcome, str]:
        lost = self._blocks - self._moved
        if self._called_off:
            return Outcome.CANCELLED, f"called off after {self._moved} blocks"
        if not self._known() and (lost or self._skipped or not self._blocks):
            return Outcome.CANCELLED, f"the session was forgotten after {self._moved} blocks"
        if not self._blocks and not self._skipped:
            return Outcome.NOTHING, "every block is there already"
        if not lost and not self._skipped:
            return Outcome.DONE, ""
        detail = f"{lost} of {self._blocks} blocks could not be copied, {self._skipped} had no room"
        return (Outcome.PARTIAL if self._moved else Outcome.FAILED), detail
