"""What plays the engine over tiers on any device: sessions whose every block holds bytes that derive from its key.

Compares on the device, without waiting: `wrong` counts blocks that held something else when they were read, NaN
included. `Poisoned` overwrites with NaN what has no owner.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections.abc import Callable, Sequence

import torch

from agentkv.kv.geometry import BLOCK_TOKENS
from agentkv.kv.index import BlockKey, chain_keys, root_key
from agentkv.kv.streams import DONE, Direction, Event, Memory, Run, Streams
from agentkv.kv.ticket import Lease
from agentkv.kv.tiers import Tiers
from gpu_sections.scene import Scene

_NAP_S = 0.0005
_PATIENCE_S = 30.0
ROOT = root_key(fingerprint=b"player", salt="")


def keys_of(family: int, blocks: int, *, branch: int = 0, shared: int = 0) -> list[BlockKey]:
    """The chain of a made-up context: the first `shared` blocks are the family's, the rest the branch's own."""
    tokens = [family] * (BLOCK_TOKENS * min(shared, blocks))
    tokens += [100_000 + family * 1000 + branch] * (BLOCK_TOKENS * (blocks - min(shared, blocks)))
    return list(chain_keys(ROOT, tokens))


class Poisoned:
    """Streams around the real ones: freed device blocks (half of them) and host slots turn to NaN, and a stream now
    and then dawdles. Not all device blocks, because a load would have to wait for the poison and with it, always, for
    the block's last reader, which is one of the waits under test.
    """

    def __init__(self, inner: Streams, *, seed: int = 0, dawdle: Callable[[], None] | None = None) -> None:
        self._inner = inner
        self._chance = random.Random(seed)  # noqa: S311
        self._dawdle = dawdle
        self._memory: Memory | None = None
        self._poison: dict[int, Event] = {}
        self._lock = threading.Lock()
        self.poisoned = 0

    def bind(self, memory: Memory) -> None:
        self._inner.bind(memory)
        self._memory = memory
        self._bytes = memory.pool.pool.view(memory.pool.pool.shape[0], -1).view(torch.uint8)

    def launch(self, fn: Callable[[], None]) -> None:
        if self._dawdle is not None and self._chance.random() < 0.1:
            self._inner.launch(self._dawdle)
        self._inner.launch(fn)

    def record(self) -> Event:
        return self._inner.record()

    def compute_wait(self, event: Event) -> None:
        self._inner.compute_wait(event)

    def copy(self, direction: Direction, runs: Sequence[Run], after: Sequence[Event]) -> Event:
        with self._lock:
            blocks = [run.device_block + i for run in runs for i in range(run.n)]
            poison = [self._poison.pop(block, DONE) for block in blocks] if direction == "h2d" else []
        return self._inner.copy(direction, runs, [*after, *poison])

    def taken(self, *, device: Sequence[int] = (), host: Sequence[int] = (), compute: bool = False) -> None:
        self._inner.taken(device=device, host=host, compute=compute)

    def freed(self, *, device: Sequence[tuple[int, Event]] = (), host: Sequence[int] = ()) -> None:
        assert self._memory is not None
        self._inner.freed(device=device, host=host)
        for block, event in device:
            if self._chance.random() < 0.5:
                self._inner.compute_wait(event)
                self._inner.launch(lambda block=block: self._bytes[block].fill_(0xFF))
                self._count(block, self._inner.record())
        arena = self._memory.arena
        for slot in host:
            assert arena is not None
            ctypes.memset(arena.address + slot * arena.slot_bytes, 0xFF, arena.slot_bytes)
            self.poisoned += 1

    def _count(self, block: int, event: Event) -> None:
        with self._lock:
            self._poison[block] = event
            self.poisoned += 1

    def close(self) -> None:
        self._inner.close()


class Player:
    """Leases, reads, computes and releases blocks of `tiers` as an engine does. One thread."""

    def __init__(self, scene: Scene, tiers: Tiers) -> None:
        self._scene = scene
        self.tiers = tiers
        shape = tiers.pool.shape[1:]
        # small whole numbers: exact in every dtype
        ramp = torch.arange(tiers.pool[0].numel(), device=tiers.pool.device) % 61
        self._ramp = ramp.view(shape).to(tiers.pool.dtype)
        self._wrong = torch.zeros((), dtype=torch.int64, device=tiers.pool.device)
        self.read_blocks = 0
        self.held: dict[str, list[int]] = {}
        self.loading: dict[str, tuple[Lease, Sequence[BlockKey]]] = {}
        scene.sync()  # they were made on another stream

    @property
    def wrong(self) -> int:
        """Blocks that held other bytes than they should, so far; waits for the device."""
        self.tiers.streams.record().wait()
        return int(self._wrong)

    def content(self, key: BlockKey) -> torch.Tensor:
        """What the key's block must hold, [layers, 2, 16, kv_heads, head_dim]."""
        return self._ramp + (int.from_bytes(key[:4], "little") % 67)

    def lease(self, session: str, keys: Sequence[BlockKey], *, until: bool = True) -> Lease | None:
        """Pin and load what is there; None if there is no room and nobody wants to wait (`until`)."""
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            found = self.tiers.acquire(session, keys)
            if found is not None or not until:
                return found
            assert time.monotonic() < deadline, "no room, and no progress"
            time.sleep(_NAP_S)

    def begin(self, session: str, keys: Sequence[BlockKey]) -> Lease | None:
        """A model call starts: its blocks are on their way. None: there is no room."""
        lease = self.lease(session, keys, until=not (self.held or self.loading))
        if lease is not None:
            self.loading[session] = (lease, keys)
        return lease

    def arrive(self, session: str) -> None:
        """Its blocks are there, and are read."""
        lease, keys = self.loading.pop(session)
        assert lease.ticket.wait(_PATIENCE_S), "a load never ended"
        self.tiers.streams.compute_wait(lease.ticket.event)
        blocks = list(lease.blocks)
        if lease.ticket.failed_from is not None:
            self.tiers.release(session, blocks[lease.ticket.failed_from :], used=self.tiers.streams.record())
            blocks = blocks[: lease.ticket.failed_from]
        self.held[session] = blocks
        self.read(blocks, keys)

    def read(self, blocks: Sequence[int], keys: Sequence[BlockKey]) -> None:
        """Compare, on the compute stream."""
        for block, key in zip(blocks, keys, strict=False):
            self.read_blocks += 1
            self.tiers.streams.launch(lambda block=block, key=key: self._compare(block, key))

    def _compare(self, block: int, key: BlockKey) -> None:
        self._wrong += (self.tiers.pool[block] != self.content(key)).any()

    def extend(self, session: str, keys: Sequence[BlockKey]) -> bool:
        """Compute the blocks of `keys` that the call lacks. False if room ran out: what there is stays."""
        blocks = self.held[session]
        for at in range(len(blocks), len(keys)):
            deadline = time.monotonic() + _PATIENCE_S
            while (fresh := self.tiers.allocate(1)) is None:
                if len(self.held) + len(self.loading) > 1:
                    return False
                assert time.monotonic() < deadline, "no room, and no progress"
                time.sleep(_NAP_S)
            (block,) = fresh
            self.tiers.streams.launch(lambda block=block, at=at: self.tiers.pool[block].copy_(self.content(keys[at])))
            parent = keys[at - 1] if at else None
            blocks.append(self.tiers.commit(session, block, keys[at], parent, self.tiers.streams.record()))
        return True

    def end(self, session: str, keys: Sequence[BlockKey]) -> None:
        """The call ends: all its blocks are read once more, held by the session, and unpinned."""
        blocks = self.held.pop(session)
        self.read(blocks, keys)
        self.tiers.hold(session, session, keys[: len(blocks)], len(blocks) * BLOCK_TOKENS)
        self.tiers.release(session, blocks, used=self.tiers.streams.record())

    def turn(self, session: str, keys: Sequence[BlockKey]) -> Lease:
        """A whole call."""
        lease = self.begin(session, keys)
        assert lease is not None
        self.arrive(session)
        assert self.extend(session, keys)
        self.end(session, keys)
        return lease
