"""Notebook: what was decided about a conversation, found again by a digest of the messages before it.

Covers the chain digest, folds and notes by digest, and a bound. The fold of a digest never changes, so the same messages
give the same prompt again, in this process or in the next. Files are `notefiles.py`.
A fold's digest covers *all* messages at the moment when it took effect (not only those that it folds), so a resume
from an earlier checkpoint finds the fold that held then.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from agentkv.context.notefiles import NoteFiles
from agentkv.core.message import Message
from agentkv.errors import ConfigError

MAX_ENTRIES = 5_000
"""A conversation needs a handful of folds and a note a call; a full notebook of 1-4 kB each is read in 0.3 s."""
_Kind = Literal["fold", "note"]
_SEED = b"agentkv.chain/1"
_HEX = re.compile(r"(?:[0-9a-f]{2})*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """The first `k` messages are replaced by the summary `text`, but for those at the indices `pinned` (all < `k`).

    It holds for every conversation that runs through `digest`.
    """

    digest: bytes
    k: int
    text: str
    pinned: tuple[int, ...] = ()


def chain(previous: bytes, message: Message) -> bytes:
    """The digest (16 bytes) of a conversation from that of all messages before (b"" at the start) and the next one.

    Every field is framed by its length, so no two messages run together. The same in every process.
    """
    import xxhash

    fields = [_SEED, previous, *map(_bytes, (message.role, message.content, message.tool_call_id, message.name))]
    for call in message.tool_calls:
        fields += map(_bytes, (call.id, call.name, call.arguments))
    framed = bytearray()
    for field in fields:
        framed += b"-" if field is None else b"%d:" % len(field) + field
    return xxhash.xxh3_128_digest(bytes(framed))


class Notebook:
    """Folds and notes by digest. Thread-safe; never raises for what its folder does.

    With a `folder` entries survive the process: each writes its own file there, all files are read at the start and
    again by `refresh()`. Above `max_entries` the longest unused go.
    """

    def __init__(self, folder: Path | str | None = None, max_entries: int = MAX_ENTRIES) -> None:
        if max_entries < 1:
            raise ConfigError(f"Notebook(max_entries={max_entries}): a number >= 1 is needed")
        self._max_entries = max_entries
        self._entries: OrderedDict[tuple[_Kind, bytes], Fold | str] = OrderedDict()
        self._lock = threading.RLock()
        self._files = None if folder is None else NoteFiles(Path(folder), max_lines=2 * max_entries)
        if self._files is not None:
            with self._lock:
                self._take(self._files.read())
                self._files.tidy(self._take, self._rows)

    def fold(self, digest: bytes) -> Fold | None:
        """The fold that took effect at `digest`."""
        found = self._get("fold", digest)
        return found if isinstance(found, Fold) else None

    def note(self, digest: bytes) -> str | None:
        """The text noted at `digest`; "" where it was taken away again."""
        found = self._get("note", digest)
        return found if isinstance(found, str) else None

    def latest(self, digests: Sequence[bytes], start: int = 0) -> Fold | None:
        """The last fold that took effect at one of `digests[start:]`; `digests[i]` is the chain over messages 0 to i.

        A fold that would leave no message behind it is none: it was not made for this conversation.
        """
        with self._lock:
            for place in range(len(digests) - 1, start - 1, -1):
                found = self._entries.get(("fold", digests[place]))
                if isinstance(found, Fold) and 0 < found.k <= place:
                    self._entries.move_to_end(("fold", digests[place]))
                    return found
        return None

    def put_fold(self, fold: Fold) -> Fold:
        """Record `fold`; the answer is the one that counts: an earlier one of this digest stays."""
        if any(not 0 <= index < fold.k for index in fold.pinned):
            raise ConfigError(f"Fold(k={fold.k}, pinned={fold.pinned}): pinned indices lie below k")
        with self._lock:
            known = self.fold(fold.digest)
            if known is None:
                self._put("fold", fold.digest, fold, write=True)
            return known or fold

    def put_note(self, digest: bytes, text: str) -> None:
        """Note `text` at `digest`, in place of what was noted there before."""
        with self._lock:
            if (self.note(digest) or "") != text:
                self._put("note", digest, text, write=True)

    def refresh(self) -> None:
        """Read what other processes wrote since. Cheap where nothing was: one look at the folder."""
        with self._lock:
            if self._files is not None:
                self._take(self._files.read())

    def close(self) -> None:
        """Let go of the file; idempotent. Entries stay readable, new ones stay in memory."""
        with self._lock:
            if self._files is not None:
                self._files.close()

    def __len__(self) -> int:
        return len(self._entries)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def check(self) -> None:
        """Assert what always holds; for tests."""
        with self._lock:
            assert len(self._entries) <= self._max_entries
            for (kind, digest), entry in self._entries.items():
                assert (kind == "fold") == isinstance(entry, Fold)
                if isinstance(entry, Fold):
                    assert entry.digest == digest
                    assert all(0 <= index < entry.k for index in entry.pinned)

    def _get(self, kind: _Kind, digest: bytes) -> Fold | str | None:
        with self._lock:
            found = self._entries.get((kind, digest))
            if found is not None:
                self._entries.move_to_end((kind, digest))
            return found

    def _put(self, kind: _Kind, digest: bytes, entry: Fold | str, *, write: bool) -> None:
        self._entries[kind, digest] = entry
        while len(self._entries) > self._max_entries:
            self._entries.popitem(last=False)
        if write and self._files is not None:
            self._files.write(_row(kind, digest, entry), self._rows)

    def _take(self, rows: Iterable[list[object]]) -> None:
        """Older rows come first: of a fold the first counts, of a note the last."""
        for row in rows:
            read = _entry(row)
            if read is not None and (read[0] == "note" or read[:2] not in self._entries):
                self._put(*read, write=False)

    def _rows(self) -> list[list[object]]:
        return [_row(kind, digest, entry) for (kind, digest), entry in self._entries.items()]


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else text.encode("utf-8", "surrogatepass")


def _row(kind: _Kind, digest: bytes, entry: Fold | str) -> list[object]:
    if isinstance(entry, Fold):
        return [kind, digest.hex(), entry.text, entry.k, list(entry.pinned)]
    return [kind, digest.hex(), entry]


def _entry(row: list[object]) -> tuple[_Kind, bytes, Fold | str] | None:
    """The entry that a row holds; None for a row of another version."""
    match row:
        case ["fold", str(digest), str(text), int(k), list(pinned)] if _HEX.fullmatch(digest):
            indices = tuple(index for index in pinned if isinstance(index, int) and 0 <= index < k)
            if len(indices) == len(pinned):
                key = bytes.fromhex(digest)
                return "fold", key, Fold(digest=key, k=k, text=text, pinned=indices)
        case ["note", str(digest), str(text)] if _HEX.fullmatch(digest):
            return "note", bytes.fromhex(digest), text
    return None
