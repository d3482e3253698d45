"""What outlives the process: one note per session in the slab's store, and the sessions that an earlier one left.

Covers writing and reading the notes. A note names a session's blocks; whether their bytes are still there and right is
the slab's to say, and what is doubtful is a miss. Without a lasting slab everything here does nothing.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentkv.core.residency import Action, Move, Tier
from agentkv.kv.book import Book
from agentkv.kv.index import KEY_BYTES, BlockKey
from agentkv.kv.slab import Slab
from agentkv.log import failed, warn_once

Describe = Callable[[str], Mapping[str, Any] | None]
"""What an engine wants to know of a session when it comes back; plain JSON values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Revived:
    """A session of an earlier process. `tokens` of its context are on disk; `memo` is what the engine had said."""

    session: str
    task: str
    tokens: int
    memo: Mapping[str, Any] = field(default_factory=dict)


class Keep:
    """The notes of one slab. `wall_s` gives unix time."""

    def __init__(self, book: Book, slab: Slab | None, *, block_bytes: int, wall_s: Callable[[], float]) -> None:
        self.describe: Describe = lambda _session: None
        self._lock = threading.Lock()  # a note is never written after its session was forgotten
        self._book = book
        self._slab = slab
        self._block_bytes = block_bytes
        self._wall_s = wall_s

    @property
    def lasting(self) -> bool:
        """True if sessions outlive this process."""
        return self._slab is not None and self._slab.lasting

    def revive(self, now_s: float) -> list[Revived]:
        """Put what an earlier process left into the book, longest unused first; frees blocks that no session has."""
        if self._slab is None:
            return []
        on_disk = {one.key: one.slot for one in self._slab.kept}
        found: list[Revived] = []
        for name, note in sorted(self._notes(), key=lambda one: float(one[1].get("used_at", 0))):
            revived = self._revive(note, on_disk, now_s)
            if revived is None:
                self._slab.forget_note(name)
            else:
                found.append(revived)
        self._slab.free(slot for key, slot in on_disk.items() if key not in self._book.blocks)
        return found

    def _notes(self) -> list[tuple[str, dict[str, Any]]]:
        assert self._slab is not None
        notes: list[tuple[str, dict[str, Any]]] = []
        for name, payload in self._slab.notes.items():
            try:
                note = json.loads(payload)
                assert isinstance(note, dict)
                float(note.get("used_at", 0))
            except (ValueError, TypeError, AssertionError) as error:
                failed("kv_note_unreadable", session=name, error=repr(error))
                self._slab.forget_note(name)
                continue
            notes.append((name, note))
        return notes

    def _revive(self, note: Mapping[str, Any], on_disk: Mapping[BlockKey, int], now_s: float) -> Revived | None:
        try:
            session, task, tokens = str(note["session"]), str(note["task"]), int(note["tokens"])
            keys = [bytes.fromhex(key) for key in note["keys"]]
            memo = dict(note.get("memo") or {})
            idle_s = max(0.0, self._wall_s() - float(note.get("used_at", 0)))
        except (KeyError, TypeError, ValueError) as error:
            failed("kv_note_unreadable", error=repr(error))
            return None
        there = 0
        while there < len(keys) and len(keys[there]) == KEY_BYTES and keys[there] in on_disk:
            there += 1
        if there == 0 or len(set(keys[:there])) != there:
            return None
        self._book.hold(session, task, keys[:there], tokens, now_s - idle_s)
        for key in keys[:there]:
            block = self._book.blocks[key]
            if not block.has(Tier.DISK):
                self._book.place(block, Tier.DISK, on_disk[key])
        return Revived(session=session, task=task, tokens=tokens, memo=memo)

    def note(self, session: str) -> None:
        """Write down what the session consists of now. Never raises; not for a thread that holds a lock."""
        if not self.lasting:
            return
        assert self._slab is not None
        try:
            with self._lock:
                self._write(session, self._slab)
        except Exception as error:
            warn_once("kv_note_not_kept", session=session, reason=repr(error))

    def _write(self, session: str, slab: Slab) -> None:
        holding = self._book.holdings.get(session)
        if holding is None:
            return
        keys = [block.key.hex() for block in list(holding.chain)]
        memo = dict(self.describe(session) or {})
        note = {
            "session": session,
            "task": holding.task,
            "model": memo.pop("model", ""),
            "tokens": holding.tokens,
            "bytes": len(keys) * self._block_bytes,
            "used_at": self._wall_s(),
            "keys": keys,
            "memo": memo,
        }
        if not slab.note(session, json.dumps(note, ensure_ascii=True).encode()):
            warn_once("kv_note_not_kept", session=session, reason=slab.not_lasting or "the notes are full")

    def save(self, sessions: Sequence[str], apply: Callable[[Move], bool], quiesce: Callable[[], None]) -> bool:
        """Write these sessions to disk, with their notes. False if not all was written in time."""
        for session in sessions:
            move = Move(session=session, action=Action.WRITE, to=Tier.DISK, reason="it is kept for later")
            if not apply(move):
                self.note(session)
        try:
            quiesce()
        except TimeoutError as error:
            failed("kv_not_all_saved", error=str(error))
            return False
        return True

    def forget(self, session: str) -> None:
        """The session is over, for good. Never raises; not for a thread that holds a lock."""
        if self._slab is None:  # not only while it lasts: the journal may be off for a moment
            return
        try:
            with self._lock:
                self._slab.forget_note(session)
        except Exception as error:
            failed("kv_note_not_forgotten", session=session, reason=repr(error))
