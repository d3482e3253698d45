"""Ages and moments as people write them on a command line: 30m, 12h, 7d, 2w, 2026-11-01, 2026-11-01T14:30."""

from __future__ import annotations

import re
import time
from datetime import datetime

import typer

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_AGE = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw])", re.ASCII)


def age_s(text: str, *, option: str) -> float:
    """Seconds from an age such as 12h. Raises BadParameter that names `option`."""
    found = _AGE.fullmatch(text.strip())
    if found is None:
        raise typer.BadParameter(f"{option} {text!r}: write for instance 30m, 12h, 7d or 2w")
    return float(found[1]) * _UNITS_S[found[2]]


def since_ms(text: str, *, option: str) -> int:
    """Milliseconds since 1970 of a moment, or of so long ago; without a zone it is this machine's time."""
    if _AGE.fullmatch(text.strip()):
        return round((time.time() - age_s(text, option=option)) * 1000)
    try:
        moment = datetime.fromisoformat(text.strip())
        return round(moment.astimezone().timestamp() * 1000)
    except (ValueError, OverflowError, OSError):
        raise typer.BadParameter(
            f"{option} {text!r}: write for instance 12h, 7d, 2026-11-01 or 2026-11-01T14:30+02:00"
        ) from None
