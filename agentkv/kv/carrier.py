"""The carrier: what the lanes do with a job. Begins and ends copies, reads and writes the disk, gives up stalled ones.

Covers the four lanes. Does not decide who goes where (`leases.py`, `moves.py`), nor what an end means for a block
(`transfers.py`). `begin` and `end` are called by the lanes without the lock of `Tiers`, and take it for moments.

A disk that does not answer (a hung network mount) must not hold anybody up: a job that is over its deadline is
abandoned. Whoever waited computes again; the host slots it may still write to stay taken until it comes back (R4).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

from agentkv.core.residency import Tier
from agentkv.kv.block import NOWHERE, Block
from agentkv.kv.device import DevicePool
from agentkv.kv.host import HostArena
from agentkv.kv.index import BlockKey
from agentkv.kv.mover import Job, Lane, LaneName, Rate
from agentkv.kv.slab import Slab, SlotImage
from agentkv.kv.streams import DONE, Direction, Event, Streams, runs_of
from agentkv.kv.transfers import ENDS, Transfers
from agentkv.log import warn_once

_SETTLED_AT_ONCE = 128
"""Blocks committed under one hold of the lock: a fraction of a millisecond."""
_LAST_WAIT_S = 2.0
"""How long `close` waits for a disk that is known not to answer."""


class Carrier:
    """The work of the lanes (see mover.Work)."""

    def __init__(
        self,
        *,
        transfers: Transfers,
        device: DevicePool,
        host: HostArena | None,
        slab: Slab | None,
        streams: Streams,
        now_s: Callable[[], float],
        locked: Callable[[], AbstractContextManager[None]],
        rates_bytes_s: Mapping[LaneName, float],
        verify: bool,
        threads: bool,
        io_deadline_s: float,
    ) -> None:
        self._transfers = transfers
        self._device = device
        self._host = host
        self._slab = slab
        self._streams = streams
        self._now_s = now_s
        self._locked = locked
        self._verify = verify
        self._io_deadline_s = io_deadline_s
        self._on_disk: set[Job] = set()
        self._loading: set[tuple[LaneName, BlockKey]] = set()
        widths = {"h2d": 1 if host else 0, "d2h": 1 if host else 0, "read": 8 if slab else 0, "write": 4 if slab else 0}
        self.lanes: dict[LaneName, Lane] = {
            name: Lane(name, self, Rate(rates_bytes_s[name]), threads=widths[name] if threads else 0) for name in ENDS
        }

    # -- called by the lanes

    def begin(self, job: Job) -> Event | None:
        """Start a job (see mover.Work)."""
        transfers = self._transfers
        with self._locked():
            keep = [block for block in job.blocks if not transfers.called_off(block)]
            if len(keep) < len(job.blocks):
                for block in set(job.blocks).difference(keep):
                    transfers.settle(job.lane, block, ok=False)
            job.blocks = keep
            if not keep:
                return None
            job.size_bytes = len(keep) * self._device.geometry.block_bytes
            self._started(job)
            if job.lane == "h2d":
                after = self._device.reads([block.coming[Tier.DEVICE] for block in keep])  # R2
                pairs = [(block.coming[Tier.DEVICE], block.where[Tier.HOST]) for block in keep]
            elif job.lane == "d2h":
                after = self._device.writes([block.where[Tier.DEVICE] for block in keep])  # R1
                pairs = [(block.where[Tier.DEVICE], block.coming[Tier.HOST]) for block in keep]
            elif job.lane == "read":
                images = [self._image(block, block.where[Tier.DISK], block.coming[Tier.HOST]) for block in keep]
        if job.lane == "h2d":
            return self._copy(job, "h2d", pairs, after)
        if job.lane == "d2h":
            return self._copy(job, "d2h", pairs, after)
        return self._read(job, images) if job.lane == "read" else self._write(job)

    def end(self, job: Job) -> None:
        """Commit a job (see mover.Work)."""
        with self._locked():
            self._on_disk.discard(job)
            self._loading.difference_update([(job.lane, block.key) for block in job.blocks])
            if job.abandoned:
                self._came_back(job)
                return
            counts = self._transfers.counts
            moved = len(job.blocks) - len(job.failed)
            counts[f"{job.lane}_bytes"] += moved * self._device.geometry.block_bytes
            counts[f"{job.lane}_jobs"] += 1
        for at in range(0, len(job.blocks), _SETTLED_AT_ONCE):
            with self._locked():
                for block in job.blocks[at : at + _SETTLED_AT_ONCE]:
                    self._transfers.settle(job.lane, block, ok=id(block) not in job.failed)

    def _started(self, job: Job) -> None:
        now_s = self._now_s()
        for block in job.blocks:
            for waiter in block.waiters:
                waiter.errand.started(now_s)
        if job.lane in ("read", "write"):
            job.due_s = now_s + self._io_deadline_s
            self._on_disk.add(job)
        if job.lane in ("read", "h2d"):
            keys = {(job.lane, block.key) for block in job.blocks}
            self._transfers.counts["duplicate_loads"] += len(self._loading & keys)
            self._loading |= keys

    def _copy(self, job: Job, direction: Direction, pairs: Sequence[tuple[int, int]], after: Sequence[Event]) -> Event:
        assert all(device >= 0 <= slot for device, slot in pairs), "a copy from or to nowhere"
        runs = runs_of(pairs)
        event = self._streams.copy(direction, runs, after)
        self._transfers.counts[f"{direction}_descriptors"] += len(runs)
        if direction == "h2d":
            self._transfers.counts["restore_descriptors"] += len(runs) if job.urgent else 0
            if event is not DONE:
                with self._locked():
                    self._transfers.issued(job.blocks, event)
        return event

    def _read(self, job: Job, images: list[SlotImage]) -> Event:
        assert self._slab is not None
        good = self._slab.read(images, verify=self._verify)
        job.failed = {id(block) for block, ok in zip(job.blocks, good, strict=True) if not ok}
        return DONE

    def _write(self, job: Job) -> Event:
        assert self._slab is not None
        slots = self._slab.reserve(len(job.blocks))
        if len(slots) < len(job.blocks) and self._slab.off is None:
            with self._locked():
                self._transfers.room.on_disk(len(job.blocks) - len(slots), job.blocks[0])
            slots += self._slab.reserve(len(job.blocks) - len(slots))
        with self._locked():
            if job.abandoned:
                job.stuck += slots
                return DONE
            job.due_s = self._now_s() + self._io_deadline_s  # making a new file may have taken long
            job.failed = {id(block) for block in job.blocks[len(slots) :]}
            written = job.blocks[: len(slots)]
            images = [
                self._image(block, slot, block.where[Tier.HOST]) for block, slot in zip(written, slots, strict=True)
            ]
            for block, slot in zip(written, slots, strict=True):
                block.coming[Tier.DISK] = slot
        try:
            self._slab.write(images, still=lambda: not job.abandoned)
        except OSError:
            job.failed = {id(block) for block in job.blocks}
        return DONE

    def _image(self, block: Block, slot: int, host: int) -> SlotImage:
        assert self._host is not None
        return SlotImage(slot, block.key, self._host.view(host))

    # -- a disk that does not answer, with the lock held

    def expire(self) -> None:
        """Give up what is over its deadline, and what stands in line behind it."""
        if not self._on_disk:
            return
        now_s = self._now_s()
        late = [job for job in self._on_disk if now_s > job.due_s and not job.abandoned]
        if not late:
            if self._transfers.stalled is not None:
                self._withdraw()
            return
        reason = f"the disk has not answered for {self._io_deadline_s:g} s"
        warn_once("kv_disk_stalled", reason=reason, path=str(self._slab.path) if self._slab else "")
        self._transfers.stall(reason)
        for job in late:
            self._abandon(job)
        self._withdraw()

    def _withdraw(self) -> None:
        """What stands in line for the disk goes home."""
        for name in ("read", "write"):
            for job in self.lanes[name].withdraw():
                for block in job.blocks:
                    self._transfers.settle(job.lane, block, ok=False, trusted=True)

    def _abandon(self, job: Job) -> None:
        job.abandoned = True
        to = ENDS[job.lane][1]
        for block in job.blocks:
            slot, block.coming[to] = block.coming[to], NOWHERE
            if slot != NOWHERE:
                job.stuck.append(slot)
                self._transfers.stuck[to].add(slot)
            self._transfers.settle(job.lane, block, ok=False, trusted=True)
        self._transfers.counts["stalled_jobs"] += 1

    def _came_back(self, job: Job) -> None:
        to = ENDS[job.lane][1]
        for slot in job.stuck:
            self._transfers.stuck[to].discard(slot)
            self._transfers.give(to, slot)
        if not any(other.abandoned for other in self._on_disk):
            self._transfers.stall(None)

    def close(self) -> bool:
        """Stop the lanes; waits for a disk copy no longer than its deadline. False if a thread hangs in one."""
        wait_s = _LAST_WAIT_S if any(job.abandoned for job in self._on_disk) else self._io_deadline_s
        ended = {name: lane.close(wait_s if name in {"read", "write"} else None) for name, lane in self.lanes.items()}
        return all(ended.values())
