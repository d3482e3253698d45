"""Table: the passages in the database: put in, taken out, found by their words.

Covers duplicates (stored once, each origin kept), removal by origin or age, the bound on their number, and the lexical
half of a search: bm25 finds candidates, how much of the query's weight they hold is their score. Does not cover
vectors' search (`vectors.py`) nor how both are weighed (`memory.py`).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentkv.context.memory.terms import terms

if TYPE_CHECKING:
    import sqlite3

QUERY_TERMS = 48
"""Of a long query the rarest terms are searched for."""
MAX_POSTINGS = 2_000
HEAVIEST_TERMS = 12
"""A passage that holds terms of this weight covers any query, however long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One passage to write."""

    namespace: str
    kind: str
    text: str
    source: str
    task: str
    tags: tuple[str, ...]
    at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One passage as read, with its newest origin."""

    id: int | str
    kind: str
    text: str
    at_ms: int
    source: str
    task: str
    tags: tuple[str, ...]


def insert(connection: sqlite3.Connection, entry: Entry, embedder: str, vector: bytes | None) -> bool:
    """Write one passage and its origin; False if its text was there already (then it is as new as this one)."""
    digest = hashlib.blake2b(entry.text.encode(), digest_size=16).digest()
    found = connection.execute(
        "INSERT INTO passages(namespace, kind, digest, text, at_ms, embedder, vector) VALUES (?, ?, ?, ?, ?, ?, ?) "
        "ON CONFLICT DO NOTHING RETURNING id",
        (entry.namespace, entry.kind, digest, entry.text, entry.at_ms, embedder, vector),
    ).fetchone()
    if found is None:
        key = (entry.at_ms, entry.namespace, entry.kind, digest)
        sql = "UPDATE passages SET at_ms = max(at_ms, ?) WHERE namespace = ? AND kind = ? AND digest = ? RETURNING id"
        (passage,) = connection.execute(sql, key).fetchone()
    else:
        (passage,) = found
        words = " ".join(terms(entry.text, singles=True))
        connection.execute("INSERT INTO words(rowid, space, terms) VALUES (?, ?, ?)", (passage, _space(entry), words))
    origin = (passage, entry.source, entry.task, json.dumps(entry.tags), entry.at_ms)
    connection.execute("INSERT OR REPLACE INTO origins VALUES (?, ?, ?, ?, ?)", origin)
    return found is not None


def remove(connection: sqlite3.Connection, passages: Iterable[int]) -> int:
    """Take passages out, words, origins and all; the number that were there."""
    removed = 0
    for passage in passages:
        removed += connection.execute("DELETE FROM passages WHERE id = ?", (passage,)).rowcount
        connection.execute("DELETE FROM words WHERE rowid = ?", (passage,))
    if removed:
        connection.execute("UPDATE meta SET value = value + 1 WHERE key = 'removals'")
    return removed


def remove_source(connection: sqlite3.Connection, namespace: str, source: str) -> int:
    """Take out what came from `source` alone; what came from elsewhere too stays, without this origin."""
    touched = [
        passage
        for (passage,) in connection.execute(
            "SELECT passage FROM origins JOIN passages ON id = passage WHERE source = ? AND namespace = ?",
            (source, namespace),
        )
    ]
    connection.executemany(
        "DELETE FROM origins WHERE passage = ? AND source = ?", ((passage, source) for passage in touched)
    )
    sql = "SELECT count(*) FROM origins WHERE passage = ?"
    return remove(connection, [p for p in set(touched) if not connection.execute(sql, (p,)).fetchone()[0]])


def remove_older(connection: sqlite3.Connection, namespace: str, before_ms: int) -> int:
    """Take out what was last remembered before `before_ms`."""
    sql = "SELECT id FROM passages WHERE namespace = ? AND at_ms < ?"
    return remove(connection, [row[0] for row in connection.execute(sql, (namespace, before_ms)).fetchall()])


def remove_one(connection: sqlite3.Connection, namespace: str, passage: int) -> int:
    """Take out one passage if it is of this namespace."""
    sql = "SELECT id FROM passages WHERE namespace = ? AND id = ?"
    return remove(connection, [row[0] for row in connection.execute(sql, (namespace, passage)).fetchall()])


def remove_oldest(connection: sqlite3.Connection, max_passages: int) -> int:
    """Take out the oldest passages of all namespaces until `max_passages` are left."""
    (there,) = connection.execute("SELECT count(*) FROM passages").fetchone()
    sql = "SELECT id FROM passages ORDER BY at_ms, id LIMIT ?"
    return remove(connection, [row[0] for row in connection.execute(sql, (max(0, there - max_passages),)).fetchall()])


