"""CUDA without CUDA, for tests: a driver that queues everything and runs it as late as CUDA's rules allow, and a
binding of cudaMemcpyBatchAsync that checks its arguments as the driver does and copies real bytes in host memory.

As early, and as late, as may be: sources of "any order" copies are read when the call is made, all others when their
stream gets there. Batched copies run backwards, over a destination that was poisoned before.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from agentkv.kv.streams import Memory
from agentkv.kv.streams.batch import BatchCopy
from agentkv.kv.streams.cuda import CudaStreams

STREAM_ORDER, DURING_CALL, ANY_ORDER = 1, 2, 3
_POISON = 0xFF
"""Bytes of ones are NaN in bf16, fp16 and fp32."""
_REFUSED = 1
_THIRTEEN = 13


class _Point:
    """What an event stands for: a place in a stream's queue."""

    def __init__(self, stream: PretendStream) -> None:
        self.stream = stream
        self.done = False


class PretendStream:
    """A queue that nobody works on until somebody waits for something behind it."""

    def __init__(self, handle: int, lock: threading.RLock) -> None:
        self.cuda_stream = handle
        self.priority = 0
        self.queue: deque[tuple[Callable[[], None], _Point | None]] = deque()
        self._lock = lock

    def push(self, fn: Callable[[], None], *, waits_for: _Point | None = None) -> None:
        """Behind everything in the queue; not before `waits_for` is done."""
        with self._lock:
            self.queue.append((fn, waits_for))

    def step(self) -> None:
        """Do the first thing in the queue, and before it what it waits for."""
        with self._lock:
            fn, waits_for = self.queue.popleft()
            while waits_for is not None and not waits_for.done:
                waits_for.stream.step()
            fn()

    @property
    def ready(self) -> bool:
        """The first thing in the queue waits for nothing."""
        return bool(self.queue) and (self.queue[0][1] is None or self.queue[0][1].done)

    def synchronize(self) -> None:
        """Do everything."""
        while self.queue:
            self.step()

    def wait_event(self, event: PretendEvent) -> None:
        """Everything behind this comes after the event's point."""
        self.push(_nothing, waits_for=event.point)

    def wait_stream(self, other: PretendStream) -> None:
        """Everything behind this comes after what `other` has."""
        point = _Point(other)
        other.push(lambda: setattr(point, "done", True))
        self.push(_nothing, waits_for=point)


class PretendEvent:
    """May be recorded again: who waits for the old point is not disturbed."""

    made = 0

    def __init__(self, driver: PretendDriver) -> None:
        PretendEvent.made += 1
        self._driver = driver
        self.point: _Point | None = None

    def record(self, stream: PretendStream) -> None:
        """Stand for the place where `stream` is now."""
        point = self.point = _Point(stream)
        stream.push(lambda: setattr(point, "done", True))

    def query(self) -> bool:
        """True once the point is reached; with a restless driver, asking makes time pass."""
        assert self.point is not None
        self._driver.maybe_step()
        return self.point.done

    def synchronize(self) -> None:
        """Work until the point is reached."""
        assert self.point is not None
        while not self.point.done:
            self.point.stream.step()


