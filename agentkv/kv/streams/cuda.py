"""Streams on CUDA: torch streams and events; copies are asynchronous, from and to pinned memory.

One compute stream and one side stream per direction. Copies run on the copy engines, not on the multiprocessors, so
they do not slow down what computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from agentkv.kv.streams import Direction, Event, Memory, Run, cut_runs


class CudaEvent:
    """A point on a CUDA stream. Waiting sleeps instead of spinning."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.native = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self.native.record(stream)

    def query(self) -> bool:
        return bool(self.native.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self.native.synchronize()


class CudaStreams:
    """`compute` is the stream that `launch` runs on. Nothing here blocks but `copy`, on events that are not CUDA's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.compute = _new_stream(device)
        self._side: dict[Direction, torch.cuda.Stream] = {"h2d": _new_stream(device), "d2h": _new_stream(device)}
        self._blocks: torch.Tensor | None = None
        self._slots: torch.Tensor | None = None
        self._piece_slots = 1

    def bind(self, memory: Memory) -> None:
        pool = memory.pool.pool
        # [blocks, bytes of a block] and [slots, bytes of a block] over the same memory: a run is one slice of each
        self._blocks = pool.view(pool.shape[0], -1).view(torch.uint8)
        if memory.arena is not None:
            slots = torch.frombuffer(memory.arena.buffer, dtype=torch.uint8).view(-1, memory.arena.slot_bytes)
            self._slots = slots[:, : memory.pool.geometry.block_bytes]
            self._piece_slots = memory.arena.piece_slots
        self.compute.wait_stream(torch.cuda.current_stream(self._device))  # the pool was zeroed there

    def launch(self, fn: Callable[[], None]) -> None:
        with torch.cuda.stream(self.compute):
            fn()

    def record(self) -> Event:
        return CudaEvent(self.compute)

    def compute_wait(self, event: Event) -> None:
        _stream_wait(self.compute, event)

    def copy(self, direction: Direction, runs: Sequence[Run], after: Sequence[Event]) -> Event:
        assert self._blocks is not None
        assert self._slots is not None
        side = self._side[direction]
        for event in after:
            _stream_wait(side, event)
        with torch.cuda.stream(side):
            for run in self._whole(runs):
                device = self._blocks[run.device_block : run.device_block + run.n]
                host = self._slots[run.host_block : run.host_block + run.n]
                if direction == "h2d":
                    device.copy_(host, non_blocking=True)
                else:
                    host.copy_(device, non_blocking=True)
        return CudaEvent(side)

    def _whole(self, runs: Sequence[Run]) -> Sequence[Run]:
        """Runs whose host side is one piece of registered memory: block by block if slots have padding."""
        assert self._slots is not None
        return cut_runs(runs, self._piece_slots if self._slots.is_contiguous() else 1)

    def taken(self, *, device: Sequence[int] = (), host: Sequence[int] = (), compute: bool = False) -> None:
        pass

    def freed(self, *, device: Sequence[tuple[int, Event]] = (), host: Sequence[int] = ()) -> None:
        pass

    def close(self) -> None:
        """Let what runs end, and let go of the memory."""
        for stream in (self.compute, *self._side.values()):
            stream.synchronize()
        self._blocks = self._slots = None


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _stream_wait(stream: torch.cuda.Stream, event: Event) -> None:
    """`stream` waits for `event`; one that is not CUDA's is waited for by this thread."""
    if isinstance(event, CudaEvent):
        stream.wait_event(event.native)
    else:
        event.wait()
