"""Processes that are killed: the next start serves the right bytes or a miss, and nothing piles up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

CHILD = Path(__file__).with_name("crash_child.py")


def kill(directory, kills, seed, *damage):
    """Run the children; their counts."""
    run = subprocess.run(
        [sys.executable, CHILD, directory, str(kills), str(seed), *damage], capture_output=True, text=True, check=False
    )
    assert 0 == run.returncode, run.stderr[-4000:]
    return json.loads(run.stdout)


def test_after_a_kill_every_recorded_block_is_right(tmp_path):
    """200 kills at random moments of start, write, read, free and note, on one store: not even a miss."""
    counts = kill(tmp_path, 200, 1)
    assert counts["kept"] > 200 * 50
    assert counts["notes"] > 200
    assert 0 == counts["misses"]


def test_kills_and_spoilt_files_never_serve_a_wrong_byte(tmp_path):
    """60 kills with the journal or a segment cut, flipped or removed after each: misses, but nothing wrong."""
    counts = kill(tmp_path, 60, 2, "damage")
    assert counts["kept"] > 0
    assert counts["misses"] > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("seed", "damage"), [(3, ()), (4, ("damage",))])
def test_a_thousand_kills(tmp_path, seed, damage):
    """The same for longer."""
    kill(tmp_path, 1000, seed, *damage)


LOAD = """
    import mmap, os, sys
    from agentkv.kv.slab import Slab, SlotImage
    store = sys.argv[2] or None
    slab = Slab(sys.argv[1], 64 * 4096 + 65536, 4096, store=store)
    page = memoryview(mmap.mmap(-1, 4096))
    read = [slab.read([SlotImage(one.slot, one.key, page)]) for one in slab.kept]
    assert all(good for (good,) in read), read
    slab.write([SlotImage(slot, os.urandom(16), page) for slot in slab.reserve(1)])
    slab.note(str(os.getpid()), b"x")
    print(len(read), len(slab.notes), flush=True)
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("store", ["", "mine"])
def test_ten_killed_starts_leave_no_more_than_one(tmp_path, store):
    """No growth in the folder, /dev/shm or the folder for temporary files; the eleventh start works (K11, K12)."""
    disk, temporary = tmp_path / "disk", tmp_path / "tmp"
    temporary.mkdir()
    shared = set(Path("/dev/shm").glob("*agentkv*"))
    entries, kept = [], []
    for _ in range(11):
        run = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(LOAD), disk, store],
            env=os.environ | {"TMPDIR": str(temporary)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert -9 == run.returncode, run.stderr
        kept.append(int(run.stdout.split()[0]))
        entries.append(len(list(disk.rglob("*"))))
    assert 1 == len(set(entries))
    assert (list(range(11)) if store else [0] * 11) == kept
    assert [] == list(temporary.iterdir())
    assert shared == set(Path("/dev/shm").glob("*agentkv*"))


BUSY = """
    import mmap, os, sys, time
    from agentkv.kv.slab import Slab, SlotImage
    arena = mmap.mmap(-1, 16 * 4096)
    views = [memoryview(arena)[i * 4096 : (i + 1) * 4096] for i in range(16)]
    until = time.monotonic() + float(sys.argv[2])
    rounds = 0
    with Slab(sys.argv[1], 40 * 4096 + 65536, 4096, segment_bytes=16 * 4096, store="shared") as slab:
        print(slab.path.name, flush=True)
        slab.free([one.slot for one in slab.kept])
        while time.monotonic() < until or rounds <= 10:
            slots = slab.reserve(16)
            images = [SlotImage(slot, os.urandom(16), view) for slot, view in zip(slots, views)]
            for image in images:
                image.view[:] = image.key * 256
            slab.write(images)
            for image in images:
                image.view[:] = bytes(4096)
            assert all(slab.read(images)), slab.stats()
            assert all(image.view[:] == image.key * 256 for image in images)
            slab.free(slots)
            rounds += 1
            assert slab.size_bytes <= 40 * 4096 + 65536
        assert not slab.errors, slab.errors
        slab.check()
    assert rounds > 10
"""


@pytest.mark.parametrize("seconds", ["1.2", pytest.param("60", marks=pytest.mark.slow)])
def test_four_processes_share_one_folder(tmp_path, seconds):
    """One has the store, the others private files; each keeps its own cap, nobody disturbs anybody (K17)."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(BUSY), tmp_path, seconds],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    results = [process.communicate(timeout=200) for process in processes]
    assert [0] * 4 == [process.returncode for process in processes], results
    names = [out.strip() for out, _ in results]
    assert 4 == len(set(names))
    assert 1 == names.count("store-shared")
    assert {"store-shared", "store-shared.lock"} == {path.name for path in tmp_path.iterdir()}
