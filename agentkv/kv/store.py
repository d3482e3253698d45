"""The stores below a folder, seen from outside: which there are, what their notes are, and forgetting notes.

For people at a command line, while no process works with the store or even while one does (reading only). What is in
a note, and which blocks it needs, is known to whoever wrote it; blocks that no note needs are given up at the store's
next start.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from agentkv.errors import DiskUnavailable
from agentkv.kv.journal import Journal, load
from agentkv.kv.lair import LOCK, STORE_PREFIX, Lair, holder


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFacts:
    """One store as it is on disk."""

    name: str
    """As it was named, where that was a plain name; else a hash of it."""
    path: Path
    block_bytes: int
    blocks: int
    size_bytes: int
    """Disk space of its files."""
    notes: dict[str, bytes]
    held_by: str | None
    """The living process that has it, such as "process 123"."""


def default_root() -> Path:
    """Where stores are kept unless somebody says otherwise: `kv` in $AGENTKV_CACHE or the user's cache folder."""
    given = os.environ.get("AGENTKV_CACHE")
    if given:
        return Path(given) / "kv"
    import platformdirs

    return Path(platformdirs.user_cache_dir("agentkv")) / "kv"


def stores(root: str | Path) -> list[StoreFacts]:
    """The stores below `root`, by name. Folders that cannot be read as one are left out."""
    found = []
    for path in sorted(Path(root).glob(f"{STORE_PREFIX}*")):
        try:
            facts = _facts(path) if path.is_dir() else None
        except OSError:
            continue
        if facts is not None:
            found.append(facts)
    return found


def drop_notes(store: StoreFacts, names: Iterable[str]) -> list[str]:
    """Forget those notes of `store`; their text is gone from its journal. Returns the names that there were. With its
    last note the whole store goes, since no block of it is needed.

    Raises StoreBusy, naming the process, if a living one has the store, and DiskUnavailable if it cannot be written.
    """
    try:
        lair = Lair.of(store.path)
    except OSError as error:
        raise DiskUnavailable(f"{store.path} cannot be opened: {error}") from error
    try:
        errors: list[OSError] = []
        journal = Journal(
            lair.dir_fd,
            block_bytes=store.block_bytes,
            store=store.path.name,
            budget_bytes=1 << 62,
            retry_s=0,
            on_error=errors.append,
        )
        dropped = [name for name in names if name in journal.notes]
        for name in dropped:
            journal.forget(name)
        empty = not journal.notes
        if dropped and not empty:
            journal.compact()
        journal.close()
        if dropped and empty:
            lair.remove()
        elif errors:
            raise DiskUnavailable(f"{store.path} cannot be written: {errors[0]}")
        return dropped
    finally:
        lair.close()


def _facts(path: Path) -> StoreFacts | None:
    dir_fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = load(dir_fd)
    finally:
        os.close(dir_fd)
    if found.header is None:
        return None
    return StoreFacts(
        name=path.name.removeprefix(STORE_PREFIX),
        path=path,
        block_bytes=found.header.block_bytes,
        blocks=len(found.entries),
        size_bytes=sum(one.stat().st_blocks * 512 for one in path.iterdir()),
        notes=found.notes,
        held_by=holder(path.with_name(path.name + LOCK)),
    )
