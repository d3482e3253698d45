"""The files of the disk tier: slots numbered through a row of preallocated segments, and their reads and writes.

Covers making, finding and cutting the files, O_DIRECT with its fallback per file, short reads and writes, and merging
neighbours into one call. Which slots are taken, and whether their bytes can be trusted, is `slab.py`.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import mmap
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from agentkv.kv.geometry import SLOT_ALIGN_BYTES
from agentkv.kv.index import BlockKey
from agentkv.log import warn_once
from agentkv.units import format_bytes

_NAME = re.compile(r"segment-(\d{5,9})")
_IOV_MAX = 1024
_NOT_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)
"""What a file system says that takes no O_DIRECT."""
_PLACE_BITS = 32
_KEEP_FREE = 0.05
"""Part of the file system that is left to others."""

Op = Literal["read", "write"]


class SlotImage(NamedTuple):
    """A block's bytes in memory and its slot on disk."""

    slot: int
    key: BlockKey
    view: memoryview
    """`slot_bytes` long, page-aligned for O_DIRECT."""


class Segment:
    """One file of `slots` slots. O_DIRECT where the file system takes it, else through the page cache."""

    def __init__(self, folder: Path, dir_fd: int, number: int, slots: int, slot_bytes: int, *, new: bool) -> None:
        self.number = number
        self.slots = slots
        self.path = folder / _name(number)
        self._dir_fd = dir_fd
        self._retired_fd: int | None = None
        flags = os.O_CREAT | os.O_EXCL if new else os.O_NOFOLLOW
        fd = os.open(self.path.name, os.O_RDWR | os.O_CLOEXEC | flags, 0o600, dir_fd=dir_fd)
        try:
            if new:
                os.posix_fallocate(fd, 0, slots * slot_bytes)
            else:
                os.ftruncate(fd, slots * slot_bytes)
            self.direct_fd = open_direct(self.path.name, dir_fd, blank=new)
        except OSError:
            os.close(fd)
            if new:
                os.unlink(self.path.name, dir_fd=dir_fd)
            raise
        self.fd = fd

    def transfer(self, op: Op, views: Sequence[memoryview], offset: int) -> None:
        """Read or write all of `views`; OSError if not every byte went."""
        size = sum(len(view) for view in views)
        done = self._once(op, views, offset)
        while done < size:  # rare; what is left need not be aligned, so it goes through the page cache
            more = _call(op, self.fd, _after(views, done), offset + done)
            if more == 0:
                raise OSError(errno.EIO, f"{op} of {size} bytes at {offset} of {self.path} ended after {done}")
            done += more

    def _once(self, op: Op, views: Sequence[memoryview], offset: int) -> int:
        direct_fd = self.direct_fd
        if direct_fd is not None:
            try:
                return _call(op, direct_fd, views, offset)
            except OSError as error:
                if error.errno not in _NOT_DIRECT:
                    raise
                warn_once("kv_disk_not_direct", path=str(self.path), error=str(error))
                self.direct_fd = None  # stays open: other threads may be in it
                self._retired_fd = direct_fd
        return _call(op, self.fd, views, offset)

    def close(self, *, remove: bool) -> None:
        for fd in {self.fd, self.direct_fd, self._retired_fd}:
            if fd is not None:
                os.close(fd)
        self.fd, self.direct_fd, self._retired_fd = -1, None, None  # for a thread that comes late
        if remove:
            with contextlib.suppress(OSError):
                os.unlink(self.path.name, dir_fd=self._dir_fd)


