"""Vectors: the embeddings of one namespace in memory, searched by brute force (10,000 of 512 numbers: a few ms)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Vectors:
    """Rows of length 1, each with an id and the number of its kind (0 to 255); ids grow. Not thread-safe: the owner holds a lock."""

    def __init__(self, dimensions: int) -> None:
        import numpy as np

        self.dimensions = dimensions
        self._size = 0
        self._ids = np.zeros(64, dtype=np.int64)
        self._kinds = np.zeros(64, dtype=np.uint8)
        self._rows = np.zeros((64, dimensions), dtype=np.float32)

    def __len__(self) -> int:
        return self._size

    def add(self, ids: list[int], kinds: list[int], rows: NDArray[np.float32]) -> None:
        """Append `rows` [n, dimensions]; `ids` must be greater than those before. Amortised constant per row."""
        import numpy as np

        end = self._size + len(ids)
        if end > len(self._ids):
            room = max(end, 2 * len(self._ids))
            self._ids = np.resize(self._ids, room)
            self._kinds = np.resize(self._kinds, room)
            grown = np.zeros((room, self.dimensions), dtype=np.float32)
            grown[: self._size] = self._rows[: self._size]
            self._rows = grown
        self._ids[self._size : end] = ids
        self._kinds[self._size : end] = kinds
        self._rows[self._size : end] = rows
        self._size = end

    def nearest(self, query: NDArray[np.float32], k: int, kinds: Collection[int]) -> list[tuple[int, float]]:
        """At most `k` ids with their cosines, greatest first, of the given kinds."""
        import numpy as np

        if not self._size:
            return []
        scores = self._rows[: self._size] @ query
        scores[~np.isin(self._kinds[: self._size], list(kinds))] = -2.0
        top = np.argpartition(scores, -k)[-k:] if k < self._size else np.arange(self._size)
        top = top[np.argsort(-scores[top], kind="stable")]
        return [(int(self._ids[at]), float(scores[at])) for at in top if scores[at] > 0]

    def cosines(self, query: NDArray[np.float32], ids: Iterable[int]) -> dict[int, float]:
        """The cosine of each of `ids` that is here."""
        import numpy as np

        wanted = np.array(sorted(ids), dtype=np.int64)
        at = np.searchsorted(self._ids[: self._size], wanted)
        here = at < self._size
        here[here] = self._ids[at[here]] == wanted[here]
        scores = self._rows[at[here]] @ query
        return dict(zip(wanted[here].tolist(), scores.tolist(), strict=True))
