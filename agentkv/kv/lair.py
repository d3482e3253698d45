"""The folder that one process has for itself below a shared root: a private one, or a lasting store.

A lock file beside each folder is held with flock as long as the process lives; the kernel lets go of it when the
process dies, however it dies, and process numbers that come round again do no harm. A private folder is removed when
it is closed, or at the next start if its process died; a store stays. A forked child lets go of its parent's folders.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import time
import uuid
import weakref
from pathlib import Path

from agentkv.errors import DiskUnavailable
from agentkv.log import get_logger, warn_once

_PREFIX = "agentkv-"
STORE_PREFIX = "store-"
LOCK = ".lock"
_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}(\.[A-Za-z0-9_-]{1,32}){0,3}")
_HASHED = "hashed."
_GLANCE_S = 0.005
"""Longer than anybody holds a lock just to see whether it is free."""


class StoreBusy(DiskUnavailable):
    """A living process has the store; the message names it."""


class Lair:
    """A locked folder (0700). `path` is the folder, `dir_fd` a descriptor of it, `lasting` whether `close` keeps it.

    Made by `private` and `lasting_store`; both raise DiskUnavailable, naming the path and the reason.
    """

    def __init__(self, path: Path, lock_path: Path, lock_fd: int, *, lasting: bool) -> None:
        self.path = path
        self.lasting = lasting
        self._pid = os.getpid()
        self._lock_path = lock_path
        self._lock_fd = lock_fd
        try:
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o700)
            self.dir_fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            state = os.fstat(self.dir_fd)
            if state.st_uid != os.geteuid():
                os.close(self.dir_fd)
                raise PermissionError(1, f"it belongs to user {state.st_uid}")
            os.fchmod(self.dir_fd, 0o700)
        except OSError:
            os.close(lock_fd)
            raise
        _open.add(self)

    @classmethod
    def private(cls, root: str | Path) -> Lair:
        """A new folder below `root`, after sweeping those of dead processes."""
        root = Path(root)
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            sweep(root)
            lock_path, fd = _take_lock(root)
            return cls(lock_path.with_suffix(""), lock_path, fd, lasting=False)
        except OSError as error:
            raise _unavailable(root, error) from error

    @classmethod
    def lasting_store(cls, root: str | Path, name: str) -> Lair:
        """The store `name` below `root`, made if it is not there. Raises StoreBusy if a living process has it."""
        root = Path(root)
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            return cls.of(root / folder_name(name))
        except OSError as error:
            raise _unavailable(root, error) from error

    @classmethod
    def of(cls, folder: Path) -> Lair:
        """The store in `folder`. Raises StoreBusy, or OSError."""
        lock_path = folder.with_name(folder.name + LOCK)
        return cls(folder, lock_path, _take_store_lock(lock_path), lasting=True)

    def remove(self) -> None:
        """`close`, and nothing is left of it."""
        self.lasting = False
        self.close()

    def close(self) -> None:
        """Let go; a private folder is removed with its lock. Idempotent. In a forked child nothing happens."""
        if self._lock_fd < 0 or os.getpid() != self._pid:
            return
        if not self.lasting:
            shutil.rmtree(self.path, ignore_errors=True)
            with contextlib.suppress(OSError):
                self._lock_path.unlink()
        os.close(self.dir_fd)
        os.close(self._lock_fd)
        self._lock_fd = -1


_open: weakref.WeakSet[Lair] = weakref.WeakSet()


def _forked() -> None:
    """A child that inherits a lock would hold it beyond its parent's death."""
    for lair in list(_open):
        if lair._lock_fd >= 0:
            os.close(lair._lock_fd)
            lair._lock_fd = -1


os.register_at_fork(after_in_child=_forked)


def find_lair(root: str | Path, store: str | None) -> tuple[Lair, str]:
    """The folder to work in, and why it does not last ("" if it does). Raises DiskUnavailable."""
    if store is None:
        return Lair.private(root), "no store was named"
    try:
        return Lair.lasting_store(root, store), ""
    except StoreBusy as busy:
        warn_once("kv_store_busy", reason=str(busy))
        return Lair.private(root), str(busy)


def folder_name(store: str) -> str:
    """The folder of the store `store`: its name where that is plain, else a hash of it."""
    if _PLAIN_NAME.fullmatch(store) and not store.startswith(_HASHED) and not store.endswith(LOCK):
        return STORE_PREFIX + store
    return (
        f"{STORE_PREFIX}{_HASHED}{hashlib.blake2b(store.encode('utf-8', 'surrogatepass'), digest_size=16).hexdigest()}"
    )


def holder(lock_path: Path) -> str | None:
    """Who has the lock, in words; None if no living process does. Takes it for a moment to see."""
    for _ in range(3):
        try:
            fd = _try_lock(lock_path)
        except OSError:
            return None
        if fd is not None:
            os.close(fd)
            return None
        time.sleep(_GLANCE_S)
    return _who(lock_path) if lock_path.exists() else None


def sweep(root: str | Path) -> list[Path]:
    """Remove what dead processes left below `root`; returns the directories that are gone. Live ones and stores stay."""
    gone: list[Path] = []
    for lock_path in sorted(Path(root).glob(f"{_PREFIX}*{LOCK}")):
        try:
            fd = _try_lock(lock_path)
        except OSError:  # another user's, or a mount without locks: none of ours to remove
            continue
        if fd is None:
            continue
        directory = lock_path.with_suffix("")
        shutil.rmtree(directory, ignore_errors=True)
        if not directory.exists():
            with contextlib.suppress(OSError):
                lock_path.unlink()
            gone.append(directory)
        os.close(fd)
    if gone:
        get_logger().info("kv_swept", root=str(root), directories=len(gone))
    return gone


def _unavailable(root: Path, error: OSError) -> DiskUnavailable:
    return DiskUnavailable(
        f"the disk tier cannot use {root}: {error.strerror or error}; give a directory that can be written, or no disk"
    )


def _take_lock(root: Path) -> tuple[Path, int]:
    """A new lock file, locked. Raises OSError where files cannot be locked, as on some network mounts."""
    while True:
        path = root / f"{_PREFIX}{os.getpid()}-{uuid.uuid4().hex[:8]}{LOCK}"
        path.touch(mode=0o600, exist_ok=False)
        try:
            fd = _try_lock(path)
        except OSError:
            with contextlib.suppress(OSError):
                path.unlink()
            raise
        if fd is not None:
            return path, fd


def _take_store_lock(path: Path) -> int:
    """The lock of a store, with our process number in it. Raises StoreBusy, or OSError as `_take_lock`."""
    for _ in range(10):
        with contextlib.suppress(FileExistsError):
            path.touch(mode=0o600, exist_ok=False)
        fd = _try_lock(path)
        if fd is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(fd, 0)
                os.pwrite(fd, str(os.getpid()).encode(), 0)
            return fd
        time.sleep(_GLANCE_S)
    raise StoreBusy(f"{_who(path)} has {path.with_name(path.name.removesuffix(LOCK))}")


def _who(lock_path: Path) -> str:
    try:
        text = lock_path.read_text("ascii")[:20]
    except (OSError, UnicodeDecodeError):
        text = ""
    return f"process {text}" if text.isdigit() else "another process"


def _try_lock(path: Path) -> int | None:
    """The locked descriptor; None if a living process has it, or a sweep removed the file under our hands. Raises
    OSError if it cannot be locked at all.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(fd).st_ino == path.stat().st_ino:
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:
        os.close(fd)
        raise
    os.close(fd)
    return None
