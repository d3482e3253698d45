"""The private directory of one process below a shared root, and the removal of those whose process is dead.

A lock file beside each directory is held with flock as long as the process lives; the kernel lets go of it when the
process dies, however it dies, and process numbers that come round again do no harm.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import uuid
from pathlib import Path

from agentkv.errors import DiskUnavailable
from agentkv.log import get_logger

_PREFIX = "agentkv-"
_LOCK = ".lock"


class Lair:
    """Makes a directory (0700) below `root` that only this process uses, after sweeping the dead ones.

    Raises DiskUnavailable, naming the path and the reason, where that is not possible.
    """

    def __init__(self, root: str | Path) -> None:
        root = Path(root)
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            sweep(root)
            self._lock_path, self._lock_fd = _take_lock(root)
            self.path = self._lock_path.with_suffix("")
            self.path.mkdir(mode=0o700)
        except OSError as error:
            raise DiskUnavailable(
                f"the disk tier cannot use {root}: {error.strerror or error}; "
                "give a directory that can be written, or no disk"
            ) from error

    def close(self) -> None:
        """Remove the directory, then the lock. Idempotent."""
        if self._lock_fd < 0:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            self._lock_path.unlink()
        os.close(self._lock_fd)
        self._lock_fd = -1


def sweep(root: str | Path) -> list[Path]:
    """Remove what dead processes left below `root`; returns the directories that are gone. Live ones stay."""
    gone: list[Path] = []
    for lock_path in sorted(Path(root).glob(f"{_PREFIX}*{_LOCK}")):
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


def _take_lock(root: Path) -> tuple[Path, int]:
    """A new lock file, locked. Raises OSError where files cannot be locked, as on some network mounts."""
    while True:
        path = root / f"{_PREFIX}{os.getpid()}-{uuid.uuid4().hex[:8]}{_LOCK}"
        path.touch(mode=0o600, exist_ok=False)
        try:
            fd = _try_lock(path)
        except OSError:
            with contextlib.suppress(OSError):
                path.unlink()
            raise
        if fd is not None:
            return path, fd


def _try_lock(path: Path) -> int | None:
    """The locked descriptor; None if a living process has it, or a sweep removed the file under our hands. Raises
    OSError if it cannot be locked at all.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
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
