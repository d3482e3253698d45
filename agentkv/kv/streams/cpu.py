"""Streams on the CPU: compute runs inline, copies are memmoves on the calling (mover's) thread and one helper.

`ctypes.memmove` releases the interpreter lock; indexing a byte tensor is ten times slower. What limits scattered
copies is the lock: each memmove ends by taking it, and a thread that finds it taken sleeps for longer than a block
of 192 KiB takes to copy. So the loop over the pieces runs in C, and both threads draw from one queue: a core that
others keep busy takes fewer pieces, and nobody waits for it.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import starmap

from agentkv.kv.streams import DONE, Direction, Event, Memory, Run
from agentkv.units import MIB

_SPLIT_BYTES = 2 * MIB
"""Below this a second thread costs more than it brings."""
_PIECE_BYTES = 2 * MIB
"""Long runs are drawn in pieces of this size: smaller ones cost speed, larger ones leave one thread waiting longer for
the other's last.
"""

ByteMove = tuple[int, int, int]
"""(to address, from address, bytes)."""


class CpuStreams:
    """Everything before a point on the compute stream is done when the point is made, so its events are DONE."""

    def __init__(self) -> None:
        self._memory: Memory | None = None
        self._second: dict[Direction, ThreadPoolExecutor] = {}

    def bind(self, memory: Memory) -> None:
        self._memory = memory

    def launch(self, fn: Callable[[], None]) -> None:
        fn()

    def record(self) -> Event:
        return DONE

    def compute_wait(self, event: Event) -> None:
        event.wait()

    def copy(self, direction: Direction, runs: Sequence[Run], after: Sequence[Event]) -> Event:
        for event in after:
            event.wait()
        assert self._memory is not None
        moves = byte_moves(self._memory, direction, runs)
        if sum(size for _, _, size in moves) < _SPLIT_BYTES:
            move_all(moves)
            return DONE
        queue = deque[ByteMove | None](pieces(moves))
        queue.extend((None, None))  # one end mark for each thread
        other = self._thread(direction).submit(_draw, queue)
        _draw(queue)
        other.result()
        return DONE

    def _thread(self, direction: Direction) -> ThreadPoolExecutor:
        if direction not in self._second:
            self._second[direction] = ThreadPoolExecutor(1, thread_name_prefix=f"agentkv-{direction}-second")
        return self._second[direction]

    def taken(self, *, device: Sequence[int] = (), host: Sequence[int] = (), compute: bool = False) -> None:
        pass

    def freed(self, *, device: Sequence[tuple[int, Event]] = (), host: Sequence[int] = ()) -> None:
        pass

    def close(self) -> None:
        for thread in self._second.values():
            thread.shutdown()
        self._second.clear()


def byte_moves(memory: Memory, direction: Direction, runs: Sequence[Run]) -> list[ByteMove]:
    """(to address, from address, bytes) for each run; a run is one move if slots have no padding."""
    pool, arena = memory.pool, memory.arena
    assert arena is not None
    block_bytes, slot_bytes = pool.geometry.block_bytes, pool.geometry.slot_bytes
    device, host = pool.address, arena.address
    if block_bytes == slot_bytes:
        pairs = [(device + d * block_bytes, host + h * slot_bytes, n * block_bytes) for d, h, n in runs]
    else:
        pairs = [
            (device + (d + i) * block_bytes, host + (h + i) * slot_bytes, block_bytes)
            for d, h, n in runs
            for i in range(n)
        ]
    return pairs if direction == "h2d" else [(h, d, size) for d, h, size in pairs]


def pieces(moves: Sequence[ByteMove]) -> list[ByteMove]:
    """The same bytes, in moves of at most `_PIECE_BYTES`."""
    return [
        (to + at, source + at, min(_PIECE_BYTES, size - at))
        for to, source, size in moves
        for at in range(0, size, _PIECE_BYTES)
    ]


def move_all(moves: Sequence[ByteMove]) -> None:
    """Copy (to, from, bytes) one after another."""
    deque(starmap(ctypes.memmove, moves), maxlen=0)


def _draw(queue: deque[ByteMove | None]) -> None:
    """Copy what is in the queue until its end mark; drawing is atomic, so several threads may do it at once."""
    deque(starmap(ctypes.memmove, iter(queue.popleft, None)), maxlen=0)
