"""FreeMap: which slots of a tier are free, in runs of neighbours, because a run is one copy.

Free runs are kept by length, in classes of powers of two, and each knows its other end, so taking and giving cost
some steps per run, however many slots there are: `take` gives the smallest run that is long enough, and where there
is none, few long ones rather than many scattered slots.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import islice

_LOOKED_AT = 8
"""Runs of the request's own class that are looked at: about half of them are too short."""


class FreeMap:
    """`size` numbered slots, all free at first. Not thread-safe: the owner's lock guards it."""

    def __init__(self, size: int) -> None:
        self._map = bytearray()
        self._other_end = array("q")
        """Of a free run's first slot its last, of the last the first; meaningless elsewhere."""
        self._classes: list[dict[int, None]] = []
        """First slots of free runs; class k has those of 2^k to 2^(k+1) - 1 slots."""
        self._free = 0
        self.grow(size)

    def __len__(self) -> int:
        """Free slots."""
        return self._free

    @property
    def size(self) -> int:
        """All slots."""
        return len(self._map)

    def grow(self, more: int) -> None:
        """Add `more` free slots at the end."""
        first = len(self._map)
        self._map.extend(bytes(more))
        self._other_end.frombytes(bytes(8 * more))
        while len(self._classes) < len(self._map).bit_length():
            self._classes.append({})
        if more:
            self._give_run(first, first + more - 1)

    def take(self, n: int) -> list[int]:
        """`n` slots, ascending, neighbours where possible, or ValueError (and nothing taken) if fewer are free."""
        if n > self._free:
            raise ValueError(f"{n} slots asked, {self._free} free")
        left, runs = n, []
        while left:
            found = self._long_enough(left)
            if found is not None:
                runs.append((found, self._shorten(found, left)))
                break
            whole = self._longest(left)
            runs += whole
            left -= sum(last + 1 - first for first, last in whole)
        self._free -= n
        slots: list[int] = []
        for first, last in sorted(runs):
            if first == last:
                self._map[first] = 0
                slots.append(first)
            else:
                self._map[first : last + 1] = bytes(last + 1 - first)
                slots.extend(range(first, last + 1))
        return slots

    def _long_enough(self, n: int) -> int | None:
        """The first slot of a run of at least `n` slots, of the shortest there are; None if none was found."""
        own = n.bit_length() - 1
        for first in islice(reversed(self._classes[own]), _LOOKED_AT):
            if self._other_end[first] - first + 1 >= n:
                return first
        for longer in islice(self._classes, own + 1, None):
            if longer:
                return next(reversed(longer))
        return None

    def _longest(self, n: int) -> list[tuple[int, int]]:
        """Remove some of the longest runs, together at most `n` slots: (first, last) of each."""
        k = next(k for k in reversed(range(len(self._classes))) if self._classes[k])
        runs, other_end, taken = self._classes[k], self._other_end, []
        for _ in range(min(len(runs), max(1, n >> (k + 1)))):
            first, _ = runs.popitem()
            taken.append((first, other_end[first]))
        return taken

    def _shorten(self, first: int, n: int) -> int:
        """Take `n` slots off the front of a run; returns the last of them."""
        end = self._other_end[first]
        del self._classes[(end - first + 1).bit_length() - 1][first]
        if first + n <= end:
            self._index(first + n, end)
        return first + n - 1

    def give(self, slots: Iterable[int]) -> None:
        """Free `slots`; giving a free slot is a bug and raises ValueError."""
        for first, last in _runs(sorted(slots)):
            twice = self._map.find(1, first, last + 1)
            if twice >= 0:
                raise ValueError(f"slot {twice} is already free")
            self._give_run(first, last)

    def _give_run(self, first: int, last: int) -> None:
        free, other_end = self._map, self._other_end
        count = last + 1 - first
        if count == 1:
            free[first] = 1
        else:
            free[first : last + 1] = b"\x01" * count
        self._free += count
        if first and free[first - 1]:
            start = other_end[first - 1]
            del self._classes[(first - start).bit_length() - 1][start]
            first = start
        if last + 1 < len(free) and free[last + 1]:
            end = other_end[last + 1]
            del self._classes[(end - last).bit_length() - 1][last + 1]
            last = end
        self._index(first, last)

    def _index(self, first: int, last: int) -> None:
        """Make the run of free slots `first` ... `last` known."""
        self._other_end[first], self._other_end[last] = last, first
        self._classes[(last + 1 - first).bit_length() - 1][first] = None

    def is_free(self, slot: int) -> bool:
        """True if nobody has taken `slot`."""
        return bool(self._map[slot])

    def check(self) -> None:
        """Recount."""
        assert self._free == sum(self._map), f"{self._free} counted free, {sum(self._map)} are"
        runs = dict(_runs([slot for slot, free in enumerate(self._map) if free]))
        known = {first: k for k, firsts in enumerate(self._classes) for first in firsts}
        assert known == {first: (last + 1 - first).bit_length() - 1 for first, last in runs.items()}, "runs by length"
        for first, last in runs.items():
            assert (self._other_end[first], self._other_end[last]) == (last, first), f"the ends of run {first}"


def _runs(slots: Sequence[int]) -> list[tuple[int, int]]:
    """(first, last) of each run of neighbours; `slots` ascend."""
    if not slots:
        return []
    first, last = slots[0], slots[-1]
    if len(slots) == 1 or (last - first + 1 == len(slots) and slots == list(range(first, last + 1))):
        return [(first, last)]
    runs = []
    last = first
    for slot in slots[1:]:
        if slot != last + 1:
            runs.append((first, last))
            first = slot
        last = slot
    runs.append((first, last))
    return runs
