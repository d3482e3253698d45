"""The disk tier: slots for blocks in preallocated files, checksummed, private to this process or a lasting store.

Covers slots, writes and reads, checksums, growth within the capacity, and what happens when the disk fails. Any doubt
about a slot's bytes is a miss. No fsync: losing a cache is fine. Files are `segments.py`, the folder `lair.py`, the
memory of a store `journal.py`, the pause after failures `breaker.py`. Does not know which block is worth a slot
(`transfers.py`), nor what is in the notes that it keeps.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from agentkv.errors import Closed, ConfigError, DiskUnavailable
from agentkv.kv import journal as journals
from agentkv.kv.breaker import Breaker
from agentkv.kv.checksums import Checksums
from agentkv.kv.freemap import FreeMap
from agentkv.kv.geometry import MIN_SLOTS, SLOT_ALIGN_BYTES
from agentkv.kv.index import BlockKey
from agentkv.kv.journal import Journal
from agentkv.kv.lair import find_lair
from agentkv.kv.resume import resume
from agentkv.kv.segments import Segments, SlotImage
from agentkv.log import count, warn_once
from agentkv.units import GIB, MIB, format_bytes

__all__ = ["Kept", "Slab", "SlotImage"]

_SMALLEST_SEGMENT_BYTES = 8 * MIB
_FIRST_SEGMENT_BYTES = 64 * MIB
_LAST_WAIT_S = 1.0
_FULL = (errno.ENOSPC, errno.EDQUOT)


class Kept(NamedTuple):
    """A block that an earlier process left; its slot is taken."""

    key: BlockKey
    slot: int


class Slab:
    """Slots for blocks below `directory`, at most `capacity_bytes` of disk. Thread-safe; a context manager.

    Without `store` the files are private and go with the process. With it they stay for the next process that names
    the same store: `kept` has its blocks, `notes` its notes. One process at a time: while a living one has the store,
    a later one works in private files, each within its own capacity, and `not_lasting` says why. A store's journal
    counts towards the capacity. Whatever the name, the folder lies directly in `directory`.

    Raises DiskUnavailable if `directory` cannot be made or written, or has no room for a first file, ConfigError for
    a capacity that holds no block. All methods raise Closed after `close` and in a forked child.
    """

    def __init__(
        self,
        directory: str | Path,
        capacity_bytes: int,
        block_bytes: int,
        *,
        segment_bytes: int = GIB,
        retry_s: float = 5.0,
        store: str | None = None,
    ) -> None:
        self.block_bytes = block_bytes
        self.slot_bytes = -(-block_bytes // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES
        self.short: str | None = None
        """Why the slab could not grow to its capacity when it last tried; it works with what it has."""
        self.checksum_failures = 0
        self.errors: Counter[str] = Counter()
        """Failed system calls by the name of their error, such as "ENOSPC"."""
        self.kept: list[Kept] = []
        """The store's blocks as they were found at the start, in slots that are taken: free those not wanted."""
        self._segment_slots = max(MIN_SLOTS, segment_bytes // self.slot_bytes)
        self._retry_s = retry_s
        self._grow_at_s = 0.0
        self._pid = os.getpid()
        self._closed = False
        self._lock = threading.Lock()
        self._grow_lock = threading.Lock()
        self._errors_lock = threading.Lock()
        self._breaker = Breaker(retry_s)
        self._free = FreeMap(0)
        self._checksums = Checksums(block_bytes)
        self._sums: dict[int, int] = {}
        self._writes = 0
        self._unproven: set[int] = set()
        """Slots written by an earlier process: always verified."""
        self._journal: Journal | None = None
        self.capacity = self._slots_within(capacity_bytes)
        self._lair, self._not_lasting = find_lair(directory, store)
        self._segments = Segments(self._lair.path, self._lair.dir_fd, self.slot_bytes)
        try:
            if self._lair.lasting:
                journal_bytes = journals.budget_bytes(capacity_bytes, self.slot_bytes)
                self.capacity = self._slots_within(capacity_bytes - journal_bytes)
                self._resume(journal_bytes)
            self._grow_to_start()
        except BaseException:
            self._segments.close(remove=not self._lair.lasting)
            if self._journal is not None:
                self._journal.close()
            self._lair.close()
            raise

    # -- what there is

    @property
    def path(self) -> Path:
        """The folder of the files."""
        return self._lair.path

    @property
    def lasting(self) -> bool:
        """True if what is written now is there for the next process."""
        return not self.not_lasting

    @property
    def has_store(self) -> bool:
        """True if there is a journal, whether it can be written at the moment or not."""
        return self._journal is not None

    @property
    def not_lasting(self) -> str:
        """Why nothing outlives this process; "" if it does."""
        return self._not_lasting or (self._journal.off or "" if self._journal is not None else "")

    @property
    def off(self) -> str | None:
        """Why no block is written at the moment; None if all is well. After failed writes it lapses by itself."""
        return self._breaker.off

    @property
    def slots(self) -> int:
        """Slots on disk now; grows up to `capacity`."""
        return self._free.size

    @property
    def size_bytes(self) -> int:
        """Disk space taken by the files."""
        return self.slots * self.slot_bytes + (self._journal.size_bytes if self._journal is not None else 0)

    @property
    def used(self) -> int:
        """Slots taken."""
        return self._free.size - len(self._free)

    @property
    def notes(self) -> dict[str, bytes]:
        """The store's notes by name; empty without a store."""
        return dict(self._journal.notes) if self._journal is not None else {}

    def stats(self) -> dict[str, Any]:
        """Counts as plain JSON values."""
        return {
            "off": self.off,
            "short": self.short,
            "lasting": self.lasting,
            "not_lasting": self.not_lasting,
            "kept_blocks": len(self.kept),
            "notes": len(self._journal.notes) if self._journal is not None else 0,
            "journal_bytes": self._journal.size_bytes if self._journal is not None else 0,
            "size_bytes": self.size_bytes,
            "checksum_failures": self.checksum_failures,
            "errors": dict(self.errors),
        }

    # -- slots

    def reserve(self, n: int) -> list[int]:
        """Up to `n` slots, neighbours where possible; fewer if the slab is full, none while it is off. May take long
        (it makes files): for a writer's thread only.
        """
        self._refuse_strangers()
        if self.off is not None:
            return []
        if len(self._free) < n and self.slots < self.capacity and time.monotonic() >= self._grow_at_s:
            self._grow()
        with self._lock:
            n = min(n, len(self._free))
            return self._free.take(n) if n and self._breaker.probe() else []

    def free(self, slots: Iterable[int]) -> None:
        """Give `slots` back."""
        self._refuse_strangers()
        with self._lock:
            for slot in slots:
                known = self._sums.pop(slot, None) is not None
                self._unproven.discard(slot)
                if known and self._journal is not None:
                    self._journal.free((self._segments.place(slot),))
                self._free.give((slot,))

    def write(self, images: Sequence[SlotImage], *, still: Callable[[], bool] = lambda: True) -> None:
        """Write `images` to their reserved slots. On OSError none of them counts as written and the slab is off for
        a while; the caller frees the slots.
        """
        self._refuse_strangers()
        if not images:
            return
        with self._lock:
            self._writes += 1
        try:
            self._write(images, still)
        finally:
            with self._lock:
                self._writes -= 1

    def _write(self, images: Sequence[SlotImage], still: Callable[[], bool]) -> None:
        if self._journal is not None:
            self._journal.settle()
        hashed = self._checksums.start(images)
        try:
            for segment, offset, run in self._segments.runs(images):
                segment.transfer("write", [image.view for image in run], offset)
        except OSError as error:
            self._count(error)
            self._breaker.failed(str(error), full=error.errno in _FULL)
            warn_once("kv_disk_off", reason=str(error), path=str(self.path), retry_s=self._retry_s)
            raise
        finally:
            sums = hashed()  # even after a failure: nobody reads `images` once we are gone
        self._breaker.worked()
        if not still():
            return
        self._sums.update((image.slot, checksum) for image, checksum in zip(images, sums, strict=True))
        if self._journal is not None:
            place = self._segments.place
            self._journal.put(
                (place(image.slot), image.key, checksum) for image, checksum in zip(images, sums, strict=True)
            )

    def read(self, images: Sequence[SlotImage], *, verify: bool = True) -> list[bool]:
        """Read `images` into their views. False for each whose bytes cannot be trusted; the caller frees its slot.
        Blocks of an earlier process are verified in any case.
        """
        self._refuse_strangers()
        good = dict.fromkeys((image.slot for image in images), True)
        for segment, offset, run in self._segments.runs(images):
            try:
                segment.transfer("read", [image.view for image in run], offset)
            except OSError as error:
                self._count(error)
                warn_once("kv_disk_read_failed", error=str(error))
                count("kv_disk_read_errors")
                good.update(dict.fromkeys((image.slot for image in run), False))
                continue
            for image in run:
                if not verify and image.slot not in self._unproven:
                    continue
                if self._sums.get(image.slot) != self._checksums.of(image):
                    good[image.slot] = False
                    self.checksum_failures += 1
                    warn_once("kv_checksum_failed", slot=image.slot, path=str(segment.path))
        return [good[image.slot] for image in images]

    # -- notes

    def note(self, name: str, payload: bytes) -> bool:
        """Keep `payload` under `name` for the next process, in place of what was there. False if nothing lasts or
        the notes are full. Writes a file: not for a thread that holds a lock of others.
        """
        self._refuse_strangers()
        return self._journal is not None and self._journal.note(name, payload)

    def forget_note(self, name: str) -> None:
        """Forget the note `name`; nothing happens if there is none. Its text leaves the file when that is written anew."""
        self._refuse_strangers()
        if self._journal is not None:
            self._journal.forget(name)

    # -- whole

    def check(self) -> None:
        """Recount, and compare the journal's file with what is known, unless a write is under way."""
        with self._grow_lock, self._lock:
            self._free.check()
            assert self._free.size == self._segments.slots <= self.capacity
            assert not any(self._free.is_free(slot) for slot in self._sums), "a free slot has a checksum"
            assert self._unproven <= self._sums.keys()
            if self._journal is None or self._writes:
                return
            self._journal.check()
            recorded = {self._segments.slot(place): one.checksum for place, one in self._journal.entries.items()}
            assert recorded == self._sums, "the journal knows other blocks"

    def close(self) -> None:
        """Remove the files; those of a store stay. Idempotent. In a forked child nothing happens."""
        if self._pid != os.getpid():
            return
        self._closed = True
        growing = self._grow_lock.acquire(timeout=_LAST_WAIT_S)  # a dead mount may hold a thread for ever
        if self._journal is not None:
            self._journal.close(_LAST_WAIT_S)
        self._segments.close(remove=not self._lair.lasting)
        self._lair.close()
        self._checksums.close()
        if growing:
            self._grow_lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside

    def _slots_within(self, size_bytes: int) -> int:
        slots = max(0, size_bytes) // self.slot_bytes
        if slots < MIN_SLOTS:
            raise ConfigError(
                f"disk memory of {format_bytes(max(0, size_bytes))} holds {slots} blocks of "
                f"{format_bytes(self.slot_bytes)}; at least {MIN_SLOTS} are needed"
            )
        return slots

    def _resume(self, journal_bytes: int) -> None:
        """Take over what an earlier process left in the store."""
        self._journal, blocks = resume(
            self._lair,
            self._segments,
            most_slots=self.capacity,
            block_bytes=self.block_bytes,
            journal_bytes=journal_bytes,
            retry_s=self._retry_s,
            on_error=self._count,
        )
        self._free.grow(self._segments.slots)
        every = self._free.take(self.slots)
        self._free.give(slot for slot in every if slot not in blocks)
        self._sums = {slot: entry.checksum for slot, entry in blocks.items()}
        self._unproven = set(blocks)
        self.kept = [Kept(entry.key, slot) for slot, entry in blocks.items()]

    def _grow_to_start(self) -> None:
        if self.slots < MIN_SLOTS and not self._grow():
            raise DiskUnavailable(f"the disk tier at {self.path.parent} cannot start: {self.short}")

    def _grow(self) -> bool:
        """Add a segment, as large as all before it together, a smaller one where space is short. False, and not tried
        again for a while, if none fits.
        """
        with self._grow_lock:
            due = max(self.slots, _FIRST_SEGMENT_BYTES // self.slot_bytes)
            most = min(self._segment_slots, self.capacity - self.slots, due)
            least = min(most, max(MIN_SLOTS, _SMALLEST_SEGMENT_BYTES // self.slot_bytes))
            if most <= 0 or self._closed:
                return True
            added, self.short = self._segments.grow(most, least, on_error=self._count)
            if not added:
                self._grow_at_s = time.monotonic() + self._retry_s
                warn_once("kv_disk_short", reason=self.short, path=str(self.path), have=format_bytes(self.size_bytes))
                return False
            with self._lock:
                self._free.grow(added)
            return True

    def _count(self, error: OSError) -> None:
        name = errno.errorcode.get(error.errno or errno.EIO, str(error.errno))
        with self._errors_lock:
            self.errors[name] += 1
        warn_once(f"kv_disk_error_{name.lower()}", error=str(error), path=str(self.path))

    def _refuse_strangers(self) -> None:
        if self._pid != os.getpid():
            raise Closed(
                f"this disk tier belongs to process {self._pid}; a forked child (here {os.getpid()}) must make its own"
            )
        if self._closed:
            raise Closed("the disk tier is closed")
