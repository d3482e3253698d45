"""Who waits for host slots, and for whom room is made there: whoever is first in line, urgent ones before all others.

Covers the line and the decision when to look for room again. Which copies go is `room.py`; what a trip is,
`transfers.py`. Called with the lock of `Tiers` held.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentkv.core.residency import Tier
from agentkv.kv.block import NOWHERE, Block
from agentkv.kv.book import Book, Holding
from agentkv.kv.host import HostArena
from agentkv.kv.mover import LaneName

if TYPE_CHECKING:
    from agentkv.kv.transfers import Transfers

_SEARCH_AGAIN_S = 0.05
"""Who waits is looked after this often even if nothing changed: who is back last depends on the time."""


@dataclass(eq=False, slots=True)
class Wanted:
    """Blocks that wait for host slots; room may be made at the cost of what goes before `below` only. For urgent
    ones, copies that are elsewhere too go whoever holds them.
    """

    blocks: deque[Block]
    below: Holding | None
    lane: LaneName
    urgent: bool

    @property
    def passing_to(self) -> Tier | None:
        """The tier beyond the host that they are on their way to; None if they are to stay on the host."""
        if self.lane == "d2h":
            return Tier.DISK if any(block.down == Tier.DISK for block in self.blocks) else None
        return Tier.DEVICE if any(block.up == Tier.DEVICE for block in self.blocks) else None


class Queue:
    """The line for host slots. `transit_blocks`: so many of others' blocks leave for the disk at a time, where
    somebody only passes through the host and has no other way.
    """

    def __init__(
        self,
        *,
        transfers: Transfers,
        book: Book,
        host: HostArena | None,
        now_s: Callable[[], float],
        transit_blocks: int,
    ) -> None:
        self._transfers = transfers
        self._book = book
        self._host = host
        self._now_s = now_s
        self._transit_blocks = min(transit_blocks, max(1, host.slots // 8)) if host else 0
        self._line: deque[Wanted] = deque()
        self._changes = 0
        self._searched: tuple[int, int, float] | None = None

    def put(self, wanted: Wanted) -> None:
        """Stand in line; urgent ones in front."""
        self.stir()
        if wanted.urgent:
            self._line.appendleft(wanted)
        else:
            self._line.append(wanted)

    def hasten(self, block: Block) -> None:
        """The block is wanted urgently: whoever brings it goes to the front."""
        for wanted in list(self._line):
            if wanted.lane == "read" and block in wanted.blocks:
                self.stir()
                wanted.below, wanted.urgent = None, True
                self._line.remove(wanted)
                self._line.appendleft(wanted)

    def refuse_reads(self) -> None:
        """Nobody gets anything from disk at the moment."""
        for wanted in [one for one in self._line if one.lane == "read"]:
            self._line.remove(wanted)
            self._transfers.refuse(wanted)

    def clear(self) -> None:
        """Nobody waits any more."""
        self._line.clear()

    def stir(self) -> None:
        """Something happened that may have made room."""
        self._changes += 1

    def advance(self) -> None:
        """Give slots to whom they are due."""
        while self._line and self._worth_a_search() and self._feed(self._line[0]):
            self._line.popleft()
            self._searched = None

    def _worth_a_search(self) -> bool:
        """False while nothing has changed that could give the first in line a slot: a search looks at every block
        there, and each release of the lock would pay for it.
        """
        now_s = self._now_s()
        if self._searched is not None:
            *seen, when_s = self._searched
            if seen == [self._changes, self._book.host_changes] and now_s - when_s < _SEARCH_AGAIN_S:
                return False
        self._searched = (self._changes, self._book.host_changes, now_s)
        return True

    def _feed(self, wanted: Wanted) -> bool:
        """Give `wanted` its host slots. True once none of its blocks waits any more."""
        assert self._host is not None
        short = len(wanted.blocks) - len(self._host.free)
        below = None if wanted.passing_to is not None else wanted.below  # a slot for a moment
        if short > 0:
            short -= self._transfers.room.on_host_by_eviction(
                short, None if wanted.urgent else below, for_device_room=wanted.urgent and wanted.lane == "d2h"
            )
        if short > 0:
            short -= self._transfers.room.on_host_by_reuse(short, wanted)
        if short > 0:
            short -= self._transfers.room.on_host_by_spilling(short, wanted.below)
        if short > 0 and wanted.passing_to is not None and not len(self._host.free):
            self._transfers.room.on_host_by_spilling(min(short, self._transit_blocks), None, drop=False)
        slots = self._host.free.take(min(len(wanted.blocks), len(self._host.free)))
        self._transfers.taken_on_host(slots)
        for slot in slots:
            block = wanted.blocks.popleft()
            block.coming[Tier.HOST] = slot
            self._transfers.plan(block, wanted.lane)
        if not wanted.blocks:
            return True
        if any(block.users[Tier.HOST] or block.coming[Tier.HOST] != NOWHERE for block in self._transfers.under_way):
            return False
        self._transfers.refuse(wanted)
        return True
