"""Streams of an adversary: everything that CUDA may do in theory and hardly ever does on a good day. For tests.

Compute and copies are queued and run later, one small step at a time, in an order that a seed decides; only events
order them. What is about to be overwritten, and what nobody owns, is poisoned (NaN), so that whoever reads too
early or too late reads nonsense. Nothing runs by itself: whoever queries or waits for an event makes steps, hence
`launch`ed functions may run on any thread, one at a time.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from agentkv.kv.streams import Direction, Event, Memory, Run
from agentkv.kv.streams.cpu import byte_moves, move_all

_POISON = 0xFF
"""Bytes of ones are NaN in bf16, fp16 and fp32."""
_NAP_S = 0.0002


class _Mark:
    """An event on one of the adversary's streams."""

    def __init__(self, streams: AdversarialStreams) -> None:
        self._streams = streams
        self.done = False

    def query(self) -> bool:
        self._streams.maybe_step()
        return self.done

    def wait(self) -> None:
        while not self.done:
            if not self._streams.step():
                time.sleep(_NAP_S)
        self._streams.raise_error()


class _Op:
    """`steps` yields after each small step; `after` must have happened before the first."""

    def __init__(self, steps: Iterator[None], after: Sequence[Event] = ()) -> None:
        self.steps = steps
        self.after = after

    @property
    def ready(self) -> bool:
        return all(event.done if isinstance(event, _Mark) else event.query() for event in self.after)


class AdversarialStreams:
    """Streams (see the protocol) whose every legal order may happen; the seed chooses one."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)  # noqa: S311  chance that can be repeated, no secret
        self._memory: Memory | None = None
        self._queues: dict[str, deque[_Op]] = {"compute": deque(), "h2d": deque(), "d2h": deque()}
        self._turn = threading.RLock()
        self._stepping = False
        self._poisoning = threading.Lock()
        self._ownerless_device: dict[int, Event] = {}
        self._ownerless_host: set[int] = set()
        self._error: BaseException | None = None

    def bind(self, memory: Memory) -> None:
        self._memory = memory

    # -- the streams

    def launch(self, fn: Callable[[], None]) -> None:
        self._queues["compute"].append(_Op(_call(fn)))

    def record(self) -> Event:
        return self._mark("compute")

    def compute_wait(self, event: Event) -> None:
        self._queues["compute"].append(_Op(iter(()), (event,)))

    def copy(self, direction: Direction, runs: Sequence[Run], after: Sequence[Event]) -> Event:
        self._queues[direction].append(_Op(self._copy(direction, list(runs)), after))
        return self._mark(direction)

    def taken(self, *, device: Sequence[int] = (), host: Sequence[int] = (), compute: bool = False) -> None:
        with self._poisoning:
            for block in device:
                self._ownerless_device.pop(block, None)
            self._ownerless_host.difference_update(host)
        if compute and device:
            blocks = list(device)
            # a sequence may read the unwritten tail of its own block, masked; garbage there is finite in real life
            self.launch(lambda: self._fill(blocks))

    def freed(self, *, device: Sequence[tuple[int, Event]] = (), host: Sequence[int] = ()) -> None:
        with self._poisoning:
            self._ownerless_device.update(device)
            self._ownerless_host.update(host)

    def close(self) -> None:
        """Run what can still run."""
        while self.step():
            pass

    # -- the adversary

    def step(self) -> bool:
        """One small step of one stream. False if every stream is empty or waits."""
        with self._turn:
            if self._stepping:
                return False
            self._stepping = True
            try:
                self._poison_ownerless()
                ready = [queue for queue in self._queues.values() if queue and queue[0].ready]
                if not ready:
                    return False
                queue = self._random.choice(ready)
                try:
                    next(queue[0].steps)
                except StopIteration:
                    queue.popleft()
                except BaseException as error:
                    self._error = error
                    queue.popleft()
                return True
            finally:
                self._stepping = False

    def maybe_step(self) -> None:
        """Somebody looks: time passes, or not."""
        with self._turn:
            if self._random.choice((True, False)):
                self.step()

    def raise_error(self) -> None:
        """What a launched function raised, once, in whoever waits next: as CUDA does."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _mark(self, queue: str) -> Event:
        mark = _Mark(self)

        def reach() -> None:
            mark.done = True

        self._queues[queue].append(_Op(_call(reach)))
        return mark

    def _copy(self, direction: Direction, runs: list[Run]) -> Iterator[None]:
        assert self._memory is not None
        moves = byte_moves(self._memory, direction, runs)
        for to, _, size in moves:
            _poison(to, size)
        yield
        self._random.shuffle(moves)
        for move in moves:
            move_all([move])
            yield

    def _poison_ownerless(self) -> None:
        assert self._memory is not None
        pool, arena = self._memory.pool, self._memory.arena
        size = pool.geometry.block_bytes
        with self._poisoning:
            for block, read in list(self._ownerless_device.items()):
                if not isinstance(read, _Mark) or read.done:
                    _poison(pool.address + block * size, size)
                    del self._ownerless_device[block]
            for slot in self._ownerless_host:
                assert arena is not None
                _poison(arena.address + slot * arena.slot_bytes, size)
            self._ownerless_host.clear()

    def _fill(self, blocks: Sequence[int]) -> None:
        assert self._memory is not None
        for block in blocks:
            self._memory.pool.pool[block] = 0


def _call(fn: Callable[[], None]) -> Iterator[None]:
    fn()
    return
    yield


def _poison(address: int, size: int) -> None:
    ctypes.memset(address, _POISON, size)
