"""Any value as plain JSON: dicts with text keys, lists, texts, finite numbers, True, False and None. Never raises.

The outcome for each kind of value that JSON has not is in the table of docs/prefix.md. Nothing that differs from
process to process (an address, a set's order) gets into the result.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import enum
import json
import math
import pathlib
import uuid
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from agentkv.context.mend import clean

MAX_DEPTH = 100
"""What lies deeper, and a container inside itself, becomes {}: as a JSON schema that allows anything."""
MAX_NODES = 200_000
"""Likewise what comes after so many values: a schema that names one part many times can be without end."""

_AS_TEXT = (dt.date, dt.time, uuid.UUID, pathlib.PurePath, complex)
_NUMBERS = (int, float, decimal.Decimal)


def canonical_json(value: Any, *, sort: bool = True) -> Any:
    """`value` as plain JSON, with keys sorted (or, with sort=False, as they come) and sets as sorted lists."""
    return _Walk(sort=sort).plain(value, 0)


class _Walk:
    """One value being made plain."""

    def __init__(self, *, sort: bool) -> None:
        self._sort = sort
        self._nodes = 0
        self._inside: set[int] = set()

    def plain(self, value: Any, depth: int) -> Any:
        if value is None or value is True or value is False:
            return value
        kind = type(value)
        if kind is str:
            return clean(value)
        if kind is int:
            return value
        try:
            return self._container(value, depth) if _is_container(value) else self._leaf(value, depth)
        except Exception:  # a foreign value may raise from anything that is asked of it
            return _type_name(value)

    def _container(self, value: Any, depth: int) -> Any:
        self._nodes += 1
        if id(value) in self._inside or depth >= MAX_DEPTH or self._nodes > MAX_NODES:
            return {}
        self._inside.add(id(value))
        try:
            if isinstance(value, Mapping):
                return self._mapping(value, depth)
            items = [self.plain(item, depth + 1) for item in value]
            self._nodes += len(items)
            return sorted(items, key=_sort_key) if isinstance(value, AbstractSet) else items
        finally:
            self._inside.discard(id(value))

    def _mapping(self, value: Mapping[Any, Any], depth: int) -> dict[str, Any]:
        keys = {key: _key(key) for key in value}
        self._nodes += len(keys)
        ordered = sorted(keys, key=lambda key: (keys[key], type(key).__name__)) if self._sort else keys
        return {keys[key]: self.plain(value[key], depth + 1) for key in ordered}

    def _leaf(self, value: Any, depth: int) -> Any:
        if isinstance(value, str) and not isinstance(value, enum.Enum):
            return clean(str.__str__(value))
        if isinstance(value, _NUMBERS) and not isinstance(value, enum.Enum):
            return _number(value)
        if isinstance(value, bytes | bytearray | memoryview):
            return clean(bytes(value).decode("utf-8", "replace"))
        if isinstance(value, _AS_TEXT):
            return clean(value.isoformat() if isinstance(value, dt.date | dt.time) else str(value))
        inner = _opened(value)
        return _type_name(value) if inner is None else self._inner(inner, depth)

    def _inner(self, value: Any, depth: int) -> Any:
        return self.plain(value, depth + 1) if depth < MAX_DEPTH else {}


def _is_container(value: Any) -> bool:
    return isinstance(value, Mapping | list | AbstractSet | tuple) and not isinstance(value, enum.Enum)


def _opened(value: Any) -> Any:
    """What an enum, a model class, a model or a dataclass stands for; None for everything else."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, type):
        schema = getattr(value, "model_json_schema", None)
        return schema() if schema is not None else None
    dump = getattr(value, "model_dump", None)
    if dump is not None:
        return dump(mode="json")
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return None


def _number(value: Any) -> Any:
    """A number that JSON can hold; the text of one that is none (NaN, infinity)."""
    if isinstance(value, int):
        return int(value)
    if not math.isfinite(value):
        return str(value)
    whole = isinstance(value, decimal.Decimal) and value == value.to_integral_value()
    return int(value) if whole else float(value)


def _key(key: Any) -> str:
    """A key as text: JSON's own words for None, True and False, an enum's value, else as a leaf would be."""
    if isinstance(key, enum.Enum):
        key = key.value
    if isinstance(key, str):
        return clean(str.__str__(key))
    plain = _Walk(sort=True).plain(key, 0)
    return plain if isinstance(plain, str) else _sort_key(plain)


def _sort_key(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def _type_name(value: Any) -> str:
    """The name of a value's type (of the type itself, or of a function): never its repr, which may hold an address."""
    named = value if isinstance(value, type) or callable(value) else type(value)
    return clean(str(getattr(named, "__qualname__", type(value).__qualname__)))
