"""How blocks get from host memory to a CUDA device and back: one batched call per job, or torch's `copy_` per run.

Covers the choice and the fall-back, for memory that is pinned, pageable, or pinned in its first part. Does not cover
streams and events (`cuda.py`) nor the batched call (`batch.py`). Everything here runs on CPU tensors as well.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from agentkv.kv.streams import Direction, Memory, Run, cut_runs
from agentkv.kv.streams.batch import BatchCopy, BatchRefused, Layout, copies_of
from agentkv.log import warn_once

BATCHED = "cudaMemcpyBatchAsync"


class CopyPath:
    """Copies of one pool and one arena. `batch` is the batched call or why there is none."""

    def __init__(self, memory: Memory, batch: BatchCopy | str) -> None:
        assert memory.arena is not None
        pool, arena = memory.pool, memory.arena
        self._batch = batch
        self._layout = Layout(
            pool_address=pool.address,
            arena_address=arena.address,
            block_bytes=pool.geometry.block_bytes,
            slot_bytes=arena.slot_bytes,
            piece_slots=arena.piece_slots,
        )
        self._pinned_slots = arena.pinned_bytes // arena.slot_bytes
        # [blocks, bytes of a block] and [slots, bytes of a block] over the same memory: a run is one slice of each
        self._blocks = pool.pool.view(pool.pool.shape[0], -1).view(torch.uint8)
        slots = torch.frombuffer(arena.buffer, dtype=torch.uint8).view(-1, arena.slot_bytes)
        self._slots = slots[:, : pool.geometry.block_bytes]

    @property
    def words(self) -> str:
        """How copies are made, for people."""
        if isinstance(self._batch, str):
            return f"copy_ per run: {self._batch}"
        if self._pinned_slots == 0:
            return "copy_ per run: host memory is not pinned"
        if self._pinned_slots < len(self._slots):
            return f"{BATCHED} for the {self._pinned_slots} of {len(self._slots)} host slots that are pinned"
        return BATCHED

    def pinned(self, runs: Sequence[Run]) -> bool:
        """True if the host side of all `runs` is page-locked: then copies are asynchronous, both ways."""
        return all(run.host_block + run.n <= self._pinned_slots for run in runs)

    def copy(self, direction: Direction, runs: Sequence[Run], *, stream: int, settled: bool) -> None:
        """Queue `runs` on `stream`, which is torch's current one. `settled`: the host side has its bytes already, so
        a copy from it may read them at any time from now on.

        Pageable memory: the driver stages it, on this thread, and may make it wait; a batch gains nothing there.
        """
        if not isinstance(self._batch, str) and self.pinned(runs):
            copies = copies_of(self._layout, direction, runs)
            try:
                self._batch.submit(copies, stream=stream, any_order=settled and direction == "h2d")
            except BatchRefused as error:
                self._batch = f"{error}"
                warn_once("kv_batch_copy_off", reason=str(error))
            else:
                return
        self._one_by_one(direction, runs)  # after a refusal too: copying twice, in order, does no harm

    def _one_by_one(self, direction: Direction, runs: Sequence[Run]) -> None:
        """Cut as in `copies_of`."""
        for run in cut_runs(runs, self._layout.piece_slots if self._slots.is_contiguous() else 1):
            device = self._blocks[run.device_block : run.device_block + run.n]
            host = self._slots[run.host_block : run.host_block + run.n]
            if direction == "h2d":
                device.copy_(host, non_blocking=True)
            else:
                host.copy_(device, non_blocking=True)
