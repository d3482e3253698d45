"""Not a test: forks children that use a lasting store at full speed and kills them at random moments.

    python crash_child.py DIRECTORY KILLS SEED [damage]

Each child first verifies what the one before it left, then writes, reads, frees and notes until it is killed. With
`damage` the files are also spoilt between a kill and the next start. Prints one JSON line of counts; exits with 1 on
a wrong byte, a leak or a folder that grows. Needs neither torch nor pytest.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import random
import sys
import threading
import time
import traceback
from pathlib import Path

from agentkv import log
from agentkv.kv import journal
from agentkv.kv.slab import Slab, SlotImage

SLOT = 8192
BLOCK = 7000
CAPACITY = 2 * 1024 * 1024
WIDTH = 4
log._write = lambda *_: None
journal.get_logger = type("Quiet", (), {"info": lambda *_, **__: None})


def content(key):
    """What the block of `key` must hold."""
    return hashlib.shake_128(key).digest(SLOT)


class Arena:
    def __init__(self):
        self.map = mmap.mmap(-1, WIDTH * SLOT)
        self.views = [memoryview(self.map)[i * SLOT : (i + 1) * SLOT] for i in range(WIDTH)]

    def write(self, slab, keys):
        slots = slab.reserve(len(keys))
        images = []
        for slot, key, view in zip(slots, keys, self.views, strict=False):
            view[:] = content(key)
            images.append(SlotImage(slot, key, view))
        slab.write(images)
        return {image.key: image.slot for image in images}

    def read(self, slab, blocks):
        """How many of `blocks` were misses; wrong bytes raise."""
        misses = 0
        items = list(blocks.items())
        for at in range(0, len(items), WIDTH):
            images = [
                SlotImage(slot, key, view)
                for (key, slot), view in zip(items[at : at + WIDTH], self.views, strict=False)
            ]
            for image, good in zip(images, slab.read(images, verify=False), strict=True):
                if good:
                    assert content(image.key)[:BLOCK] == image.view[:BLOCK], "a wrong byte was served"
                else:
                    misses += 1
                    slab.free([image.slot])
                    del blocks[image.key]
        return misses


def work(slab, blocks, seed):
    """Until somebody kills us."""
    chance, arena = random.Random(seed), Arena()
    fresh = 0
    while True:
        deed = chance.random()
        if deed < 0.45:
            fresh += 1
            keys = [hashlib.md5(f"{seed}/{fresh}/{i}".encode()).digest() for i in range(chance.randint(1, WIDTH))]
            written = arena.write(slab, keys)
            if len(written) < len(keys):
                for key in chance.sample(sorted(blocks), min(len(blocks), WIDTH)):
                    slab.free([blocks.pop(key)])
            blocks.update(written)
        elif deed < 0.65 and blocks:
            for key in chance.sample(sorted(blocks), min(len(blocks), 3)):
                slab.free([blocks.pop(key)])
        elif deed < 0.8:
            payload = os.urandom(chance.randint(0, 2000))
            slab.note(f"session-{chance.randint(0, 9)}", hashlib.md5(payload).digest() + payload)
        elif deed < 0.85:
            slab.forget_note(f"session-{chance.randint(0, 9)}")
        elif blocks:
            some = {key: blocks[key] for key in chance.sample(sorted(blocks), min(len(blocks), WIDTH))}
            assert arena.read(slab, some) == 0, "a block of our own was missed"


def child(directory, seed, ready):
    slab = Slab(directory, CAPACITY, BLOCK, segment_bytes=512 * 1024, store="crash", retry_s=0)
    assert slab.lasting, slab.not_lasting
    assert slab.used == len(slab.kept), "a slot leaked"
    blocks = {one.key: one.slot for one in slab.kept}
    assert len(blocks) == len(slab.kept), "a block is there twice"
    kept = len(blocks)
    misses = Arena().read(slab, blocks)
    for payload in slab.notes.values():
        assert hashlib.md5(payload[16:]).digest() == payload[:16], "a note is damaged"
    slab.check()
    sizes = [path.stat().st_blocks * 512 for path in slab.path.iterdir()]
    assert sum(sizes) <= CAPACITY + SLOT, "the files exceed the capacity"
    os.write(ready, f"{kept} {misses} {len(slab.notes)}\n".encode())
    halves = [{}, {}]
    for i, (key, slot) in enumerate(sorted(blocks.items())):
        halves[i % 2][key] = slot
    failures = []

    def run(half, number):
        try:
            work(slab, half, f"{seed}/{number}")
        except BaseException:
            failures.append(traceback.format_exc())
            os.write(2, failures[-1].encode())
            os._exit(3)

    for number, half in enumerate(halves):
        threading.Thread(target=run, args=(half, number), daemon=True).start()
    time.sleep(60)


def spoil(directory, chance):
    """Cut the journal, flip a bit of it or of a block, shorten a segment, remove one."""
    store = Path(directory) / "store-crash"
    files = sorted(store.glob("segment-*")) if chance.random() < 0.5 else [store / "journal"]
    if not files or not files[0].exists():
        return
    path = chance.choice(files)
    size = path.stat().st_size
    deed = chance.random()
    if deed < 0.4:
        os.truncate(path, chance.randint(0, size))
    elif deed < 0.45:
        path.unlink()
    elif size:
        with path.open("r+b") as file:
            at = chance.randrange(size)
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1 << chance.randrange(8)]))


def main():
    directory, kills, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    damage = "damage" in sys.argv[4:]
    chance = random.Random(seed)
    counts = {"kills": 0, "before_ready": 0, "kept": 0, "misses": 0, "notes": 0}
    while counts["kills"] < kills:
        told, ready = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                child(directory, f"{seed}/{counts['kills']}", ready)
            except BaseException:
                os.write(2, traceback.format_exc().encode())
            os._exit(3)
        os.close(ready)
        line = b""
        if chance.random() < 0.8:
            line = os.read(told, 100)
            time.sleep(chance.random() * 0.03)
        else:
            time.sleep(chance.random() * 0.01)
            counts["before_ready"] += 1
        os.kill(pid, 9)
        _, status = os.waitpid(pid, 0)
        if not os.WIFSIGNALED(status):
            sys.exit(1)
        os.close(told)
        if line:
            kept, misses, notes = map(int, line.split())
            counts["kept"] += kept
            counts["misses"] += misses
            counts["notes"] += notes
        counts["kills"] += 1
        there = {path.name for path in Path(directory).iterdir()}
        assert there <= {"store-crash", "store-crash.lock"}, there
        inside = {path.name for path in (Path(directory) / "store-crash").iterdir()} if there else set()
        assert len(inside) <= (60 if damage else 6), inside  # a shortened file is made up for by another
        if damage:
            spoil(directory, chance)
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