def weights(connection: sqlite3.Connection, query: str) -> tuple[dict[str, float], list[str]]:
    """The rarest terms of `query` with what each is worth (its inverse document frequency), and those to search for.

    Those are the rarest that together stand in MAX_POSTINGS passages, so that a search costs the same however many
    there are; what is left out is worth next to nothing.
    """
    (total,) = connection.execute("SELECT count(*) FROM passages").fetchone()
    held = {}
    for term in dict.fromkeys(terms(query)):
        row = connection.execute("SELECT doc FROM spread WHERE term = ?", (term,)).fetchone()
        held[term] = row[0] if row else 0
    rarest = sorted(held, key=lambda term: held[term])[:QUERY_TERMS]
    weighed = {term: worth(total, held[term]) for term in rarest}
    searched: list[str] = []
    postings = 0
    for term in rarest:
        postings += held[term]
        if held[term] and (postings <= MAX_POSTINGS or not searched):
            searched.append(term)
    return weighed, searched


def by_words(connection: sqlite3.Connection, namespace: str, searched: Collection[str], limit: int) -> list[int]:
    """Ids of passages that hold any of the terms, best bm25 first."""
    if not searched:
        return []
    any_of = " OR ".join(f'"{term}"' for term in searched)
    match = f"space : {_name(namespace)} AND terms : ({any_of})"
    sql = "SELECT rowid FROM words WHERE words MATCH ? ORDER BY bm25(words, 0.0, 1.0) LIMIT ?"
    return [row[0] for row in connection.execute(sql, (match, limit))]


def coverage(
    connection: sqlite3.Connection, weighed: Mapping[str, float], passages: Collection[int]
) -> dict[int, float]:
    """For each of `passages` how much of the query's weight its terms hold, 0 to 1."""
    sql = f"SELECT rowid, terms FROM words WHERE rowid IN ({_marks(passages)})"
    found = connection.execute(sql, tuple(passages)).fetchall()
    return {passage: covered(weighed, words.split()) for passage, words in found}


def worth(total: int, holders: int) -> float:
    """The inverse document frequency of a term that `holders` of `total` passages hold, as in BM25, never below 0."""
    return math.log1p(max(0.0, total - holders + 0.5) / (holders + 0.5))


def covered(weighed: Mapping[str, float], held: Collection[str]) -> float:
    """How much of the weight of a query's terms `held` has, 0 to 1."""
    whole = sum(sorted(weighed.values(), reverse=True)[:HEAVIEST_TERMS])
    return min(1.0, sum(weighed[term] for term in weighed.keys() & set(held)) / whole) if whole else 0.0


def rows(
    connection: sqlite3.Connection, namespace: str, kinds: Collection[str], passages: Collection[int]
) -> list[Row]:
    """The passages with these ids, of this namespace and these kinds only."""
    sql = (
        "SELECT id, kind, text, p.at_ms, source, task, tags, max(o.at_ms) FROM passages p JOIN origins o ON passage = id "
        f"WHERE namespace = ? AND kind IN ({_marks(kinds)}) AND id IN ({_marks(passages)}) GROUP BY id"
    )
    return [
        Row(
            id=row[0],
            kind=row[1],
            text=row[2],
            at_ms=row[3],
            source=row[4],
            task=row[5],
            tags=tuple(json.loads(row[6])),
        )
        for row in connection.execute(sql, (namespace, *kinds, *passages))
    ]


def texts(connection: sqlite3.Connection, passages: Collection[int]) -> list[tuple[int, str]]:
    """Ids and texts of those that are there."""
    return connection.execute(
        f"SELECT id, text FROM passages WHERE id IN ({_marks(passages)})", tuple(passages)
    ).fetchall()


def set_vector(connection: sqlite3.Connection, passage: int, embedder: str, vector: bytes | None) -> None:
    """Give a passage another vector; who holds vectors in memory reads them all again."""
    connection.execute("UPDATE passages SET vector = ?, embedder = ? WHERE id = ?", (vector, embedder, passage))
    connection.execute("UPDATE meta SET value = value + 1 WHERE key = 'removals'")


def _marks(values: Collection[object]) -> str:
    return ",".join("?" * len(values))


def _space(entry: Entry) -> str:
    return _name(entry.namespace)


def _name(namespace: str) -> str:
    """A namespace as a single term, so that the index itself keeps them apart."""
    return "n" + hashlib.blake2b(namespace.encode(), digest_size=12).hexdigest()


def changed(connection: sqlite3.Connection) -> int:
    """How many removals there were; more than at the last look means that what is held in memory may be gone."""
    return int(connection.execute("SELECT value FROM meta WHERE key = 'removals'").fetchone()[0])


def vectors_after(
    connection: sqlite3.Connection, namespace: str, after: int
) -> Sequence[tuple[int, str, str, bytes | None]]:
    """Id, kind, embedder and vector of the passages with ids greater than `after`, in order."""
    sql = "SELECT id, kind, embedder, vector FROM passages WHERE namespace = ? AND id > ? ORDER BY id"
    return connection.execute(sql, (namespace, after)).fetchall()
