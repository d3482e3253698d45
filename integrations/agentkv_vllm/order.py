"""Order: which copies give way when a tier needs room, by the policy's own key over the sessions that have them.

Covers the copies of one tier: present ones by key, last uses of those that no session has, victims. A block of several sessions
counts as that of the one which needs it most; within a session the end of its prompt goes first, so that what is left is
still a beginning. A prefetch takes room only from those that the key puts before it. Does not cover sessions
(`sessions.py`). Needs no vLLM: a copy is anything with a `ref_cnt` that is 0 while nobody reads or writes it.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Protocol

from agentkv.policy.evict import EvictKey
from agentkv.policy.hazard import stall_rate
from agentkv_vllm.sessions import Key, Session, Sessions

_FEW = 64
"""With more sessions than these their ranks are taken anew only every `_RANKS_S`."""
_RANKS_S = 0.05


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
        self._let_go = sessions.let_go()
        self._loose: OrderedDict[Key, float] = (
            OrderedDict()
        )  # last uses of what nobody has, as far as known; oldest first
        self._held: dict[Key, float] = {}  # last uses of what was found to have an owner
        self._ranks: tuple[float, list[tuple[tuple[float, ...], Session]]] = (-math.inf, [])

    def add(self, key: Key, copy: Copy) -> None:
        """A copy that is there from now on."""
        self.copies[key] = copy
        self.use((key,))

    def remove(self, key: Key) -> None:
        """A copy that is gone; KeyError if there is none."""
        del self.copies[key]
        self._loose.pop(key, None)
        self._held.pop(key, None)

    def use(self, keys: Iterable[Key]) -> None:
        """These were used, the first of them most recently: the end of a prompt is older than its beginning."""
        now_s = self._sessions.clock.now_s()
        for key in reversed(list(keys)):
            if key in self._held:
                self._held[key] = now_s
            elif key in self.copies:
                self._loose[key] = now_s
                self._loose.move_to_end(key)

    def clear(self) -> None:
        """No copy is left."""
        self.copies.clear()
        self._loose.clear()
        self._held.clear()

    def victims(
        self,
        n: int,
        protected: Collection[Key],
        *,
        asker: str = "",
        spared: Callable[[Key], bool] = lambda _: False,
    ) -> list[Key] | None:
        """Exactly `n` copies to give up, the first to go first; None, and nothing changed, where there are not so many.

        `asker`: the session for which a prefetch needs the room; it gets none of its own, nor of those due before it.
        `spared`: further copies that are not to go now.
        """
        if n <= 0:
            return []
        with self._sessions.lock:
            found = self._found(n, protected, asker, spared)
            if found is None and self._sort_out():
                found = self._found(n, protected, asker, spared)
        return found

    def _found(self, n: int, protected: Collection[Key], asker: str, spared: Callable[[Key], bool]) -> list[Key] | None:
        self._take_back()
        found: list[Key] = []
        kept = set(protected)
        owned: list[Key] = []
        for key in self._giving_way(asker, owned):
            if key not in kept and self.copies[key].ref_cnt == 0 and not spared(key):
                kept.add(key)
                found.append(key)
                if len(found) == n:
                    break
        for key in owned:
            self._held[key] = self._loose.pop(key)
        return found if len(found) == n else None

    def check(self) -> None:
        """Every redundant fact, recomputed."""
        assert self._loose.keys() | self._held.keys() == self.copies.keys(), (
            "a use without a copy, or the other way round"
        )
        assert not self._loose.keys() & self._held.keys(), "one use for two"

    def used_s(self, key: Key) -> float:
        """When this copy was last used; -inf where its session has ended since."""
        return self._held[key] if key in self._held else self._loose[key]

    def _take_back(self) -> None:
        """What nobody has any more goes first; before everything, if its session has ended."""
        while self._let_go:
            key, over = self._let_go.popleft()
            if key in self.copies and not self._sessions.has_owner(key):
                used_s = self._held.pop(key) if key in self._held else self._loose[key]
                self._loose[key] = -math.inf if over else used_s
                self._loose.move_to_end(key, last=False)

    def _sort_out(self) -> bool:
        """Copies that lost their owner unheard (a queue is bounded) are loose again; whether there were any."""
        lost = [key for key in self._held if not self._sessions.has_owner(key)]
        for key in lost:
            self._loose[key] = self._held.pop(key)
        return bool(lost)

    def _giving_way(self, asker: str, owned: list[Key]) -> Iterator[Key]:
        """Candidates, the first to go first; protected and busy ones are among them. `owned` takes what is not loose."""
        now_s = self._sessions.clock.now_s()
        ranked = self._ranked(now_s)
        limit = self._limit(asker, ranked, now_s)
        place = {session.name: number for number, (_, session) in enumerate(ranked)}
        unseen = len(ranked)  # a session that came since: it computes now
        loose = self._loose_keys(owned)
        waiting = next(loose, None)
        for number, (rank, session) in enumerate(ranked):
            if limit is not None and rank <= limit:
                break
            while waiting is not None and self._rank_of_loose(waiting, now_s) >= rank:
                yield waiting
                waiting = next(loose, None)
            for key in reversed(session.keys()):
                owners = self._sessions.owners(key)
                if key in self.copies and all(place.get(owner, unseen) <= number for owner in owners):
                    yield key
        while waiting is not None:
            if limit is not None and self._rank_of_loose(waiting, now_s) <= limit:
                return
            yield waiting
            waiting = next(loose, None)

    def _ranked(self, now_s: float) -> list[tuple[tuple[float, ...], Session]]:
        """Sessions, the first to give way first. Of many it is asked anew only now and then: each costs microseconds."""
        made_s, ranked = self._ranks
        if len(ranked) > _FEW and 0 <= now_s - made_s < _RANKS_S:
            return ranked
        ranked = []
        for session in self._sessions.every():
            if session.running or session.returning:
                session.used_s = now_s
            ranked.append((self._key(session, now_s), session))
        ranked.sort(key=lambda pair: pair[0], reverse=True)
        self._ranks = (now_s, ranked)
        return ranked

    def _limit(
        self, asker: str, ranked: Iterable[tuple[tuple[float, ...], Session]], now_s: float
    ) -> tuple[float, ...] | None:
        """The rank of whoever asks: nobody at or below it gives way to a prefetch."""
        if not asker:
            return None
        return next((rank for rank, session in ranked if session.name == asker), self._key(_nobody(now_s), now_s))

    def _loose_keys(self, owned: list[Key]) -> Iterator[Key]:
        """Blocks that no session has, the longest unused first."""
        for key in self._loose:
            if self._sessions.has_owner(key):
                owned.append(key)
            else:
                yield key

    def _rank_of_loose(self, key: Key, now_s: float) -> tuple[float, ...]:
        return self._key(_nobody(self._loose[key]), now_s)
