"""Sessions are suspended and resumed ten thousand times, through all three tiers, by real threads and a real disk.

Each resume compares the xxh3 of every block with what was written; each turn appends a few blocks, sometimes the
context is cut or dropped. Between warm-up and end memory, slots and files must stay flat. Blocks are tiny: what is
tested is the bookkeeping over many cycles, not the bandwidth. Interrupting it (Ctrl-C) removes its files.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
import xxhash
from common import arguments, emit, say
from contexts import Context

from agentkv.core.residency import Action, Tier
from agentkv.kv.geometry import Geometry
from agentkv.kv.index import BlockKey
from agentkv.kv.slab import Slab
from agentkv.kv.tiers import Tiers

TINY = Geometry(layers=2, kv_heads=1, head_dim=16, dtype="float32")
THREADS = 4
SESSIONS = 3
"""Of each thread."""
MOST_BLOCKS = 32
SHARED_BLOCKS = 4
"""What every session begins with."""
DEVICE_BLOCKS = THREADS * MOST_BLOCKS + 16
"""Every thread's running session fits; half of all sessions do not."""
HOST_BLOCKS = THREADS * MOST_BLOCKS
DISK_BLOCKS = 2 * THREADS * SESSIONS * MOST_BLOCKS
DEADLINE_S = 3.0
"""A disk job that is forgotten, not done, counts as hung within the run."""
WAYS_DOWN = (
    (Action.DEMOTE, Tier.HOST),
    (Action.DEMOTE, Tier.DISK),
    (Action.DEMOTE, Tier.DISK),
    (Action.WRITE, Tier.HOST),
    None,
)


def content(key: BlockKey) -> bytes:
    """What the block of that key holds: the same, whoever writes it."""
    return hashlib.shake_128(key).digest(TINY.block_bytes)


@functools.lru_cache(maxsize=8 * THREADS * SESSIONS * MOST_BLOCKS)
def fingerprint(key: BlockKey) -> int:
    """The xxh3 of that."""
    return xxhash.xxh3_64_intdigest(content(key))


class Soak:
    """The tiers, and what all threads count."""

    def __init__(self, tiers: Tiers, cycles: int) -> None:
        self.tiers = tiers
        self.bytes = tiers.pool.view(tiers.pool.shape[0], -1).view(torch.uint8).numpy()  # [blocks, bytes of a block]
        self.cycles = cycles
        self.next = itertools.count(1).__next__
        self.done = 0
        self.counts: Counter[str] = Counter()
        self.stop = threading.Event()
        self.room = threading.Event()
        tiers.on_room(self.room.set)
        self.errors: list[BaseException] = []

    def take(self, n: int) -> list[int]:
        """`n` private blocks, as soon as there is room."""
        while (blocks := self.tiers.allocate(n)) is None:
            self.wait_for_room()
        return blocks

    def wait_for_room(self) -> None:
        """Until something may have changed."""
        if self.stop.is_set():
            raise KeyboardInterrupt
        self.room.wait(0.05)
        self.room.clear()

    def run(self, number: int) -> None:
        """One thread's life: its sessions in turn, until all cycles are done."""
        chance = random.Random(number)  # noqa: S311  chance that can be repeated, no secret
        lives = [Life(self, f"soak-{number}-{i}", chance) for i in range(SESSIONS)]
        try:
            while not self.stop.is_set() and self.next() <= self.cycles:
                chance.choice(lives).cycle()
                self.done += 1
        except KeyboardInterrupt:
            pass
        except BaseException as error:
            self.errors.append(error)
            self.stop.set()
        for life in lives:
            self.tiers.drop(life.context.session)


