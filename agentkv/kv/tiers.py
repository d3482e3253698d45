"""The one front door of the data plane: an engine leases and commits blocks here, a planner moves sessions.

Covers the lock, sessions, counts, lifetime. Bookkeeping is `book.py`, what a sequence has in hand `leases.py`, what a
move does `moves.py`, who makes room `room.py`, copies `transfers.py` and `carrier.py`, what outlives the process
`keep.py`, memory `device.py`, `host.py` and `slab.py`.

One lock guards all of them; it is held for microseconds and never while a byte is copied. What others gave us to
call (tickets, receipts, room) is called after it is released.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch

from agentkv.clock import Clock, SystemClock
from agentkv.core.rates import Rates
from agentkv.kv.audit import check, figures
from agentkv.kv.book import Book
from agentkv.kv.carrier import Carrier
from agentkv.kv.device import DevicePool
from agentkv.kv.family import Family, make_family
from agentkv.kv.gauge import reckoned
from agentkv.kv.geometry import BLOCK_TOKENS, Geometry
from agentkv.kv.guard import Guard
from agentkv.kv.index import BlockKey
from agentkv.kv.keep import Keep, Revived
from agentkv.kv.leases import Leases
from agentkv.kv.moves import Moves
from agentkv.kv.planner_side import PlannerSide
from agentkv.kv.slab import Slab
from agentkv.kv.streams import Event, Memory, Streams, streams_for
from agentkv.kv.ticket import Lease
from agentkv.kv.transfers import Transfers
from agentkv.kv.window import Window
from agentkv.log import warn_once

PREFILL_TOKENS_S = 300.0
"""Until the engine has measured its own."""
_LAST_NOTES_S = 2.0
"""How long `close` waits for notes that are being written."""


class Tiers(PlannerSide):
    """Blocks in device, host and disk memory. Thread-safe; a context manager.

    `window_tokens`: the model's, if all of its layers have one. `slab` is closed with it. With a `family` instead of `host_bytes` and `slab`, they are shared with other devices. With
    `threads=False` nothing moves but by `pump()`, for tests. Raises ConfigError on sizes that cannot work.
    """

    def __init__(
        self,
        *,
        geometry: Geometry,
        device: str = "cpu",
        device_bytes: int,
        window_tokens: int = 0,
        host_bytes: int = 0,
        slab: Slab | None = None,
        family: Family | None = None,
        rates: Rates | None = None,
        streams: Streams | None = None,
        clock: Clock | None = None,
        verify: bool = True,
        threads: bool = True,
        template_window_s: float = 120.0,
        io_deadline_s: float = 10.0,
    ) -> None:
        if family is None:
            family = make_family(geometry, device=device, host_bytes=host_bytes, slab=slab)
        self.geometry = geometry
        self.prefill_tokens_s = PREFILL_TOKENS_S
        """The engine's prefill rate; it sets what it measures. Of no account with `rates`, which know more."""
        self._rates = rates
        self._device = DevicePool(geometry, device, device_bytes)
        self._family = family
        self._host, self._slab = family.host, family.slab
        self._clock: Clock = clock or SystemClock()
        self.window = Window(tokens=window_tokens)
        self._book = Book(self.window)
        self._guard = Guard(family.lock)
        self._lock, self._locked = self._guard.lock, self._guard.locked
        self._pressed = False
        self._closed = False
        self._moved: Counter[str] = Counter()
        self.streams: Streams = streams if streams is not None else streams_for(self._device)
        self.streams.bind(Memory(pool=self._device, arena=self._host))
        now_s = self._clock.now_s
        self._transfers = Transfers(
            book=self._book, device=self._device, family=family, streams=self.streams, now_s=now_s
        )
        self._carrier = Carrier(
            transfers=self._transfers,
            device=self._device,
            host=self._host,
            slab=self._slab,
            streams=self.streams,
            now_s=now_s,
            locked=self._guard.copying,
            rates_bytes_s=reckoned(rates, on_gpu=self._device.pool.is_cuda),
            verify=verify,
            threads=threads,
            io_deadline_s=io_deadline_s,
        )
        self._transfers.lanes = self._carrier.lanes
        self._leases = Leases(
            book=self._book, device=self._device, transfers=self._transfers, streams=self.streams, now_s=now_s
        )
        self._moves = Moves(
            book=self._book,
            device=self._device,
            transfers=self._transfers,
            locked=self._guard.copying,
            now_s=now_s,
            template_window_s=template_window_s,
        )
        self._guard.turn, self._guard.idle = self._turn, lambda: self._transfers.idle
        family.join(self._transfers)
        self._keep = Keep(
            self._book,
            self._slab,
            block_bytes=geometry.block_bytes,
            stalled=lambda: self._transfers.stalled is not None,
        )
        self.revived: list[Revived] = self._keep.revive(now_s()) if len(family.members) == 1 else []
        """Sessions of an earlier process, longest unused first."""

    @property
    def pool(self) -> torch.Tensor:
        """[num_blocks + 1, layers, 2, 16, kv_heads, head_dim]; block 0 is for padding."""
        return self._device.pool

    @property
    def num_blocks(self) -> int:
        """Usable device blocks."""
        return self._device.num_blocks

    def _turn(self) -> list[Callable[[], None]]:
        """Ends each locked section; returns what is to be called after it."""
        self._carrier.expire()
        if not self._closed:
            self._moves.expire()
        self._transfers.advance()
        calls, self._transfers.calls = self._transfers.calls, []
        return calls

    # -- the engine's side

    def match(self, keys: Sequence[BlockKey], tokens: int | None = None) -> int:
        """How many leading keys make a context that can be gone on with: all that its next token sees has a copy in some
        tier. `tokens`: the length of all their content, if the last one is partial.
        """
        with self._lock:
            first, blocks = self._leases.in_sight(keys, tokens)
            return first + len(blocks)

    def acquire(self, session: str, keys: Sequence[BlockKey], tokens: int | None = None) -> Lease | None:
        """Pin the blocks of the context that `match` finds for a running sequence, as far as its next token sees them,
        and load those that the device lacks.

        A block that is being loaded for somebody else is waited for, not loaded twice (R9). None if the device has
        no room at the moment: then nothing is pinned and nothing moves, `on_room` tells when to try again.
        """
        with self._locked():
            self._refuse_if_closed()
            return self._leases.acquire(session, keys, tokens)

    def allocate(self, n: int) -> list[int] | None:
        """`n` device blocks that only the caller knows, neighbours where possible.

        None if the device has no room at the moment (`on_room` tells when to try again). Unused blocks always make
        way in the end: clean ones at once, dirty ones when written, and those that cannot be written are dropped.
        """
        with self._locked():
            self._refuse_if_closed()
            return self._leases.allocate(n)

    def commit(self, session: str, block: int, key: BlockKey, parent: BlockKey | None, written: Event) -> int:
        """A private block has its content: from now on it is known by its key and never changes. `written` is after
        its last write by compute. The last block of a context may be partial, under its `tail_key`.

        Returns the device block to use from now on, pinned: another one, if the same block was there already; then
        `block` is freed. If the same block is on its way to the device, `block` stays private.
        """
        with self._locked():
            return self._leases.commit(session, block, key, parent, written)

    def reopen(self, session: str, block: int, spare: int) -> int:
        """Make a leased partial block private again, so that its sequence can fill it. Its ticket must be done.

        Returns the block to write to: `block` itself if nobody else uses it, else the private block `spare`, which
        gets its content on the compute stream; the other one is released. Copies in slower tiers stay what they are.
        """
        with self._locked():
            in_place = self._leases.reopen(block)
        if not in_place:
            self.streams.launch(lambda: self._copy_block(block, spare))
        self.release(session, [spare if in_place else block], used=self.streams.record())
        return block if in_place else spare

    def _copy_block(self, source: int, to: int) -> None:
        self.pool[to].copy_(self.pool[source])

    def release(self, session: str, blocks: Sequence[int], *, used: Event, behind: bool = False) -> None:
        """A sequence needs these device blocks no more: keyed ones are unpinned, private ones freed. `used` is after
        its last read by compute (R2). `behind`: all windows have passed them, in order.
        """
        with self._locked():
            self._leases.release(session, blocks, used, behind=behind)
            self._guard.room_changed = True

    def hold(
        self,
        session: str,
        task: str,
        keys: Sequence[BlockKey],
        tokens: int,
        *,
        also_at: int | None = None,
        template_tokens: int = 0,
        background: bool = False,
        order: int = 0,
        priority: int = 0,
    ) -> None:
        """What the session's context consists of now, in order. Blocks that no session holds any more are freed; those
        that all windows have passed are not held, and stay on the device until somebody needs the room.

        `also_at`: it may be gone on with behind so many of its tokens, too; what that sees is held as far as it is there,
        unless there are dead blocks in between.
        `template_tokens`: so many of its first tokens are a template that other tasks begin with. `background`: a
        side branch that nobody waits for. `order`: its task's place in order of arrival. `priority`: of its calls.
        """
        with self._locked():
            first = self.window.first_seen(min(tokens, BLOCK_TOKENS * len(keys)))  # it is gone on with behind the keys
            if also_at is not None and also_at // BLOCK_TOKENS >= first:
                first = self._book.reaching(
                    keys[:first], self.window.first_seen(also_at // BLOCK_TOKENS * BLOCK_TOKENS)
                )
            past, now_s = keys[:first], self._clock.now_s()
            for block in self._book.hold(session, task, keys[first:], tokens, now_s, past=past, first=first):
                self._transfers.forget(block)
            holding = self._book.holdings[session]
            for block in list(holding.past.values()):
                if not block.holders and block.in_lower_tiers:
                    self._transfers.fade(block)
            holding.template_blocks = template_tokens // BLOCK_TOKENS
            holding.background, holding.order, holding.priority = background, order, priority
            holding.recompute_s = self._recompute_s(tokens)
            self._guard.room_changed = True

    def on_room(self, fn: Callable[[], None]) -> None:
        """Have `fn` called, from any thread, whenever blocks may have become free or evictable."""
        self._guard.watch(fn)

    def set_pressed(self, flag: bool) -> None:
        """Somebody waits for device memory; shown in every Residency."""
        self._pressed = flag

    # -- whole

    def stats(self) -> dict[str, Any]:
        """Counts as plain JSON values."""
        with self._lock:
            return {
                **figures(self._book, self._device, self._host, self._slab, self._transfers),
                "hits": {name: self._leases.hits[name] for name in ("device", "host", "disk", "joined")},
                "template_blocks": self._moves.template_blocks,
                "moves": dict(self._moved),
                "pressed": self._pressed,
            }

    def check(self) -> None:
        """Recount everything that is counted twice; AssertionError if it differs."""
        with self._lock:
            if not self._closed:
                check(self._book, self._device, self._host, self._slab, self._transfers)

    def tick(self) -> None:
        """Give up disk copies that are over their deadline; for somebody who waits."""
        with self._locked():
            pass

    def pump(self) -> bool:
        """One step of each lane, with `threads=False`. False if nothing was to be done."""
        turned = [lane.turn() for lane in self._transfers.lanes.values()]
        return any(turned)

    def quiesce(self, timeout_s: float) -> None:
        """Wait until no trip is under way. Raises TimeoutError."""
        until_s = time.monotonic() + timeout_s
        while not self._guard.wait_until_idle(min(0.2, max(0.0, until_s - time.monotonic()))):
            self.tick()  # a disk that does not answer must not use up all of the time
            if time.monotonic() >= until_s:
                raise TimeoutError(f"{len(self._transfers.under_way)} blocks still move after {timeout_s} s")

    def close(self) -> None:
        """End what moves, free what is ours. Idempotent. Tickets and receipts that are out end as failed; leases and
        moves are refused from now on.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        ended = self._carrier.close()
        with self._locked():
            self._transfers.abandon()
        self.streams.close()
        ended = self._keep.close(_LAST_NOTES_S) and ended
        if not ended:  # a thread hangs in the kernel and may still touch memory and files: leave it both
            warn_once("kv_left_to_a_hung_disk", reason=self._transfers.stalled)
        self._family.leave(self._transfers, hung=not ended)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
