"""Copier: blocks between vLLM's device pool and the CPU tier where both are main memory: a memcpy on a thread.

Covers addresses, the order of jobs (loads first: a request waits for them), and their results. Does not cover GPUs: there vLLM's own
worker copies. Needs no vLLM: a plane is one layer's (or several layers') pages in both places.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Plane:
    """Pages of one tensor: where block 0 and chunk 0 are, how far the next is, and the bytes of a page that count.

    A chunk holds `blocks_per_chunk` pages behind one another, each `pool_page_bytes` apart.
    """

    pool: int
    pool_stride: int
    tier: int
    tier_stride: int
    tier_page: int
    page_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Blocks of one cache group: `blocks` in the pool, `chunks` in the tier; the first block is the `skip`th of its chunk."""

    planes: Sequence[Plane]
    blocks: Sequence[int]
    chunks: Sequence[int]
    skip: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """A job that is done."""

    job: int
    size_bytes: int
    seconds: float


class Copier:
    """One thread. Whoever submits sees to it that neither side's blocks are used by others until the job is done."""

    def __init__(self, blocks_per_chunk: int) -> None:
        self._blocks_per_chunk = blocks_per_chunk
        self._turn = threading.Condition()
        self._waiting: list[tuple[int, bool, Sequence[Group]]] = []
        self._running: int | None = None
        self._done: list[Copied] = []
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="agentkv-copier", daemon=True)
        self._thread.start()

    def submit(self, job: int, groups: Sequence[Group], *, load: bool) -> None:
        """Copy soon: to the pool (`load`) or to the tier."""
        with self._turn:
            at = next((n for n, (_, other, _) in enumerate(self._waiting) if not other), len(self._waiting))
            self._waiting.insert(at if load else len(self._waiting), (job, load, groups))
            self._turn.notify_all()

    def done(self) -> list[Copied]:
        """Jobs that ended since this was last asked."""
        with self._turn:
            done, self._done = self._done, []
            return done

    def wait(self, jobs: Iterable[int]) -> None:
        """Until none of these is still to be done; jobs unknown here are done."""
        wanted = set(jobs)
        with self._turn:
            self._turn.wait_for(lambda: not wanted & {self._running, *(job for job, _, _ in self._waiting)})

    def close(self) -> None:
        """Finish what was submitted, and stop. Idempotent."""
        with self._turn:
            self._closed = True
            self._turn.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._turn:
                self._turn.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                job, load, groups = self._waiting.pop(0)
                self._running = job
            began_s = time.monotonic()
            size_bytes = sum(self._copy(group, load=load) for group in groups)
            with self._turn:
                self._running = None
                self._done.append(Copied(job=job, size_bytes=size_bytes, seconds=time.monotonic() - began_s))
                self._turn.notify_all()

    def _copy(self, group: Group, *, load: bool) -> int:
        per = self._blocks_per_chunk
        for plane in group.planes:
            for number, block in enumerate(group.blocks, group.skip):
                chunk, page = divmod(number, per)
                here = plane.pool + block * plane.pool_stride
                there = plane.tier + group.chunks[chunk] * plane.tier_stride + page * plane.tier_page
                ctypes.memmove(*((here, there) if load else (there, here)), plane.page_bytes)
        return len(group.blocks) * sum(plane.page_bytes for plane in group.planes)
