"""Streams on CUDA: torch's streams and events; copies are asynchronous, from and to pinned memory.

One compute stream and one side stream per direction. Copies run on the copy engines, not on the multiprocessors, so
they do not slow down what computes. How a job is copied is `path.py`.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from agentkv.kv.streams import Direction, Event, Memory, Run
from agentkv.kv.streams.batch import BatchCopy, batch_copy
from agentkv.kv.streams.path import BATCHED, CopyPath

_SIDE_PRIORITY = -1


class CudaEvent:
    """A point on a CUDA stream. Waiting sleeps instead of spinning.

    The driver's event goes home when nobody holds this object any more, and is recorded anew for somebody else: a
    stream that was told to wait for it waits for the point that it stood for at that time.
    """

    __slots__ = ("_done", "_home", "native", "stream")

    def __init__(self, native: Any, stream: Any, home: deque[Any]) -> None:
        self.native = native
        self.stream = stream
        self._home = home
        self._done = False

    def query(self) -> bool:
        self._done = self._done or bool(self.native.query())
        return self._done

    def wait(self) -> None:
        if not self._done:
            self.native.synchronize()
            self._done = True

    def __del__(self) -> None:
        self._home.append(self.native)


class CudaStreams:
    """`compute` is the stream that `launch` runs on. Nothing here blocks but `copy`: on events that are not CUDA's, and
    on pageable host memory.

    `batch` is the batched copy or why there is none (default: what this machine has). `native` is torch.cuda.
    """

    def __init__(self, device: torch.device, *, batch: BatchCopy | str | None = None, native: Any = torch.cuda) -> None:
        self._device = device
        self._pid = os.getpid()
        self._native = native
        self._batch = batch_copy() if batch is None else batch
        self.compute = native.Stream(device)
        # Torch hands the same 32 streams round, for each priority. Copies have none, so a side stream of this other
        # pool is never what some engine computes on.
        self._side = {way: native.Stream(device, priority=_SIDE_PRIORITY) for way in ("h2d", "d2h")}
        self._free_events: deque[Any] = deque()
        self._path: CopyPath | None = None

    @property
    def copy_path(self) -> str:
        """How copies are made, in words: "cudaMemcpyBatchAsync", or "copy_ per run: " and why."""
        if self._path is not None:
            return self._path.words
        return f"copy_ per run: {self._batch}" if isinstance(self._batch, str) else BATCHED

    def bind(self, memory: Memory) -> None:
        if memory.arena is not None:
            self._path = CopyPath(memory, self._batch)
        self.compute.wait_stream(self._native.current_stream(self._device))  # the pool was zeroed there

    def launch(self, fn: Callable[[], None]) -> None:
        with self._native.stream(self.compute):
            fn()

    def record(self) -> Event:
        return self._event(self.compute)

    def compute_wait(self, event: Event) -> None:
        self._wait(self.compute, event)

    def copy(self, direction: Direction, runs: Sequence[Run], after: Sequence[Event]) -> Event:
        assert self._path is not None, "there is no host tier"
        side = self._side[direction]
        settled = True
        for event in after:
            if self._writes_host(event) and not event.query():
                settled = False
                if not self._path.pinned(runs):
                    event.wait()  # pageable sources are staged at once, by this thread
            self._wait(side, event)
        with self._native.stream(side):
            self._path.copy(direction, runs, stream=side.cuda_stream, settled=settled)
        return self._event(side)

    def _writes_host(self, event: Event) -> bool:
        return isinstance(event, CudaEvent) and event.stream is self._side["d2h"]

    def _wait(self, stream: Any, event: Event) -> None:
        """`stream` waits for `event`; one that is not CUDA's is waited for by this thread."""
        if isinstance(event, CudaEvent):
            stream.wait_event(event.native)
        else:
            event.wait()

    def _event(self, stream: Any) -> CudaEvent:
        try:
            native = self._free_events.pop()
        except IndexError:
            native = self._native.Event(blocking=True)
        native.record(stream)
        return CudaEvent(native, stream, self._free_events)

    def taken(self, *, device: Sequence[int] = (), host: Sequence[int] = (), compute: bool = False) -> None:
        pass

    def freed(self, *, device: Sequence[tuple[int, Event]] = (), host: Sequence[int] = ()) -> None:
        pass

    def close(self) -> None:
        """Let what runs end, and let go of the memory. In a forked child nothing runs, and CUDA must not be asked."""
        if os.getpid() == self._pid:
            for stream in (self.compute, *self._side.values()):
                stream.synchronize()
        self._path = None
