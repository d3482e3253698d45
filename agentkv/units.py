"""Sizes in words: parse "256MiB", print 268435456 as "256.0 MiB"."""

from __future__ import annotations

import re

from agentkv.errors import ConfigError

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
TIB = 1024 * GIB

_FACTORS = {
    "": 1, "b": 1,
    "k": KIB, "kib": KIB, "kb": 1000,
    "m": MIB, "mib": MIB, "mb": 1000**2,
    "g": GIB, "gib": GIB, "gb": 1000**3,
    "t": TIB, "tib": TIB, "tb": 1000**4,
}  # fmt: skip
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def parse_bytes(size: int | str, *, option: str = "size") -> int:
    """Bytes from an int or a text such as "256MiB", "1.5 GB" or "4G" (single letters are binary).

    Raises ConfigError naming `option` if the text is not a size or the size is negative.
    """
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise ConfigError(f'{option}={size!r} is not a size; write bytes or "256MiB"')
    if isinstance(size, int):
        if size < 0:
            raise ConfigError(f"{option}={size} is negative")
        return size
    match = _SIZE.fullmatch(size)
    if match is None or match[2].lower() not in _FACTORS:
        raise ConfigError(f'{option}={size!r} is not a size; write for instance "256MiB" or "4GiB"')
    return int(float(match[1]) * _FACTORS[match[2].lower()])


_NEXT_UNIT = 1024
_MILLISECONDS_BELOW_S = 0.9995
_DECIMALS_BELOW_S = 0.01
_MINUTES_FROM_S = 120
_HOURS_FROM_MIN = 120
_DAYS_FROM_H = 48


def format_bytes(size_bytes: float) -> str:
    """A size for people: "360.0 KiB"."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < _NEXT_UNIT:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= _NEXT_UNIT
    return f"{value:.1f} TiB"


def format_seconds(seconds: float) -> str:
    """A duration for people: "0 ms", "2.5 ms", "18 ms", "3.4 s", "2 min 5 s", "3 h 20 min", "2 d 4 h"."""
    if seconds < _MILLISECONDS_BELOW_S:
        return f"{seconds * 1000:.1f} ms" if 0 < seconds < _DECIMALS_BELOW_S else f"{seconds * 1000:.0f} ms"
    if seconds < _MINUTES_FROM_S:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < _HOURS_FROM_MIN:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    if hours < _DAYS_FROM_H:
        return f"{hours} h {minutes} min"
    days, hours = divmod(round(seconds / 3600), 24)
    return f"{days:,} d {hours} h"
