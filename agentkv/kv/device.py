"""DevicePool: the device tier's memory and the events of its blocks.

Covers the pool tensor and, per device block, who has it and the last write and read by compute (rules R1, R2).
Does not know sessions: that is `book.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from agentkv.errors import ConfigError
from agentkv.kv.block import Block
from agentkv.kv.freemap import FreeMap
from agentkv.kv.geometry import MIN_SLOTS, Geometry
from agentkv.kv.limits import available_bytes
from agentkv.kv.streams import Event
from agentkv.units import format_bytes

NULL_BLOCK = 0
"""Padding points here; it is never allocated and stays finite."""


class DevicePool:
    """`pool`: [num_blocks, layers, 2, 16, kv_heads, head_dim], contiguous, block 0 reserved."""

    def __init__(self, geometry: Geometry, device: str, size_bytes: int) -> None:
        blocks = size_bytes // geometry.block_bytes
        if blocks < MIN_SLOTS:
            raise ConfigError(
                f"device memory of {format_bytes(size_bytes)} holds {blocks} blocks of "
                f"{format_bytes(geometry.block_bytes)}; at least {MIN_SLOTS} are needed"
            )
        self.geometry = geometry
        self.num_blocks = blocks
        self.pool = _zeros(geometry, blocks + 1, device)
        self.address = self.pool.data_ptr()
        self.free = FreeMap(blocks + 1)
        taken = self.free.take(1)
        assert taken == [NULL_BLOCK]
        self.private: set[int] = set()
        """Blocks of running sequences that are not full yet, or have no key."""
        self.owner: list[Block | None] = [None] * (blocks + 1)
        """The keyed block whose copy is here, or on its way here."""
        self.last_use: list[Event | None] = [None] * (blocks + 1)
        self.last_write: list[Event | None] = [None] * (blocks + 1)

    def take(self, n: int) -> list[int]:
        """`n` free blocks, neighbours where possible; ValueError if fewer are free."""
        return self.free.take(n)

    def give(self, blocks: Iterable[int]) -> None:
        """Free `blocks`; their last use stays known, for whoever loads into them next must wait for it."""
        for block in blocks:
            self.last_write[block] = None
            self.owner[block] = None
            self.private.discard(block)
            self.free.give((block,))

    def reads(self, blocks: Sequence[int]) -> list[Event]:
        """What a copy into `blocks` waits for (R2)."""
        return _pending(self.last_use, blocks)

    def writes(self, blocks: Sequence[int]) -> list[Event]:
        """What a copy out of `blocks` waits for (R1)."""
        return _pending(self.last_write, blocks)


def _pending(events: Sequence[Event | None], blocks: Sequence[int]) -> list[Event]:
    found = {id(event): event for block in blocks if (event := events[block]) is not None}
    return list(found.values())


def _zeros(geometry: Geometry, blocks: int, device: str) -> torch.Tensor:
    size_bytes = blocks * geometry.block_bytes
    refusal = ConfigError(
        f"device memory of {format_bytes(size_bytes)} cannot be had on {device}; {_available(device)} are available "
        "beside the model: give less device_memory"
    )
    if torch.device(device).type == "cpu" and size_bytes > available_bytes():
        raise refusal  # where memory is overcommitted, the first use would be killed instead
    try:
        return torch.zeros((blocks, *geometry.block_shape), dtype=getattr(torch, geometry.dtype), device=device)
    except RuntimeError as error:  # torch's OutOfMemoryError is one
        raise refusal from error


def _available(device: str) -> str:
    """Free memory of the device, in words."""
    if torch.device(device).type == "cuda":
        return format_bytes(torch.cuda.mem_get_info(device)[0])
    return format_bytes(available_bytes())
