"""Reading price tables: the package's own, and a user's file (YAML or JSON) whose rows come first.

Numbers are read as written, never through a float. What cannot be right is a ConfigError that names file, row and
field.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from agentkv.budget.prices import Price, PriceTable, Rates, Step
from agentkv.errors import ConfigError

VERSION = 1
_OURS = Path(__file__).with_name("prices.yaml")
_RATES = ("input", "output", "cached_read", "cache_write", "cache_write_long")
_ROW = frozenset({"model", "provider", "aliases", "date", "source", "tiers", "above", "device_hour", *_RATES})
_MOST = Decimal(1_000_000)


def read_prices(path: str | Path | None = None) -> PriceTable:
    """The package's table; with `path`, that file's rows replace or join its rows.

    Raises ConfigError for a file that cannot be read or holds what is no price.
    """
    prices, device_hour = _ours()
    if path is not None:
        more, own_hour = _read(Path(path))
        names = {name for price in more for name in (price.model, *price.aliases)}
        prices = tuple(price for price in prices if price.model not in names) + more
        device_hour = device_hour if own_hour is None else own_hour
    return PriceTable(prices, device_hour=device_hour)


@cache
def _ours() -> tuple[tuple[Price, ...], Decimal | None]:
    return _read(_OURS)


def _read(path: Path) -> tuple[tuple[Price, ...], Decimal | None]:
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        body = yaml.load(text, Loader=yaml.BaseLoader)  # noqa: S506  it makes nothing but texts, lists and mappings
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"prices={str(path)!r} cannot be read: {error}") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path}: no YAML or JSON: {error}") from error
    file = _Part(str(path), body, {"version", "rows", "device_hour"})
    version = file.text("version") or str(VERSION)
    if version != str(VERSION):
        file.wrong("version", version, f"this program reads version {VERSION}; a newer agentkv may read it")
    rows = file.body.get("rows", [])
    if not isinstance(rows, list):
        file.wrong("rows", rows, "write a list of rows")
    prices = [_price(path, number, row) for number, row in enumerate(rows, 1)]
    seen: dict[str, int] = {}
    for number, price in enumerate(prices, 1):
        for name in (price.model, *price.aliases):
            if name in seen:
                raise ConfigError(
                    f"{path}: row {number} ({price.model}): {name!r} is named by row {seen[name]} already"
                )
            seen[name] = number
    return tuple(prices), file.money("device_hour")


def _price(path: Path, number: int, body: Any) -> Price:
    model = body.get("model") if isinstance(body, Mapping) else None
    row = _Part(f"{path}: row {number}" + (f" ({model:.80})" if isinstance(model, str) else ""), body, _ROW)
    name = row.text("model") or row.wrong("model", model, "write the model's name as the endpoint reports it")
    hour = row.money("device_hour")
    if hour is not None and (row.body.keys() & {*_RATES, "tiers", "above"}):
        row.wrong("device_hour", str(hour), "a row holds either a device's hour or prices of tokens")
    aliases = row.body.get("aliases", [])
    if not isinstance(aliases, list) or not all(isinstance(alias, str) and alias for alias in aliases):
        row.wrong("aliases", aliases, "write a list of names")
    return Price(
        model=name,
        provider=row.text("provider"),
        aliases=tuple(aliases),
        date=row.date("date"),
        source=row.text("source"),
        table=path.name,
        listed=path == _OURS,
        rates=None if hour is not None else row.rates(),
        device_hour=hour,
        tiers=row.tiers(),
        above=row.above(),
    )


class _Part:
    """A mapping in a file, read field by field; `where` names it in errors."""

    def __init__(self, where: str, body: Any, known: frozenset[str] | set[str]) -> None:
        self.where = where
        if not isinstance(body, Mapping):
            raise ConfigError(f"{where}: {body!r:.80} is no mapping of fields to values")
        self.body: Mapping[str, Any] = body
        for name in body:
            if name not in known:
                raise ConfigError(f"{where}: the field {name!r:.80} is unknown; there are {', '.join(sorted(known))}")

    def wrong(self, field: str, value: Any, what: str) -> NoReturn:
        raise ConfigError(f"{self.where}: {field}={value!r:.80}: {what}")

    def text(self, field: str) -> str:
        value = self.body.get(field, "")
        if not isinstance(value, str):
            self.wrong(field, value, "write a text")
        return value.strip()

    def money(self, field: str) -> Decimal | None:
        value = self.body.get(field)
        if value is None:
            return None
        try:
            amount = Decimal(value.strip()) if isinstance(value, str) else None
        except InvalidOperation:
            amount = None
        if amount is None or not amount.is_finite():
            self.wrong(field, value, "write US dollars as a plain number, such as 2.50")
        if not 0 <= amount <= _MOST:
            self.wrong(field, value, f"a price lies between 0 and {_MOST}")
        return amount

    def date(self, field: str) -> dt.date | None:
        value = self.text(field)
        try:
            return dt.date.fromisoformat(value) if value else None
        except ValueError:
            self.wrong(field, value, "write a date as 2025-08-07")

    def rates(self) -> Rates:
        """The prices of tokens; input and output are needed."""
        found = {name: self.money(name) for name in _RATES}
        for name in ("input", "output"):
            if found[name] is None:
                self.wrong(name, None, "a price of tokens is needed, in US dollars per million")
        return Rates(**found)  # type: ignore[arg-type]  # the two that must not be None are not

    def tiers(self) -> dict[str, Rates | Decimal]:
        """Factors and prices by service tier."""
        given = self.body.get("tiers", {})
        if not isinstance(given, Mapping):
            self.wrong("tiers", given, "write the tiers by name")
        tiers: dict[str, Rates | Decimal] = {}
        for name, value in given.items():
            where = f"{self.where}: tiers"
            if isinstance(value, Mapping):
                tiers[str(name)] = _Part(f"{where}: {name}", value, frozenset(_RATES)).rates()
            else:
                factor = _Part(where, {str(name): value}, {str(name)}).money(str(name))
                assert factor is not None
                tiers[str(name)] = factor
        return tiers

    def above(self) -> tuple[Step, ...]:
        """Steps by length, the lowest first."""
        given = self.body.get("above", [])
        if not isinstance(given, list):
            self.wrong("above", given, "write a list of steps")
        steps = []
        for number, body in enumerate(given, 1):
            part = _Part(f"{self.where}: above {number}", body, frozenset({"input_tokens", "tiers", *_RATES}))
            tokens = part.text("input_tokens")
            if not tokens.isdecimal():
                part.wrong("input_tokens", tokens, "write a number of tokens")
            steps.append(Step(input_tokens=int(tokens), rates=part.rates(), tiers=part.tiers()))
        return tuple(sorted(steps, key=lambda step: step.input_tokens))