class Segments:
    """All files of one folder. Not thread-safe but for `runs`, which may be called while `add` runs."""

    def __init__(self, folder: Path, dir_fd: int, slot_bytes: int) -> None:
        self._folder = folder
        self._dir_fd = dir_fd
        self._slot_bytes = slot_bytes
        self._files: list[Segment] = []
        self._starts: list[int] = []
        self.slots = 0

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._files)

    def add(self, slots: int) -> None:
        """A new file of `slots` slots, numbered after those that are there. Raises OSError and leaves nothing."""
        number = max((file.number for file in self._files), default=-1) + 1
        self._take(Segment(self._folder, self._dir_fd, number, slots, self._slot_bytes, new=True))

    def grow(self, most: int, least: int, *, on_error: Callable[[OSError], None]) -> tuple[int, str | None]:
        """A new file of `most` slots, or of half as many as often as it takes, but not below `least`. Returns the
        slots added, and why there are none.
        """
        wanted, reason = most, None
        while wanted >= least:
            size_bytes = wanted * self._slot_bytes
            try:
                if size_bytes <= _spare_bytes(self._dir_fd):
                    self.add(wanted)
                    return wanted, None
                reason = f"no {format_bytes(size_bytes)} to spare on the file system"
            except OSError as error:
                on_error(error)
                reason = str(error)
            wanted = wanted // 2 if wanted // 2 >= least or wanted == least else least
        return 0, reason

    def adopt(self, most_slots: int, live: Mapping[int, int]) -> int:
        """Take the files that are there, at most `most_slots`: those with the most `live` blocks (by file number)
        first, one cut if need be, the rest removed. Returns how many slots that cost. Raises OSError.
        """
        found = {
            number: os.stat(name, dir_fd=self._dir_fd).st_size // self._slot_bytes for name, number in self._there()
        }
        kept: dict[int, int] = {}
        left = most_slots
        for number in sorted(found, key=lambda number: (-live.get(number, 0), number)):
            kept[number] = min(found[number], left)
            left -= kept[number]
        for number in sorted(found):
            if kept[number] == 0:
                os.unlink(_name(number), dir_fd=self._dir_fd)
            else:
                self._take(Segment(self._folder, self._dir_fd, number, kept[number], self._slot_bytes, new=False))
        return sum(found.values()) - self.slots

    def clear(self) -> None:
        """Remove all files that are there, before any is taken."""
        for name, _ in self._there():
            os.unlink(name, dir_fd=self._dir_fd)

    def place(self, slot: int) -> int:
        """Where `slot` is, in terms that outlive this process: file number and slot in that file."""
        at = bisect.bisect_right(self._starts, slot) - 1
        return self._files[at].number << _PLACE_BITS | slot - self._starts[at]

    def slot(self, place: int) -> int | None:
        """The slot at `place`; None if there is no such file or it is shorter."""
        number, index = place >> _PLACE_BITS, place & ((1 << _PLACE_BITS) - 1)
        for file, start in zip(self._files, self._starts, strict=True):
            if file.number == number:
                return start + index if index < file.slots else None
        return None

    def runs(self, images: Sequence[SlotImage]) -> list[tuple[Segment, int, list[SlotImage]]]:
        """(file, offset, images) with neighbouring slots of one file together: one system call each."""
        runs: list[tuple[Segment, int, list[SlotImage]]] = []
        last = None
        for image in sorted(images, key=lambda image: image.slot):
            at = bisect.bisect_right(self._starts, image.slot) - 1
            if runs and last == (at, image.slot - 1) and len(runs[-1][2]) < _IOV_MAX:
                runs[-1][2].append(image)
            else:
                runs.append((self._files[at], (image.slot - self._starts[at]) * self._slot_bytes, [image]))
            last = (at, image.slot)
        return runs

    def close(self, *, remove: bool) -> None:
        """Close the files, and remove them if told so. Idempotent."""
        files, self._files = self._files, []
        for file in files:
            file.close(remove=remove)

    def _take(self, file: Segment) -> None:
        self._files.append(file)
        self._starts.append(self.slots)
        self.slots += file.slots

    def _there(self) -> list[tuple[str, int]]:
        names = os.listdir(self._dir_fd)  # noqa: PTH208 - by descriptor: the path may lead elsewhere by now
        return [(name, int(found[1])) for name in names if (found := _NAME.fullmatch(name))]


def live_by_file(places: Sequence[int]) -> dict[int, int]:
    """How many of `places` are in each file, by its number."""
    live: dict[int, int] = {}
    for place in places:
        live[place >> _PLACE_BITS] = live.get(place >> _PLACE_BITS, 0) + 1
    return live


def open_direct(name: str, dir_fd: int, *, blank: bool) -> int | None:
    """A descriptor that bypasses the page cache, tried with a page (written too if the file is `blank`); None where
    that does not work.
    """
    try:
        fd = os.open(name, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=dir_fd)
    except OSError:
        return None
    with mmap.mmap(-1, SLOT_ALIGN_BYTES) as page:
        try:
            if blank:
                os.pwritev(fd, [page], 0)
            os.preadv(fd, [page], 0)
        except OSError as error:
            if error.errno not in _NOT_DIRECT and not blank:
                return fd  # that page cannot be read, which says nothing about O_DIRECT
            os.close(fd)
            if error.errno not in _NOT_DIRECT:
                raise
            return None
    return fd


def _spare_bytes(dir_fd: int) -> int:
    state = os.statvfs(dir_fd)
    return int((state.f_bavail - _KEEP_FREE * state.f_blocks) * state.f_frsize)


def _call(op: Op, fd: int, views: Sequence[memoryview], offset: int) -> int:
    return os.preadv(fd, views, offset) if op == "read" else os.pwritev(fd, views, offset)


def _after(views: Sequence[memoryview], done: int) -> list[memoryview]:
    left = []
    for view in views:
        if done < len(view):
            left.append(view[done:])
        done = max(0, done - len(view))
    return left


def _name(number: int) -> str:
    return f"segment-{number:05d}"
