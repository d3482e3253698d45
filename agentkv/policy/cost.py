"""What holding, moving and recomputing a context costs: arithmetic on measured rates.

Covers A1 (bytes per token) and A2 (restore against recompute, and where they cross). Does not measure: the rates come
from the tiers' receipts and the engine's prefill times. Units: tokens, bytes, seconds, bytes per second.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from agentkv.errors import ConfigError


def kv_bytes_per_token(*, layers: int, kv_heads: int, head_dim: int, dtype_bytes: int) -> int:
    """2 (K and V) x layers x kv_heads x head_dim x dtype_bytes. MHA: kv_heads = heads; MQA: kv_heads = 1."""
    factors = {"layers": layers, "kv_heads": kv_heads, "head_dim": head_dim, "dtype_bytes": dtype_bytes}
    for name, value in factors.items():
        if value < 1:
            raise ConfigError(f"{name}={value}: a model has at least 1")
    return 2 * layers * kv_heads * head_dim * dtype_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A way back to the device: `bytes_s` of throughput after `setup_s` of latency."""

    bytes_s: float
    setup_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.bytes_s < math.inf or not 0 <= self.setup_s < math.inf:
            raise ConfigError(f"a link needs bytes_s > 0 and setup_s >= 0, got {self.bytes_s} and {self.setup_s}")

    def restore_s(self, size_bytes: float) -> float:
        """Seconds to bring `size_bytes` back; nothing to bring costs nothing."""
        return self.setup_s + size_bytes / self.bytes_s if size_bytes > 0 else 0.0


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


def break_even_tokens(prefill: Prefill, link: Link, bytes_per_token: int) -> float:
    """The context length from which restoring is faster than recomputing, for all longer ones; inf if there is none.

    The larger root of quadratic_s C^2 + (linear_s - bytes_per_token / bytes_s) C + (constant_s - setup_s) = 0.
    """
    a = prefill.quadratic_s
    b = prefill.linear_s - bytes_per_token / link.bytes_s
    c = prefill.constant_s - link.setup_s
    if a == 0:
        if b > 0:
            return max(0.0, -c / b)
        return 0.0 if b == 0 and c > 0 else math.inf
    discriminant = b * b - 4 * a * c
    if discriminant < 0:
        return 0.0
    root = math.sqrt(discriminant)
    larger = (-b + root) / (2 * a) if b <= 0 else -2 * c / (b + root)  # the form without cancellation
    return max(0.0, larger)
