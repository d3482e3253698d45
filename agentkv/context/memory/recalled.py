"""What is recalled: the noun, its kinds, how it is scored, and the surface that every backend of memories has.

Does not cover where memories are: `memory.py` (SQLite), or a framework's own store.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Kind = Literal["semantic", "episodic"]
KINDS: tuple[Kind, ...] = ("semantic", "episodic")
QUERY_CHARS = 4_000
"""Of a longer query the first and the last half of this are looked up."""
VECTOR_SHARE = 0.5
"""Of a score; the rest is how much of the query's words the passage holds. See docs/memory.md for the trials."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recalled:
    """One passage that was found. `score` is 0 to 1, comparable between queries; `tokens` is what injecting costs."""

    text: str
    score: float
    kind: str
    source: str
    tokens: int
    id: int | str
    at_ms: int = 0
    task: str = ""
    tags: tuple[str, ...] = ()


class Memories(Protocol):
    """What the SQLite memory and any other backend of memories can do; see `Memory` for the words."""

    def remember(
        self,
        text: str,
        kind: Kind = "semantic",
        *,
        source: str = "",
        tags: Collection[str] = (),
        task: str = "",
        namespace: str | None = None,
    ) -> bool: ...

    def recall(
        self,
        query: str,
        *,
        k: int = 5,
        kinds: Collection[str] = KINDS,
        tags: Collection[str] = (),
        namespace: str | None = None,
    ) -> list[Recalled]: ...

    async def arecall(self, query: str, **options: Any) -> list[Recalled]: ...

    def forget(
        self,
        memory: int | str | None = None,
        *,
        source: str | None = None,
        older_than_s: float | None = None,
        namespace: str | None = None,
    ) -> int: ...

    def flush(self, timeout_s: float = 10.0) -> bool: ...

    def close(self) -> None: ...


def best(rows: Iterable[Any], cosines: Mapping[Any, float], covered: Mapping[Any, float], k: int) -> list[Recalled]:
    """The `k` rows of the greatest scores: cosine and coverage, weighed. Equal texts of two kinds count once.

    A weighted sum and not a fusion of ranks: a rank says nothing about whether the best one is any good, and that is
    what the decision to inject needs. Where a passage has no vector (yet) its words count alone.
    """
    found: dict[str, Recalled] = {}
    for row in rows:
        share = VECTOR_SHARE if row.id in cosines else 0.0
        score = share * max(0.0, cosines.get(row.id, 0.0)) + (1 - share) * covered.get(row.id, 0.0)
        if row.text not in found or found[row.text].score < score:
            found[row.text] = Recalled(
                text=row.text,
                score=round(score, 4),
                kind=row.kind,
                source=row.source,
                tokens=0,
                id=row.id,
                at_ms=row.at_ms,
                task=row.task,
                tags=row.tags,
            )
    return sorted(found.values(), key=lambda one: (-one.score, -one.at_ms, str(one.id)))[:k]


def asked(query: str) -> str:
    """`query` as it is looked up: bounded, and as UTF-8 can hold it."""
    half = QUERY_CHARS // 2
    return clean(query if len(query) <= QUERY_CHARS else f"{query[:half]} {query[-half:]}")


def clean(text: str) -> str:
    """`text` as UTF-8 can hold it: a lone surrogate becomes U+FFFD."""
    return text.encode("utf-8", "replace").decode("utf-8") if not text.isascii() else text
