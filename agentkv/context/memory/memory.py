"""Memory: what outlives a prompt. Episodic: conclusions of finished tasks; semantic: documents and facts.

Covers remembering (off the caller's path), recalling (words and vectors together) and forgetting, per namespace.
Working memory is the live context and not here. Whether what is recalled goes into a prompt is `decide.py`'s.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from agentkv.clock import Clock, SystemClock
from agentkv.context.estimate import estimate
from agentkv.context.memory import table
from agentkv.context.memory.embed import Embed, HashingEmbed, name_of, vectors_of
from agentkv.context.memory.passages import PASSAGE_CHARS, cut
from agentkv.context.memory.queue import Queue
from agentkv.context.memory.recalled import KINDS, Kind, Recalled, asked, best, clean
from agentkv.context.memory.vectors import Vectors
from agentkv.errors import Closed, ConfigError
from agentkv.log import count, failed

if TYPE_CHECKING:
    import sqlite3

    import numpy as np
    from numpy.typing import NDArray

    from agentkv.context.memory.database import Database

_NUMBER: dict[str, int] = {kind: number for number, kind in enumerate(KINDS)}
MAX_QUEUE_CHARS = 64_000_000
_TOGETHER = 256


def default_path() -> Path:
    """Where memories are unless told otherwise: $AGENTKV_DATA, else the user's data folder."""
    folder = os.environ.get("AGENTKV_DATA")
    if folder:
        return Path(folder) / "memory.sqlite"
    import platformdirs

    return Path(platformdirs.user_data_dir("agentkv")) / "memory.sqlite"


