"""What outlives the process: one note per session in the slab's store, and the sessions that an earlier one left.

Covers writing and reading the notes. A note names a session's blocks; whether their bytes are still there and right is
the slab's to say, and what is doubtful is a miss. Without a lasting slab everything here does nothing.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from agentkv.core.residency import Action, Move, Tier
from agentkv.kv.book import Book
from agentkv.kv.index import KEY_BYTES, BlockKey
from agentkv.kv.slab import Slab
from agentkv.log import failed, warn_once

Describe = Callable[[str], Mapping[str, Any] | None]
"""What an engine wants to know of a session when it comes back; plain JSON values."""
Deed = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Revived:
    """A session of an earlier process. `tokens` of its context are on disk; `memo` is what the engine had said."""

    session: str
    task: str
    tokens: int
    memo: Mapping[str, Any] = field(default_factory=dict)


class Keep:
    """The notes of one slab. `wall_s` gives unix time; `stalled` says that the disk does not answer.

    Notes are written by a thread of their own, in the order in which they were asked for: whoever asks may hold up
    others, and the disk may hang.
    """

    def __init__(
        self,
        book: Book,
        slab: Slab | None,
        *,
        block_bytes: int,
        stalled: Callable[[], bool],
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self.describe: Describe = lambda _session: None
        self._book = book
        self._slab = slab
        self._block_bytes = block_bytes
        self._wall_s = wall_s
        self._stalled = stalled
        self._asked: SimpleQueue[tuple[Deed, str] | None] = SimpleQueue()
        self._undone = 0
        self._done = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

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
            first = int(note.get("first", 0))
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
        self._book.hold(session, task, keys[:there], tokens, now_s - idle_s, first=first)
        for key in keys[:there]:
            block = self._book.blocks[key]
            if not block.has(Tier.DISK):
                self._book.place(block, Tier.DISK, on_disk[key])
        return Revived(session=session, task=task, tokens=tokens, memo=memo)

    def note(self, session: str) -> None:
        """Have written down what the session consists of now. Never raises, never waits."""
        if self.lasting and not self._stalled():
            self._ask(self._note, session)

    def forget(self, session: str) -> None:
        """The session is over, for good. Never raises, never waits."""
        if self._slab is not None and self._slab.has_store:  # lasting or not: the journal may be off for a moment
            self._ask(self._forget, session)

    def _ask(self, deed: Deed, session: str) -> None:
        with self._done:
            if self._closed:
                return
            self._undone += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="agentkv-keep", daemon=True)
                self._thread.start()
            self._asked.put((deed, session))

    def _run(self) -> None:
        while (asked := self._asked.get()) is not None:
            deed, session = asked
            try:
                deed(session)
            except Exception as error:
                warn_once("kv_note_not_kept", session=session, reason=repr(error))
            with self._done:
                self._undone -= 1
                self._done.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was asked for is done. False if it was not in time."""
        with self._done:
            return self._done.wait_for(lambda: self._undone == 0, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Do what was asked for, stop the thread. False if it hangs in the disk."""
        with self._done:
            self._closed = True
            thread = self._thread
        if thread is None:
            return True
        self._asked.put(None)
        thread.join(timeout_s)
        return not thread.is_alive()

    def _forget(self, session: str) -> None:
        assert self._slab is not None
        self._slab.forget_note(session)

    def _note(self, session: str) -> None:
        slab, holding = self._slab, self._book.holdings.get(session)
        if slab is None or holding is None:
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
            "first": holding.first,
            "keys": keys,
            "memo": memo,
        }
        if not slab.note(session, json.dumps(note, ensure_ascii=True).encode()):
            warn_once("kv_note_not_kept", session=session, reason=slab.not_lasting or "the notes are full")

    def save(
        self, sessions: Sequence[str], apply: Callable[[Move], bool], quiesce: Callable[[], None], timeout_s: float
    ) -> bool:
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
        return self.flush(timeout_s) and not self._stalled()
