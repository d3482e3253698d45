"""Trips of blocks between the tiers: up to host or device, down to host or disk, each in two phases.

Covers planning a trip, jobs for the lanes, commits and failures. Does not decide who goes where
(`leases.py`, `moves.py`), nor which copies make room (`room.py`), who waits for a host slot (`queue.py`), nor copies a
byte (`carrier.py`). Every method is called with the lock of `Tiers` held.

R8: from its plan to its end a trip counts as a user of the copy that it reads. R4, R3: a slot is given back only at
a commit, after the copy into or out of it ended. R9: a block has one trip up, whoever asks.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence

from agentkv.core.residency import Tier
from agentkv.kv.block import NOWHERE, Block
from agentkv.kv.book import Book, Holding
from agentkv.kv.device import DevicePool
from agentkv.kv.family import LOWER, Family
from agentkv.kv.mover import Job, Lane, LaneName
from agentkv.kv.queue import Queue, Wanted
from agentkv.kv.room import Room
from agentkv.kv.streams import DONE, Event, Streams
from agentkv.kv.ticket import Consignment, Errand, Waiter
from agentkv.units import MIB

_JOB_BYTES = 64 * MIB
_DISK_JOB_BYTES = 4 * MIB
"""Small enough that 8 readers share a context and the copies to the device start while others still read."""

ENDS: Mapping[LaneName, tuple[Tier, Tier]] = {
    "h2d": (Tier.HOST, Tier.DEVICE),
    "d2h": (Tier.DEVICE, Tier.HOST),
    "read": (Tier.DISK, Tier.HOST),
    "write": (Tier.HOST, Tier.DISK),
}


class Transfers:
    """The trips under way. `dead` has the device blocks whose load failed while sequences had them pinned, `stuck`
    the slots of a tier that a stalled disk copy may still touch.
    """

    def __init__(
        self,
        *,
        book: Book,
        device: DevicePool,
        family: Family,
        streams: Streams,
        now_s: Callable[[], float],
    ) -> None:
        self.book = book
        self.device = device
        self.family = family
        self.host, self.slab = host, slab = family.host, family.slab
        self.room = Room(book=book, device=device, slab=slab, transfers=self, now_s=now_s)
        self.counts: Counter[str] = Counter()
        self.dead: dict[int, int] = {}
        self.stuck: dict[Tier, set[int]] = {tier: set() for tier in Tier}
        self.under_way: set[Block] = set()
        self.plans: set[Consignment] = set()
        """Moves whose plan has not ended."""
        self.stalled: str | None = None
        """Why the disk is left alone at the moment."""
        self.calls: list[Callable[[], None]] = []
        """To be called once the lock is released."""
        self.lanes: Mapping[LaneName, Lane] = {}
        """Set by whoever makes them."""
        self._streams = streams
        disk_job = _DISK_JOB_BYTES // device.geometry.block_bytes
        self._queue = Queue(transfers=self, book=book, host=host, now_s=now_s, transit_blocks=max(1, disk_job))
        self._ready: dict[tuple[LaneName, bool], list[Block]] = {}

    @property
    def idle(self) -> bool:
        """True if nothing moves and nothing is planned."""
        return not self.under_way and not self.plans

    @property
    def has_host(self) -> bool:
        """True if there is a host tier."""
        return self.host is not None

    @property
    def has_disk(self) -> bool:
        """True if there is a disk tier that answers and takes writes."""
        return self.slab is not None and self.slab.off is None and self.stalled is None

    # -- plans

    def up(
        self,
        blocks: Sequence[Block],
        to: Tier,
        *,
        urgent: bool,
        errand: Errand,
        indices: Sequence[int] | None = None,
        below: Holding | None = None,
    ) -> None:
        """Bring `blocks`, none of which has a copy in `to` or above, up to `to`. For DEVICE the caller has set
        `coming[DEVICE]`. A block that is on its way already is joined (R9), and made urgent if this one is. `errand`
        hears of each block by its number, `indices[i]` or i.
        """
        from_disk: deque[Block] = deque()
        for i, block in enumerate(blocks):
            block.waiters.append(Waiter(errand, i if indices is None else indices[i], to, True))
            joined = block.up is not None
            if joined and urgent and not block.urgent:
                self._hasten(block)
            block.up = to if block.up is None else min(block.up, to)
            block.urgent = block.urgent or urgent
            self.under_way.add(block)
            if joined:
                continue
            if block.has(Tier.HOST):
                self.plan(block, "h2d")
            else:
                block.users[Tier.DISK] += 1
                from_disk.append(block)
        if from_disk:
            self._queue.put(Wanted(from_disk, below, "read", urgent))

    def down(
        self, blocks: Sequence[Block], to: Tier, *, urgent: bool, errand: Errand | None, below: Holding | None
    ) -> None:
        """Write `blocks` down to `to`; each has a copy above it and none there."""
        from_device: deque[Block] = deque()
        for i, block in enumerate(blocks):
            if errand is not None:
                block.waiters.append(Waiter(errand, i, to, False))
            joined = block.down is not None
            block.down = to if block.down is None else max(block.down, to)
            block.urgent = block.urgent or urgent
            self.under_way.add(block)
            if joined:
                continue
            if block.has(Tier.HOST):
                self.plan(block, "write")
            else:
                block.users[Tier.DEVICE] += 1
                from_device.append(block)
        if from_device:
            self._queue.put(Wanted(from_device, below, "d2h", urgent))

    def advance(self) -> None:
        """Give host slots to whom they are due and hand the planned copies to the lanes; ends each locked section."""
        self._queue.advance()
        for (lane, urgent), blocks in self._ready.items():
            self.lanes[lane].put(self._jobs(lane, blocks), urgent=urgent)
        self._ready.clear()

    def plan(self, block: Block, lane: LaneName) -> None:
        """The block's copy in the lane's source tier is used from now on (R8)."""
        source, _ = ENDS[lane]
        if lane in ("h2d", "write"):
            block.users[source] += 1
        self._ready.setdefault((lane, block.urgent), []).append(block)

    def _hasten(self, block: Block) -> None:
        for name in ("h2d", "read"):
            self.lanes[name].hasten(lambda job: any(other is block for other in job.blocks))
        self._queue.hasten(block)

    def _jobs(self, lane: LaneName, blocks: list[Block]) -> list[Job]:
        most = max(
            1, (_DISK_JOB_BYTES if lane in ("read", "write") else _JOB_BYTES) // self.device.geometry.block_bytes
        )
        return [Job(lane=lane, blocks=blocks[at : at + most]) for at in range(0, len(blocks), most)]

    # -- copies that go

    def evict(self, block: Block, tier: Tier) -> bool:
        """Give up the block's copy in `tier`; a drop, if it was the last one. False if a sibling still has the slot."""
        assert block.evictable(tier), f"{tier.name} copy is in use"
        if tier == Tier.DEVICE:
            self.unfetch(block, used=False)
        free = self.give(tier, self.book.vacate(block, tier))
        self.counts[f"evicted_{tier.name.lower()}"] += 1
        if not block.resident:
            self.counts["dropped"] += 1
        self.book.tidy(block)
        return free

    def unfetch(self, block: Block, *, used: bool) -> None:
        """What a prefetch brought is used by a sequence, or goes unused."""
        if block.fetched:
            block.fetched = False
            self.counts["prefetch_used" if used else "prefetch_wasted"] += 1

    def give(self, tier: Tier, slot: int) -> bool:
        """Free a slot that we neither read nor write any more. False if a sibling still has it."""
        if tier == Tier.DEVICE:
            self._streams.freed(device=((slot, self.device.last_use[slot] or DONE),))
            self.device.give((slot,))
            return True
        if not self.family.give(tier, slot):
            return False
        if tier == Tier.HOST:
            assert self.host is not None
            self._streams.freed(host=(slot,))
            self.host.free.give((slot,))
            for member in self.family.members:
                member.stir()
        else:
            assert self.slab is not None
            self.slab.free((slot,))
        return True

    def stir(self) -> None:
        """There may be room on the host."""
        self._queue.stir()

    def taken_on_host(self, slots: Sequence[int]) -> None:
        """Copies will write to these host slots: no member's streams may take them for nobody's."""
        for member in self.family.members:
            member._streams.taken(host=slots)

    def surrender(self) -> None:
        """Give up every lower copy; siblings keep theirs. On a lasting disk they stay for the next process."""
        lasting = self.slab is not None and self.slab.lasting
        for block in list(self.book.blocks.values()):
            for tier in LOWER:
                if block.has(tier) and not (tier == Tier.DISK and lasting):
                    self.give(tier, self.book.vacate(block, tier))

    def taken(self, device_blocks: Sequence[int]) -> None:
        """Loads will write to these device blocks."""
        self._streams.taken(device=device_blocks)

    # -- commits

    def called_off(self, block: Block) -> bool:
        """True if nobody wants the block's copy any more."""
        return block.doomed and block.pins == 0

    def issued(self, blocks: Sequence[Block], event: Event) -> None:
        """The copies of these blocks to the device are on the stream, and done after `event`."""
        for block in blocks:
            for waiter in block.waiters:
                if waiter.upwards and waiter.tier == Tier.DEVICE:
                    waiter.errand.issued(waiter.number, event)

    def stall(self, reason: str | None) -> None:
        """The disk does not answer (or does again): trips that need it end where they are."""
        self.stalled = reason
        if reason is None:
            return
        self._queue.refuse_reads()

    def refuse(self, wanted: Wanted) -> None:
        """There is no host slot for these blocks: their trips end where they are."""
        for block in wanted.blocks:
            block.users[ENDS[wanted.lane][0]] -= 1
            self._fail(block, up=wanted.lane == "read", at=Tier.HOST)
            self._rest(block)

    def settle(self, lane: LaneName, block: Block, *, ok: bool, trusted: bool = False) -> None:
        """A copy has ended: it becomes readable, or its slot goes back and what it was read from stays; a disk slot
        that could not be read goes, unless it is `trusted` all the same.
        """
        source, to = ENDS[lane]
        self._queue.stir()
        block.users[source] -= 1
        slot, block.coming[to] = block.coming[to], NOWHERE
        upwards = lane in ("h2d", "read")
        if ok:
            self.book.place(block, to, slot)
            self._arrived(block, to, upwards=upwards)
        else:
            if to == Tier.DEVICE:
                block.coming[to] = slot
            elif slot != NOWHERE:
                self.give(to, slot)
            if lane == "read" and not trusted and not self.called_off(block):
                self.give(Tier.DISK, self.book.vacate(block, Tier.DISK))
                self.counts["lost_on_disk"] += 1
            self._fail(block, up=upwards, at=to)
        self._rest(block)

    def _rest(self, block: Block) -> None:
        if block.doomed and block.idle:
            self.forget(block)
        elif block.behind and not block.holders and block.idle:
            self.fade(block)
        self.book.tidy(block)

    def _arrived(self, block: Block, tier: Tier, *, upwards: bool) -> None:
        target = block.up if upwards else block.down
        if upwards and tier == Tier.DEVICE:
            self.counts["loaded"] += 1
            block.fetched = block.pins == 0
            self.counts["prefetched"] += block.fetched
        if target == Tier.DISK and tier == Tier.HOST and self.stalled is not None:
            self._tell(block, upwards=False, reached=tier, ended=False)
            self._fail(block, up=False, at=Tier.DISK)
            return
        if target != tier and target is not None:
            self.plan(block, "h2d" if upwards else "write")
        elif upwards:
            block.up = None
        else:
            block.down = None
            block.refused = None
        self._tell(block, upwards=upwards, reached=tier, ended=target == tier)

    def _fail(self, block: Block, *, up: bool, at: Tier) -> None:
        """The block's trip ends before the tier `at`."""
        if up:
            block.up = None
            slot, block.coming[Tier.DEVICE] = block.coming[Tier.DEVICE], NOWHERE
            if slot != NOWHERE and block.pins:
                self.dead[slot], block.pins = block.pins, 0
                self.device.owner[slot] = None
            elif slot != NOWHERE:
                self.give(Tier.DEVICE, slot)
        else:
            block.refused = at if block.down is None else max(at, block.down)
            block.down = None
        self._tell(block, upwards=up, reached=None, ended=True)

    def _tell(self, block: Block, *, upwards: bool, reached: Tier | None, ended: bool) -> None:
        rest: list[Waiter] = []
        for waiter in block.waiters:
            there = reached is not None and (reached <= waiter.tier if upwards else reached >= waiter.tier)
            if waiter.upwards != upwards or not (there or ended):
                rest.append(waiter)
            elif (call := waiter.errand.arrived(waiter.number, there)) is not None:
                self.calls.append(call)
        block.waiters = rest
        if block.up is None and block.down is None:
            block.urgent = False
            self.under_way.discard(block)

    def forget(self, block: Block) -> None:
        """Free every copy of a block without writing a byte; at once if nobody uses it, else when that ends."""
        block.doomed = True
        if not block.idle:
            return
        self.unfetch(block, used=False)
        for tier in Tier:
            if block.has(tier):
                self.give(tier, self.book.vacate(block, tier))
        self.counts["forgotten"] += 1
        self.book.tidy(block)

    def fade(self, block: Block) -> None:
        """The windows of all its sessions have passed the block: it is not kept below the device any more. What is there
        stays for a prompt that goes back, and is the first to make room.
        """
        self.counts["faded"] += 1
        for tier in LOWER:
            if block.evictable(tier):
                self.give(tier, self.book.vacate(block, tier))
        self.book.tidy(block)

    def abandon(self) -> None:
        """No lane works any more: whoever waits for a trip hears that it failed."""
        for block in self.under_way:
            for waiter in block.waiters:
                if (call := waiter.errand.arrived(waiter.number, False)) is not None:
                    self.calls.append(call)
            block.waiters = []
        self._queue.clear()
        self.under_way.clear()
        self.calls += [plan.call_off() for plan in self.plans]
        self.plans.clear()

    def check(self) -> None:
        """A trip is under way exactly for blocks with a target."""
        for block in self.book.blocks.values():
            moving = block.up is not None or block.down is not None
            assert moving == (block in self.under_way), "a trip is not accounted for"
            assert moving or not block.waiters, "somebody waits for a trip that is over"
            assert moving or block.coming == [NOWHERE] * 3, "a slot is reserved for no trip"
            assert moving or not any(block.users), "a copy is used by no trip"
