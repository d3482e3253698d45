"""Shelf: blocks on disk by key, in a slab of checksummed slots that goes with the process.

Covers the index over `agentkv.kv.slab`, room by the order of giving way, and pins while a block is read. Whoever writes or reads
calls from threads of its own: these wait for the disk. A block whose bytes cannot be trusted is gone from the index and
counts as never stored. Does not cover vLLM's jobs (`disk.py`). Needs no vLLM.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentkv.errors import ConfigError
from agentkv.kv.geometry import SLOT_ALIGN_BYTES
from agentkv.kv.slab import Slab, SlotImage
from agentkv_vllm.order import Order
from agentkv_vllm.sessions import Key, Sessions


@dataclass(slots=True)
class _Slot:
    """A block's place. `ref_cnt`: readers and writers of it now; `ready`: it has been written."""

    number: int
    ref_cnt: int = 1
    ready: bool = False


class Shelf:
    """Blocks of `block_bytes`, a multiple of a page, at most `capacity_bytes` of them below `folder`. Thread-safe.

    Raises ConfigError and DiskUnavailable as `Slab` does. `close()` is idempotent.
    """

    def __init__(self, folder: str | Path, capacity_bytes: int, block_bytes: int, sessions: Sessions) -> None:
        if block_bytes <= 0 or block_bytes % SLOT_ALIGN_BYTES:
            raise ConfigError(f"a block of {block_bytes} bytes: a multiple of {SLOT_ALIGN_BYTES} is needed")
        self._slab = Slab(folder, capacity_bytes, block_bytes)
        self._lock = threading.Lock()
        self._order = Order(sessions)
        self._let_go = sessions.let_go()

    def has(self, key: Key) -> bool:
        """Whether the block can be read."""
        slot = self._order.copies.get(key)
        return slot is not None and slot.ready

    def pin(self, keys: Iterable[Key]) -> list[Key]:
        """Keep those that are there from being given up; which they are. Each is to be unpinned once."""
        with self._lock:
            found = []
            for key in keys:
                slot = self._order.copies.get(key)
                if slot is not None and slot.ready:
                    slot.ref_cnt += 1
                    found.append(key)
            self._order.use(found)
            return found

    def write(self, blocks: Sequence[tuple[Key, memoryview]]) -> int:
        """Store what is not there yet, as far as there is room; how many of `blocks` are there now."""
        taken: list[SlotImage] = []
        with self._lock:
            self._give_up()
            wanted = sum(key not in self._order.copies for key, _ in blocks)
        free = self._slab.reserve(wanted) if wanted else []  # it may make files: the scheduler must not wait for that
        with self._lock:
            there = sum(key in self._order.copies for key, _ in blocks)
            new = [(key, view) for key, view in blocks if key not in self._order.copies]
            numbers = self._room(free, len(new), {key for key, _ in blocks})
            for (key, view), number in zip(new, numbers, strict=False):  # the beginning of a prompt first
                self._order.add(key, _Slot(number))
                taken.append(SlotImage(number, key, view))
            self._slab.free(numbers[len(taken) :])
        if not taken:
            return there
        try:
            self._slab.write(taken)
        except Exception:
            with self._lock:
                for image in taken:
                    self._drop(image.key)
            raise
        with self._lock:
            for image in taken:
                slot = self._order.copies[image.key]
                slot.ready, slot.ref_cnt = True, slot.ref_cnt - 1
        return there + len(taken)

    def read(self, blocks: Sequence[tuple[Key, memoryview]]) -> list[bool]:
        """Read pinned blocks into their views and unpin them; False for each that cannot be trusted."""
        with self._lock:
            slots = [self._order.copies[key] for key, _ in blocks]
        images = [SlotImage(slot.number, key, view) for slot, (key, view) in zip(slots, blocks, strict=True)]
        good = [False] * len(images)
        try:
            good = self._slab.read(images)
        finally:
            with self._lock:
                for slot, image, fine in zip(slots, images, good, strict=True):
                    slot.ref_cnt -= 1
                    slot.ready = slot.ready and fine
                    if not slot.ready and slot.ref_cnt == 0:
                        self._drop(image.key)
        return good

    def give_up(self) -> None:
        """Free what ended sessions left, except what is being read; that goes first when room is needed."""
        if self._let_go:
            with self._lock:
                self._give_up()

    def stats(self) -> dict[str, Any]:
        """Counts as plain JSON values."""
        return {"blocks": len(self._order.copies), **self._slab.stats()}

    def check(self) -> None:
        """Every redundant fact, recomputed."""
        with self._lock:
            numbers = [slot.number for slot in self._order.copies.values()]
            assert len(set(numbers)) == len(numbers) == self._slab.used, "a slot lost, or one for two"
            assert all(slot.ref_cnt >= 0 for slot in self._order.copies.values())
        self._slab.check()

    def close(self) -> None:
        """Remove the files."""
        self._slab.close()

    def _room(self, free: list[int], wanted: int, protected: set[Key]) -> list[int]:
        """`wanted` slots if there are so many: free ones, then those of blocks that give way."""
        numbers = list(free)
        if len(numbers) < wanted and self._slab.off is None:
            for count in range(wanted - len(numbers), 0, -1):
                victims = self._order.victims(count, protected)
                if victims is not None:
                    for key in victims:
                        numbers.append(self._order.copies[key].number)
                        self._order.remove(key)
                    break
        return numbers

    def _give_up(self) -> None:
        while self._let_go:
            key, over = self._let_go.popleft()
            slot = self._order.copies.get(key)
            if over and slot is not None and slot.ref_cnt == 0:
                self._drop(key)

    def _drop(self, key: Key) -> None:
        number = self._order.copies[key].number
        self._order.remove(key)
        self._slab.free((number,))
