"""Refusals: which of our fields which server does not take, for which of its routes and models.

Covers reading a refusal (is it about a field of ours?) and what is remembered of it, in memory and bounded. Does not cover
what is sent instead (`inject.py`) nor what outlives the process (`probe.py`).
"""

from __future__ import annotations

import json
import threading
from collections import Counter, OrderedDict
from typing import Any, NamedTuple

MOST_PLACES = 1024
MARKS_AFTER = 3
"""A mark inside of a message is refused for where it stands as well: only as many refusals with none taken in between are about marks."""


class Place(NamedTuple):
    """Where a request goes: its endpoint (`places.place`), its whole path, and the model that it asks for. "": all of them."""

    origin: str
    path: str = ""
    model: str = ""


class Refusals:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._refused: OrderedDict[Place, frozenset[str]] = OrderedDict()
        self._taken: OrderedDict[tuple[Place, frozenset[str]], None] = OrderedDict()
        self._marks: Counter[Place] = Counter()

    def at(self, origin: str) -> frozenset[str]:
        """What this server refused, for any of its routes and models."""
        with self._lock:
            return frozenset().union(*(names for place, names in self._refused.items() if place.origin == origin))

    def of(self, place: Place) -> frozenset[str]:
        """What is not to be sent there."""
        if not self._refused:
            return frozenset()
        nothing: frozenset[str] = frozenset()
        return self._refused.get(place, nothing) | self._refused.get(Place(place.origin), nothing)

    def add(self, place: Place, names: frozenset[str]) -> None:
        """From now on these are left out there."""
        with self._lock:
            self._refused[place] = self._refused.pop(place, frozenset()) | names
            _bound(self._refused)

    def forget(self, origin: str) -> None:
        """Another server is there: what was refused or taken says nothing of it."""
        with self._lock:
            for kept in (self._refused, self._marks):
                for place in [place for place in kept if place.origin == origin]:
                    del kept[place]
            for taken in [taken for taken in self._taken if taken[0].origin == origin]:
                del self._taken[taken]

    def learn(self, place: Place, names: frozenset[str], marks: frozenset[str]) -> frozenset[str]:
        """These were refused, and it helped to leave them out: those of them that are left out from now on."""
        if names & marks:
            with self._lock:
                self._marks[place] += 1
                if self._marks[place] < MARKS_AFTER:
                    names -= marks
                else:
                    del self._marks[place]
                while len(self._marks) > MOST_PLACES:
                    del self._marks[next(iter(self._marks))]
        if names:
            self.add(place, names)
        return names

    def take(self, place: Place, names: frozenset[str], marks: frozenset[str]) -> None:
        """These were taken."""
        if names & marks and self._marks:
            with self._lock:
                self._marks.pop(place, None)
        if (place, names) not in self._taken:
            with self._lock:
                self._taken[place, names] = None
                _bound(self._taken)

    def were_taken(self, place: Place, names: frozenset[str]) -> bool:
        """Whether all of these were taken there before."""
        return (place, names) in self._taken


def _bound(kept: OrderedDict[Any, Any]) -> None:
    while len(kept) > MOST_PLACES:
        kept.popitem(last=False)


def named_in(text: str, names: frozenset[str]) -> frozenset[str]:
    """Those of our fields that a refusal speaks of, as they are or in the server's own spelling (promptCacheKey)."""
    plain = _plain(text)
    return frozenset(name for name in names if _plain(name) in plain)


def _plain(text: str) -> str:
    return text.replace("_", "").replace("-", "").lower()


def is_about_another(text: str) -> bool:
    """Whether a refusal that names none of ours names another parameter, as OpenAI's do."""
    try:
        error = json.loads(text)["error"]
        return isinstance(error["param"], str) and error["param"] != ""
    except (ValueError, LookupError, TypeError, RecursionError):
        return False
