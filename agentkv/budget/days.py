"""Calendar days in a time zone: on which day a call fell, when a day begins. Days may have 23 or 25 hours, or be missing.

A zone is a `tzinfo`, or None for this machine's own.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, tzinfo
from decimal import Decimal
from typing import Literal

from agentkv.budget.facts import ModelCall
from agentkv.errors import ConfigError

Period = Literal["ever", "day", "month"]
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(slots=True)
class Day:
    """What was spent on one day."""

    calls: int = 0
    total_tokens: int = 0
    cost_usd: Decimal = Decimal(0)
    unpriced_calls: int = 0


def day_of(at_ms: int, zone: tzinfo | None = None) -> date:
    """The day on which this moment fell; the first or last of the calendar for moments beyond it."""
    try:
        return (_EPOCH + timedelta(milliseconds=at_ms)).astimezone(zone).date()
    except (OverflowError, ValueError, OSError):
        return date.min if at_ms < 0 else date.max


def day_start_ms(day: date, zone: tzinfo | None = None) -> int:
    """The first moment of the day; where the clocks skip midnight, the first after it."""
    midnight = datetime(day.year, day.month, day.day, tzinfo=zone)
    return round(midnight.timestamp() * 1000)


def period_of(at_ms: int, per: Period, zone: tzinfo | None = None) -> str:
    """The day or month in which this moment fell, as "2026-11-30" or "2026-11"; "" for ever."""
    day = day_of(at_ms, zone)
    return {"ever": "", "day": f"{day}", "month": f"{day:%Y-%m}"}[per]


def zone_of(name: str, *, what: str) -> tzinfo:
    """The zone of that name. Raises ConfigError, which names `what`."""
    from zoneinfo import ZoneInfo

    try:
        return ZoneInfo(name)
    except (ValueError, OSError, KeyError):
        raise ConfigError(f"{what} {name!r} is no time zone; write for instance Europe/Berlin or UTC") from None


def zone_name(zone: tzinfo | None) -> str:
    """As it is told to people: "Asia/Shanghai", or this machine's, "CET/CEST, UTC+01:00/+02:00": "CST" is four zones."""
    if zone is not None:
        return str(zone)
    names = "/".join(dict.fromkeys(time.tzname[: 1 + time.daylight]))
    west_s = dict.fromkeys((time.timezone, time.altzone)[: 1 + time.daylight])
    offsets = "/".join(f"{'-' if s > 0 else '+'}{abs(s) // 3600:02}:{abs(s) % 3600 // 60:02}" for s in west_s)
    return f"{names}, UTC{offsets}" if any(west_s) or time.daylight else names


def days(calls: Iterable[ModelCall], zone: tzinfo | None = None) -> dict[date, Day]:
    """What was spent on each day, in order; a call falls on the day on which it began."""
    found: dict[date, Day] = {}
    for call in calls:
        if call.served_locally:
            continue
        day = found.setdefault(day_of(call.at_ms, zone), Day())
        day.calls += 1
        day.total_tokens += call.usage.total_tokens
        if call.cost_usd is None:
            day.unpriced_calls += 1
        else:
            day.cost_usd += call.cost_usd
    return dict(sorted(found.items()))
