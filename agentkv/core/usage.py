"""What a model call used: tokens and time. Values add up."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one or many calls, whose parts lie inside their sums.

    0 <= cached_tokens + cache_write_tokens <= input_tokens, cache_write_long_tokens <= cache_write_tokens and
    reasoning_tokens <= output_tokens always hold; ValueError otherwise (`core.reported` reads what servers say).

    `cached_tokens` is the part of the input whose KV was reused (from any tier), as in OpenAI's
    `prompt_tokens_details.cached_tokens`. `cache_write_tokens` were computed and also put into a provider's cache,
    `cache_write_long_tokens` of them for its longer lifetime, which costs more. `calls` counts model calls.
    """

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    calls: int = 0
    reasoning_tokens: int = 0
    cache_write_tokens: int = 0
    cache_write_long_tokens: int = 0

    def __post_init__(self) -> None:
        written, long = self.cache_write_tokens, self.cache_write_long_tokens
        if min(self.input_tokens, self.output_tokens, self.cached_tokens, self.calls, written, long) < 0:
            raise ValueError(f"negative usage: {self}")
        if self.cached_tokens > self.input_tokens:
            raise ValueError(f"cached_tokens {self.cached_tokens} exceed input_tokens {self.input_tokens}")
        if self.cached_tokens + written > self.input_tokens:
            raise ValueError(f"cached and written tokens exceed the input: {self}")
        if long > written:
            raise ValueError(f"cache_write_long_tokens {long} exceed cache_write_tokens {written}")
        if not 0 <= self.reasoning_tokens <= self.output_tokens:
            raise ValueError(f"reasoning_tokens {self.reasoning_tokens}, but output_tokens {self.output_tokens}")

    @property
    def total_tokens(self) -> int:
        """Input plus output."""
        return self.input_tokens + self.output_tokens

    @property
    def uncached_tokens(self) -> int:
        """Input tokens that had to be computed."""
        return self.input_tokens - self.cached_tokens

    def __add__(self, other: Self) -> Self:
        return type(self)(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Where a call's time went, seconds. The parts do not overlap; `ttft_s` and `total_s` span them.

    `queued_s` waiting for memory or a place in the batch; `restore_s` waiting for blocks on their way back from
    host or disk; `recompute_s` prefill of tokens that this session had computed before and lost; `prefill_s`
    prefill of new tokens; `decode_s` first to last output token.
    """

    queued_s: float = 0.0
    restore_s: float = 0.0
    recompute_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    ttft_s: float = 0.0
    total_s: float = 0.0

    @property
    def stall_s(self) -> float:
        """What the wait for this session's own old context cost: queue, restore and recompute."""
        return self.queued_s + self.restore_s + self.recompute_s

    def __add__(self, other: Self) -> Self:
        return type(self)(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})
