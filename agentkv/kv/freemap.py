"""FreeMap: which slots of a tier are free. Prefers runs of neighbours, because a run is one copy."""

from __future__ import annotations

from collections.abc import Iterable


class FreeMap:
    """`size` numbered slots, all free at first. Not thread-safe: the owner's lock guards it."""

    def __init__(self, size: int) -> None:
        self._map = bytearray(b"\x01" * size)
        self._free = size
        self._cursor = 0

    def __len__(self) -> int:
        """Free slots."""
        return self._free

    @property
    def size(self) -> int:
        """All slots."""
        return len(self._map)

    def grow(self, more: int) -> None:
        """Add `more` free slots at the end."""
        self._map.extend(b"\x01" * more)
        self._free += more

    def take(self, n: int) -> list[int]:
        """`n` slots, neighbours where possible, or ValueError (and nothing taken) if fewer are free."""
        if n > self._free:
            raise ValueError(f"{n} slots asked, {self._free} free")
        if n == 0:
            return []
        run = self._map.find(b"\x01" * n, self._cursor)
        if run < 0:
            run = self._map.find(b"\x01" * n)
        slots = list(range(run, run + n)) if run >= 0 else self._scattered(n)
        for slot in slots:
            self._map[slot] = 0
        self._free -= n
        self._cursor = slots[-1] + 1
        return slots

    def _scattered(self, n: int) -> list[int]:
        slots: list[int] = []
        at = -1
        while len(slots) < n:
            at = self._map.find(1, at + 1)
            slots.append(at)
        return slots

    def give(self, slots: Iterable[int]) -> None:
        """Free `slots`; giving a free slot is a bug and raises ValueError."""
        for slot in slots:
            if self._map[slot]:
                raise ValueError(f"slot {slot} is already free")
            self._map[slot] = 1
            self._free += 1

    def is_free(self, slot: int) -> bool:
        """True if nobody has taken `slot`."""
        return bool(self._map[slot])

    def check(self) -> None:
        """Recount."""
        assert self._free == sum(self._map), f"{self._free} counted free, {sum(self._map)} are"
