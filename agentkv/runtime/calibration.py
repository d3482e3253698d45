"""Calibration: measure this machine with one model's blocks, keep what was measured, refine it by what really happens.

Covers the order of measuring, cleaning up, refining, and `RateBook`: what one engine takes from the cache at its start
and gives back at its end. Timing itself is `kv/gauge.py` and `engine/local/gauge.py`; files are `ratefiles.py`.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentkv.core.rates import Rates
from agentkv.errors import ConfigError, DiskUnavailable, ExtraMissing
from agentkv.log import failed
from agentkv.runtime.machine import Place
from agentkv.runtime.ratefiles import load_rates, save_rates
from agentkv.units import GIB, MIB

if TYPE_CHECKING:
    from agentkv.engine.local.loader import LoadedModel

_COPY_PART, _DISK_PART, _PREFILL_PART = 0.15, 0.25, 0.6
LARGEST_WEIGHT = 0.2
"""How far one run may pull the logarithm of a rate towards what it saw."""
LARGEST_RATIO = 2.0
"""What one run saw counts as at most this many times faster or slower than what was known."""
_FULL_BYTES = GIB
_FULL_TOKENS = 16_384
_LEAST_BYTES = 16 * MIB
_LEAST_TOKENS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """One measurement: where, and what. `disk_off` says why no disk was measured."""

    place: Place
    rates: Rates
    disk_off: str


def calibrate(
    model: str = "smollm2-135m",
    *,
    device: str = "auto",
    dtype: str = "auto",
    disk: Path | None = None,
    seconds: float = 8.0,
    progress: Callable[[str], None] | None = None,
) -> Calibration:
    """Measure copies, the disk at `disk` (None: no disk tier) and prefill in about `seconds`, loading the model apart.

    Nothing is saved: that is `save_rates(calibration.place, calibration.rates)`. A folder that cannot hold a disk tier
    is left out, with the reason in `disk_off`. Raises ConfigError, ExtraMissing, or what loading the model raises.
    """
    if not 0 < seconds < math.inf:
        raise ConfigError(f"seconds={seconds}: give the measurement some time, for instance 8")
    say = progress or (lambda _line: None)
    try:
        from agentkv.engine.local.gauge import measure_prefill
        from agentkv.engine.local.loader import load_model
    except ImportError as error:
        raise ExtraMissing(f"calibration needs {error.name or 'torch'}: pip install 'agentkv-sdk[local]'") from error
    from agentkv.kv.gauge import measure_copies, measure_disk

    loaded = load_model(model, device=device, dtype=dtype, progress=progress)
    say("copying between host and device")
    copies = measure_copies(loaded.geometry, device=str(loaded.device), seconds=seconds * _COPY_PART)
    read_bytes_s = write_bytes_s = None
    off = "no folder was given"
    if disk is not None:
        say(f"writing and reading below {disk}")
        try:
            with only_borrowed(disk):
                found = measure_disk(loaded.geometry, disk, seconds=seconds * _DISK_PART)
            read_bytes_s, write_bytes_s, off = found.read_bytes_s, found.write_bytes_s, ""
        except DiskUnavailable as error:
            off = str(error)
    say(f"computing contexts of up to {loaded.context_tokens} tokens")
    prefill = measure_prefill(loaded, seconds=seconds * _PREFILL_PART)
    return Calibration(
        place=Place.of(loaded, None if off else disk),
        rates=Rates(
            memcpy_bytes_s=copies.memcpy_bytes_s,
            h2d_bytes_s=copies.h2d_bytes_s,
            d2h_bytes_s=copies.d2h_bytes_s,
            read_bytes_s=read_bytes_s,
            write_bytes_s=write_bytes_s,
            prefill=prefill,
            measured_at=time.time(),
        ),
        disk_off=off,
    )


@contextlib.contextmanager
def only_borrowed(folder: Path) -> Iterator[None]:
    """Folders that did not exist before and are empty afterwards are removed again, whatever happens between."""
    folder = folder.absolute()
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        yield
    finally:
        for each in made:  # the deepest first
            with contextlib.suppress(OSError):
                each.rmdir()


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A rate that real transfers had, over `size_bytes`."""

    bytes_s: float
    size_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What one run of an engine saw; None where it saw nothing. Prefill: how long the same work took and should have."""

    h2d: Seen | None = None
    d2h: Seen | None = None
    read: Seen | None = None
    write: Seen | None = None
    prefill_tokens: int = 0
    prefill_spent_s: float = 0.0
    prefill_expected_s: float = 0.0


def observed(stats: Mapping[str, Any]) -> Observed:
    """From `engine.stats()`: the lanes' bytes and rates in `kv`, the meter's sums in `prefill`. What lacks is None."""
    kv, meter = stats.get("kv") or {}, stats.get("prefill") or {}
    rates, sizes = kv.get("rates_bytes_s") or {}, kv.get("bytes") or {}
    seen = {
        lane: Seen(bytes_s=rates[lane], size_bytes=sizes[lane])
        for lane in ("h2d", "d2h", "read", "write")
        if sizes.get(lane, 0) > 0 and rates.get(lane, 0) > 0
    }
    return Observed(
        **seen,
        prefill_tokens=meter.get("tokens", 0),
        prefill_spent_s=meter.get("spent_s", 0.0),
        prefill_expected_s=meter.get("expected_s", 0.0),
    )


def refine(old: Rates, seen: Observed, *, now: float) -> Rates:
    """`old`, moved towards what a run saw, by its amount of evidence and never by more than 2^0.2, about 15 %.

    Rates move in their logarithm, so that twice and half are equally far. `now` is Unix seconds. Returns `old` itself
    if the run saw too little of everything.
    """
    lanes = {"h2d": seen.h2d, "d2h": seen.d2h, "read": seen.read, "write": seen.write}
    changed: dict[str, Any] = {}
    for lane, one in lanes.items():
        known = getattr(old, f"{lane}_bytes_s")
        if known is None or one is None or one.size_bytes < _LEAST_BYTES:
            continue
        changed[f"{lane}_bytes_s"] = known * _pull(one.bytes_s / known, one.size_bytes / _FULL_BYTES)
    if seen.prefill_tokens >= _LEAST_TOKENS and seen.prefill_expected_s > 0:
        slower = seen.prefill_spent_s / seen.prefill_expected_s
        changed["prefill"] = old.prefill.scaled(_pull(slower, seen.prefill_tokens / _FULL_TOKENS))
    if not changed:
        return old
    return replace(old, **changed, samples=old.samples + 1, measured_at=now)


def _pull(ratio: float, evidence: float) -> float:
    """The factor for a value that was seen `ratio` times as large; 1 for what cannot be a ratio."""
    if not 0 < ratio < math.inf:
        return 1.0
    bounded = min(max(ratio, 1 / LARGEST_RATIO), LARGEST_RATIO)
    return math.pow(bounded, LARGEST_WEIGHT * min(1.0, evidence))


class RateBook:
    """One engine's part of the cache: `rates` (None: never calibrated) at its start, `learn` at its end."""

    def __init__(self, loaded: LoadedModel, disk: Path | None) -> None:
        self._place = Place.of(loaded, disk)
        self.rates = load_rates(self._place)

    def learn(self, stats: Mapping[str, Any]) -> None:
        """Fold in what `engine.stats()` says of a run that ends. Without a calibration nothing is made up. Never raises.

        The cache is read again: another process may have refined it meanwhile, and its part is kept.
        """
        if self.rates is None:
            return
        try:
            known = load_rates(self._place) or self.rates
            refined = refine(known, observed(stats), now=time.time())
            if refined is not known:
                save_rates(self._place, refined)
        except Exception as error:
            failed("calibration_not_refined", error=repr(error))
