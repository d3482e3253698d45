"""Rates: how fast this machine copies, reads, writes and computes contexts, as far as it was measured.

Covers the values and what follows from them for one context. Does not measure (`kv/gauge.py`, `engine/local/gauge.py`),
does not keep them (`runtime/calibration.py`), does not compare (`policy/cost.py`). Bytes, seconds, tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from agentkv.errors import ConfigError

OVERLAP = 1 / 8
"""Part of the copy to the device that a restore from disk adds to its reading: the rest runs while others still read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """Seconds to compute a context of C tokens: quadratic_s C^2 + linear_s C + constant_s (attention, matmuls, rest)."""

    linear_s: float
    quadratic_s: float = 0.0
    constant_s: float = 0.0

    def __post_init__(self) -> None:
        coefficients = (self.linear_s, self.quadratic_s, self.constant_s)
        if not all(0 <= value < math.inf for value in coefficients):
            raise ConfigError(f"prefill coefficients must be finite and >= 0, got {coefficients}")

    def recompute_s(self, tokens: int) -> float:
        """Seconds to compute `tokens` again from nothing."""
        if tokens <= 0:
            return 0.0
        return self.quadratic_s * tokens * tokens + self.linear_s * tokens + self.constant_s

    def extend_s(self, start: int, end: int) -> float:
        """Seconds to compute tokens `start`..`end` of a context whose first `start` tokens are there."""
        return self.recompute_s(end) - self.recompute_s(start) if end > start else 0.0

    def scaled(self, factor: float) -> Prefill:
        """Everything slower by `factor`."""
        return Prefill(
            linear_s=self.linear_s * factor,
            quadratic_s=self.quadratic_s * factor,
            constant_s=self.constant_s * factor,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Measured on one machine with one model's blocks. `read_bytes_s` and `write_bytes_s` are None without a disk.

    `memcpy_bytes_s`: one thread, one run of host memory: the ceiling to hold the others against. `measured_at`: Unix
    seconds of the last measurement or refinement. `samples`: how many of them went in. Raises ConfigError on rates
    that no measurement gives.
    """

    memcpy_bytes_s: float
    h2d_bytes_s: float
    d2h_bytes_s: float
    read_bytes_s: float | None = None
    write_bytes_s: float | None = None
    prefill: Prefill
    measured_at: float = 0.0
    samples: int = 1

    def __post_init__(self) -> None:
        for name in ("memcpy_bytes_s", "h2d_bytes_s", "d2h_bytes_s", "read_bytes_s", "write_bytes_s"):
            value = getattr(self, name)
            if value is None and name in ("read_bytes_s", "write_bytes_s"):
                continue
            if value is None or not 0 < value < math.inf:
                raise ConfigError(f"{name}={value}: a rate is finite and > 0")
        if (self.read_bytes_s is None) != (self.write_bytes_s is None):
            raise ConfigError("a disk has both a read and a write rate, or neither was measured")
        if not 0 <= self.measured_at < math.inf or self.samples < 1:
            raise ConfigError(f"measured_at={self.measured_at} and samples={self.samples} say nothing of a measurement")

    def recompute_s(self, tokens: int) -> float:
        """Seconds to compute a context of `tokens` from nothing."""
        return self.prefill.recompute_s(tokens)

    def restore_host_s(self, size_bytes: float) -> float:
        """Seconds to copy `size_bytes` from host memory to the device."""
        return size_bytes / self.h2d_bytes_s

    def restore_disk_s(self, size_bytes: float) -> float | None:
        """Seconds to bring `size_bytes` from disk to the device; None without a disk.

        Reading, and the last part of the copy: the rest of it runs while blocks are still read.
        """
        if self.read_bytes_s is None:
            return None
        return size_bytes / self.read_bytes_s + OVERLAP * self.restore_host_s(size_bytes)
