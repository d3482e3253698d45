"""Block: the smallest part of a context that moves; where its copies are, and who uses them.

Covers the state of one block. Sessions, counts and the order of eviction are `book.py`. Guarded by the lock of `Tiers`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentkv.core.residency import Tier
from agentkv.kv.index import BlockKey

if TYPE_CHECKING:
    from agentkv.kv.book import Holding
    from agentkv.kv.ticket import Waiter

NOWHERE = -1


class Block:
    """One full block of tokens.

    `where[tier]` is the slot of its copy there; `coming[tier]` a slot that a copy is on its way to (two phases: it
    becomes `where` when the copy ends well, and nobody reads it before). `users[tier]` counts transfers that read
    the copy, `pins` running sequences that read the device copy; either keeps the copy where it is (R8).
    `up` and `down` are the targets of the trips under way; `refused` is the tier to which it could not be written last
    time. `doomed`: to be forgotten as soon as nobody uses it. `fetched`: on the device ahead of its use.
    `kept_until_s`: an ended task's template, kept so long for the next one. `behind`: so many sessions' windows have
    passed it.
    """

    __slots__ = (
        "behind",
        "coming",
        "doomed",
        "down",
        "fetched",
        "holders",
        "kept_until_s",
        "key",
        "parent",
        "pins",
        "refused",
        "up",
        "urgent",
        "users",
        "waiters",
        "where",
    )

    def __init__(self, key: BlockKey, parent: BlockKey | None) -> None:
        self.key = key
        self.parent = parent
        self.where = [NOWHERE, NOWHERE, NOWHERE]
        self.coming = [NOWHERE, NOWHERE, NOWHERE]
        self.users = [0, 0, 0]
        self.pins = 0
        self.holders: dict[str, Holding] = {}
        self.up: Tier | None = None
        self.down: Tier | None = None
        self.urgent = False
        self.doomed = False
        self.behind = 0
        self.fetched = False
        self.kept_until_s: float | None = None
        self.refused: Tier | None = None
        self.waiters: list[Waiter] = []

    def has(self, tier: Tier) -> bool:
        """True if a readable copy is there."""
        return self.where[tier] != NOWHERE

    @property
    def device_block(self) -> int:
        """Where its device copy is, or will be."""
        return self.where[Tier.DEVICE] if self.has(Tier.DEVICE) else self.coming[Tier.DEVICE]

    @property
    def resident(self) -> bool:
        """True if a readable copy is anywhere."""
        return self.where != [NOWHERE, NOWHERE, NOWHERE]

    @property
    def in_memory(self) -> bool:
        """True if a readable copy is on the device or the host."""
        return self.has(Tier.DEVICE) or self.has(Tier.HOST)

    @property
    def in_lower_tiers(self) -> bool:
        """True if a readable copy is on the host or on disk."""
        return self.has(Tier.HOST) or self.has(Tier.DISK)

    @property
    def unwritten(self) -> bool:
        """True if the device has the only copy."""
        device, host, disk = self.where
        return device != NOWHERE and host == NOWHERE and disk == NOWHERE

    @property
    def idle(self) -> bool:
        """True if no trip is under way and nobody uses any copy."""
        return self.up is None and self.down is None and not any(self.users) and self.pins == 0

    def evictable(self, tier: Tier) -> bool:
        """True if the copy there can go at once: nobody reads it, no trip starts from it."""
        return self.where[tier] != NOWHERE and self.users[tier] == 0 and (tier != Tier.DEVICE or self.pins == 0)
