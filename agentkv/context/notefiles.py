"""The notebook's files: one per process, lines of JSON with a checksum, appended.

Covers reading all files of a folder, one writer per file, joining what dead processes left, and damage: lines whose
checksum holds are used, the damaged file is put aside and never read again. Files are 0600 in a folder of 0700. No
fsync: losing the last entries costs a fold, not a token. Nothing here raises: a disk that fails is counted and logged
once, and the notebook goes on in memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from agentkv.log import count, warn_once

Rows = Callable[[], list[list[object]]]
_SUFFIX = ".jsonl"
_SUM_CHARS = 16
_LOOKS = 3
_FILES_TO_JOIN = 2


class NoteFiles:
    """The files in `folder`. Not thread-safe: its notebook holds a lock."""

    def __init__(self, folder: Path, *, max_lines: int) -> None:
        self._folder = folder
        self._max_lines = max_lines
        self._read_to: dict[str, int] = {}
        self._own: int | None = None
        self._own_name = ""
        self._pid = os.getpid()
        self._lines = 0
        self._closed = False
        self._damaged = False

    def read(self) -> Iterator[list[object]]:
        """The rows that were not read yet, oldest file first."""
        try:
            yield from self._rows_of_others()
        except OSError as error:
            self._failed(error)

    def write(self, row: list[object], rows: Rows) -> None:
        """Append `row`; above the bound write the file anew with `rows()`, which hold `row` already."""
        if self._closed:
            return
        try:
            if self._pid != os.getpid():  # a forked child has a file of its own; the lock is its parent's
                self._own, self._own_name, self._pid, self._lines = None, "", os.getpid(), 0
            if self._lines >= self._max_lines:
                self._renew(rows())
            else:
                self._append([row])
        except OSError as error:
            self._failed(error)

    def tidy(self, take: Callable[[Iterable[list[object]]], None], rows: Rows) -> None:
        """Join the files whose writers have ended into one of our own. `rows()` holds what `take` was given."""
        try:
            with contextlib.ExitStack() as held:
                ended = [name for name in self._names() if self._lock(name, held)]
                if len(ended) < _FILES_TO_JOIN and not self._damaged:
                    return
                for name in ended:
                    with contextlib.suppress(FileNotFoundError):
                        take(self._rows_of(name))
                self._renew(rows())
                self._damaged = False
                for name in ended:
                    (self._folder / name).unlink(missing_ok=True)
        except OSError as error:
            self._failed(error)

    def close(self) -> None:
        """Let go of the own file."""
        self._closed = True
        if self._own is not None and self._pid == os.getpid():
            os.close(self._own)
        self._own = None

    def _names(self) -> list[str]:
        if not self._folder.is_dir():
            return []
        names = (path.name for path in self._folder.iterdir() if path.suffix == _SUFFIX)
        return sorted(name for name in names if name != self._own_name)

    def _rows_of_others(self) -> Iterator[list[object]]:
        for _ in range(_LOOKS):  # a file may vanish into another one, that of a process that tidies
            vanished = False
            for name in self._names():
                try:
                    yield from self._rows_of(name)
                except FileNotFoundError:
                    vanished = True
            if not vanished:
                return

    def _rows_of(self, name: str) -> Iterator[list[object]]:
        path, start = self._folder / name, self._read_to.get(name, 0)
        if path.stat().st_size <= start:
            return
        with path.open("rb") as file:
            file.seek(start)
            data = file.read()
        whole = data.rfind(b"\n") + 1  # the last line may be on its way, or torn by the end of its process
        self._read_to[name] = start + whole
        damaged = False
        for line in data[:whole].split(b"\n"):
            row = _row_of(line) if line else []
            if row:
                yield row
            damaged |= row is None
        if damaged:
            self._damaged = True
            count("notebook_damaged")
            warn_once("notebook_damaged", file=name, advice="it is kept aside with the ending .damaged")
            with contextlib.suppress(OSError):
                path.rename(path.with_suffix(f".{uuid.uuid4().hex[:6]}.damaged"))

    def _lock(self, name: str, held: contextlib.ExitStack) -> bool:
        """Hold the file's lock as long as `held`; False if its writer lives or the file has gone."""
        try:
            descriptor = os.open(self._folder / name, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        held.callback(os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return os.fstat(descriptor).st_nlink > 0

    def _append(self, rows: list[list[object]]) -> None:
        if self._own is None:
            self._own_name, self._own = self._new_file()
        data = b"".join(map(_line, rows))
        written = os.write(self._own, data)
        if written < len(data):  # a full disk: end the torn line, so that the next one is whole
            os.write(self._own, b"\n")
        self._lines += len(rows)

    def _renew(self, rows: list[list[object]]) -> None:
        """A new file with `rows` takes the place of the own one, which stays if the new one cannot be written."""
        before = self._own_name, self._own, self._lines
        self._own, self._lines = None, 0
        try:
            self._append(rows)
        except OSError:
            self._drop(self._own_name if self._own is not None else "", self._own)
            self._own_name, self._own, self._lines = before
            raise
        self._drop(before[0], before[1])

    def _drop(self, name: str, descriptor: int | None) -> None:
        if descriptor is not None:
            (self._folder / name).unlink(missing_ok=True)
            os.close(descriptor)

    def _new_file(self) -> tuple[str, int]:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        name = f"{time.time_ns():020d}-{os.getpid()}-{uuid.uuid4().hex[:8]}{_SUFFIX}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        descriptor = os.open(self._folder / name, flags, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return name, descriptor

    def _failed(self, error: OSError) -> None:
        warn_once(
            "notebook_failed",
            error=repr(error),
            advice="folds and notes are kept in memory only; a later process may build other prompts",
        )


def _line(row: list[object]) -> bytes:
    body = json.dumps(row, separators=(",", ":")).encode("ascii")
    return _sum(body) + b" " + body + b"\n"


def _row_of(line: bytes) -> list[object] | None:
    """The row, or None for a damaged line."""
    total, body = line[:_SUM_CHARS], line[_SUM_CHARS + 1 :]
    if total != _sum(body):
        return None
    try:
        row = json.loads(body)
    except ValueError:
        return None
    return row if isinstance(row, list) else None


def _sum(body: bytes) -> bytes:
    import xxhash

    return xxhash.xxh3_64_hexdigest(body).encode("ascii")
