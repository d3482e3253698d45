"""Drafts: what a call will probably write next, copied from where its context has said the same before.

Prompt lookup: agents write again what they read (paths, code, JSON, log lines), so the tokens that followed the last
few ones earlier are a fair guess, and checking several guesses costs a step little more than one token does. What is
drafted never changes what is written (`sampler.py` says why), only how many steps it takes.

Covers: finding a draft, and how long it may be. Does not cover: checking it, nor whose turn it is (`batch.py`).
The idea is A. Saxena's "prompt lookup decoding" (2023); the length rule is our own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MOST_DRAFTED = 15
"""With the token before them 16 rows: on CPUs 1 to 16 rows of a matrix product cost about the same."""
_MATCH = 3
"""So many last tokens must have stood there before."""
_LONGEST_MATCH = 16
_CANDIDATES = 8
_FIRST = 4
_LONGEST_REST = 64


class Drafter:
    """Drafts for one call. `taken` tells it what became of each, and it drafts more, less, or rests for a while."""

    def __init__(self, *, most: int = MOST_DRAFTED) -> None:
        self.drafted = 0
        """Tokens guessed so far, and how many of them were right."""
        self.accepted = 0
        self._most = most
        self._length = min(_FIRST, most)
        self._resting = 0
        self._rest = 1
        self._ids = np.empty(0, dtype=np.int32)
        self._count = 0

    def draft(self, ids: Sequence[int], most: int) -> list[int]:
        """At most `most` tokens that may follow `ids`; [] where nothing is known. `ids` only ever grows."""
        if self._resting:
            self._resting -= 1
            return []
        most = min(most, self._length)
        if most < 1 or len(ids) <= _MATCH:
            return []
        known = self._known(ids)
        at = _last_place(known)
        return [] if at is None else known[at : at + most].tolist()

    def taken(self, drafted: int, right: int) -> None:
        """Of the last draft's `drafted` tokens the first `right` were what the model chose."""
        self.drafted += drafted
        self.accepted += right
        if right == drafted:
            self._length = min(2 * self._length, self._most)
        else:
            self._length = max(2, min(self._length, right + 2))
        if right:
            self._rest = 1
        else:  # the text only looks alike: each failure costs a little, so they become rare
            self._resting, self._rest = self._rest, min(2 * self._rest, _LONGEST_REST)

    def _known(self, ids: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        """`ids` as an array; only new ones are copied."""
        if len(ids) > len(self._ids):
            grown = np.empty(max(256, 2 * len(ids)), dtype=np.int32)
            grown[: self._count] = self._ids[: self._count]
            self._ids = grown
        self._ids[self._count : len(ids)] = ids[self._count :]
        self._count = len(ids)
        return self._ids[: self._count]


def _last_place(ids: np.ndarray[tuple[int], np.dtype[np.int32]]) -> int | None:
    """Where the text goes on after an earlier place like its end: of the last few such places the one with the longest
    common past, of equals the latest.
    """
    end = len(ids) - _MATCH
    found = ids[:end] == ids[end]
    for offset in range(1, _MATCH):
        found &= ids[offset : end + offset] == ids[end + offset]
    places = np.flatnonzero(found)[-_CANDIDATES:] + _MATCH
    if not len(places):
        return None
    return int(max(places.tolist(), key=lambda place: (_common_past(ids, place), place)))


def _common_past(ids: np.ndarray[tuple[int], np.dtype[np.int32]], place: int) -> int:
    longest = min(place, _LONGEST_MATCH)
    same = ids[place - longest : place] == ids[len(ids) - longest :]
    return longest if same.all() else longest - 1 - int(np.flatnonzero(~same)[-1])
