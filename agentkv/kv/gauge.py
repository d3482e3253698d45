"""The gauge of the data plane: how fast blocks of one model are copied, read and written on this machine.

Covers memcpy, host <-> device through the real streams, and disk through the real slab with as many threads as the
lanes have. Blocks are scattered, as in a pool that has been in use. Medians of rounds within a time budget; nothing
is left behind, whatever ends it. Does not cover prefill: that is `engine/local/gauge.py`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agentkv.errors import DiskUnavailable
from agentkv.kv.geometry import Geometry
from agentkv.kv.host import HostArena
from agentkv.kv.limits import available_bytes
from agentkv.kv.slab import Slab, SlotImage
from agentkv.units import MIB

if TYPE_CHECKING:
    from agentkv.core.rates import Rates
    from agentkv.kv.mover import LaneName
    from agentkv.kv.streams import Direction

_COPY_BYTES = 256 * MIB
"""More than a CPU's caches hold: what comes back from a cache looks twice as fast."""
_MEMORY_PART = 16
"""The gauge takes at most this part of what memory is available, twice."""
_DISK_BYTES = 128 * MIB
_DISK_JOB_BYTES = 4 * MIB
_READERS, _WRITERS = 8, 4
_LEAST_BLOCKS = 4
_LEAST_ROUNDS = 3
_NOISE_BYTES = MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyRates:
    """Bytes per second: one thread over one run of host memory, scattered blocks to the device, and from it."""

    memcpy_bytes_s: float
    h2d_bytes_s: float
    d2h_bytes_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskRates:
    """Bytes per second with checksums, as the disk tier reads and writes."""

    read_bytes_s: float
    write_bytes_s: float


def reckoned(rates: Rates | None, *, on_gpu: bool) -> dict[LaneName, float]:
    """Bytes per second that a lane starts with: what was measured, else rough figures."""
    link = 20e9 if on_gpu else 4e9
    found: dict[LaneName, float] = {"h2d": link, "d2h": link, "read": 1.5e9, "write": 0.8e9}
    if rates is not None:
        found |= {"h2d": rates.h2d_bytes_s, "d2h": rates.d2h_bytes_s}
        found |= {"read": rates.read_bytes_s or found["read"], "write": rates.write_bytes_s or found["write"]}
    return found


def measure_copies(
    geometry: Geometry, *, device: str = "cpu", seconds: float = 1.0, size_bytes: int = _COPY_BYTES
) -> CopyRates:
    """Copy about `size_bytes` to and fro for `seconds`, at least three times each way.

    Raises ConfigError where the device has no room for a pool of that size.
    """
    from agentkv.kv.device import DevicePool
    from agentkv.kv.streams import Memory, runs_of, streams_for

    blocks = _blocks(geometry, size_bytes)
    pool = DevicePool(geometry, device, blocks * geometry.block_bytes)
    with closing(HostArena(geometry, blocks * geometry.slot_bytes, pin=pool.pool.is_cuda)) as arena:
        _fill(arena)
        memcpy_bytes_s = _median_rate(lambda: _memcpy(arena), seconds / 3)
        with closing(streams_for(pool)) as streams:
            streams.bind(Memory(pool=pool, arena=arena))
            order = list(range(blocks))
            random.Random(0).shuffle(order)  # noqa: S311  an order, not a secret
            runs = runs_of((i + 1, slot) for i, slot in enumerate(order))

            def copy(direction: Direction) -> int:
                streams.copy(direction, runs, []).wait()
                return blocks * geometry.block_bytes

            copy("h2d")  # the first touch of every page is not a rate
            h2d_bytes_s = _median_rate(lambda: copy("h2d"), seconds / 3)
            d2h_bytes_s = _median_rate(lambda: copy("d2h"), seconds / 3)
    return CopyRates(memcpy_bytes_s=memcpy_bytes_s, h2d_bytes_s=h2d_bytes_s, d2h_bytes_s=d2h_bytes_s)


