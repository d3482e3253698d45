"""HostArena: the host tier's memory, one mapping of page-aligned slots, pinned where there is a CUDA device.

Covers mapping, touching and free slots. Copies are the streams' work; `limits.py` knows what there is to be had,
`pins.py` how it is page-locked, `numa.py` where it should lie.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from agentkv.errors import ConfigError
from agentkv.kv.freemap import FreeMap
from agentkv.kv.geometry import MIN_SLOTS, Geometry
from agentkv.kv.limits import available_bytes
from agentkv.kv.numa import node_of_cuda, prefer
from agentkv.kv.pins import Pins
from agentkv.units import GIB, MIB, format_bytes

_PIN_PIECE_BYTES = 64 * GIB
_TOUCH_PIECE_BYTES = 64 * MIB
_MADV_WIPEONFORK = 18
_ROOT = Path("/")


class HostArena:
    """`slots` slots of `slot_bytes` each; `view(slot)` is the slot's bytes, `address` the first one's address.

    `pin`: page-lock it for CUDA, near the device `device` (a number). A forked child sees zeros instead of its
    parent's bytes: were the pages shared, the parent's next write would move them away from under the copy engines.
    Raises ConfigError on a size that holds no block, or more than there is.
    """

    def __init__(
        self, geometry: Geometry, size_bytes: int, *, pin: bool = False, device: int = 0, root: Path = _ROOT
    ) -> None:
        self.slot_bytes = geometry.slot_bytes
        self.slots = size_bytes // self.slot_bytes
        if self.slots < MIN_SLOTS:
            raise ConfigError(
                f"host memory of {format_bytes(size_bytes)} holds {self.slots} blocks of "
                f"{format_bytes(self.slot_bytes)}; at least {MIN_SLOTS} are needed, or 0 bytes for no host tier"
            )
        available = available_bytes(root)
        if size_bytes > available:
            raise ConfigError(
                f"host memory of {format_bytes(size_bytes)} is more than the {format_bytes(available)} that are "
                f"available here; give less host_memory ({format_bytes(available // 2)} leaves room for others)"
            )
        self.size_bytes = self.slots * self.slot_bytes
        try:
            self._map = mmap.mmap(-1, self.size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError, ValueError) as error:
            raise ConfigError(f"host memory of {format_bytes(size_bytes)} cannot be mapped: {error}") from error
        for advice in (getattr(mmap, "MADV_HUGEPAGE", None), _MADV_WIPEONFORK):
            if advice is not None:
                with contextlib.suppress(AttributeError, OSError, ValueError):
                    self._map.madvise(advice)
        self.buffer = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.buffer))
        self.piece_slots = max(1, _PIN_PIECE_BYTES // self.slot_bytes)
        """Slots per registration with CUDA: no slot lies in two, and no copy may reach from one into the next."""
        node = node_of_cuda(device) if pin else None
        self.node = node if node is not None and prefer(self.address, self.size_bytes, node) else None
        """The memory node that its pages were asked to come from; None if that was left to the kernel."""
        self._touch()
        self.free = FreeMap(self.slots)
        self._pins = Pins(self.address, self.size_bytes, self.piece_slots * self.slot_bytes) if pin else None

    @property
    def pinned_bytes(self) -> int:
        """Page-locked bytes, from the first slot on, in whole slots."""
        return 0 if self._pins is None else self._pins.pinned_bytes

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

    def close(self) -> None:
        """Unpin and unmap; views that somebody still holds keep the memory until they go. Idempotent."""
        if self._pins is not None:
            self._pins.close()
        self.buffer = memoryview(b"")
        with contextlib.suppress(BufferError):
            self._map.close()
