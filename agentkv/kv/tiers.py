"""The one front door of the data plane: an engine leases and commits blocks here, a planner moves sessions.

Covers leases, private blocks, sessions, residency, counts. Bookkeeping is `book.py`, what a move does `moves.py`, who
makes room `room.py`, copies `transfers.py` and `mover.py`, memory `device.py`, `host.py` and `slab.py`.

One lock guards all of them; it is held for microseconds and never while a byte is copied. What others gave us to
call (tickets, receipts, room) is called after it is released.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch

from agentkv.clock import Clock, SystemClock
from agentkv.core.residency import Action, Move, Receipt, Residency, Tier
from agentkv.errors import Closed, ConfigError
from agentkv.kv.audit import check, facts, figures
from agentkv.kv.book import NOWHERE, Book, Holding
from agentkv.kv.device import DevicePool
from agentkv.kv.geometry import Geometry
from agentkv.kv.host import HostArena
from agentkv.kv.index import BlockKey
from agentkv.kv.moves import Moves
from agentkv.kv.slab import Slab
from agentkv.kv.streams import Event, Memory, Streams, streams_for
from agentkv.kv.ticket import Lease, Ticket
from agentkv.kv.transfers import Transfers
from agentkv.log import failed

PREFILL_TOKENS_S = 300.0
"""Until the engine has measured its own."""


class Tiers:
    """Blocks in device, host and disk memory. Thread-safe; a context manager.

    `slab` is closed with it. With `threads=False` nothing moves but by `pump()`: for tests that decide what happens
    when. Raises ConfigError on sizes that cannot work.
    """

    def __init__(
        self,
        *,
        geometry: Geometry,
        device: str = "cpu",
        device_bytes: int,
        host_bytes: int,
        slab: Slab | None = None,
        streams: Streams | None = None,
        clock: Clock | None = None,
        verify: bool = True,
        threads: bool = True,
    ) -> None:
        if slab is not None and host_bytes == 0:
            raise ConfigError("a disk tier needs a host tier: blocks pass through host memory; host memory is 0")
        if slab is not None and slab.block_bytes != geometry.block_bytes:
            raise ConfigError(f"the slab has blocks of {slab.block_bytes} B, the model of {geometry.block_bytes} B")
        self.geometry = geometry
        self.prefill_tokens_s = PREFILL_TOKENS_S
        """The engine's prefill rate; it sets what it measures."""
        self._device = DevicePool(geometry, device, device_bytes)
        self._host = HostArena(geometry, host_bytes, pin=self._device.pool.is_cuda) if host_bytes else None
        self._slab = slab
        self._clock: Clock = clock or SystemClock()
        self._book = Book()
        self._lock = threading.Lock()
        self._quiet = threading.Condition(self._lock)
        self._watchers: list[Callable[[], None]] = []
        self._room_changed = False
        self._pressed = False
        self._closed = False
        self._hits: Counter[str] = Counter()
        self._moved: Counter[str] = Counter()
        self.streams: Streams = streams if streams is not None else streams_for(self._device)
        self.streams.bind(Memory(pool=self._device, arena=self._host))
        self._transfers = Transfers(
            book=self._book,
            device=self._device,
            host=self._host,
            slab=slab,
            streams=self.streams,
            now_s=self._clock.now_s,
            locked=self._copying,
            verify=verify,
            threads=threads,
        )
        self._moves = Moves(
            book=self._book,
            device=self._device,
            transfers=self._transfers,
            has_disk=slab is not None,
            now_s=self._clock.now_s,
        )

    @property
    def pool(self) -> torch.Tensor:
        """[num_blocks + 1, layers, 2, 16, kv_heads, head_dim]; block 0 is for padding."""
        return self._device.pool

    @property
    def num_blocks(self) -> int:
        """Usable device blocks."""
        return self._device.num_blocks

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """The lock; on its release trips advance and watchers are called."""
        with self._lock:
            yield
            self._transfers.advance()
            if not self._transfers.under_way:
                self._quiet.notify_all()
            calls, self._transfers.calls = self._transfers.calls, []
            if self._room_changed:
                self._room_changed = False
                calls += self._watchers
        for call in calls:
            try:
                call()
            except Exception as error:
                failed("kv_callback_failed", error=repr(error))

    @contextmanager
    def _copying(self) -> Iterator[None]:
        """The lock, for the lanes: whenever a copy starts or ends, there may be room."""
        with self._locked():
            self._room_changed = True
            yield

    # -- the engine's side

    def match(self, keys: Sequence[BlockKey]) -> int:
        """How many leading keys have a copy in some tier."""
        with self._lock:
            return len(self._book.leading(keys))

    def acquire(self, session: str, keys: Sequence[BlockKey]) -> Lease | None:
        """Pin the leading blocks that are in some tier for a running sequence, and load those that the device lacks.

        A block that is being loaded for somebody else is waited for, not loaded twice (R9). None if the device has
        no room at the moment: then nothing is pinned and nothing moves, `on_room` tells when to try again.
        """
        with self._locked():
            self._refuse_if_closed()
            holding = self._touch(session)
            if holding is not None:
                holding.expected_s = holding.demoted_to = None
            blocks = self._book.leading(keys)
            for block in blocks:
                block.pins += 1
            new = [block for block in blocks if not block.has(Tier.DEVICE) and block.coming[Tier.DEVICE] == NOWHERE]
            if not self._transfers.room.on_device(len(new)):
                for block in blocks:
                    block.pins -= 1
                return None
            for block, slot in zip(new, self._device.take(len(new)), strict=True):
                block.coming[Tier.DEVICE] = slot
                self._device.owner[slot] = block
            loading = [i for i, block in enumerate(blocks) if not block.has(Tier.DEVICE)]
            from_host = sum(block.has(Tier.HOST) for block in new)
            lease = Lease(
                blocks=[block.device_block for block in blocks],
                ticket=Ticket(len(loading)),
                loaded_blocks=len(loading),
                from_host=from_host,
                from_disk=len(new) - from_host,
            )
            for block in blocks:
                block.doomed, block.refused = False, None
            self.streams.taken(device=[block.coming[Tier.DEVICE] for block in new])
            self._transfers.up(
                [blocks[i] for i in loading], Tier.DEVICE, urgent=True, errand=lease.ticket, indices=loading
            )
            self._hits.update(device=len(blocks) - len(loading), host=lease.from_host, disk=lease.from_disk)
            self._hits["joined"] += len(loading) - len(new)
            return lease

    def allocate(self, n: int) -> list[int] | None:
        """`n` device blocks that only the caller knows, neighbours where possible.

        None if the device has no room at the moment (`on_room` tells when to try again). Unused blocks always make
        way in the end: clean ones at once, dirty ones when written, and those that cannot be written are dropped.
        """
        with self._locked():
            self._refuse_if_closed()
            if not self._transfers.room.on_device(n):
                return None
            blocks = self._device.take(n)
            self._device.private.update(blocks)
            self.streams.taken(device=blocks, compute=True)
            return blocks

    def commit(self, session: str, block: int, key: BlockKey, parent: BlockKey | None, written: Event) -> int:
        """A private block is full: from now on it is known by its key and never changes. `written` is after its last
        write by compute.

        Returns the device block to use from now on, pinned: another one, if the same block was there already; then
        `block` is freed. If the same block is on its way to the device, `block` stays private.
        """
        with self._locked():
            if block not in self._device.private:
                raise ValueError(f"block {block} is not private, so it cannot be committed")
            known = self._book.ensure(key, parent)
            known.doomed = False
            if known.coming[Tier.DEVICE] != NOWHERE:
                return block
            known.pins += 1
            if known.has(Tier.DEVICE):
                self._device.last_use[block] = written
                self._transfers.give(Tier.DEVICE, block)
                return known.where[Tier.DEVICE]
            self._device.private.discard(block)
            self._device.owner[block] = known
            self._device.last_write[block] = written
            self._book.place(known, Tier.DEVICE, block)
            self._touch(session)
            return block

    def release(self, session: str, blocks: Sequence[int], *, used: Event) -> None:
        """A sequence needs these device blocks no more: keyed ones are unpinned, private ones freed. `used` is after
        its last read by compute (R2).
        """
        with self._locked():
            for slot in blocks:
                self._device.last_use[slot] = used
                owner = self._device.owner[slot]
                if slot in self._device.private:
                    self._transfers.give(Tier.DEVICE, slot)
                elif slot in self._transfers.dead:
                    self._unpin_dead(slot)
                elif owner is not None and owner.pins > 0:
                    owner.pins -= 1
                    if owner.doomed and owner.pins == 0:
                        self._transfers.forget(owner)
                else:
                    raise ValueError(f"device block {slot} is not in use by any sequence")
            self._touch(session)
            self._room_changed = True

    def _unpin_dead(self, slot: int) -> None:
        self._transfers.dead[slot] -= 1
        if self._transfers.dead[slot] == 0:
            del self._transfers.dead[slot]
            self._transfers.give(Tier.DEVICE, slot)

    def hold(self, session: str, task: str, keys: Sequence[BlockKey], tokens: int) -> None:
        """What the session's context consists of now, in order. Blocks that no session holds any more are freed."""
        with self._locked():
            for block in self._book.hold(session, task, keys, tokens, self._clock.now_s()):
                self._transfers.forget(block)
            self._room_changed = True

    def _touch(self, session: str) -> Holding | None:
        holding = self._book.holdings.get(session)
        if holding is not None:
            holding.used_s = self._clock.now_s()
        return holding

    # -- the planner's side

    def residency(self, session: str) -> Residency | None:
        """Where the session's blocks are and what bringing them back would cost; None if unknown."""
        with self._lock:
            holding = self._book.holdings.get(session)
            if holding is None:
                return None
            return facts(
                holding,
                self._transfers,
                prefill_tokens_s=self.prefill_tokens_s,
                has_disk=self._slab is not None and self._slab.off is None,
                pressed=self._pressed,
            )

    def apply(self, move: Move, on_receipt: Callable[[Receipt], None] | None = None) -> bool:
        """Carry out `move`, now. True if copies were submitted: then the receipt comes from a mover's thread, else
        before this returns. Never raises.
        """

        def deliver(receipt: Receipt) -> None:
            self._moved[receipt.outcome.value] += 1
            if on_receipt is not None:
                on_receipt(receipt)

        try:
            with self._locked():
                self._refuse_if_closed()
                self._moved[move.action.value] += 1
                self._room_changed |= move.action == Action.DROP
                return self._moves.carry_out(move, deliver)
        except Exception as error:
            failed("kv_move_failed", session=move.session, action=move.action.value, error=repr(error))
            deliver(self._moves.failure(move, repr(error)))
            return False

    def drop(self, session: str) -> None:
        """Forget the session without writing a byte (A6). Blocks that others hold stay; so do those that a sequence
        uses, until it releases them.
        """
        with self._locked():
            self._moves.forget(session)
            self._room_changed = True

    def drop_task(self, task: str) -> None:
        """`drop` each of the task's sessions."""
        with self._locked():
            for session in [one.session for one in self._book.holdings.values() if one.task == task]:
                self._moves.forget(session)
            self._room_changed = True

    def vacate(self, session: str, tier: Tier) -> int:
        """Give up the session's unused copies in `tier` that are elsewhere too, pressed or not; returns how many."""
        with self._locked():
            holding = self._book.holdings.get(session)
            found = [] if holding is None else [b for b in reversed(holding.chain) if b.has(tier) and b.evictable(tier)]
            spare = [b for b in found if any(b.has(other) for other in Tier if other != tier)]
            for block in spare:
                self._transfers.evict(block, tier)
            self._room_changed = True
            return len(spare)

    def expect(self, session: str, at_s: float | None) -> None:
        """When the session is expected back (monotonic; None = unknown): whoever is back last is evicted first."""
        with self._lock:
            holding = self._book.holdings.get(session)
            if holding is not None:
                holding.expected_s = at_s

    def on_room(self, fn: Callable[[], None]) -> None:
        """Have `fn` called, from any thread, whenever blocks may have become free or evictable."""
        with self._lock:
            self._watchers = [*self._watchers, fn]

    def set_pressed(self, flag: bool) -> None:
        """Somebody waits for device memory; shown in every Residency."""
        self._pressed = flag

    # -- whole

    def stats(self) -> dict[str, Any]:
        """Counts as plain JSON values."""
        with self._lock:
            return {
                **figures(self._book, self._device, self._host, self._slab, self._transfers),
                "hits": {name: self._hits[name] for name in ("device", "host", "disk", "joined")},
                "moves": dict(self._moved),
                "pressed": self._pressed,
            }

    def check(self) -> None:
        """Recount everything that is counted twice; AssertionError if it differs."""
        with self._lock:
            check(self._book, self._device, self._host, self._slab, self._transfers)

    def pump(self) -> bool:
        """One step of each lane, with `threads=False`. False if nothing was to be done."""
        turned = [lane.turn() for lane in self._transfers.lanes.values()]
        return any(turned)

    def quiesce(self, timeout_s: float) -> None:
        """Wait until no trip is under way. Raises TimeoutError."""
        with self._lock:
            if not self._quiet.wait_for(lambda: not self._transfers.under_way, timeout_s):
                raise TimeoutError(f"{len(self._transfers.under_way)} blocks still move after {timeout_s} s")

    def close(self) -> None:
        """End what moves, free host memory and disk. Idempotent; the pool tensor lives as long as somebody uses it.

        Tickets and receipts that are still out end as failed; leases and moves are refused from now on.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for lane in self._transfers.lanes.values():
            lane.close()
        with self._locked():
            self._transfers.abandon()
        self.streams.close()
        if self._slab is not None:
            self._slab.close()
        if self._host is not None:
            self._host.close()

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise Closed("the KV tiers are closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