def measure_disk(
    geometry: Geometry, directory: Path, *, seconds: float = 2.0, size_bytes: int = _DISK_BYTES
) -> DiskRates:
    """Write and read about `size_bytes` below `directory` for `seconds`, less where the disk is slow.

    Where the file system refuses O_DIRECT the page cache is emptied before a read: a cold context is read from disk.
    Raises DiskUnavailable if the directory cannot hold a disk tier, or gives back other bytes than it took.
    """
    blocks = _blocks(geometry, size_bytes)
    read_rates: list[float] = []
    write_rates: list[float] = []
    with (
        Slab(directory, blocks * geometry.slot_bytes, geometry.block_bytes) as slab,
        closing(HostArena(geometry, blocks * geometry.slot_bytes)) as arena,
    ):
        _fill(arena)
        jobs = _jobs(slab, arena)
        end_s = time.monotonic() + seconds
        while not read_rates or time.monotonic() < end_s:
            try:
                written, rate = _race(jobs, slab.write, threads=_WRITERS, seconds=seconds / 2)
                write_rates.append(rate)
                _empty_page_cache(slab.path)
                _, rate = _race(written, lambda job: _read(slab, job), threads=_READERS, seconds=seconds / 2)
                read_rates.append(rate)
            except OSError as error:
                raise DiskUnavailable(f"the disk tier cannot use {directory}: {error.strerror or error}") from error
        jobs.clear()  # they hold views of the arena
        written.clear()
    return DiskRates(read_bytes_s=statistics.median(read_rates), write_bytes_s=statistics.median(write_rates))


def _blocks(geometry: Geometry, size_bytes: int) -> int:
    return max(_LEAST_BLOCKS, min(size_bytes, available_bytes() // _MEMORY_PART) // geometry.slot_bytes)


def _median_rate(step: Callable[[], int], seconds: float) -> float:
    """Bytes per second of `step`, which returns how many it copied."""
    rates: list[float] = []
    end_s = time.monotonic() + seconds
    while len(rates) < _LEAST_ROUNDS or time.monotonic() < end_s:
        began_s = time.perf_counter()
        size_bytes = step()
        rates.append(size_bytes / max(time.perf_counter() - began_s, 1e-9))
    return statistics.median(rates)


def _memcpy(arena: HostArena) -> int:
    half = arena.size_bytes // 2
    ctypes.memmove(arena.address + half, arena.address, half)
    return half


def _fill(arena: HostArena) -> None:
    """Noise: zeros are a special case for some memory and some file systems."""
    noise = os.urandom(_NOISE_BYTES)
    for at in range(0, arena.size_bytes, len(noise)):
        ctypes.memmove(arena.address + at, noise, min(len(noise), arena.size_bytes - at))


def _jobs(slab: Slab, arena: HostArena) -> list[list[SlotImage]]:
    """The arena's blocks with slots on disk, in jobs of the size that the lanes make."""
    images = [
        SlotImage(slot, i.to_bytes(16, "little"), arena.view(i)) for i, slot in enumerate(slab.reserve(arena.slots))
    ]
    size = max(1, _DISK_JOB_BYTES // arena.slot_bytes)
    return [images[at : at + size] for at in range(0, len(images), size)]


def _read(slab: Slab, job: Sequence[SlotImage]) -> None:
    if not all(slab.read(job)):
        raise OSError("what was written did not come back")


def _race(
    jobs: Sequence[list[SlotImage]], act: Callable[[list[SlotImage]], None], *, threads: int, seconds: float
) -> tuple[list[list[SlotImage]], float]:
    """`threads` threads take jobs until there are none or the time is over: those done, and bytes per second."""
    left, done, stop = deque(jobs), list[list[SlotImage]](), threading.Event()
    began_s = time.perf_counter()

    def work() -> None:
        while not stop.is_set():
            try:
                job = left.popleft()
            except IndexError:
                return
            act(job)
            done.append(job)
            if time.perf_counter() - began_s > seconds:
                return

    with ThreadPoolExecutor(threads, thread_name_prefix="agentkv-gauge") as pool:
        running = [pool.submit(work) for _ in range(threads)]
        try:
            for future in running:
                future.result()
        finally:
            stop.set()
    size_bytes = sum(len(image.view) for job in done for image in job)
    return done, size_bytes / max(time.perf_counter() - began_s, 1e-9)


def _empty_page_cache(directory: Path) -> None:
    """Best effort; with O_DIRECT there is nothing to empty."""
    for path in directory.iterdir():
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fdatasync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
