"""The journal of a lasting store: which block is in which place, and the notes, so that the next start finds them.

Covers the file: appending, writing it anew when much of it is dead, and failing without hurting anybody. Its bytes are
`records.py`. No fsync: what a power cut mixes up is caught by the checksums of records and blocks. What kill -9 leaves
is whole up to the last write. After a failure nothing is recorded (`off` says why); it is tried again after a while by
writing the whole file anew.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from agentkv.kv import records
from agentkv.kv.index import BlockKey
from agentkv.kv.records import Entry, Header, Replay
from agentkv.log import count, get_logger, warn_once
from agentkv.units import GIB, KIB

JOURNAL = "journal"
_NEW = "journal.new"
_SLACK_BYTES = 64 * KIB
"""Below this, dead records are not worth a new file."""


def budget_bytes(capacity_bytes: int, slot_bytes: int) -> int:
    """The part of a store's capacity that its journal may take, both files counted while it is written anew.

    An eighth of it is for the blocks' records, an eighth for the notes, the rest for what is dead.
    """
    slots = capacity_bytes // slot_bytes
    return max(_SLACK_BYTES, min(capacity_bytes // 32, GIB), 8 * records.PUT_BYTES * slots)


class Journal:
    """The journal in the folder `dir_fd`. Thread-safe. Never raises OSError: failures go to `on_error` and `off`.

    A journal of other blocks or another store counts as none; `stranger` says so.
    """

    def __init__(
        self,
        dir_fd: int,
        *,
        block_bytes: int,
        store: str,
        budget_bytes: int,
        retry_s: float,
        on_error: Callable[[OSError], None],
    ) -> None:
        self.off: str | None = None
        """Why nothing is recorded at the moment."""
        self.stranger: str | None = None
        self.size_bytes = 0
        self._dir_fd = dir_fd
        self._budget_bytes = budget_bytes
        self._retry_s = retry_s
        self._retry_at_s = 0.0
        self._on_error = on_error
        self._lock = threading.Lock()
        self._freed: deque[int] = deque()
        self._fd = -1
        self._closed = False
        found = Replay()
        try:
            found = load(dir_fd)
        except OSError as error:
            self._fail(error)
        self.stranger = _stranger(found, block_bytes, store)
        if self.stranger is not None:
            found = Replay()
        self.entries: dict[int, Entry] = found.entries
        self.notes: dict[str, bytes] = found.notes
        self._note_bytes = sum(map(_note_bytes, found.notes.items()))
        self._generation = max((entry.generation for entry in found.entries.values()), default=0)
        self._header = found.header or Header(block_bytes, secrets.randbits(64), store)
        if self.off is None:
            self._open(found)

    def put(self, blocks: Iterable[tuple[int, BlockKey, int]]) -> None:
        """These (place, key, checksum) have been written."""
        with self._lock:
            self._settle()
            new = []
            for place, key, checksum in blocks:
                self._generation += 1
                self.entries[place] = entry = Entry(key, self._generation, checksum)
                new.append((place, entry))
            self._append(records.puts(new, epoch=self._header.epoch))

    def free(self, places: Iterable[int]) -> None:
        """These places are free. Never blocks: it is recorded by the next `settle` or `put`."""
        self._freed.extend(places)

    def settle(self) -> None:
        """Record the frees so far: before anything is written into those places."""
        with self._lock:
            self._settle()

    def note(self, name: str, payload: bytes) -> bool:
        """Keep `payload` under `name`, in place of what was there. False if there is no room for it, and then the
        old one is gone too. May write up to the journal's budget: not for a thread that holds a lock of others.
        """
        with self._lock:
            self._settle()
            held = self._note_bytes - (_note_bytes((name, self.notes[name])) if name in self.notes else 0)
            wanted = _note_bytes((name, payload))
            if held + wanted > self._budget_bytes // 8:
                warn_once("kv_note_refused", note_bytes=wanted, held_bytes=held, limit_bytes=self._budget_bytes // 8)
                self._forget(name)
                return False
            self.notes[name] = payload
            self._note_bytes = held + wanted
            self._append(records.note(name, payload, epoch=self._header.epoch))
            return self.off is None

    def forget(self, name: str) -> None:
        """Forget the note `name`; nothing happens if there is none."""
        with self._lock:
            self._settle()
            self._forget(name)

    def compact(self) -> None:
        """Write the file anew: what was freed and forgotten is gone from it."""
        with self._lock:
            self._settle()
            if self.off is None:
                self._rewrite()

    def check(self) -> None:
        """Read the file and compare it with what we know."""
        with self._lock:
            self._settle()
            if self.off is not None:
                return
            found = load(self._dir_fd)
            assert found.left_out_bytes == 0, f"{found.left_out_bytes} bad bytes in the journal"
            assert found.entries == self.entries
            assert found.notes == self.notes
            assert self._note_bytes == sum(map(_note_bytes, self.notes.items()))
            assert found.good_bytes == self.size_bytes <= self._budget_bytes

    def close(self, wait_s: float = -1) -> None:
        """Record what is due and close the file. Idempotent. If another thread is still writing after `wait_s`, it
        keeps the file, and what is due is lost.
        """
        if self._closed or not self._lock.acquire(timeout=wait_s):
            self._closed = True
            return
        try:
            self._settle()
            self._closed = True
            self.off = "closed"
            if self._fd >= 0:
                os.close(self._fd)
        finally:
            self._lock.release()

    # -- with the lock held

    def _settle(self) -> None:
        freed = []
        while self._freed:
            place = self._freed.popleft()
            entry = self.entries.pop(place, None)
            if entry is not None:
                freed.append((place, entry.generation))
        if self.off is not None and not self._closed and time.monotonic() >= self._retry_at_s:
            self._rewrite()
        else:
            self._append(records.frees(freed, epoch=self._header.epoch))

    def _forget(self, name: str) -> None:
        payload = self.notes.pop(name, None)
        if payload is not None:
            self._note_bytes -= _note_bytes((name, payload))
            self._append(records.forget(name, epoch=self._header.epoch))

    def _append(self, data: bytes) -> None:
        """Write `data` at the end, or all of it anew where the file has become too long."""
        if not data or self.off is not None:
            return
        size = self.size_bytes + len(data)
        live = len(self.entries) * records.PUT_BYTES + self._note_bytes
        if size > self._budget_bytes // 2 or size > 2 * live + _SLACK_BYTES:
            self._rewrite()
            return
        try:
            if os.fstat(self._fd).st_nlink == 0:
                raise FileNotFoundError(2, "the journal was removed")
            _write_all(self._fd, data, self.size_bytes)
            self.size_bytes = size
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self.size_bytes)
            self._fail(error)

    def _rewrite(self) -> None:
        """All that we know into a new file, which then takes the place of the old one."""
        header = self._header._replace(epoch=secrets.randbits(64))
        size = 0
        try:
            fd = os.open(_NEW, _CREATE, 0o600, dir_fd=self._dir_fd)
            try:
                for piece in records.whole(header, self.entries, self.notes):
                    _write_all(fd, piece, size)
                    size += len(piece)
                os.rename(_NEW, JOURNAL, src_dir_fd=self._dir_fd, dst_dir_fd=self._dir_fd)
            except OSError:
                os.close(fd)
                with contextlib.suppress(OSError):
                    os.unlink(_NEW, dir_fd=self._dir_fd)
                raise
        except OSError as error:
            self._fail(error)
            return
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._header, self.size_bytes, self.off = fd, header, size, None

    def _open(self, found: Replay) -> None:
        """Go on after the last good record, or start afresh."""
        if found.left_out_bytes:
            count("kv_journal_cut")
            get_logger().info("kv_journal_cut", left_out_bytes=found.left_out_bytes, blocks=len(found.entries))
        with contextlib.suppress(OSError):
            os.unlink(_NEW, dir_fd=self._dir_fd)
        if found.header is None:
            self._rewrite()
            return
        try:
            self._fd = os.open(JOURNAL, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=self._dir_fd)
            os.ftruncate(self._fd, found.good_bytes)
            self.size_bytes = found.good_bytes
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        self.off = f"the journal cannot be written: {error}"
        self._retry_at_s = time.monotonic() + self._retry_s
        self._on_error(error)
        warn_once("kv_persistence_off", reason=self.off)


_CREATE = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW


def load(dir_fd: int) -> Replay:
    """What the journal in the folder `dir_fd` says; empty if there is none. Raises OSError if it cannot be read."""
    try:
        fd = os.open(JOURNAL, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=dir_fd)
    except FileNotFoundError:
        return Replay()
    with os.fdopen(fd, "rb") as file:
        return records.replay(file.read())


def _stranger(found: Replay, block_bytes: int, store: str) -> str | None:
    if found.header is None:
        return f"its journal of {found.left_out_bytes} bytes cannot be read" if found.left_out_bytes else None
    if found.header.block_bytes != block_bytes:
        return f"its blocks have {found.header.block_bytes} bytes, ours {block_bytes}"
    if found.header.store != store:
        return f"it belongs to the store {found.header.store!r}"
    return None


def _note_bytes(one: tuple[str, bytes]) -> int:
    return 4 * len(one[0]) + len(one[1]) + records.FRAME_BYTES


def _write_all(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(fd, view, offset)
        if done == 0:
            raise OSError(5, "nothing was written")
        view, offset = view[done:], offset + done
