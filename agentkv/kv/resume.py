"""How a process takes over what an earlier one left in a store: the journal says what, the files say whether.

Covers opening both, and which blocks are believed. Their bytes are not read here: the checksums decide at the first
read.
"""

from __future__ import annotations

from collections.abc import Callable

from agentkv.errors import DiskUnavailable
from agentkv.kv.index import BlockKey
from agentkv.kv.journal import Journal
from agentkv.kv.lair import Lair
from agentkv.kv.records import Entry
from agentkv.kv.segments import Segments, live_by_file
from agentkv.log import warn_once


def resume(
    lair: Lair,
    segments: Segments,
    *,
    most_slots: int,
    block_bytes: int,
    journal_bytes: int,
    retry_s: float,
    on_error: Callable[[OSError], None],
) -> tuple[Journal, dict[int, Entry]]:
    """The store's journal and its blocks by slot; `segments` has taken its files, `most_slots` at most.

    Raises DiskUnavailable if the files cannot be opened. A store of other blocks is emptied, with a warning.
    """
    journal = Journal(
        lair.dir_fd,
        block_bytes=block_bytes,
        store=lair.path.name,
        budget_bytes=journal_bytes,
        retry_s=retry_s,
        on_error=on_error,
    )
    try:
        if journal.stranger is not None:
            warn_once("kv_store_discarded", reason=journal.stranger, path=str(lair.path))
            segments.clear()
        lost = segments.adopt(most_slots, live_by_file(list(journal.entries)))
    except OSError as error:
        journal.close()
        on_error(error)
        raise DiskUnavailable(f"the store at {lair.path} cannot be opened: {error}") from error
    if lost:
        warn_once("kv_store_shrunk", slots=lost, capacity=most_slots, path=str(lair.path))
    return journal, surviving(journal, segments)


def surviving(journal: Journal, segments: Segments) -> dict[int, Entry]:
    """The journal's blocks by slot: those whose file is there, of two copies of a block the later one. The rest is
    freed in the journal.
    """
    blocks: dict[int, Entry] = {}
    slot_of: dict[BlockKey, int] = {}
    for place, entry in sorted(journal.entries.items(), key=lambda item: item[1].generation):
        slot = segments.slot(place)
        if slot is None:
            journal.free((place,))
            continue
        older = slot_of.get(entry.key)
        if older is not None:
            del blocks[older]
            journal.free((segments.place(older),))
        blocks[slot], slot_of[entry.key] = entry, slot
    journal.settle()
    return blocks
