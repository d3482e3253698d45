"""The family: what the tiers of several devices have in common: one lock, one host arena, one slab.

A block's key names no device, and a full block never changes. So a member that lacks a block which a sibling has on
the host or on disk takes a share in the sibling's slot, without a byte copied, and a session can wake on another
device. A slot is free when its last share is given up. Covers shares and the common lifetime; each member keeps its own
book. All but `join` and `leave` are called with the lock held.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from agentkv.core.residency import Tier
from agentkv.errors import ConfigError
from agentkv.kv.block import NOWHERE, Block
from agentkv.kv.book import Book
from agentkv.kv.geometry import Geometry
from agentkv.kv.guard import OwnLock
from agentkv.kv.host import HostArena
from agentkv.kv.index import BlockKey
from agentkv.kv.slab import Slab

if TYPE_CHECKING:
    from agentkv.kv.tiers import Tiers
    from agentkv.kv.transfers import Transfers

LOWER = (Tier.HOST, Tier.DISK)


class Family:
    """`host` and `slab` (None: no such tier) belong to it: the last member to leave closes them."""

    def __init__(self, *, host: HostArena | None, slab: Slab | None) -> None:
        self.lock = OwnLock()
        self.host = host
        self.slab = slab
        self.members: list[Transfers] = []
        self._shares: Counter[tuple[Tier, int]] = Counter()
        """Owners of a slot beyond the first."""

    def join(self, member: Transfers) -> None:
        """One more device."""
        with self.lock:
            self.members.append(member)

    def leave(self, member: Transfers, *, hung: bool) -> None:
        """A device less; with the last one the memory goes, unless a `hung` thread may still touch it."""
        with self.lock:
            if member not in self.members:
                return
            if len(self.members) > 1:
                member.surrender()
            self.members.remove(member)
            last = not self.members
        if not last or hung:
            return
        if self.slab is not None:
            self.slab.close()
        if self.host is not None:
            self.host.close()

    def adopt(self, book: Book, keys: Sequence[BlockKey]) -> None:
        """Let `book` share in the leading keys' lower copies that a sibling has and it lacks. Behind windows that all
        layers have, there are holes.
        """
        if all(member.book is book for member in self.members):  # nobody to share with
            return
        holes = bool(book.window)
        for key in keys:
            own = book.blocks.get(key)
            if own is not None and own.resident:
                continue
            found = self._sibling(book, key)
            if found is None or (own is not None and not own.idle):
                if holes:
                    continue
                return
            block = book.ensure(key, found.parent)
            for tier in LOWER:
                if found.has(tier):
                    self._shares[tier, found.where[tier]] += 1
                    book.place(block, tier, found.where[tier])

    def _sibling(self, book: Book, key: BlockKey) -> Block | None:
        for member in self.members:
            block = member.book.blocks.get(key)
            if member.book is not book and block is not None and any(block.has(tier) for tier in LOWER):
                return block
        return None

    def give(self, tier: Tier, slot: int) -> bool:
        """One owner less. True if it was the last: the slot is free."""
        if self._shares[tier, slot] == 0:
            del self._shares[tier, slot]
            return True
        self._shares[tier, slot] -= 1
        return False

    def check(self, tier: Tier, used: int | None) -> None:
        """Every slot has as many owners as shares say; `used` slots are taken (None: cannot be said now)."""
        owners: Counter[int] = Counter()
        stuck: set[int] = set()
        for member in self.members:
            stuck |= member.stuck[tier]
            for block in member.book.blocks.values():
                owners.update(slot for slot in (block.where[tier], block.coming[tier]) if slot != NOWHERE)
        for slot, count in owners.items():
            shares = self._shares.get((tier, slot), 0)
            assert count == 1 + shares, f"{tier.name} slot {slot} has {count} owners and {shares} shares"
        assert not stuck.intersection(owners), "a slot that a stalled copy may write to has an owner"
        assert used is None or len(owners) + len(stuck) == used, f"{tier.name} slots leak"


def hand_over(session: str, *, source: Tiers, to: Tiers) -> None:
    """Have `to` hold what `source`, of the same family, holds for the session, as far as it is on the host or on disk;
    `source` forgets it.
    """
    with to._locked():
        holding = source._book.holdings.get(session)
        if holding is None:
            return
        keys = [block.key for block in holding.chain]
        to._family.adopt(to._book, keys)
        to._book.hold(session, holding.task, keys, holding.tokens, holding.used_s, first=holding.first)
        ours = to._book.holdings[session]
        for fact in ("template_blocks", "background", "order", "priority", "recompute_s", "expected_s", "forecast"):
            setattr(ours, fact, getattr(holding, fact))
    with source._locked():
        source._moves.forget(session)
        source._guard.room_changed = True


def make_family(geometry: Geometry, *, device: str, host_bytes: int, slab: Slab | None) -> Family:
    """The lower tiers of one device, or of several: `device` is one of them. ConfigError on sizes that cannot work."""
    if slab is not None and host_bytes == 0:
        raise ConfigError("a disk tier needs a host tier: blocks pass through host memory; host memory is 0")
    if slab is not None and slab.block_bytes != geometry.block_bytes:
        raise ConfigError(f"the slab has blocks of {slab.block_bytes} B, the model of {geometry.block_bytes} B")
    kind, _, number = device.partition(":")
    host = HostArena(geometry, host_bytes, pin=kind == "cuda", device=int(number or 0)) if host_bytes else None
    return Family(host=host, slab=slab)
