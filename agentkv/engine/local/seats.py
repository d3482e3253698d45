"""Seats: the device blocks that sequences have, from the first to those that their windows have passed.

Covers taking what the tiers know and what is to be computed, growing, and giving blocks up. Does not cover who gets a
seat and who has to leave it (`batch.py`), nor what happens in the tiers (`kv/`). Used by the engine's thread only.

A sequence gets all blocks of its prompt or none. Where all layers have a window, it gets what is in sight and a chunk;
it takes the next ones as it goes and gives up those behind it, so that any context passes through few blocks.
"""

from __future__ import annotations

from agentkv.engine.local.attention import NULL_BLOCK
from agentkv.engine.local.sequence import Sequence, blocks_for
from agentkv.kv.geometry import BLOCK_TOKENS
from agentkv.kv.index import BlockKey
from agentkv.kv.streams import Event
from agentkv.kv.ticket import Lease
from agentkv.kv.tiers import Tiers


class Seats:
    """Blocks of sequences. Places of a sequence's `blocks` that its windows have passed have the null block."""

    def __init__(self, tiers: Tiers, *, chunk_tokens: int) -> None:
        self._tiers = tiers
        self._window = tiers.window
        self._stride = min(blocks_for(chunk_tokens), tiers.num_blocks - self._window.least_blocks)
        self._fresh: list[int] = []

    def take(self, sequence: Sequence, *, beside_others: bool) -> Lease | None:
        """Give the sequence what it needs to start: blocks that the tiers have, which are the lease, and private ones.
        Or change nothing and return None.
        """
        session = sequence.session.key
        keys, partial = self._findable(sequence)
        lease = self._tiers.acquire(session, keys, sequence.tail_tokens if partial else None)
        if lease is None:
            return None
        partial = partial and lease.end == len(keys)
        spare = int(beside_others)  # no seat that the next grown block of another one would undo
        whole = blocks_for(len(sequence.ids)) - lease.end
        for count in self._strides(whole, partial=partial):
            private = self._tiers.allocate(count + partial + spare)
            if private is not None:
                break
        else:
            self._tiers.release(session, lease.blocks, used=self._tiers.streams.record())
            return None
        if spare:
            self._tiers.release(session, [private.pop()], used=self._tiers.streams.record())
        if partial:
            sequence.spare = private.pop()
        self._fresh += private[-1:]  # a decode batch reads the end of the last block: it must be finite
        sequence.blocks = [*[NULL_BLOCK] * lease.first, *lease.blocks, *private]
        sequence.passed = lease.first
        sequence.committed = lease.end - partial
        sequence.computed = sequence.tail_tokens if partial else sequence.committed * BLOCK_TOKENS
        return lease

    def _strides(self, whole: int, *, partial: bool) -> list[int]:
        """How many blocks to compute a sequence may start with, the most that is of use first."""
        if not self._window:
            return [whole]
        least = min(whole, 0 if partial else 1)
        most = max(least, min(whole, self._stride))
        return [most] if most == least else [most, least]

    def _findable(self, sequence: Sequence) -> tuple[list[BlockKey], bool]:
        """The keys to ask the tiers for. True: the last one is of the partial block with which the session ended."""
        keys, trusted = sequence.reusable_keys(), sequence.trusted_blocks
        full = sequence.tail_tokens // BLOCK_TOKENS
        if sequence.tail_tokens >= len(sequence.ids) or (trusted is not None and trusted <= full):
            return keys, False
        if (blocks_for(len(sequence.ids)) + 1) * BLOCK_TOKENS > self._window.longest(self._tiers.num_blocks):
            return keys, False  # alone on the device, it would have no place for a copy of the partial block
        partial = sequence.partial_key(sequence.tail_tokens)
        if partial is None or self._tiers.match(keys) > full:
            return keys, False
        ended = [*keys[:full], partial]
        return (ended, True) if self._tiers.match(ended, sequence.tail_tokens) == len(ended) else (keys, False)

    # -- while it computes

    def room_for(self, sequence: Sequence, count: int) -> int:
        """So many of the next `count` prompt tokens have a place, new blocks included."""
        place = len(sequence.blocks) * BLOCK_TOKENS - sequence.computed
        if place >= count:
            return count
        lacking = blocks_for(sequence.computed + count) - len(sequence.blocks)
        if self.grow(sequence, lacking):
            return count
        if place:
            return place
        while lacking > 1:
            lacking //= 2
            if self.grow(sequence, lacking):
                return lacking * BLOCK_TOKENS
        return 0

    def grow(self, sequence: Sequence, blocks: int = 1) -> bool:
        """More private blocks at its end; False if the device has no room at the moment."""
        new = self._tiers.allocate(blocks)
        if new is None:
            return False
        sequence.blocks += new
        self._fresh += new[-1:]
        return True

    def take_fresh(self) -> list[int]:
        """Blocks to be cleared before the next forward."""
        fresh, self._fresh = self._fresh, []
        return fresh

    # -- what it needs no more

    def pass_by(self, sequence: Sequence, used: Event) -> None:
        """Give up the blocks that no layer's window shows to any later token. `used`: after their last read.

        What the session's next prompt goes on with, when this one's thought is left out, stays the session's.
        """
        first = self._window.first_seen(sequence.computed)
        if first <= sequence.passed:
            return
        behind = sequence.blocks[sequence.passed : first]
        sequence.blocks[sequence.passed : first] = [NULL_BLOCK] * len(behind)
        dead = len(behind)
        if sequence.outlives is not None:
            border = sequence.outlives.tokens // BLOCK_TOKENS * BLOCK_TOKENS
            dead = max(0, min(dead, self._window.first_seen(border) - sequence.passed))
        sequence.passed = first
        self._tiers.release(sequence.holder, behind[:dead], used=used, behind=True)
        self._tiers.release(sequence.holder, behind[dead:], used=used)

    def give_up(self, sequence: Sequence) -> None:
        """It has no blocks any more."""
        blocks, sequence.blocks = sequence.blocks[sequence.passed :], []
        if sequence.spare is not None:
            blocks.append(sequence.spare)
        sequence.spare = sequence.tail = None
        gone = set(blocks)
        self._fresh = [block for block in self._fresh if block not in gone]
        sequence.ticket = None
        sequence.computed = sequence.committed = sequence.passed = 0
        if blocks:
            self._tiers.release(sequence.session.key, blocks, used=self._tiers.streams.record())
