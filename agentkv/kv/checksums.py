"""Checksums of blocks on disk: xxh3-64 of a block, seeded with its key, computed while the block is being written.

A writer that hashed first would leave the disk idle for that time: under load that cost 5 to 20 % of the writes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import xxhash

from agentkv.kv.segments import SlotImage
from agentkv.units import KIB

_THREADS = 2
_WORTH_A_THREAD_BYTES = 512 * KIB
"""Below this, handing the work over takes longer than doing it."""


class Checksums:
    """Hashes blocks of `block_bytes`. Thread-safe; `close` ends its threads."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="agentkv-checksums")

    def start(self, images: Sequence[SlotImage]) -> Callable[[], list[int]]:
        """Begin to hash `images`, whose bytes must not change until the function that is returned has been called:
        it waits for the result.
        """
        if len(images) * self._block_bytes >= _WORTH_A_THREAD_BYTES:
            try:
                return self._pool.submit(self._all, images).result
            except RuntimeError:  # closed meanwhile
                pass
        sums = self._all(images)
        return lambda: sums

    def of(self, image: SlotImage) -> int:
        """Seeded with the key, so that a whole and healthy block of another key fails too."""
        return xxhash.xxh3_64_intdigest(image.view[: self._block_bytes], int.from_bytes(image.key[:8], "little"))

    def close(self) -> None:
        """End the threads. Idempotent."""
        self._pool.shutdown(wait=False)

    def _all(self, images: Sequence[SlotImage]) -> list[int]:
        return [self.of(image) for image in images]
