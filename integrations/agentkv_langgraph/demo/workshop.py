"""The folder that one run works in, gone when the run is over; what a killed run left is swept by the next one."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from platformdirs import user_cache_path

try:
    import fcntl
except ImportError:  # not POSIX: nothing is swept there
    fcntl = None  # type: ignore[assignment]

_PREFIX = "demo-"
_LOCK = "lock"


def cache_folder() -> Path:
    """Where runs have their folders: the user's cache, or AGENTKV_CACHE."""
    own = os.environ.get("AGENTKV_CACHE")
    return Path(own) if own else user_cache_path("agentkv")


@contextmanager
def workshop(cache: Path) -> Iterator[Path]:
    """A folder under `cache` for the project, scratch files and the disk tier of one run."""
    cache.mkdir(parents=True, exist_ok=True)
    _sweep(cache)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=cache))
    try:
        with _locked(folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sweep(cache: Path) -> None:
    """Remove the folders of runs that are dead: nobody holds their lock."""
    for folder in cache.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), _locked(folder):
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, which the system releases when its process ends, however that happens.

    Raises BlockingIOError if a living process holds it.
    """
    if fcntl is None:
        if (folder / _LOCK).exists():
            raise BlockingIOError
        (folder / _LOCK).touch()
        yield
        return
    with (folder / _LOCK).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
