"""Window: how far back the furthest-seeing layer of a model sees, in blocks.

Covers the arithmetic of models all of whose layers have a sliding window: which blocks of a context can still be read
by a token to come. Blocks before them are dead. What becomes of those is `book.py` and `transfers.py`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from agentkv.kv.geometry import BLOCK_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A token attends to the last `tokens` ones, itself included, in the layer that sees furthest; 0: to all."""

    tokens: int = 0

    def __bool__(self) -> bool:
        return self.tokens > 0

    def first_seen(self, computed: int) -> int:
        """The first block of a context that is read by the token behind `computed` ones, or by any later one."""
        return max(0, computed - self.tokens + 1) // BLOCK_TOKENS if self.tokens else 0

    def live_blocks(self, computed: int) -> int:
        """Blocks of a context of `computed` tokens that a later token reads."""
        return -(-computed // BLOCK_TOKENS) - self.first_seen(computed)

    @property
    def reach_blocks(self) -> int:
        """Most blocks before the one that a token is written to that it reads."""
        return -(-(self.tokens - 1) // BLOCK_TOKENS) if self.tokens else 0

    def longest(self, blocks: int) -> int:
        """The longest context, in tokens, that is computed in so many blocks."""
        return sys.maxsize if self.tokens and blocks >= self.least_blocks else blocks * BLOCK_TOKENS

    @property
    def least_blocks(self) -> int:
        """A context of any length is computed in so many blocks, one at a time: those in sight, the one that is
        written, and a copy of a partial one that others use too.
        """
        return self.reach_blocks + 2