class Life:
    """One session: resumed, compared, grown, suspended."""

    def __init__(self, soak: Soak, session: str, chance: random.Random) -> None:
        self.soak = soak
        self.session = session
        self.chance = chance
        self.renew()

    def renew(self) -> None:
        """Another context under the same name."""
        self.context = Context(self.soak.tiers, self.session, MOST_BLOCKS, shared=SHARED_BLOCKS)
        self.written = 0

    def cycle(self) -> None:
        """Resume, compare, grow, suspend."""
        blocks = self.resume()
        if self.written >= self.chance.choice((MOST_BLOCKS, MOST_BLOCKS // 2)):
            self.soak.tiers.release(self.session, blocks, used=self.soak.tiers.streams.record())
            self.soak.tiers.drop(self.session)
            self.renew()
            blocks = self.resume()
        blocks += self.write(min(MOST_BLOCKS, self.written + self.chance.randrange(1, 9)))
        self.context.end(blocks, self.written)
        self.suspend()

    def resume(self) -> list[int]:
        """Lease what there is and compare it; what is missing or did not arrive is written again."""
        soak, keys = self.soak, self.context.keys[: max(self.written, SHARED_BLOCKS)]
        while (lease := soak.tiers.acquire(self.session, keys)) is None:
            soak.wait_for_room()
        assert lease.ticket.wait(60), "a load takes more than a minute"
        good = len(lease.blocks) if lease.ticket.failed_from is None else lease.ticket.failed_from
        if good < len(lease.blocks):
            soak.counts["failed_loads"] += 1
            soak.tiers.release(self.session, lease.blocks[good:], used=soak.tiers.streams.record())
        blocks = lease.blocks[:good]
        for block, key in zip(blocks, keys, strict=False):
            soak.counts["mismatches"] += xxhash.xxh3_64_intdigest(soak.bytes[block].data) != fingerprint(key)
        soak.counts["compared"] += good
        soak.counts["from_host"] += lease.from_host
        soak.counts["from_disk"] += lease.from_disk
        soak.counts["missing"] += max(0, self.written - good)
        before, self.written = self.written, good
        return blocks + self.write(max(before, good))

    def write(self, last: int) -> list[int]:
        """The blocks from where the context ends up to `last`."""
        first, self.written = self.written, last
        blocks = self.soak.take(last - first)
        for at, block in enumerate(blocks, first):
            self.soak.bytes[block].data[:] = content(self.context.keys[at])
        return self.context.commit(blocks, first)

    def suspend(self) -> None:
        """Somewhere down, at once or while others work; sometimes called back before it is needed."""
        way = self.chance.choice(WAYS_DOWN)
        if way is None:
            return
        self.context.move(*way)
        if self.chance.random() < 0.3:
            self.soak.tiers.quiesce(60)
            for dearer in (Tier.DEVICE, Tier.HOST)[: int(way[1])]:
                self.soak.tiers.vacate(self.session, dearer)
        if self.chance.random() < 0.2:
            self.context.move(Action.PREFETCH, self.chance.choice((Tier.DEVICE, Tier.HOST)))


def rss_mib() -> float:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def soak(tiers: Tiers, slab: Slab, cycles: int, say_line: Callable[[str], None]) -> dict[str, float]:
    """All cycles; figures of warm-up against end."""
    one = Soak(tiers, cycles)
    threads = [threading.Thread(target=one.run, args=(i,), name=f"soak-{i}") for i in range(THREADS)]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    warm_at, shown, warm = max(1, cycles // 5), 0, (rss_mib(), slab.size_bytes)
    warmed = False
    try:
        while any(thread.is_alive() for thread in threads):
            time.sleep(0.05)
            if not warmed and one.done >= warm_at:
                warm, warmed = (rss_mib(), slab.size_bytes), True
            if one.done * 10 // cycles > shown:
                shown = one.done * 10 // cycles
                say_line(f"{one.done} cycles, {rss_mib():.0f} MiB resident, {one.counts['mismatches']} mismatches")
    finally:
        one.stop.set()
        for thread in threads:
            thread.join()
    if one.errors:
        raise one.errors[0]
    tiers.quiesce(60)
    tiers.check()
    stats = tiers.stats()
    left = {name: stats[name]["used"] for name in ("device", "host", "disk")}
    return {
        "cycles": one.done,
        "mismatches": one.counts["mismatches"],
        "rss_growth_mib": round(rss_mib() - warm[0], 2),
        "slots_leaked": sum(left.values()),
        "file_growth_mib": round((slab.size_bytes - warm[1]) / (1 << 20), 2),
        "blocks_compared": one.counts["compared"],
        "blocks_from_host": one.counts["from_host"],
        "blocks_from_disk": one.counts["from_disk"],
        "blocks_joined": stats["hits"]["joined"],
        "duplicate_loads": stats["duplicate_loads"],
        "blocks_missing": one.counts["missing"],
        "failed_loads": one.counts["failed_loads"],
        "seconds": round(time.monotonic() - started, 1),
    }


def main() -> int:
    args = arguments(
        __doc__ or "",
        cycles=(int, 10_000, "suspend and resume cycles"),
        disk=(Path, Path(tempfile.gettempdir()), "folder for the disk tier"),
    )
    try:
        with (
            tempfile.TemporaryDirectory(dir=args.disk, prefix="agentkv-soak-") as directory,
            Tiers(
                geometry=TINY,
                device_bytes=DEVICE_BLOCKS * TINY.block_bytes,
                host_bytes=HOST_BLOCKS * TINY.slot_bytes,
                io_deadline_s=DEADLINE_S,
                slab=(slab := Slab(directory, DISK_BLOCKS * TINY.slot_bytes, TINY.block_bytes)),
            ) as tiers,
        ):
            result = soak(tiers, slab, args.cycles, lambda line: say(args, line))
    except KeyboardInterrupt:
        say(args, "interrupted; nothing is left behind")
        return 130
    emit(args, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
