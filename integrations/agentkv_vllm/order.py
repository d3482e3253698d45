"""Order: which copies give way when a tier needs room, by the policy's own key over the sessions that have them.

Covers the copies of one tier: present ones by key, last uses of those that no session has, victims. A block of several sessions
counts as that of the one which needs it most; within a session the end of its prompt goes first, so that what is left is
still a beginning. A prefetch takes room only from those that the key puts before it. Does not cover sessions
(`sessions.py`). Needs no vLLM: a copy is anything with a `ref_cnt` that is 0 while nobody reads or writes it.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from typing import Any, Protocol

from agentkv.policy.evict import EvictKey
from agentkv.policy.hazard import stall_rate
from agentkv_vllm.sessions import Key, Session, Sessions


class Copy(Protocol):
    """What a tier knows of a block that it holds."""

    ref_cnt: Any


def _nobody(used_s: float) -> Session:
    """The last use of a block that no session has, in the shape that a key reads."""
    return Session(name="", order=0, used_s=used_s)


class Order:
    """Copies in one tier. Not thread-safe by itself; reads sessions under their lock."""

    def __init__(self, sessions: Sessions, *, key: EvictKey = stall_rate) -> None:
        self._sessions = sessions
        self._key = key
        self.copies: dict[Key, Any] = {}
        self._given_up = sessions.given_up()
        self._used: OrderedDict[Key, float] = OrderedDict()  # every copy's last use, the oldest first

    def add(self, key: Key, copy: Copy) -> None:
        """A copy that is there from now on."""
        self.copies[key] = copy
        self.use((key,))

    def remove(self, key: Key) -> None:
        """A copy that is gone; KeyError if there is none."""
        del self.copies[key]
        self._used.pop(key, None)

    def use(self, keys: Iterable[Key]) -> None:
        """These were used, the first of them most recently: the end of a prompt is older than its beginning."""
        now_s = self._sessions.clock.now_s()
        for key in reversed(list(keys)):
            if key in self.copies:
                self._used[key] = now_s
                self._used.move_to_end(key)

    def clear(self) -> None:
        """No copy is left."""
        self.copies.clear()
        self._used.clear()

    def victims(self, n: int, protected: Collection[Key], *, asker: str = "") -> list[Key] | None:
        """Exactly `n` copies to give up, the first to go first; None, and nothing changed, where there are not so many.

        `asker`: the session for which a prefetch needs the room; it gets none of its own, nor of those due before it.
        """
        if n <= 0:
            return []
        self._last_in_line()
        found: list[Key] = []
        kept = set(protected)
        with self._sessions.lock:
            for key in self._giving_way(asker):
                if key not in kept and self.copies[key].ref_cnt == 0:
                    kept.add(key)
                    found.append(key)
                    if len(found) == n:
                        return found
        return None

    def check(self) -> None:
        """Every redundant fact, recomputed."""
        assert self._used.keys() == self.copies.keys(), "a use without a copy, or the other way round"

    def _last_in_line(self) -> None:
        """What its session has given up goes before anything else."""
        while self._given_up:
            key = self._given_up.popleft()
            if key in self._used:
                self._used[key] = -math.inf
                self._used.move_to_end(key, last=False)

    def _giving_way(self, asker: str) -> Iterator[Key]:
        """Candidates, the first to go first; protected and busy ones are among them."""
        now_s = self._sessions.clock.now_s()
        ranked = self._ranked(now_s)
        limit = self._limit(asker, ranked, now_s)
        place = {session.name: number for number, (_, session) in enumerate(ranked)}
        loose = self._loose()
        waiting = next(loose, None)
        for number, (rank, session) in enumerate(ranked):
            if limit is not None and rank <= limit:
                break
            while waiting is not None and self._rank_of_loose(waiting, now_s) >= rank:
                yield waiting
                waiting = next(loose, None)
            for key in reversed(session.keys()):
                owners = self._sessions.owners(key)
                if key in self.copies and all(place.get(owner, number) <= number for owner in owners):
                    yield key
        while waiting is not None:
            if limit is not None and self._rank_of_loose(waiting, now_s) <= limit:
                return
            yield waiting
            waiting = next(loose, None)

    def _ranked(self, now_s: float) -> list[tuple[tuple[float, ...], Session]]:
        ranked = []
        for session in self._sessions.every():
            if session.running:
                session.used_s = now_s
            ranked.append((self._key(session, now_s), session))
        return sorted(ranked, key=lambda pair: pair[0], reverse=True)

    def _limit(
        self, asker: str, ranked: Iterable[tuple[tuple[float, ...], Session]], now_s: float
    ) -> tuple[float, ...] | None:
        """The rank of whoever asks: nobody at or below it gives way to a prefetch."""
        if not asker:
            return None
        return next((rank for rank, session in ranked if session.name == asker), self._key(_nobody(now_s), now_s))

    def _loose(self) -> Iterator[Key]:
        """Blocks that no session has, the longest unused first."""
        return (key for key in list(self._used) if not self._sessions.owners(key))

    def _rank_of_loose(self, key: Key, now_s: float) -> tuple[float, ...]:
        return self._key(_nobody(self._used[key]), now_s)
