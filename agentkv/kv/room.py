"""Room: which copies are given up when somebody needs space in a tier.

Covers the device (`on_device`), the host arena and the disk. The order among blocks is `Book.victims`; what a copy
costs to give up decides the rest: one that is elsewhere too costs nothing, one that is not is written first if it
can be, and dropped only if it cannot.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from agentkv.core.residency import Tier
from agentkv.kv.block import Block
from agentkv.kv.book import Book, Holding
from agentkv.kv.slab import Slab

if TYPE_CHECKING:
    from agentkv.kv.device import DevicePool
    from agentkv.kv.queue import Wanted
    from agentkv.kv.transfers import Transfers


class Room:
    """Called with the lock of `Tiers` held."""

    def __init__(
        self,
        *,
        book: Book,
        device: DevicePool,
        slab: Slab | None,
        transfers: Transfers,
        now_s: Callable[[], float],
    ) -> None:
        self._book = book
        self._device = device
        self._slab = slab
        self._transfers = transfers
        self._now_s = now_s

    def on_device(self, n: int, *, below: Holding | None = None, write: bool = True) -> bool:
        """Free device blocks until `n` are free. True if they are.

        False: dirty blocks are being written so that they can go, or everything is in use; ask again when told of
        room. Never False for ever while unused blocks exist: those that cannot be written are dropped (R11). With
        `below`, only what goes before that session; with `write=False`, only what costs nothing.
        """
        short = n - len(self._device.free)
        if short <= 0:
            return True
        dirty: list[Block] = []
        for block in self._book.victims(Tier.DEVICE, self._now_s(), below=below):
            if short == 0:
                return True
            if not block.evictable(Tier.DEVICE):
                continue
            if block.unwritten and block.holders:
                dirty.append(block)
                continue
            self._transfers.evict(block, Tier.DEVICE)
            short -= 1
        if short == 0 or not write:
            return short == 0
        # those that will be evictable without loss when their trip down ends
        writing = sum(1 for block in self._transfers.under_way if block.users[Tier.DEVICE] and block.pins == 0)
        for block in dirty:
            if short <= writing:
                break
            if self._write(block):
                writing += 1
            else:
                self._transfers.evict(block, Tier.DEVICE)
                short -= 1
        return short == 0

    def _write(self, block: Block) -> bool:
        """Start writing a dirty block down: to the host, else through it to the disk; False if that cannot work."""
        if block.refused is None:
            to = Tier.HOST
        elif block.refused == Tier.HOST and self._transfers.has_disk:
            to = Tier.DISK
        else:
            return False
        if not self._transfers.has_host:
            return False
        holding = min(block.holders.values(), key=lambda one: one.back_in_s(self._now_s()))
        self._transfers.down([block], to, urgent=True, errand=None, below=holding)
        return True

    def on_host_by_eviction(self, n: int, below: Holding | None, *, for_device_room: bool = False) -> int:
        """Free up to `n` host slots of blocks that are elsewhere too, on disk first. Returns how many.

        `for_device_room`: a block is to be written so that its device copy can go. Then copies that keep another one
        clean stay: that one can go at once, and taking its copy would only swap who is dirty, for ever.
        """
        done = 0
        for tier in (Tier.DISK, Tier.DEVICE):
            for block in self._book.victims(Tier.HOST, self._now_s(), below=below):
                if done == n:
                    return done
                swap = for_device_room and tier == Tier.DEVICE and block.evictable(Tier.DEVICE)
                if block.evictable(Tier.HOST) and block.has(tier) and not swap:
                    done += self._transfers.evict(block, Tier.HOST)
        return done

    def on_host_by_reuse(self, n: int, wanted: Wanted) -> int:
        """Free up to `n` host slots of the session itself, where its blocks only pass through the host: of those that
        are on disk and, on the way up, on the device too. Returns how many.
        """
        kept, own = wanted.passing_to, wanted.below
        if kept is None or own is None:
            return 0
        done = 0
        for block in reversed(own.chain):
            if done == n:
                break
            if block.evictable(Tier.HOST) and block.has(Tier.DISK) and block.has(kept):
                done += self._transfers.evict(block, Tier.HOST)
        return done

    def on_host_by_spilling(self, n: int, below: Holding | None, *, drop: bool = True) -> int:
        """Start writing up to `n` host-only blocks to disk, so that they can go; where there is no disk to take
        them, `drop` them. Returns how many were dropped.
        """
        disk = self._transfers.has_disk
        coming = sum(1 for one in self._transfers.under_way if one.down == Tier.DISK and one.has(Tier.HOST))
        dropped = 0
        for block in self._book.victims(Tier.HOST, self._now_s(), below=below):
            if dropped + coming >= n:
                break
            if not block.evictable(Tier.HOST):
                continue
            if disk and block.holders and block.refused != Tier.DISK:
                self._transfers.down([block], Tier.DISK, urgent=True, errand=None, below=below)
                coming += 1
            elif drop:
                dropped += self._transfers.evict(block, Tier.HOST)
        return dropped

    def on_disk(self, n: int, for_block: Block) -> None:
        """Free up to `n` disk slots: of blocks that are elsewhere too, then of sessions that are back later."""
        now_s = self._now_s()
        below = min(for_block.holders.values(), key=lambda one: one.back_in_s(now_s), default=None)
        for anywhere in (False, True):
            for block in self._book.victims(Tier.DISK, now_s, below=below):
                if n == 0:
                    return
                if block.evictable(Tier.DISK) and (anywhere or block.has(Tier.HOST)):
                    n -= self._transfers.evict(block, Tier.DISK)
