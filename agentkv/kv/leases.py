"""Leases: device blocks for running sequences, shared and private.

Covers acquire, allocate, commit, reopen and release. Does not cover loads (`transfers.py`) nor who makes room
(`room.py`). Every method is called with the lock of `Tiers` held.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from agentkv.core.residency import Tier
from agentkv.kv.block import NOWHERE, Block
from agentkv.kv.book import Book
from agentkv.kv.device import DevicePool
from agentkv.kv.index import BlockKey
from agentkv.kv.streams import Event, Streams
from agentkv.kv.ticket import Lease, Ticket
from agentkv.kv.transfers import Transfers


class Leases:
    """What sequences have in hand; `hits` counts where their blocks came from."""

    def __init__(
        self,
        *,
        book: Book,
        device: DevicePool,
        transfers: Transfers,
        streams: Streams,
        now_s: Callable[[], float],
    ) -> None:
        self.hits: Counter[str] = Counter()
        self._book = book
        self._device = device
        self._transfers = transfers
        self._streams = streams
        self._now_s = now_s

    def acquire(self, session: str, keys: Sequence[BlockKey], tokens: int | None = None) -> Lease | None:
        """See `Tiers.acquire`."""
        holding = self._book.holdings.get(session)
        if holding is not None:
            holding.used_s = self._now_s()
            holding.expected_s = holding.demoted_to = holding.forecast = None
        first, blocks = self.in_sight(keys, tokens)
        for block in blocks:
            block.pins += 1
        new = [block for block in blocks if not block.has(Tier.DEVICE) and block.coming[Tier.DEVICE] == NOWHERE]
        if new and not self._transfers.room.on_device(len(new)):
            for block in blocks:
                block.pins -= 1
            return None
        for block, slot in zip(new, self._device.take(len(new)), strict=True):
            block.coming[Tier.DEVICE] = slot
            self._device.owner[slot] = block
        loading = [i for i, block in enumerate(blocks) if not block.has(Tier.DEVICE)]
        from_host = sum(block.has(Tier.HOST) for block in new)
        lease = Lease(
            blocks=[block.device_block for block in blocks],
            ticket=Ticket(len(loading)),
            loaded_blocks=len(loading),
            from_host=from_host,
            from_disk=len(new) - from_host,
            first=first,
        )
        for block in blocks:
            block.doomed, block.refused = False, None
            if block.fetched:
                self._transfers.unfetch(block, used=True)
        if loading:
            self._streams.taken(device=[block.coming[Tier.DEVICE] for block in new])
            self._transfers.up(
                [blocks[i] for i in loading], Tier.DEVICE, urgent=True, errand=lease.ticket, indices=loading
            )
            self._transfers.counts["restores"] += 1
        self.hits.update(device=len(blocks) - len(loading), host=lease.from_host, disk=lease.from_disk)
        self.hits["joined"] += len(loading) - len(new)
        return lease

    def in_sight(self, keys: Sequence[BlockKey], tokens: int | None = None) -> tuple[int, list[Block]]:
        """See `Book.in_sight`; with copies that siblings have."""
        self._transfers.family.adopt(self._book, keys)
        return self._book.in_sight(keys, tokens, disk=self._transfers.stalled is None)

    def allocate(self, n: int) -> list[int] | None:
        """See `Tiers.allocate`."""
        if not self._transfers.room.on_device(n):
            return None
        blocks = self._device.take(n)
        self._device.private.update(blocks)
        self._streams.taken(device=blocks, compute=True)
        return blocks

    def commit(self, session: str, block: int, key: BlockKey, parent: BlockKey | None, written: Event) -> int:
        """See `Tiers.commit`."""
        if block not in self._device.private:
            raise ValueError(f"block {block} is not private, so it cannot be committed")
        known = self._book.ensure(key, parent)
        known.doomed = False
        if known.coming[Tier.DEVICE] != NOWHERE:
            return block
        known.pins += 1
        if known.has(Tier.DEVICE):
            self._device.last_use[block] = written
            self._transfers.give(Tier.DEVICE, block)
            return known.where[Tier.DEVICE]
        self._device.private.discard(block)
        self._device.owner[block] = known
        self._device.last_write[block] = written
        self._book.place(known, Tier.DEVICE, block)
        self._touch(session)
        return block

    def reopen(self, block: int) -> bool:
        """See `Tiers.reopen`. True if `block` itself is private now; False if it must be copied."""
        owner = self._device.owner[block]
        if block in self._transfers.dead:
            return False
        if owner is None or owner.pins == 0:
            raise ValueError(f"device block {block} is not leased, so it cannot be written to")
        if owner.pins > 1 or owner.users[Tier.DEVICE] or not owner.has(Tier.DEVICE) or owner.up is not None:
            return False
        owner.pins = 0
        self._transfers.unfetch(owner, used=True)
        assert block == self._book.vacate(owner, Tier.DEVICE)
        self._device.owner[block] = None
        self._device.private.add(block)
        if owner.doomed and owner.idle:
            self._transfers.forget(owner)
        self._book.tidy(owner)
        return True

    def release(self, session: str, blocks: Sequence[int], used: Event, *, behind: bool = False) -> None:
        """See `Tiers.release`."""
        for slot in blocks:
            self._device.last_use[slot] = used
            owner = self._device.owner[slot]
            if behind and owner is not None and self._book.shed(session, owner):
                self._transfers.fade(owner)
            if slot in self._device.private:
                self._transfers.give(Tier.DEVICE, slot)
            elif slot in self._transfers.dead:
                self._unpin_dead(slot)
            elif owner is not None and owner.pins > 0:
                self._unpin(owner)
            else:
                raise ValueError(f"device block {slot} is not in use by any sequence")
        self._touch(session)

    def _unpin(self, block: Block) -> None:
        block.pins -= 1
        if block.doomed and block.pins == 0:
            self._transfers.forget(block)

    def _unpin_dead(self, slot: int) -> None:
        self._transfers.dead[slot] -= 1
        if self._transfers.dead[slot] == 0:
            del self._transfers.dead[slot]
            self._transfers.give(Tier.DEVICE, slot)

    def _touch(self, session: str) -> None:
        holding = self._book.holdings.get(session)
        if holding is not None:
            holding.used_s = self._now_s()
