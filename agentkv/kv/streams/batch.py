"""Many copies in one call: `cudaMemcpyBatchAsync` through the cuda-bindings package, and the addresses it is given.

Covers what is needed for it and whether it is there (`available`), the call, pointer arithmetic. Knows no torch and
no stream but its handle; who falls back to what is `path.py`.

CUDA 12.8 and 13 differ in C (13 has no failIdx); in Python the arguments are the same and 12's answer has one item
more. The legacy default stream is refused by the driver.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from agentkv.kv.streams import Direction, Run, cut_runs

_OLDEST = 12080
"""CUDA's way to write 12.8."""
_LEGACY_STREAMS = (0, 1)


class BatchRefused(Exception):
    """The call was refused; none of its copies counts as submitted."""


class Layout(NamedTuple):
    """Where blocks and slots are. A slot may be longer than a block; `piece_slots` slots are registered together."""

    pool_address: int
    arena_address: int
    block_bytes: int
    slot_bytes: int
    piece_slots: int


class Copies(NamedTuple):
    """One copy per index."""

    to: list[int]
    source: list[int]
    sizes: list[int]


def copies_of(layout: Layout, direction: Direction, runs: Sequence[Run]) -> Copies:
    """A run is one copy, unless slots have padding (then a block is) or it spans two registrations of host memory."""
    pool, arena, block_bytes, slot_bytes, piece_slots = layout
    every = piece_slots if block_bytes == slot_bytes else 1
    if any(n > 1 and slot % every + n > every for _, slot, n in runs):  # half the time of cutting them all
        runs = cut_runs(runs, every)
    device = [pool + block * block_bytes for block, _, _ in runs]
    host = [arena + slot * slot_bytes for _, slot, _ in runs]
    sizes = [n * block_bytes for _, _, n in runs]
    return Copies(device, host, sizes) if direction == "h2d" else Copies(host, device, sizes)


class BatchCopy:
    """`binding` is the module cuda.bindings.runtime, or what behaves like it. Thread-safe."""

    def __init__(self, binding: Any) -> None:
        self._binding = binding
        orders = binding.cudaMemcpySrcAccessOrder
        self._stream_order = self._attributes(orders.cudaMemcpySrcAccessOrderStream)
        self._any_order = self._attributes(orders.cudaMemcpySrcAccessOrderAny)

    def submit(self, copies: Copies, *, stream: int, any_order: bool) -> None:
        """Queue `copies` behind what `stream` (a handle) has; returns at once. Raises BatchRefused.

        `any_order`: the sources may be read before the stream gets there, so they must be complete, and stay as they
        are until the copies have ended. Never right for device memory, which compute has just written (R5).

        The lists are the call's own arguments: the binding turns them into C arrays that the driver has read when it
        returns (only the memory they point to is read later), so nobody has to keep them.
        """
        if stream in _LEGACY_STREAMS:
            raise BatchRefused("the legacy default stream takes no batches")
        attributes = self._any_order if any_order else self._stream_order
        count = len(copies.sizes)
        # one set of attributes, for the copies from index 0 on
        answer = self._binding.cudaMemcpyBatchAsync(*copies, count, [attributes], [0], 1, stream)
        if int(answer[0]) != 0:
            self._binding.cudaGetLastError()  # else somebody's next call reports it as its own
            at = answer[1] if len(answer) > 1 else None  # 12.x: an index, the largest number, or None
            where = f" at copy {at}" if isinstance(at, int) and at < count else ""
            raise BatchRefused(f"cudaMemcpyBatchAsync answered {answer[0]!r}{where}")

    def _attributes(self, order: Any) -> Any:
        attributes = self._binding.cudaMemcpyAttributes()
        attributes.srcAccessOrder = order
        return attributes


def available() -> str:
    """Why copies cannot be batched on this machine, in words; "" if they can."""
    found = batch_copy()
    return found if isinstance(found, str) else ""


def batch_copy() -> BatchCopy | str:
    """The batch copy of this machine, or why there is none. Needs no GPU to answer."""
    try:
        from cuda.bindings import runtime
    except ImportError:
        return 'the package cuda-bindings is not installed (pip install "agentkv-sdk[cuda]")'
    except Exception as error:  # it looks for libraries while it is imported
        return f"the package cuda-bindings cannot be imported: {error!r}"
    return why_not(runtime) or BatchCopy(runtime)


def why_not(binding: Any) -> str:
    """Why this binding cannot batch copies on this machine's driver; "" if it can."""
    if not hasattr(binding, "cudaMemcpyBatchAsync"):
        return 'cuda-bindings is older than CUDA 12.8 (pip install "cuda-bindings>=12.8")'
    try:
        driver, runtime = int(binding.cudaDriverGetVersion()[1]), int(binding.cudaRuntimeGetVersion()[1])
    except Exception:  # 12.x raises where 13.x answers 0
        return "there is no CUDA driver"
    if driver == 0:
        return "there is no CUDA driver"
    if driver < _OLDEST:
        return f"the CUDA driver is of version {_version(driver)}, 12.8 is needed"
    if driver // 1000 < runtime // 1000:
        major = driver // 1000
        return (
            f"cuda-bindings is for CUDA {_version(runtime)}, the driver for {_version(driver)}"
            f' (pip install "cuda-bindings<{major + 1}")'
        )
    return ""


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"
