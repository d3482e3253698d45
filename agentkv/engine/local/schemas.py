"""Schemas made a little narrower before a model is held to them: what is valid under the result is valid under the
schema.

A small model likes to go on for ever: digits, and fields that nobody named. So integers without bounds stay where JSON
readers agree on them (RFC 8259, section 6), numbers have at most nine decimals, and the arguments of a call have
no fields that its tool does not name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

_SAFE = 2**53 - 1
_STEP = 1e-9
_NARROW = 1e-6
"""Between bounds that are nearer to each other there may be no multiple of the step."""
_LARGE = 1e6
"""Bounds beyond this and steps of a billionth together are more digits than llguidance holds."""
_SEVERAL = ("properties", "$defs", "definitions", "patternProperties")
_LISTS = ("anyOf", "oneOf", "prefixItems")
_ONE = ("items", "additionalProperties")


def finite(schema: Any) -> Any:
    """`schema` with numbers that end."""
    return _changed(schema, _with_an_end)


def closed(schema: Any) -> Any:
    """`schema` in which an object that names fields has no others, unless it says that it may.

    A schema with an allOf is left alone: what one part does not name another may, by a reference too.
    """
    return schema if _has(schema, "allOf") else _changed(schema, _without_others)


def _has(value: Any, key: str) -> bool:
    if isinstance(value, Mapping):
        return key in value or any(_has(inner, key) for inner in value.values())
    return isinstance(value, list) and any(_has(inner, key) for inner in value)


def _changed(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """`change` for the schema and those inside of it (but for the parts of an allOf, which only together mean anything)."""
    if not isinstance(schema, Mapping):
        return schema
    made = dict(schema)
    for name in _SEVERAL:
        if isinstance(made.get(name), Mapping):
            made[name] = {key: _changed(inner, change) for key, inner in made[name].items()}
    for name in _LISTS:
        if isinstance(made.get(name), list):
            made[name] = [_changed(inner, change) for inner in made[name]]
    for name in _ONE:
        if name in made:
            made[name] = _changed(made[name], change)
    return change(made)


def _with_an_end(schema: dict[str, Any]) -> dict[str, Any]:
    kind = schema.get("type")
    kinds = kind if isinstance(kind, list) else [kind]
    if "multipleOf" in schema or "enum" in schema or "const" in schema:
        return schema
    bounds = [schema[name] for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum") if name in schema]
    if "number" in kinds:
        small = all(isinstance(bound, int | float) and abs(bound) <= _LARGE for bound in bounds)
        narrow = small and bounds[1:] and max(bounds) - min(bounds) < _NARROW
        return schema | {"multipleOf": _STEP} if small and not narrow else schema
    if "integer" in kinds:
        low = {} if {"minimum", "exclusiveMinimum"} & schema.keys() else {"minimum": -_SAFE}
        high = {} if {"maximum", "exclusiveMaximum"} & schema.keys() else {"maximum": _SAFE}
        if all(isinstance(bound, int | float) and abs(bound) <= _SAFE for bound in bounds):
            return schema | low | high
    return schema


def _without_others(schema: dict[str, Any]) -> dict[str, Any]:
    names, asked = schema.get("properties"), schema.get("required")
    if not isinstance(names, Mapping):
        return schema
    if isinstance(asked, list) and any(name not in names for name in asked if isinstance(name, str)):
        return schema  # one is asked for that is not named
    others = {"additionalProperties", "patternProperties", "unevaluatedProperties", "allOf", "anyOf", "oneOf", "$ref"}
    return schema if others & schema.keys() else schema | {"additionalProperties": False}
