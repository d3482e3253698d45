"""What holding, moving and recomputing a context costs: arithmetic on measured rates.

Covers A1 (bytes per token) and A2 (restore against recompute, and where they cross). Does not measure: the rates are
`core/rates.py`'s, from `agentkv calibrate` and from real transfers. Units: tokens, bytes, seconds, bytes per second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from agentkv.core.rates import Prefill, Rates
from agentkv.errors import ConfigError

_SHORTEST_ROW_TOKENS = 512


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


def in_words(tokens: float) -> str:
    """A break-even length for people: "at every length", "from 812 tokens on", "at no length"."""
    if tokens == math.inf:
        return "at no length"
    return "at every length" if tokens < 1 else f"from {math.ceil(tokens)} tokens on"


def host_link(rates: Rates) -> Link:
    """From host memory to the device."""
    return Link(bytes_s=1 / rates.restore_host_s(1))


def disk_link(rates: Rates) -> Link | None:
    """From disk to the device; None where no disk was measured."""
    second_s = rates.restore_disk_s(1)
    return None if second_s is None else Link(bytes_s=1 / second_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Seconds until a context of `tokens` tokens is on the device again, by each way; `disk_s` None without a disk."""

    tokens: int
    recompute_s: float
    host_s: float
    disk_s: float | None

    @property
    def winner(self) -> str:
        """The fastest way: "recompute", "host" or "disk"; on a tie the one that needs least memory."""
        ways = {"recompute": self.recompute_s, "host": self.host_s}
        if self.disk_s is not None:
            ways = {"recompute": self.recompute_s, "disk": self.disk_s, "host": self.host_s}
        return min(ways, key=lambda way: ways[way])


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossover:
    """When recompute loses on one machine. Break-even lengths in tokens: 0 = it always loses, inf = it never does."""

    rows: tuple[Row, ...]
    host_tokens: float
    disk_tokens: float | None
    """None where no disk was measured."""


def table_lengths(limit_tokens: int) -> tuple[int, ...]:
    """512, 1024, ... up to the model's limit, which is the last one; a shorter model has its limit only."""
    if limit_tokens < 1:
        raise ConfigError(f"limit_tokens={limit_tokens}: a context has at least 1 token")
    lengths = []
    tokens = _SHORTEST_ROW_TOKENS
    while tokens < limit_tokens:
        lengths.append(tokens)
        tokens *= 2
    return (*lengths, limit_tokens)


def crossover(rates: Rates, bytes_per_token: int, lengths: Sequence[int]) -> Crossover:
    """The table of A2 for contexts of `lengths` tokens, and the lengths from which a restore is faster."""
    disk = disk_link(rates)
    return Crossover(
        rows=tuple(
            Row(
                tokens=tokens,
                recompute_s=rates.recompute_s(tokens),
                host_s=rates.restore_host_s(tokens * bytes_per_token),
                disk_s=rates.restore_disk_s(tokens * bytes_per_token),
            )
            for tokens in lengths
        ),
        host_tokens=break_even_tokens(rates.prefill, host_link(rates), bytes_per_token),
        disk_tokens=None if disk is None else break_even_tokens(rates.prefill, disk, bytes_per_token),
    )
