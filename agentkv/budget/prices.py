"""Prices: what a call costs, in Decimal dollars, from a dated table or from the hours of your own device.

Covers one row's arithmetic, finding a model's row by name, and what a call comes to. The table is read in
`pricefile.py`, its rows are data (`prices.yaml`). Does not cover budgets (`limits.py`), fees that are no tokens (searches,
storage of explicit caches), taxes and discounts. Nothing is guessed: a model without a row has no price.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Self

from agentkv.core.usage import Usage

_MILLION = Decimal(1_000_000)
_HOUR_S = Decimal(3600)
_MOST_FOUND = 1024
_SNAPSHOT = re.compile(r"(.+?)[-@](\d{4})-?(\d{2})-?(\d{2})")
_BEDROCK_VERSION = re.compile(r"-v\d+(:\d+)?$")
_PREFIXES = {"anthropic": ("anthropic.",), "google": ("gemini/", "models/")}
"""What may stand before a provider's model names, beside its own name and a slash."""
_STANDARD = ("", "default", "standard", "auto")
SELF_HOSTED = "self-hosted"
SERVED_LOCALLY = "served locally"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """US dollars per million tokens. What is None costs as much as `input` (`cache_write_long`: as `cache_write`)."""

    input: Decimal
    output: Decimal
    cached_read: Decimal | None = None
    cache_write: Decimal | None = None
    cache_write_long: Decimal | None = None

    def cost(self, usage: Usage) -> Decimal:
        """Dollars for `usage`, exactly."""
        read = self.input if self.cached_read is None else self.cached_read
        write = self.input if self.cache_write is None else self.cache_write
        write_long = write if self.cache_write_long is None else self.cache_write_long
        written, long = usage.cache_write_tokens, usage.cache_write_long_tokens
        millionths = (
            self.input * (usage.uncached_tokens - written)
            + read * usage.cached_tokens
            + write * (written - long)
            + write_long * long
            + self.output * usage.output_tokens
        )
        return millionths / _MILLION

    def times(self, factor: Decimal) -> Self:
        """All prices times `factor`."""
        others = {
            name: None if value is None else value * factor
            for name in ("cached_read", "cache_write", "cache_write_long")
            for value in (getattr(self, name),)
        }
        return type(self)(input=self.input * factor, output=self.output * factor, **others)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Other rates for calls with more than `input_tokens` of input."""

    input_tokens: int
    rates: Rates
    tiers: Mapping[str, Rates | Decimal] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """One row: rates of a hosted model, or `device_hour` dollars for each busy hour of a device of your own.

    `above` is in the order of its thresholds. `table` is the file that the row is from; `listed`: it is the package's
    list of hosted models, not a row of yours.
    """

    model: str
    provider: str = ""
    aliases: tuple[str, ...] = ()
    date: dt.date | None = None
    source: str = ""
    table: str = ""
    listed: bool = False
    rates: Rates | None = None
    device_hour: Decimal | None = None
    tiers: Mapping[str, Rates | Decimal] = field(default_factory=dict)
    above: tuple[Step, ...] = ()

    def cost(self, usage: Usage, *, tier: str = "", device_s: float = 0.0) -> Decimal | None:
        """Dollars for one call, unrounded; None for a service tier that the row does not know.

        Only for single calls: a sum of calls may pass a threshold that none of them did.
        """
        if self.device_hour is not None:
            return self.device_hour * Decimal(str(device_s)) / _HOUR_S
        rates = self._rates(usage.input_tokens, tier)
        return None if rates is None else rates.cost(usage)

    def _rates(self, input_tokens: int, tier: str) -> Rates | None:
        step = next((step for step in reversed(self.above) if input_tokens > step.input_tokens), None)
        base = self.rates if step is None else step.rates
        if tier in _STANDARD or base is None:
            return base
        own = self.tiers if step is None else step.tiers
        chosen = own.get(tier, self.tiers.get(tier))
        if isinstance(chosen, Rates):
            return chosen if tier in own else None
        return None if chosen is None else base.times(chosen)

    def __str__(self) -> str:
        day = "" if self.date is None else f" of {self.date.isoformat()}"
        return f"{self.model} in {self.table}{day}" if self.table else f"{self.model}{day}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a call came to: `usd` (None = no price is known) and where the price is from."""

    usd: Decimal | None
    price: str = ""


class PriceTable:
    """Prices by model name; made by `load_prices`; later rows replace earlier ones of the same name."""

    def __init__(self, prices: Iterable[Price], *, device_hour: Decimal | None = None) -> None:
        self.prices = tuple(prices)
        self.device_hour = device_hour
        self._by_name: dict[str, Price] = {}
        for price in self.prices:
            for name in (price.model, *price.aliases):
                self._by_name[name] = price
        self._found: dict[str, Price | None] = {}

    def find(self, model: str) -> Price | None:
        """The row of `model`: by its exact name, its provider's prefix, or as a dated snapshot; None for all else.

        Never a guess: another size, a fine-tune or a name that only looks similar has no price.
        """
        try:
            return self._found[model]
        except KeyError:
            if len(self._found) >= _MOST_FOUND:
                self._found.clear()
            found = self._found[model] = self._search(model)
            return found

    def _search(self, model: str) -> Price | None:
        model = model.strip()
        known = self._named(model)
        if known is not None:
            return known
        for provider in {price.provider for price in self.prices if price.provider}:
            for prefix in (f"{provider}/", *_PREFIXES.get(provider, ())):
                if model.startswith(prefix):
                    rest = model.removeprefix(prefix)
                    found = self._named(_BEDROCK_VERSION.sub("", rest) if prefix == "anthropic." else rest)
                    return found if found is not None and found.provider == provider else None
        return None

    def _named(self, name: str) -> Price | None:
        exact = self._by_name.get(name)
        if exact is not None:
            return exact
        snapshot = _SNAPSHOT.fullmatch(name)
        return self._by_name.get(snapshot[1]) if snapshot and _is_date(*snapshot.groups()[1:]) else None

    def cost(
        self,
        model: str,
        usage: Usage,
        *,
        tier: str = "",
        device_s: float = 0.0,
        self_hosted: bool = False,
        served_locally: bool = False,
    ) -> Cost:
        """What a call of `model` came to.

        `self_hosted`: it ran on a device of your own for `device_s` busy seconds, which costs what a row of yours says of
        the model, else what the device's hour costs, else nothing. `served_locally`: a response cache answered; that is free.
        """
        if served_locally:
            return Cost(usd=Decimal(0), price=SERVED_LOCALLY)
        price = self.find(model)
        if self_hosted and (price is None or price.listed):
            hour = self.device_hour or Decimal(0)
            return Cost(usd=hour * Decimal(str(device_s)) / _HOUR_S, price=SELF_HOSTED)
        if price is None:
            return Cost(usd=None)
        return Cost(usd=price.cost(usage, tier=tier, device_s=device_s), price=str(price))


def load_prices(path: str | Path | None = None) -> PriceTable:
    """The package's table; with `path` (YAML or JSON), that file's rows replace or join its rows.

    Raises ConfigError, naming file, row and field, for a file that cannot be read or holds what is no price.
    """
    from agentkv.budget.pricefile import read_prices

    return read_prices(path)


def _is_date(year: str, month: str, day: str) -> bool:
    try:
        dt.date(int(year), int(month), int(day))
    except ValueError:
        return False
    return True
