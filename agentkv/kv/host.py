"""HostArena: the host tier's memory, one mapping of page-aligned slots, pinned where there is a CUDA device.

Covers mapping, touching, pinning and free slots. Copies are the streams' work.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from agentkv.errors import ConfigError
from agentkv.kv.freemap import FreeMap
from agentkv.kv.geometry import MIN_SLOTS, Geometry
from agentkv.log import failed, warn_once
from agentkv.units import GIB, MIB, format_bytes

_PIN_PIECE_BYTES = 64 * GIB
_TOUCH_PIECE_BYTES = 64 * MIB


class HostArena:
    """`slots` slots of `slot_bytes` each; `view(slot)` is the slot's bytes, `address` the first one's address."""

    def __init__(self, geometry: Geometry, size_bytes: int, *, pin: bool = False) -> None:
        self.slot_bytes = geometry.slot_bytes
        self.slots = size_bytes // self.slot_bytes
        if self.slots < MIN_SLOTS:
            raise ConfigError(
                f"host memory of {format_bytes(size_bytes)} holds {self.slots} blocks of "
                f"{format_bytes(self.slot_bytes)}; at least {MIN_SLOTS} are needed, or 0 bytes for no host tier"
            )
        self.size_bytes = self.slots * self.slot_bytes
        try:
            self._map = mmap.mmap(-1, self.size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError, ValueError) as error:
            raise ConfigError(f"host memory of {format_bytes(size_bytes)} cannot be mapped: {error}") from error
        with contextlib.suppress(AttributeError, OSError, ValueError):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.buffer = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.buffer))
        self.piece_slots = max(1, _PIN_PIECE_BYTES // self.slot_bytes)
        """Slots per registration with CUDA: no slot lies in two, and no copy may reach from one into the next."""
        self._touch()
        self.free = FreeMap(self.slots)
        self.pinned_bytes = self._pin() if pin else 0

    def view(self, slot: int) -> memoryview:
        """The bytes of one slot."""
        return self.buffer[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]

    def _touch(self) -> None:
        """Fault every page in now, on several threads, so that no copy pays for it later."""
        pieces = range(0, self.size_bytes, _TOUCH_PIECE_BYTES)

        def touch(at: int) -> None:
            ctypes.memset(self.address + at, 0, min(_TOUCH_PIECE_BYTES, self.size_bytes - at))

        with ThreadPoolExecutor(min(8, os.cpu_count() or 1, len(pieces))) as threads:
            list(threads.map(touch, pieces))

    def _pin(self) -> int:
        """Page-lock the arena piece by piece; what cannot be pinned stays pageable, with one warning."""
        pinned, piece_bytes = 0, self.piece_slots * self.slot_bytes
        for at in range(0, self.size_bytes, piece_bytes):
            size = min(piece_bytes, self.size_bytes - at)
            code = int(_cudart().cudaHostRegister(self.address + at, size, 0))
            if code != 0:
                _clear_cuda_error()
                warn_once(
                    "host_memory_not_pinned",
                    pinned=format_bytes(pinned),
                    asked=format_bytes(self.size_bytes),
                    memlock_limit=_memlock_limit(),
                    error=code,
                )
                break
            pinned += size
        return pinned

    def close(self) -> None:
        """Unpin and unmap; views that somebody still holds keep the memory until they go."""
        for at in range(0, self.pinned_bytes, self.piece_slots * self.slot_bytes):
            try:
                _cudart().cudaHostUnregister(self.address + at)
            except Exception as error:
                failed("host_memory_unpin_failed", error=repr(error))
        self.pinned_bytes = 0
        self.buffer = memoryview(b"")
        with contextlib.suppress(BufferError):
            self._map.close()


def _cudart() -> Any:
    import torch

    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _clear_cuda_error() -> None:
    """A failed registration leaves an error behind that the next launch would report as its own: take it here."""
    import torch

    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")


def _memlock_limit() -> str:
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if soft == resource.RLIM_INFINITY else format_bytes(soft)
