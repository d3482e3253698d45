"""Contexts without a model: blocks that are written, held, sent down and loaded through the tiers' front door."""

from __future__ import annotations

import itertools

from agentkv.core.residency import Action, Move, Tier
from agentkv.kv.geometry import BLOCK_TOKENS
from agentkv.kv.index import BlockKey, chain_keys, root_key
from agentkv.kv.ticket import Lease
from agentkv.kv.tiers import Tiers

_numbers = itertools.count()
_ROOT = root_key(fingerprint=b"benchmark", salt="")


class Context:
    """One session whose blocks nobody computes. Its keys differ from all other contexts', but for the first
    `shared` ones, which all contexts have in common.
    """

    def __init__(self, tiers: Tiers, session: str, blocks: int, *, shared: int = 0) -> None:
        self.tiers = tiers
        self.session = session
        own = blocks * BLOCK_TOKENS * (1 + next(_numbers))
        tokens = [*range(shared * BLOCK_TOKENS), *range(own, own + (blocks - shared) * BLOCK_TOKENS)]
        self.keys: list[BlockKey] = chain_keys(_ROOT, tokens)

    def make(self, first: int = 0, last: int | None = None) -> list[int]:
        """Take device blocks for the blocks `first` ... `last` - 1, to be filled, committed and let go of (`end`)."""
        last = len(self.keys) if last is None else last
        blocks = self.tiers.allocate(last - first)
        assert blocks is not None, "the device has no room"
        return blocks

    def commit(self, blocks: list[int], first: int = 0) -> list[int]:
        """The blocks are full; returns where they are from now on."""
        written = self.tiers.streams.record()
        return [
            self.tiers.commit(self.session, block, self.keys[at], self.keys[at - 1] if at else None, written)
            for at, block in enumerate(blocks, first)
        ]

    def end(self, blocks: list[int], blocks_held: int | None = None) -> None:
        """The model call ends: the session consists of its blocks, and no sequence uses them."""
        keys = self.keys[:blocks_held]
        self.tiers.hold(self.session, self.session, keys, len(keys) * BLOCK_TOKENS)
        self.tiers.release(self.session, blocks, used=self.tiers.streams.record())

    def fill(self) -> None:
        """All of it, with whatever the blocks hold."""
        blocks = self.make()
        self.commit(blocks)
        self.end(blocks)

    def move(self, action: Action, to: Tier | None) -> bool:
        """Apply a move."""
        return self.tiers.apply(Move(session=self.session, action=action, to=to, reason="benchmark"))

    def send_down(self, tier: Tier) -> None:
        """Write it to `tier` and give up its copies in the dearer ones, whatever the pressure."""
        self.move(Action.DEMOTE, tier)
        self.tiers.quiesce(60)
        for dearer in (Tier.DEVICE, Tier.HOST)[: int(tier)]:
            self.tiers.vacate(self.session, dearer)

    def load(self) -> Lease:
        """All of it back, by demand; the caller ends it."""
        lease = self.tiers.acquire(self.session, self.keys)
        assert lease is not None, "the device has no room"
        assert lease.ticket.wait(60), "a load takes more than a minute"
        assert lease.ticket.failed_from is None, "a load failed"
        assert len(lease.blocks) == len(self.keys), "blocks are missing"
        return lease
