"""What a hosted cache costs with a model, by the price list; the usual ratios where the list does not know it."""

from __future__ import annotations

import functools

from agentkv.budget.prices import load_prices
from agentkv.policy.hosted import CachePrices

USUAL = CachePrices(input=1.0, read=0.1, write_short=1.25, write_long=2.0)
"""Shares of the price of an input token."""


@functools.lru_cache(maxsize=256)
def cache_prices(model: str, *, short_s: float = 300.0, long_s: float = 3600.0) -> CachePrices:
    """The prices of reading and writing a cache of this model."""
    price = load_prices(None).find(model) if model else None
    rates = None if price is None else price.rates
    if rates is None or rates.cached_read is None:
        usual = USUAL
        return CachePrices(
            input=usual.input, read=usual.read, write_short=usual.write_short, write_long=usual.write_long,
            short_s=short_s, long_s=long_s,
        )  # fmt: skip
    write = rates.input if rates.cache_write is None else rates.cache_write
    return CachePrices(
        input=float(rates.input), read=float(rates.cached_read), write_short=float(write),
        write_long=float(write if rates.cache_write_long is None else rates.cache_write_long), short_s=short_s,
        long_s=long_s,
    )  # fmt: skip


def has_long(model: str) -> bool:
    """Whether the list has a price for this model's longer lifetime."""
    price = load_prices(None).find(model) if model else None
    return price is not None and price.rates is not None and price.rates.cache_write_long is not None


def has_tier(model: str, tier: str) -> bool:
    """Whether the list has a price for this model in this service tier."""
    price = load_prices(None).find(model) if model else None
    return price is not None and tier in price.tiers
