"""The disk tier: preallocated segment files with one slot per block, checksummed, private to this process.

Covers slots, reads and writes, checksums, running out of space, and the directory's life (`lair.py` locks and
sweeps it). Any doubt about a slot's bytes is a miss. No fsync: losing a cache is fine. Nothing survives the process.
Does not know which block is worth a slot: that is `transfers.py`.
"""

from __future__ import annotations

import bisect
import contextlib
import mmap
import os
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import xxhash

from agentkv.errors import ConfigError, DiskUnavailable
from agentkv.kv.freemap import FreeMap
from agentkv.kv.geometry import MIN_SLOTS, SLOT_ALIGN_BYTES
from agentkv.kv.index import BlockKey
from agentkv.kv.lair import Lair
from agentkv.log import count, warn_once
from agentkv.units import GIB, MIB, format_bytes

_SMALLEST_SEGMENT_BYTES = 8 * MIB
_KEEP_FREE = 0.05
"""Part of the file system that is left to others."""
_IOV_MAX = 1024


class SlotImage(NamedTuple):
    """A block's bytes in memory and its slot on disk."""

    slot: int
    key: BlockKey
    view: memoryview
    """`slot_bytes` long, page-aligned for O_DIRECT."""


class _Segment:
    """One file. O_DIRECT where the file system takes it, else through the page cache."""

    def __init__(self, path: Path, size_bytes: int) -> None:
        self.path = path
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, size_bytes)
            self.direct_fd = _open_direct(path)
        except OSError:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        self.fd = fd

    def transfer(self, op: str, views: Sequence[memoryview], offset: int) -> None:
        """Read or write all of `views`; OSError if not every byte went."""
        call = os.preadv if op == "read" else os.pwritev
        size = sum(len(view) for view in views)
        if self.direct_fd is not None:
            try:
                done = call(self.direct_fd, views, offset)
            except OSError as error:
                if error.errno not in _NOT_DIRECT:
                    raise
                warn_once("kv_disk_not_direct", path=str(self.path), error=str(error))
                self.direct_fd = None
                done = call(self.fd, views, offset)
        else:
            done = call(self.fd, views, offset)
        if done != size:
            raise OSError(f"{op} of {size} bytes at {offset} of {self.path} ended after {done}")

    def close(self) -> None:
        for fd in (self.fd, self.direct_fd):
            if fd is not None:
                os.close(fd)
        self.direct_fd = None
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)


