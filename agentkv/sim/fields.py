"""Fields of a record: numbers, times, token counts and words, or the reason why the record cannot be used."""

from __future__ import annotations

import math
import sys
from datetime import UTC, datetime
from typing import Any

LONGEST_S = 30 * 86_400.0
"""A wait above this is taken for a clock that jumped, not for a wait."""

MOST_TOKENS = 1_000_000_000


class Unusable(ValueError):
    """A record that cannot be used; its text is the reason that is counted."""


def number(record: dict[str, Any], *names: str) -> float | None:
    """The first of `names` that is there, as a finite number; None where all are missing or null."""
    name, value = _first(record, names)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Unusable(f"{name} is not a number")
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    if not math.isfinite(found):
        raise Unusable(f"{name} is not finite")
    return found


def seconds(record: dict[str, Any], *names: str, unit_s: float = 1.0) -> float | None:
    """A span of time in seconds, from a number of `unit_s` each: neither negative nor above 30 days."""
    found = number(record, *names)
    if found is None:
        return None
    if found < 0:
        raise Unusable(f"{_first(record, names)[0]} is negative")
    if found * unit_s > LONGEST_S:
        raise Unusable(f"{_first(record, names)[0]} is above 30 days")
    return found * unit_s


def start(record: dict[str, Any], *names: str) -> float | None:
    """A point in time in whatever clock the record has: not negative."""
    found = number(record, *names)
    if found is not None and found < 0:
        raise Unusable(f"{_first(record, names)[0]} is negative")
    return found


def required(value: float | None, name: str) -> float:
    """`value`, or Unusable where it is missing."""
    if value is None:
        raise Unusable(f"{name} is missing")
    return value


def tokens(record: dict[str, Any], *names: str) -> int | None:
    """A count of tokens (or bytes, or steps): 0 to a milliard."""
    found = number(record, *names)
    if found is None:
        return None
    if not 0 <= found <= MOST_TOKENS:
        raise Unusable(f"{_first(record, names)[0]} is out of range")
    return int(found)


def flag(record: dict[str, Any], name: str) -> bool:
    """True or false; missing is false."""
    value = record.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise Unusable(f"{name} is not true or false")
    return value


def word(record: dict[str, Any], name: str) -> str:
    """A text, one object for all equal ones; missing is empty; lone surrogates, which nobody can print, become "?"."""
    value = record.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise Unusable(f"{name} is not a text")
    return sys.intern(value if value.isascii() else value.encode("utf-8", "replace").decode("utf-8"))


def session_name(record: dict[str, Any], *names: str) -> str:
    """Whose record it is: a text or a number."""
    name, value = _first(record, names)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    found = word(record, name)
    if not found:
        raise Unusable(f"{name} is missing")
    return found


def wall_s(value: object) -> float | None:
    """Seconds since 1970 of an ISO 8601 text; None where it is none. Without a zone it is taken for UTC."""
    if not isinstance(value, str):
        return None
    try:
        at = datetime.fromisoformat(value)
        return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None


def _first(record: dict[str, Any], names: tuple[str, ...]) -> tuple[str, Any]:
    value = record.get(names[0])
    if value is not None or len(names) == 1:
        return names[0], value
    return _first(record, names[1:]) if any(record.get(name) is not None for name in names[1:]) else (names[0], None)
