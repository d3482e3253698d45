"""StoreMemory: memories in a LangGraph store, with the same surface as the SQLite memory.

Covers any BaseStore, with or without vector search: without it the texts are read and ranked here, which is meant for
some thousands of them. Does not cover the store itself: who opened it closes it.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from agentkv.clock import Clock, SystemClock
from agentkv.context.estimate import estimate
from agentkv.context.memory.embed import HashingEmbed, vectors_of
from agentkv.context.memory.memory import MAX_QUEUE_CHARS
from agentkv.context.memory.passages import PASSAGE_CHARS, cut
from agentkv.context.memory.queue import Queue
from agentkv.context.memory.recalled import KINDS, Kind, Recalled, asked, best, clean
from agentkv.context.memory.table import QUERY_TERMS, Row, covered, worth
from agentkv.context.memory.terms import terms
from agentkv.errors import Closed, ConfigError
from agentkv.log import count, failed

if TYPE_CHECKING:
    from langgraph.store.base import BaseStore, SearchItem

ROOT = ("agentkv_memory",)
MAX_SCANNED = 5_000
"""Of a store without vector search at most so many texts are read for one query."""
_PAGE = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class _Text:
    space: tuple[str, ...]
    text: str
    kind: str
    origin: dict[str, Any]


class StoreMemory:
    """Memories in `store`, below `root`; each namespace is one label there, so that none is the beginning of another.

    As with `Memory`: `remember` returns at once, `recall` never raises for what a store does. A store's own vector
    search finds the candidates where it has one; words and cosine then decide together.
    """

    def __init__(
        self,
        store: BaseStore,
        *,
        root: tuple[str, ...] = ROOT,
        namespace: str = "",
        count: Callable[[str], int] = estimate,
        passage_chars: int = PASSAGE_CHARS,
        max_queue: int = 1_000,
        clock: Clock | None = None,
    ) -> None:
        next(cut("", passage_chars), None)  # refuses a size that cannot work
        self.namespace = namespace
        self._store = store
        self._root = root
        self._count = count
        self._passage_chars = passage_chars
        self._clock = clock or SystemClock()
        self._embed = HashingEmbed()
        self._closed = False
        self._queue: Queue[_Text] = Queue(
            self._write, name="agentkv-memory-store", max_entries=max_queue, max_chars=MAX_QUEUE_CHARS
        )

    @property
    def waiting(self) -> int:
        """Texts that are not written yet."""
        return len(self._queue)

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
        """As `Memory.remember`."""
        if kind not in KINDS:
            raise ConfigError(f"kind={kind!r} is not one of {', '.join(KINDS)}")
        self._check_open()
        if not text or text.isspace():
            return False
        tagged = sorted(clean(tag) for tag in tags)
        origin = {"source": clean(source), "task": clean(task), "tags": tagged, "at_ms": self._clock.wall_ms()}
        return self._queue.put(_Text(space=self._space(namespace), text=text, kind=kind, origin=origin), len(text))

    def recall(
        self,
        query: str,
        *,
        k: int = 5,
        kinds: Collection[str] = KINDS,
        tags: Collection[str] = (),
        namespace: str | None = None,
    ) -> list[Recalled]:
        """As `Memory.recall`. A store that refuses synchronous calls on an event loop wants `arecall` there."""
        text = asked(query)
        if k < 1 or not text.strip() or not kinds:
            return []
        self._check_open()
        count("memory_recalls")
        try:
            found = self._found(text, self._space(namespace), frozenset(kinds), frozenset(tags), k)
        except Exception as error:
            failed("memory_recall_failed", error=repr(error)[:200])
            return []
        return [replace(one, tokens=self._count(one.text)) for one in found]

    async def arecall(self, query: str, **options: Any) -> list[Recalled]:
        """`recall` on a worker thread."""
        return await asyncio.to_thread(self.recall, query, **options)

    def forget(
        self,
        memory: int | str | None = None,
        *,
        source: str | None = None,
        older_than_s: float | None = None,
        namespace: str | None = None,
    ) -> int:
        """As `Memory.forget`; reads the namespace's texts, and raises what the store raises."""
        if [memory, source, older_than_s].count(None) != 2:  # noqa: PLR2004  one of three
            raise ConfigError("forget() takes exactly one of: an id, source=, older_than_s=")
        self.flush()
        before_ms = self._clock.wall_ms() - (older_than_s or 0) * 1000
        space, removed = self._space(namespace), 0
        for item in list(self._items(space)):
            origins = item.value["origins"]
            left = [origin for origin in origins if source is None or origin["source"] != clean(source)]
            old = older_than_s is not None and max(origin["at_ms"] for origin in origins) < before_ms
            if item.key == memory or old or not left:
                self._store.delete(space, item.key)
                removed += 1
            elif len(left) < len(origins):
                self._store.put(space, item.key, {**item.value, "origins": left}, index=["text"])
        return removed

    def flush(self, timeout_s: float = 10.0) -> bool:
        """As `Memory.flush`."""
        return self._queue.flush(timeout_s)

    def close(self) -> None:
        """Write what waits; the store stays open. Idempotent."""
        self._closed = True
        self._queue.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("this memory is closed")

    def _space(self, namespace: str | None) -> tuple[str, ...]:
        """A namespace as one label: stores allow no empty ones and no dots, and search by the beginning of a tuple."""
        name = clean(self.namespace if namespace is None else namespace)
        return (*self._root, "n" + hashlib.blake2b(name.encode(), digest_size=12).hexdigest())

    def _write(self, batch: Sequence[_Text]) -> None:
        for entry in batch:
            for text in cut(clean(entry.text), self._passage_chars):
                key = hashlib.blake2b(f"{entry.kind} {text}".encode(), digest_size=16).hexdigest()
                there = self._store.get(entry.space, key)
                known = there.value["origins"] if there is not None else []
                same = ("source", "task")
                others = [one for one in known if any(one[name] != entry.origin[name] for name in same)]
                value = {"text": text, "kind": entry.kind, "origins": [*others, entry.origin]}
                self._store.put(entry.space, key, value, index=["text"])
                count("memory_written" if there is None else "memory_duplicates")

    def _items(self, space: tuple[str, ...]) -> Iterator[SearchItem]:
        """Every memory of `space`, page by page, up to MAX_SCANNED."""
        for offset in range(0, MAX_SCANNED, _PAGE):
            page = self._store.search(space, limit=_PAGE, offset=offset)
            yield from (item for item in page if item.namespace == space)
            if len(page) < _PAGE:
                return

    def _found(
        self, query: str, space: tuple[str, ...], kinds: frozenset[str], tags: frozenset[str], k: int
    ) -> list[Recalled]:
        page = self._store.search(space, query=query, limit=4 * k + 24)
        scored = any(item.score is not None for item in page)
        items = [item for item in page if item.namespace == space] if scored else list(self._items(space))
        rows = [row for row in map(_row, items) if row.kind in kinds and tags <= set(row.tags)]
        cosines: dict[int | str, float]
        if scored:
            cosines = {item.key: item.score or 0.0 for item in items}
        else:
            vectors = vectors_of(self._embed, [query, *(row.text for row in rows)])
            cosines = {row.id: float(score) for row, score in zip(rows, vectors[1:] @ vectors[0], strict=True)}
        return best(rows, cosines, _coverage(query, rows), k)


def _row(item: SearchItem) -> Row:
    value = item.value
    newest = max(value["origins"], key=lambda origin: origin["at_ms"])
    return Row(
        id=item.key,
        kind=value["kind"],
        text=value["text"],
        at_ms=newest["at_ms"],
        source=newest["source"],
        task=newest["task"],
        tags=tuple(newest["tags"]),
    )


def _coverage(query: str, rows: Sequence[Row]) -> dict[int | str, float]:
    """For each row how much of the weight of the query's terms it holds; a term's worth is that among these rows."""
    held = {row.id: set(terms(row.text, singles=True)) for row in rows}
    asked_for = dict.fromkeys(terms(query))
    holders = {term: sum(term in words for words in held.values()) for term in asked_for}
    rarest = sorted(asked_for, key=lambda term: holders[term])[:QUERY_TERMS]
    weighed = {term: worth(len(held), holders[term]) for term in rarest}
    return {row: covered(weighed, words) for row, words in held.items()}
