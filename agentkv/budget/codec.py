"""Facts as JSON: in full for people and other programs, short for the database.

The short form leaves out what a fact has by default, its task and its time (they have columns of their own), so that
a million facts are a quarter of a gigabyte and not one. Both are read by `fact_from_json`.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterable
from dataclasses import MISSING, Field, asdict, fields
from decimal import Decimal, InvalidOperation
from typing import Any, get_args

from agentkv.budget.facts import Fact, ModelCall
from agentkv.core.usage import Timing, Usage

_KINDS: dict[str, type[Fact]] = {cls.kind: cls for cls in get_args(Fact)}
_PARTS: dict[str, type[Usage | Timing]] = {"usage": Usage, "timing": Timing}
_PARSED_AT_ONCE = 500
_OWN_COLUMNS = ("task", "at_ms")
_NAMES: dict[type[Any], frozenset[str]] = {
    cls: frozenset(f.name for f in fields(cls)) for cls in (*_KINDS.values(), *_PARTS.values())
}


def _default(of: Field[Any]) -> Any:
    return of.default if of.default_factory is MISSING else of.default_factory()


_Plan = tuple[tuple[str, Callable[[Any], Any], Any], ...]
_PLANS: dict[type[Any], _Plan] = {
    cls: tuple((f.name, operator.attrgetter(f.name), _default(f)) for f in fields(cls) if f.name not in _OWN_COLUMNS)
    for cls in _NAMES
}


def is_known(kind: str) -> bool:
    """False for a kind of fact that only a newer program knows."""
    return kind in _KINDS


def fact_to_json(fact: Fact) -> dict[str, Any]:
    """A fact as plain JSON, in full, its money as text; its kind is kept beside it."""
    body = asdict(fact)
    if isinstance(fact, ModelCall) and fact.cost_usd is not None:
        body["cost_usd"] = f"{fact.cost_usd:f}"
    return body


def fact_to_text(fact: Fact) -> str:
    """The short form. Raises TypeError or ValueError for a fact with a value that is no JSON."""
    return _encode(_short(fact))


def _short(part: Fact | Usage | Timing) -> dict[str, Any]:
    body = {}
    for name, value_of, default in _PLANS[type(part)]:
        value = value_of(part)
        if value is default or value == default:
            continue
        body[name] = _short(value) if name in _PARTS else value
    return body


def _plain(value: object) -> int | float | str:
    """Money as text, numbers of other libraries as numbers."""
    if isinstance(value, Decimal):
        return f"{value:f}"  # 0.0000001, not 1E-7
    if hasattr(value, "__index__"):
        return operator.index(value)
    if hasattr(value, "__float__"):
        return float(value)
    raise TypeError(f"a fact cannot hold {type(value).__name__}")


_encode = json.JSONEncoder(separators=(",", ":"), default=_plain).encode


def fact_from_json(kind: str, body: dict[str, Any]) -> Fact:
    """The fact that was described, in full or short; fields that this program does not know are left out.

    Raises KeyError, TypeError or ValueError for what is no fact.
    """
    cls = _KINDS[kind]
    values = _known(cls, body)
    if cls is ModelCall:
        for name, part in _PARTS.items():
            if name in values:
                values[name] = part(**_known(part, values[name]))
        if values.get("cost_usd") is not None:
            values["cost_usd"] = _money(values["cost_usd"])
    return cls(**values)


def facts_from_rows(task: str, rows: Iterable[tuple[str, int, str]]) -> tuple[list[Fact], int, int]:
    """Facts from rows of (kind, at_ms, text), how many were of a kind unknown here, and how many were damaged."""
    all_rows = list(rows)
    known = [row for row in all_rows if row[0] in _KINDS]
    facts: list[Fact] = []
    for start in range(0, len(known), _PARSED_AT_ONCE):
        some = known[start : start + _PARSED_AT_ONCE]
        for (kind, at_ms, _), body in zip(some, _bodies([text for _, _, text in some]), strict=True):
            if body is None:
                continue
            try:
                body["task"] = task
                body["at_ms"] = at_ms
                facts.append(fact_from_json(kind, body))
            except (KeyError, TypeError, ValueError):
                continue
    return facts, len(all_rows) - len(known), len(known) - len(facts)


def _bodies(texts: list[str]) -> list[Any]:
    """The objects in the texts, None for one that is damaged. Many are parsed as one array: a third of the time."""
    try:
        bodies = json.loads(f"[{','.join(texts)}]")
        if len(bodies) == len(texts):
            return [body if type(body) is dict else None for body in bodies]
    except (ValueError, RecursionError):
        pass
    return [_body(text) for text in texts]


def _body(text: str) -> dict[str, Any] | None:
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None


def _known(cls: type[Fact | Usage | Timing], body: dict[str, Any]) -> dict[str, Any]:
    names = _NAMES[cls]
    return body if names.issuperset(body) else {name: value for name, value in body.items() if name in names}


def _money(text: str) -> Decimal:
    try:
        amount = Decimal(text)
    except InvalidOperation:
        raise ValueError(f"{text!r} is no amount of money") from None
    if not amount.is_finite():
        raise ValueError(f"{text!r} is no amount of money")
    return amount