class Slab:
    """Slots for blocks below `directory`, at most `capacity_bytes` of disk. Thread-safe; a context manager.

    Raises DiskUnavailable if `directory` cannot be made or written, or has no room for a first segment, ConfigError for
    a capacity that holds no block.
    """

    def __init__(
        self,
        directory: str | Path,
        capacity_bytes: int,
        block_bytes: int,
        *,
        segment_bytes: int = GIB,
        retry_s: float = 5.0,
    ) -> None:
        self.block_bytes = block_bytes
        self.slot_bytes = -(-block_bytes // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES
        self.capacity = capacity_bytes // self.slot_bytes
        if self.capacity < MIN_SLOTS:
            raise ConfigError(
                f"disk memory of {format_bytes(capacity_bytes)} holds {self.capacity} blocks of "
                f"{format_bytes(self.slot_bytes)}; at least {MIN_SLOTS} are needed"
            )
        self.short: str | None = None
        """Why the slab could not grow to its capacity when it last tried; it works with what it has."""
        self.checksum_failures = 0
        self._segment_slots = max(MIN_SLOTS, segment_bytes // self.slot_bytes)
        self._retry_s = retry_s
        self._failure = ""
        self._failed_until_s = 0.0
        self._grow_at_s = 0.0
        self._lock = threading.Lock()
        self._grow_lock = threading.Lock()
        self._free = FreeMap(0)
        self._starts: list[int] = []
        self._segments: list[_Segment] = []
        self._sums: dict[int, int] = {}
        self._lair = Lair(directory)
        if not self._grow():
            self._lair.close()
            raise DiskUnavailable(f"the disk tier at {directory} cannot start: {self.short}")

    @property
    def path(self) -> Path:
        """The directory of this process's segments."""
        return self._lair.path

    @property
    def off(self) -> str | None:
        """Why no block is written at the moment; None if all is well. After a failed write it lapses by itself."""
        return self._failure if time.monotonic() < self._failed_until_s else None

    @property
    def slots(self) -> int:
        """Slots on disk now; grows up to `capacity`."""
        return self._free.size

    @property
    def size_bytes(self) -> int:
        """Disk space taken by the files."""
        return self.slots * self.slot_bytes

    @property
    def used(self) -> int:
        """Slots taken."""
        return self._free.size - len(self._free)

    def reserve(self, n: int) -> list[int]:
        """Up to `n` slots, neighbours where possible; fewer if the slab is full. May take long (it makes files): for
        a writer's thread only.
        """
        if self.off is not None:
            return []
        if len(self._free) < n and self.slots < self.capacity and time.monotonic() >= self._grow_at_s:
            self._grow()
        with self._lock:
            return self._free.take(min(n, len(self._free)))

    def free(self, slots: Iterable[int]) -> None:
        """Give `slots` back."""
        with self._lock:
            for slot in slots:
                self._sums.pop(slot, None)
                self._free.give((slot,))

    def write(self, images: Sequence[SlotImage]) -> None:
        """Write `images` to their reserved slots. On OSError none of them counts as written and the slab is off for
        a while; the caller frees the slots.
        """
        for image in images:
            self._sums[image.slot] = _checksum(image, self.block_bytes)
        try:
            for segment, offset, run in self._runs(images):
                segment.transfer("write", [image.view for image in run], offset)
        except OSError as error:
            for image in images:
                self._sums.pop(image.slot, None)
            self._failure = f"a write failed: {error}"
            self._failed_until_s = time.monotonic() + self._retry_s
            warn_once("kv_disk_off", reason=self._failure, path=str(self.path), retry_s=self._retry_s)
            raise

    def read(self, images: Sequence[SlotImage], *, verify: bool = True) -> list[bool]:
        """Read `images` into their views. False for each whose bytes cannot be trusted; the caller frees its slot."""
        good = dict.fromkeys((image.slot for image in images), True)
        for segment, offset, run in self._runs(images):
            try:
                segment.transfer("read", [image.view for image in run], offset)
            except OSError as error:
                warn_once("kv_disk_read_failed", error=str(error))
                count("kv_disk_read_errors")
                good.update(dict.fromkeys((image.slot for image in run), False))
                continue
            for image in run:
                if verify and self._sums.get(image.slot) != _checksum(image, self.block_bytes):
                    good[image.slot] = False
                    self.checksum_failures += 1
                    warn_once("kv_checksum_failed", slot=image.slot, path=str(segment.path))
        return [good[image.slot] for image in images]

    def _runs(self, images: Sequence[SlotImage]) -> list[tuple[_Segment, int, list[SlotImage]]]:
        """Neighbouring slots of one segment together: one system call each."""
        runs: list[tuple[_Segment, int, list[SlotImage]]] = []
        last = None
        for image in sorted(images, key=lambda image: image.slot):
            at = bisect.bisect_right(self._starts, image.slot) - 1
            if runs and last is not None and last == (at, image.slot - 1) and len(runs[-1][2]) < _IOV_MAX:
                runs[-1][2].append(image)
            else:
                runs.append((self._segments[at], (image.slot - self._starts[at]) * self.slot_bytes, [image]))
            last = (at, image.slot)
        return runs

    def _grow(self) -> bool:
        """Add a segment, a smaller one where space is short. False, and not tried again for a while, if none fits."""
        with self._grow_lock:
            most = min(self._segment_slots, self.capacity - self.slots)
            least = min(most, max(MIN_SLOTS, _SMALLEST_SEGMENT_BYTES // self.slot_bytes))
            if most <= 0:
                return True
            path = self.path / f"segment-{len(self._segments):05d}"
            wanted, error = most, ""
            while wanted >= least:
                size_bytes = wanted * self.slot_bytes
                try:
                    if size_bytes > _spare_bytes(self.path):
                        error = f"no {format_bytes(size_bytes)} to spare on the file system"
                    else:
                        segment = _Segment(path, size_bytes)
                        break
                except OSError as failure:
                    error = str(failure)
                wanted = wanted // 2 if wanted // 2 >= least or wanted == least else least
            else:
                self.short = error
                self._grow_at_s = time.monotonic() + self._retry_s
                warn_once("kv_disk_short", reason=error, path=str(self.path), have=format_bytes(self.size_bytes))
                return False
            with self._lock:
                self._starts.append(self._free.size)
                self._segments.append(segment)
                self._free.grow(wanted)
            self.short = None
            return True

    def check(self) -> None:
        """Recount."""
        with self._lock:
            self._free.check()
            assert self._free.size <= self.capacity

    def close(self) -> None:
        """Remove the files. Idempotent."""
        with self._grow_lock:
            segments, self._segments = self._segments, []
            for segment in segments:
                segment.close()
            self._lair.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _checksum(image: SlotImage, block_bytes: int) -> int:
    """Seeded with the key, so that a whole and healthy block of another key fails too."""
    return xxhash.xxh3_64_intdigest(image.view[:block_bytes], int.from_bytes(image.key[:8], "little"))


def _spare_bytes(path: Path) -> int:
    state = os.statvfs(path)
    return int((state.f_bavail - _KEEP_FREE * state.f_blocks) * state.f_frsize)


_NOT_DIRECT = (22, 95)  # EINVAL, EOPNOTSUPP: what a file system says that takes no O_DIRECT


def _open_direct(path: Path) -> int | None:
    """A descriptor that bypasses the page cache, tried with one page; None where that does not work."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return None
    with mmap.mmap(-1, SLOT_ALIGN_BYTES) as page:
        try:
            os.pwritev(fd, [page], 0)
            os.preadv(fd, [page], 0)
        except OSError as error:
            os.close(fd)
            if error.errno not in _NOT_DIRECT:
                raise
            return None
    return fd
