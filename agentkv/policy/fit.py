"""The fit of times: least squares that never says that more work takes less time.

Covers the arithmetic. What is measured and which columns it has is the business of whoever measures.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


def non_negative(columns: np.ndarray, wanted: np.ndarray) -> tuple[float, ...]:
    """The x >= 0 with the least |columns x - wanted|: with few columns every set of positive ones can be tried."""
    import numpy as np

    count = columns.shape[1]
    best, best_error = np.zeros(count), float("inf")
    for size in range(1, count + 1):
        for chosen in itertools.combinations(range(count), size):
            part = columns[:, chosen]
            norms = np.linalg.norm(part, axis=0)
            if not norms.all():
                continue
            solved, _, rank, _ = np.linalg.lstsq(part / norms, wanted, rcond=None)
            if rank < size or (solved < 0).any():
                continue
            error = float(np.linalg.norm(part / norms @ solved - wanted))
            if error < best_error - 1e-12:
                best, best_error = np.zeros(count), error
                best[list(chosen)] = solved / norms
    return tuple(float(value) for value in best)
