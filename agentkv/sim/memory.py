"""Memory: which blocks of which context are in which tier, and who gives way to whom.

Covers the three tiers' accounts, seats for running calls, trips between tiers in two phases, and eviction by a policy's
key, under the data plane's rules (`kv/room.py`): a running or restoring context is never touched, contexts lose blocks
from their end, copies that are elsewhere too go before those that would be lost. Exact in blocks, at the grain of runs;
device copies are always the first blocks of a context. Does not know why anything moves (`policy/`), nor time's flow.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from agentkv.core.rates import OVERLAP
from agentkv.core.residency import Tier
from agentkv.policy.evict import EvictKey
from agentkv.sim import runs
from agentkv.sim.context import Context, Fetch, Trip, in_order, recount
from agentkv.sim.link import Job, Link
from agentkv.sim.runs import Runs


class Memory:
    """All contexts in three tiers of `device`, `host` and `disk` blocks (inf: no bound).

    `key` orders victims. `elsewhere_first`: host copies that the device has too go before any that would be lost.
    `writes_back`: False: an engine without offload. Links: d2h, read and write may be None where there is no tier.
    `on_change` is called when a trip has ended, that is when room or a context may have appeared.
    """

    def __init__(
        self,
        *,
        block_bytes: int,
        device: float,
        host: float,
        disk: float,
        key: EvictKey,
        now_s: Callable[[], float],
        h2d: Link,
        d2h: Link,
        read: Link | None = None,
        write: Link | None = None,
        elsewhere_first: bool = True,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.block_bytes = block_bytes
        self.capacity = {Tier.DEVICE: device, Tier.HOST: host, Tier.DISK: disk if write is not None else 0.0}
        self.used = {Tier.DEVICE: 0, Tier.HOST: 0, Tier.DISK: 0}
        self.contexts: dict[str, Context] = {}
        self.lost_blocks = 0
        self.wasted_blocks = 0
        self.wanting: dict[str, Context] = {}
        """Contexts whose blocks wait for host room to be written to."""
        self._key = key
        self._now_s = now_s
        self._h2d, self._d2h, self._read, self._write = h2d, d2h, read, write
        self._elsewhere_first = elsewhere_first
        self._seating: Context | None = None
        self._on_change = on_change

    def free(self, tier: Tier) -> float:
        """Blocks that nobody has."""
        return self.capacity[tier] - self.used[tier]

    # -- contexts

    def add(self, context: Context) -> None:
        """A new session."""
        self.contexts[context.name] = context

    def cut(self, context: Context, keep: int) -> None:
        """Blocks from `keep` on are no longer part of the context (a compaction): their copies go."""
        if keep >= context.total:
            return
        if context.incoming and keep < context.device + context.incoming:
            self._cancel_fetch(context)
        self._clip(context, keep)
        context.total = keep

    def forget(self, context: Context) -> None:
        """Its task has ended."""
        assert context.seat == 0
        self.cut(context, 0)
        for trip in context.jobs:
            self.used[trip.tier] -= runs.size(trip.blocks)
            trip.blocks = runs.NONE
        self._cancel_fetch(context)
        context.jobs.clear()
        context.gone = True
        self.wanting.pop(context.name, None)
        del self.contexts[context.name]
        self._retry()

    def _cancel_fetch(self, context: Context) -> None:
        self.used[Tier.DEVICE] -= context.incoming
        self.wasted_blocks += context.incoming
        context.incoming = 0
        context.fetch = None

    def drop(self, context: Context) -> None:
        """Forget its blocks everywhere; the session goes on and computes them again."""
        if context.seat == 0 and context.incoming == 0:
            self.lost_blocks += context.leading()
            self._clip(context, 0)

    def _clip(self, context: Context, keep: int) -> None:
        if context.device > keep:
            self._shrink_device(context, context.device - keep)
        for tier, name in ((Tier.HOST, "host"), (Tier.DISK, "disk")):
            had: Runs = getattr(context, name)
            left = runs.below(had, keep)
            self.used[tier] -= runs.size(had) - runs.size(left)
            setattr(context, name, left)
        for trip in context.jobs:
            if trip.tier is not Tier.DEVICE:
                left = runs.below(trip.blocks, keep)
                self.used[trip.tier] -= runs.size(trip.blocks) - runs.size(left)
                trip.blocks = left

    def _shrink_device(self, context: Context, count: int) -> None:
        context.device -= count
        self.used[Tier.DEVICE] -= count
        wasted = min(context.fetched, count)
        self.wasted_blocks += wasted
        context.fetched -= wasted

    # -- seats

    def seat(self, context: Context, blocks: int, hit: int) -> bool:
        """Give a call all `blocks` that it needs, of which the first `hit` are a hit; False changes nothing but may
        have started writes that make room.
        """
        assert context.seat == 0
        kept = min(context.device, hit)
        short = blocks - kept - context.incoming  # a hit shorter than what comes has cancelled that, see cut
        self._seating = context
        try:
            if short > 0 and not self.make_room(short, context):
                return False
        finally:
            self._seating = None
        if context.device > hit:
            self._shrink_device(context, context.device - hit)
        self.used[Tier.DEVICE] += blocks - context.device - context.incoming
        context.seat = blocks
        context.fetched = 0
        context.demoted_to = None
        self.wanting.pop(context.name, None)
        return True

    def load(self, context: Context, hit: int, done: Callable[[Job], None]) -> int:
        """Bring blocks up to `hit` to its seat. Returns how many come (0: `done` is not called).

        A prefetch under way is hurried and waited for.
        """
        missing = runs.span(context.device + context.incoming, hit)
        count = runs.size(missing)
        fetch = context.fetch
        if fetch is not None and fetch.link is not None and fetch.job is not None:
            fetch.link.hurry(fetch.job)
            if count == 0:
                fetch.done = done
                return context.incoming
            left = [2]

            def both_done(job: Job) -> None:
                left[0] -= 1
                if left[0] == 0:
                    done(job)

            fetch.done = both_done
            self._fetch(context, missing, both_done, urgent=True)
            return count + context.incoming
        if count == 0:
            return 0
        self._fetch(context, missing, done, urgent=True)
        return count

    def _fetch(
        self, context: Context, missing: Runs, done: Callable[[Job], None], *, urgent: bool, fetch: Fetch | None = None
    ) -> None:
        from_host = runs.both(missing, context.host)
        from_disk = runs.size(missing) - runs.size(from_host)
        host_bytes = runs.size(from_host) * self.block_bytes
        disk_bytes = from_disk * self.block_bytes

        def submit(link: Link, job: Job) -> None:
            if fetch is not None:
                fetch.link, fetch.job = link, job
            link.submit(job)

        if not disk_bytes or self._read is None:
            submit(self._h2d, Job(host_bytes, done, urgent=urgent))
            return

        # most of the copy runs while others are still read: the link carries all bytes, the last part after the reads
        def read_ended(read: Job) -> None:
            submit(self._h2d, Job(host_bytes + disk_bytes * OVERLAP, done, urgent=read.urgent))

        self._h2d.carried_bytes += disk_bytes * (1 - OVERLAP)
        submit(self._read, Job(disk_bytes, read_ended, urgent=urgent))

    def leave(self, context: Context, total: int) -> None:
        """The call has ended: the context is `total` blocks long and all of them are on the device."""
        assert total <= context.seat
        self.used[Tier.DEVICE] += total - context.seat
        context.total = context.device = total
        context.seat = 0
        context.used_s = self._now_s()

    # -- room

    def make_room(self, count: int, for_context: Context | None, *, write: bool = True, below: bool = False) -> bool:
        """Free device blocks until `count` are free. True if they are; False may have started writes that lead there.

        With `below` only contexts that go before `for_context` give way, and without `write` only what is clean.
        """
        short = count - self.free(Tier.DEVICE)
        if short <= 0:
            return True
        order = self._victims(for_context, below=below, tier=Tier.DEVICE)
        if not write and short > sum(victim.clean_tail for victim in order):
            return False
        for victim in order:
            clean = min(victim.clean_tail, math.ceil(short))
            if clean > 0:
                self._shrink_device(victim, clean)
                short -= clean
                if short <= 0:
                    return True
        return write and self._room_by_writing(short, order) and self.make_room(count, for_context, below=below)

    def _room_by_writing(self, short: float, order: list[Context]) -> bool:
        """Write what only the device has, so that it can go, and drop what cannot be written. True if that has given
        room at once: what was dropped may have stood before clean blocks.
        """
        short -= sum(runs.size(trip.blocks) for one in order for trip in one.jobs if trip.source is Tier.DEVICE)
        for victim in order:
            if short <= 0:
                return False
            dirty = runs.minus(victim.unwritten, victim.under_way)
            if not dirty:
                continue
            written = self.write(victim, runs.last(dirty, math.ceil(short)), urgent=True)
            short -= written
            lost = min(runs.size(dirty) - written, math.ceil(short))
            spilling = lost > 0 and any(t.tier is Tier.DISK for one in self.contexts.values() for t in one.jobs)
            if spilling:
                short -= lost  # it has room when what is spilled has left the host
            elif lost > 0 and not victim.under_way:
                self._lose(victim, lost)
                return True
        return False

    def _lose(self, victim: Context, count: int) -> None:
        """Drop the only copies of its last blocks."""
        count = min(count, victim.device)
        self.lost_blocks += count
        self._shrink_device(victim, count)

    def _victims(self, for_context: Context | None, *, below: bool, tier: Tier) -> list[Context]:
        """Who may give way, first to go first; never who runs, restores or is being seated."""
        some = [one for one in self.contexts.values() if one is not for_context and one is not self._seating]
        return in_order(some, tier, self._key, self._now_s(), below=for_context if below else None)

    def write(self, context: Context, blocks: Runs, *, urgent: bool = False) -> int:
        """Start copying `blocks` of the device to the host, as many as find room. Returns how many are on their way."""
        blocks = runs.minus(blocks, runs.union(context.host, context.under_way))
        count = runs.size(blocks)
        if count == 0 or self.capacity[Tier.HOST] <= 0:
            return 0
        room = min(count, int(min(self._host_room(count, context), 1 << 40)))
        if room < count:
            self.wanting[context.name] = context
        if room <= 0:
            return 0
        blocks = runs.first(blocks, room)
        self._start(Trip(context, blocks, Tier.HOST, Tier.DEVICE), self._d2h, urgent=urgent)
        return room

    def _start(self, trip: Trip, link: Link, *, urgent: bool) -> None:
        self.used[trip.tier] += runs.size(trip.blocks)
        trip.context.jobs.append(trip)
        link.submit(Job(runs.size(trip.blocks) * self.block_bytes, lambda _: self._arrived(trip), urgent=urgent))

    def _arrived(self, trip: Trip) -> None:
        context = trip.context
        if context.gone:
            return
        context.jobs.remove(trip)
        if trip.tier is Tier.HOST:
            context.host = runs.union(context.host, trip.blocks)
        else:
            context.disk = runs.union(context.disk, trip.blocks)
            if trip.source is Tier.HOST:
                self._vacate_host(context, runs.both(context.host, trip.blocks))
        self._retry()
        self._on_change()

    def _retry(self) -> None:
        """Host room may have appeared: whoever waits for some gets it, in order."""
        for waiting in list(self.wanting.values()):
            if self.free(Tier.HOST) <= 0:
                break
            del self.wanting[waiting.name]
            self.write(waiting, waiting.unwritten)

    def _vacate_host(self, context: Context, blocks: Runs) -> None:
        context.host = runs.minus(context.host, blocks)
        self.used[Tier.HOST] -= runs.size(blocks)

    def _host_room(self, count: int, for_context: Context) -> float:
        """Host blocks that `for_context` may have now, up to `count`; spills to disk may have been started for more."""
        short = count - self.free(Tier.HOST)
        if short <= 0:
            return count
        order = self._victims(for_context, below=True, tier=Tier.HOST)
        for place in ("disk", "device") if self._elsewhere_first else ("disk",):
            for victim in [*order, for_context] if place == "disk" else order:
                if short <= 0:
                    return count
                there = victim.disk if place == "disk" else runs.span(0, victim.device)
                free = runs.last(runs.both(victim.host, there), math.ceil(short))
                if free:
                    self._vacate_host(victim, free)
                    short -= runs.size(free)
        spills = self._write is not None and self.capacity[Tier.DISK] > 0
        for victim in [*order, for_context] if spills else order:
            if short <= 0:
                break
            if not victim.host:
                continue
            if spills:
                short -= self.spill(victim, math.ceil(short))
                continue
            lost = runs.last(victim.host, math.ceil(short))
            self._vacate_host(victim, lost)
            self.lost_blocks += runs.size(runs.minus(lost, runs.span(0, victim.device)))
            short -= runs.size(lost)
        return max(0.0, min(count, self.free(Tier.HOST)))

    def spill(self, victim: Context, count: int) -> int:
        """Start writing up to `count` of its last host blocks to disk; they leave the host when they are there."""
        assert self._write is not None
        coming = sum(runs.size(trip.blocks) for trip in victim.jobs if trip.tier is Tier.DISK)
        blocks = runs.last(runs.minus(victim.host, runs.union(victim.disk, victim.under_way)), count)
        if not blocks:
            return coming
        short = runs.size(blocks) - self.free(Tier.DISK)
        if short > 0:
            for other in self._victims(victim, below=True, tier=Tier.DISK):
                gone = runs.last(other.disk, math.ceil(short))
                other.disk = runs.minus(other.disk, gone)
                self.used[Tier.DISK] -= runs.size(gone)
                self.lost_blocks += runs.size(runs.minus(gone, other.host))
                short -= runs.size(gone)
                if short <= 0:
                    break
            blocks = runs.first(blocks, int(min(self.free(Tier.DISK), 1 << 40)))
        if not blocks:
            return 0
        self._start(Trip(victim, blocks, Tier.DISK, Tier.HOST), self._write, urgent=False)
        return runs.size(blocks) + coming

    def prefetch(self, context: Context, *, evicts: bool) -> int:
        """Start bringing the context back to the device, into free room, and with `evicts` into what clean copies of
        contexts that go before it hold. Returns how many blocks come.
        """
        if context.seat or context.incoming:
            return 0
        hit = min(context.leading(), context.total)
        count = hit - context.device
        if count <= 0 or (self.free(Tier.DEVICE) < count and not evicts):
            return 0
        if not self.make_room(count, context, write=False, below=True):
            return 0
        self.used[Tier.DEVICE] += count
        context.incoming = count
        missing = runs.span(context.device, hit)
        fetch = context.fetch = Fetch()

        def arrived(job: Job) -> None:
            if context.fetch is not fetch:
                return
            context.fetch = None
            context.device += context.incoming
            context.incoming = 0
            if context.seat == 0:
                context.fetched = count
            if fetch.done is not None:
                fetch.done(job)
            self._on_change()

        self._fetch(context, missing, arrived, urgent=False, fetch=fetch)
        return count

    def check(self) -> None:
        """Recount the accounts; nobody holds more than there is."""
        recount(self.contexts.values(), self.used, self.capacity)