class PretendDriver:
    """The part of torch.cuda that streams need. Torch's own calls on CPU tensors know nothing of it: they run at once.

    With a `seed` it is restless: whoever asks for an event makes some stream do something.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._handles = itertools.count(1000)
        self._chance = None if seed is None else random.Random(seed)  # noqa: S311  no secret
        self._lock = threading.RLock()
        self.streams: dict[int, PretendStream] = {}
        self.default = self.Stream(None)

    def Stream(self, _device: object, priority: int = 0) -> PretendStream:  # noqa: N802  as in torch.cuda
        """A stream of its own."""
        made = PretendStream(next(self._handles), self._lock)
        made.priority = priority
        self.streams[made.cuda_stream] = made
        return made

    def Event(self, *, blocking: bool) -> PretendEvent:  # noqa: N802, ARG002  as in torch.cuda
        """An event that was not recorded yet."""
        return PretendEvent(self)

    def current_stream(self, _device: object) -> PretendStream:
        """Where others compute."""
        return self.default

    @contextlib.contextmanager
    def stream(self, _stream: PretendStream) -> Iterator[None]:
        """Makes no difference here."""
        yield

    def maybe_step(self) -> None:
        """A restless driver does one thing."""
        if self._chance is None:
            return
        with self._lock:
            ready = [stream for stream in self.streams.values() if stream.ready]
            if ready:
                self._chance.choice(ready).step()


class PretendBinding:
    """cuda.bindings.runtime as far as it is used. Only memory in `regions` may be touched; `refuse` is the next
    calls' error.
    """

    cudaMemcpySrcAccessOrder = SimpleNamespace(  # noqa: N815  its name there
        cudaMemcpySrcAccessOrderStream=STREAM_ORDER,
        cudaMemcpySrcAccessOrderDuringApiCall=DURING_CALL,
        cudaMemcpySrcAccessOrderAny=ANY_ORDER,
    )

    def __init__(self, driver: PretendDriver, *, major: int = 13, version: int = 13010) -> None:
        self.driver = driver
        self.major = major
        self.version = version
        self.regions: list[tuple[int, int]] = []
        self.calls: list[Any] = []
        self.refuse = 0
        self.last_error = 0
        self.failed_at: int | None = None

    def cudaMemcpyAttributes(self) -> Any:  # noqa: N802
        """Attributes that nobody has set."""
        return SimpleNamespace(srcAccessOrder=0, flags=0)

    def cudaDriverGetVersion(self) -> tuple[int, int]:  # noqa: N802
        """(success, version)."""
        return (0, self.version)

    def cudaRuntimeGetVersion(self) -> tuple[int, int]:  # noqa: N802
        """(success, version)."""
        return (0, self.major * 1000)

    def cudaGetLastError(self) -> tuple[int]:  # noqa: N802
        """Take the error that a refused call left."""
        error, self.last_error = self.last_error, 0
        return (error,)

    def cudaMemcpyBatchAsync(  # noqa: N802, PLR0917  as the real one
        self,
        dsts: list[int],
        srcs: list[int],
        sizes: list[int],
        count: int,
        attrs: list[Any],
        attrs_idxs: list[int],
        num_attrs: int,
        stream: int,
    ) -> tuple[Any, ...]:
        """Queue the copies; the lists are emptied: whoever reads them later reads nothing."""
        copies = list(zip(dsts, srcs, sizes, strict=True))
        order = attrs[0].srcAccessOrder
        self.calls.append(SimpleNamespace(copies=copies, order=order, stream=stream))
        right = (
            0 < count == len(copies)
            and 1 == num_attrs == len(attrs) == len(attrs_idxs)
            and attrs_idxs[0] == 0
            and order in (STREAM_ORDER, DURING_CALL, ANY_ORDER)
            and stream in self.driver.streams
            and all(self._inside(at, size) for to, source, size in copies for at in (to, source))
        )
        if self.refuse or not right:
            self.last_error = self.refuse or _REFUSED
            return self._answer(self.last_error, self.failed_at)
        early = [ctypes.string_at(source, size) for _, source, size in copies] if order == ANY_ORDER else None

        def run() -> None:
            for to, _, size in copies:
                ctypes.memset(to, _POISON, size)
            for i in reversed(range(count)):
                to, source, size = copies[i]
                ctypes.memmove(to, early[i] if early else source, size)

        self.driver.streams[stream].push(run)
        for gone in (dsts, srcs, sizes, attrs, attrs_idxs):
            gone.clear()
        return self._answer(0, 2**64 - 1)

    def _answer(self, code: int, index: int | None) -> tuple[Any, ...]:
        return (code,) if self.major >= _THIRTEEN else (code, index)

    def _inside(self, at: int, size: int) -> bool:
        return any(start <= at and at + size <= end for start, end in self.regions)


class PretendStreams(CudaStreams):
    """CudaStreams over all of that, for tiers on the CPU: what is launched is queued like a kernel, and host memory
    counts as pinned.
    """

    def __init__(self, seed: int) -> None:
        self.driver = PretendDriver(seed)
        self.binding = PretendBinding(self.driver)
        super().__init__(torch.device("cpu"), batch=BatchCopy(self.binding), native=self.driver)

    def bind(self, memory: Memory) -> None:
        pool, arena = memory.pool, memory.arena
        self.binding.regions.append((pool.address, pool.address + pool.pool.numel() * pool.pool.element_size()))
        if arena is not None:
            arena._pins = SimpleNamespace(pinned_bytes=arena.size_bytes, close=_nothing)  # type: ignore[assignment]
            self.binding.regions.append((arena.address, arena.address + arena.size_bytes))
        super().bind(memory)

    def launch(self, fn: Callable[[], None]) -> None:
        self.compute.push(fn)


def _nothing() -> None:
    pass