class Memory:
    """Memories in one SQLite file (`path=None`: in RAM), shared by threads and processes. A context manager.

    `remember` returns at once and never raises for a text; `recall` never raises either: what fails is counted and
    logged. Texts may hold anything; a lone surrogate is stored as U+FFFD. Raises ConfigError for a file that cannot
    be used or is newer than this program.
    """

    def __init__(
        self,
        path: Path | str | None = None,
        *,
        namespace: str = "",
        embed: Embed | None = None,
        count: Callable[[str], int] = estimate,
        passage_chars: int = PASSAGE_CHARS,
        max_queue: int = 1_000,
        max_passages: int = 100_000,
        clock: Clock | None = None,
    ) -> None:
        if max_passages < 1:
            raise ConfigError(f"max_passages={max_passages} is not allowed; give 1 or more")
        next(cut("", passage_chars), None)  # refuses a size that cannot work
        self.namespace = namespace
        self.max_passages = max_passages
        self._embed = embed or HashingEmbed()
        self._embedder = name_of(self._embed)
        self._count = count
        self._passage_chars = passage_chars
        self._clock = clock or SystemClock()
        self._known: dict[str, _Known] = {}
        self._embedding_again = False
        self._queue: Queue[table.Entry | _Reembed] = Queue(
            self._write, name="agentkv-memory", max_entries=max_queue, max_chars=MAX_QUEUE_CHARS
        )
        self._closed = True
        from agentkv.context.memory.database import Database  # sqlite3: 4 ms that `import agentkv` must not pay

        self._database: Database = Database(Path(path).expanduser() if path is not None else None)
        self._closed = False

    @property
    def waiting(self) -> int:
        """Texts that are not written yet."""
        return len(self._queue)

    def __len__(self) -> int:
        """Passages stored, of all namespaces."""
        with self._database.reading() as connection:
            return int(connection.execute("SELECT count(*) FROM passages").fetchone()[0])

    def remember(
        self,
        text: str,
        kind: Kind = "semantic",
        *,
        source: str = "",
        tags: Collection[str] = (),
        task: str = "",
        namespace: str | None = None,
    ) -> bool:
        """Take `text` to be written by a thread; False, counted, where the queue is full or nothing is in the text.

        Returns at once: neither cutting, nor embedding, nor the disk is waited for. Raises ConfigError for a kind that
        there is not, Closed after `close()`.
        """
        if kind not in KINDS:
            raise ConfigError(f"kind={kind!r} is not one of {', '.join(KINDS)}")
        if self._closed:
            raise Closed("this memory is closed")
        if not text or text.isspace():
            return False
        entry = table.Entry(
            namespace=clean(self.namespace if namespace is None else namespace),
            kind=kind,
            text=text,
            source=clean(source),
            task=clean(task),
            tags=tuple(sorted(clean(tag) for tag in tags)),
            at_ms=self._clock.wall_ms(),
        )
        return self._queue.put(entry, len(text))

    def recall(
        self,
        query: str,
        *,
        k: int = 5,
        kinds: Collection[str] = KINDS,
        tags: Collection[str] = (),
        namespace: str | None = None,
    ) -> list[Recalled]:
        """At most `k` passages for `query`, best first; with `tags` only those that bear all of them.

        Blocks for a few ms (`arecall` does not block an event loop). An empty answer for an empty query, for `k` below
        1, and for whatever fails.
        """
        space = clean(self.namespace if namespace is None else namespace)
        text = asked(query)
        if k < 1 or not text.strip() or not kinds:
            return []
        if self._closed:
            raise Closed("this memory is closed")
        count("memory_recalls")
        try:
            found = self._found(text, space, tuple(kinds), frozenset(tags), k)
        except Exception as error:
            failed("memory_recall_failed", error=repr(error)[:200])
            return []
        return [replace(one, tokens=self._count(one.text)) for one in found]

    async def arecall(self, query: str, **options: Any) -> list[Recalled]:
        """`recall` on a worker thread."""
        import asyncio  # 30 ms that `import agentkv` must not pay

        return await asyncio.to_thread(self.recall, query, **options)

    def forget(
        self,
        memory: int | str | None = None,
        *,
        source: str | None = None,
        older_than_s: float | None = None,
        namespace: str | None = None,
    ) -> int:
        """Remove one memory by its id, or what came from `source` alone, or what is older; the number of passages.

        What is still waiting to be written is written first. Blocks; raises ConfigError unless exactly one is given.
        """
        if [memory, source, older_than_s].count(None) != 2:  # noqa: PLR2004  one of three
            raise ConfigError("forget() takes exactly one of: an id, source=, older_than_s=")
        space = clean(self.namespace if namespace is None else namespace)
        self.flush()
        with self._database.writing() as connection:
            if source is not None:
                return table.remove_source(connection, space, clean(source))
            if older_than_s is not None:
                return table.remove_older(connection, space, self._clock.wall_ms() - round(older_than_s * 1000))
            return table.remove_one(connection, space, memory if isinstance(memory, int) else -1)

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Wait until everything remembered so far is stored; False if that did not happen in time."""
        return self._queue.flush(timeout_s)

    def close(self) -> None:
        """Write what waits, then close the file. Idempotent."""
        self._closed = True
        self._queue.close()
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            warnings.warn("a Memory was not closed", ResourceWarning, stacklevel=2)

    def _found(self, query: str, space: str, kinds: tuple[str, ...], tags: frozenset[str], k: int) -> list[Recalled]:
        vector = self._vector(query)
        pool = (4 * k + 24) * (4 if tags else 1)
        with self._database.reading() as connection:
            weighed, searched = table.weights(connection, query)
            candidates = set(table.by_words(connection, space, searched, pool))
            cosines: dict[int, float] = {}
            vectors = self._vectors(connection, space, len(vector)) if vector is not None else None
            if vectors is not None and vector is not None:
                candidates |= {found for found, _ in vectors.nearest(vector, pool, _numbers(kinds))}
                cosines = vectors.cosines(vector, candidates)
            covered = table.coverage(connection, weighed, candidates)
            rows = table.rows(connection, space, kinds, candidates)
        return best((row for row in rows if tags <= set(row.tags)), cosines, covered, k)

    def _vector(self, query: str) -> NDArray[np.float32] | None:
        try:
            vector: NDArray[np.float32] = vectors_of(self._embed, [query])[0]
        except Exception as error:
            failed("memory_embed_failed", error=repr(error)[:200])
            return None
        return vector

    def _vectors(self, connection: sqlite3.Connection, space: str, dimensions: int) -> Vectors:
        """The vectors of `space`, brought up to date with what any process wrote. Under the reader's lock."""
        state, removals = self._database.state(connection), table.changed(connection)
        known = self._known.get(space)
        if known is None or (known.connection, known.removals, known.vectors.dimensions) != (
            connection,
            removals,
            dimensions,
        ):
            known = _Known(connection=connection, removals=removals, vectors=Vectors(dimensions))
        if known.state != state:
            known.add(table.vectors_after(connection, space, known.last), self._embedder)
            known.state = state
        self._known[space] = known
        if known.stale and not self._embedding_again:
            self._embedding_again = self._queue.put(_Reembed(passages=tuple(known.stale)), 0)
        return known.vectors

    def _write(self, batch: Sequence[table.Entry | _Reembed]) -> None:
        """On the queue's thread: cut, embed and store, in transactions of a few hundred passages."""
        for item in batch:
            if isinstance(item, _Reembed):
                self._embed_again(item.passages)
        passages = (
            replace(entry, text=piece)
            for entry in batch
            if isinstance(entry, table.Entry)
            for piece in cut(clean(entry.text), self._passage_chars)
        )
        while chunk := [entry for entry, _ in zip(passages, range(_TOGETHER), strict=False)]:
            self._store(chunk)

    def _store(self, entries: list[table.Entry]) -> None:
        import sqlite3

        vectors = self._embedded([entry.text for entry in entries])
        try:
            self._insert(entries, vectors)
        except sqlite3.DatabaseError:  # a lock that lasted, or a damaged file that was replaced: once more
            self._insert(entries, vectors)

    def _insert(self, entries: list[table.Entry], vectors: list[bytes | None]) -> None:
        with self._database.writing() as connection:
            for entry, vector in zip(entries, vectors, strict=True):
                new = table.insert(connection, entry, self._embedder if vector else "", vector)
                count("memory_written" if new else "memory_duplicates")
            dropped = table.remove_oldest(connection, self.max_passages)
        if dropped:
            count("memory_dropped_oldest")

    def _embedded(self, texts: list[str]) -> list[bytes | None]:
        """Vectors as half-precision bytes; None for each where embedding fails, and words alone find them."""
        try:
            return [row.tobytes() for row in vectors_of(self._embed, texts).astype("<f2")]
        except Exception as error:
            failed("memory_embed_failed", error=repr(error)[:200])
            return [None] * len(texts)

    def _embed_again(self, passages: tuple[int, ...]) -> None:
        """Give passages that another embedding (or none) was stored with a vector of this one."""
        try:
            for at in range(0, len(passages), _TOGETHER):
                with self._database.reading() as connection:
                    found = table.texts(connection, passages[at : at + _TOGETHER])
                vectors = self._embedded([text for _, text in found])
                if None in vectors:
                    return  # a later recall tries again
                with self._database.writing() as connection:
                    for (passage, _), vector in zip(found, vectors, strict=True):
                        table.set_vector(connection, passage, self._embedder, vector)
        finally:
            self._embedding_again = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reembed:
    passages: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class _Known:
    """What is held of one namespace, and up to where that is."""

    connection: sqlite3.Connection
    removals: int
    vectors: Vectors
    state: tuple[int, int] = (-1, -1)
    last: int = 0
    stale: list[int] = field(default_factory=list)
    """Passages whose vector is missing or another embedding's."""

    def add(self, new: Sequence[tuple[int, str, str, bytes | None]], embedder: str) -> None:
        """Take in rows with greater ids than those before."""
        import numpy as np

        size_bytes = 2 * self.vectors.dimensions
        good = [row for row in new if row[2] == embedder and row[3] is not None and len(row[3]) == size_bytes]
        self.last = new[-1][0] if new else self.last
        self.stale += sorted({row[0] for row in new} - {row[0] for row in good})
        joined = b"".join(row[3] or b"" for row in good)
        rows = np.frombuffer(joined, dtype="<f2").reshape(len(good), self.vectors.dimensions).astype(np.float32)
        self.vectors.add([row[0] for row in good], _numbers(row[1] for row in good), rows)


def _numbers(kinds: Iterable[str]) -> list[int]:
    """The numbers of kinds; what another version wrote is 255 and never asked for."""
    return [_NUMBER.get(kind, 255) for kind in kinds]
