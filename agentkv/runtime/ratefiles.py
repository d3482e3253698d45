"""The cache of measured rates: one small JSON file for each place, in the user's cache folder.

Files are replaced in one step, so that readers and writers of several processes never see half of one. A file that is
broken, of another schema or from another place is as good as none. Measuring and refining is `calibration.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import uuid
from dataclasses import asdict, replace
from pathlib import Path

from agentkv.core.rates import Prefill, Rates
from agentkv.errors import ConfigError
from agentkv.log import count, failed
from agentkv.runtime.machine import Place, machine_digest

SCHEMA = "agentkv.rates/1"
_LARGEST_BYTES = 1 << 16
_STALE_PART_S = 3600.0
_NUMBERS = ("cores", "token_bytes", "context_tokens")


def rates_folder() -> Path:
    """$AGENTKV_DATA/calibration, else $AGENTKV_CACHE/calibration, else in the user's cache folder."""
    given = os.environ.get("AGENTKV_DATA") or os.environ.get("AGENTKV_CACHE")
    if given:
        return Path(given) / "calibration"
    import platformdirs

    return Path(platformdirs.user_cache_dir("agentkv")) / "calibration"


def load_rates(place: Place) -> Rates | None:
    """What was measured at `place`; None if nothing usable was.

    If only another disk of the same machine was measured, the newest of those without its disk rates. Never raises.
    """
    found = _read(rates_folder() / _name(place))
    if found is not None and found[0].same(place):
        return found[1]
    others = [rates for there, rates in _all(f"{place.base_key}-*.json") if there.base_key == place.base_key]
    if not others:
        return None
    newest = max(others, key=lambda rates: rates.measured_at)
    return replace(newest, read_bytes_s=None, write_bytes_s=None)


def save_rates(place: Place, rates: Rates) -> Path | None:
    """Keep `rates` for `place`: the file, or None with a warning where that does not work. Never raises."""
    path = rates_folder() / _name(place)
    text = json.dumps({"schema": SCHEMA, "place": asdict(place), "rates": asdict(rates)}, indent=1)
    part = path.with_name(f".{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.part")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _sweep(path.parent)
        try:
            part.write_text(text, encoding="utf-8")
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        failed("calibration_not_saved", path=str(path), error=str(error))
        return None
    return path


def saved_here() -> list[tuple[Place, Rates]]:
    """Every usable calibration of this machine, newest first."""
    here = machine_digest()
    return sorted(
        (found for found in _all("*.json") if found[0].machine == here), key=lambda found: -found[1].measured_at
    )


def _name(place: Place) -> str:
    return f"{place.base_key}-{place.mount_key}.json"


def _all(pattern: str) -> list[tuple[Place, Rates]]:
    try:
        paths = sorted(rates_folder().glob(pattern))
    except OSError:
        return []
    return [found for path in paths if (found := _read(path)) is not None]


def _read(path: Path) -> tuple[Place, Rates] | None:
    """What a file says; None, counted, if it is not one of ours in this schema."""
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST_BYTES + 1)
    except OSError:
        return None
    try:
        if len(data) > _LARGEST_BYTES:
            raise ConfigError(f"{path} is too large to be a calibration")
        told = json.loads(data)
        if told["schema"] != SCHEMA:
            raise ConfigError(f"schema {told['schema']!r}")
        rates = Rates(**{**told["rates"], "prefill": Prefill(**told["rates"]["prefill"])})
        place = Place(**told["place"])
        for name, value in asdict(place).items():
            if name in _NUMBERS and (type(value) is not int or value < 1):
                raise ConfigError(f"{name}={value!r} is not a number of anything")
            if name not in _NUMBERS and not isinstance(value, str) and (name, value) != ("mount", None):
                raise ConfigError(f"{name}={value!r} is not a word")
    except (ValueError, TypeError, KeyError, RecursionError):  # ConfigError is a ValueError
        count("calibration_unreadable")
        return None
    return place, rates


def _sweep(folder: Path) -> None:
    """Remove what killed processes left half written."""
    for part in folder.glob(".*.part"):
        with contextlib.suppress(OSError):
            if time.time() - part.stat().st_mtime > _STALE_PART_S:
                part.unlink()
