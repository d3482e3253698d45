"""The disk tier by itself: what is written comes back, and what is not whole never does."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import shutil
import stat
import subprocess
import sys
import textwrap

import pytest

from agentkv import log
from agentkv.errors import ConfigError, DiskUnavailable
from agentkv.kv import segments
from agentkv.kv import slab as slab_module
from agentkv.kv.lair import sweep
from agentkv.kv.slab import Slab, SlotImage

SLOT = 4096
BLOCK = 3000


class Arena:
    """Page-aligned slots."""

    def __init__(self, slots):
        self.map = mmap.mmap(-1, slots * SLOT)
        self.view = memoryview(self.map)

    def slot(self, i):
        return self.view[i * SLOT : (i + 1) * SLOT]

    def close(self):
        self.view = None


@pytest.fixture
def arena():
    made = Arena(64)
    yield made
    made.close()


def key(i):
    return bytes([i]) * 16


def store(slab, arena, n, first=0):
    """Write n blocks whose bytes are their number; returns the images."""
    slots = slab.reserve(n)
    images = []
    for i, slot in enumerate(slots, first):
        view = arena.slot(i)
        view[:] = bytes([i]) * SLOT
        images.append(SlotImage(slot, key(i), view))
    slab.write(images)
    return images


def load(slab, arena, images, **options):
    for image in images:
        image.view[:] = bytes(SLOT)
    return slab.read(images, **options)


def test_what_was_written_is_read(tmp_path, arena):
    """Byte for byte, in any order."""
    with Slab(tmp_path, 16 * SLOT, BLOCK) as slab:
        images = store(slab, arena, 8)
        images.reverse()
        assert [True] * 8 == load(slab, arena, images)
        assert all(bytes(image.view[:BLOCK]) == bytes([image.key[0]]) * BLOCK for image in images)


def test_slots_come_back(tmp_path, arena):
    """Freed slots are taken again, and the count is right."""
    with Slab(tmp_path, 4 * SLOT, BLOCK) as slab:
        images = store(slab, arena, 4)
        assert [] == slab.reserve(1)
        slab.free([images[0].slot])
        assert [images[0].slot] == slab.reserve(3)
        slab.check()


@pytest.mark.parametrize("at", [0, BLOCK // 2, BLOCK - 1])
def test_one_flipped_bit_is_a_miss(tmp_path, arena, at):
    """Head, middle or tail: that block is not served, its neighbours are (K6)."""
    with Slab(tmp_path, 4 * SLOT, BLOCK) as slab:
        images = store(slab, arena, 3)
        flip(slab, images[1].slot * SLOT + at)
        assert [True, False, True] == load(slab, arena, images)
        assert 1 == slab.checksum_failures


def flip(slab, at):
    (path,) = slab.path.iterdir()
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 16]))


def test_two_swapped_blocks_are_two_misses(tmp_path, arena):
    """A whole and healthy block under the wrong key is still wrong."""
    with Slab(tmp_path, 4 * SLOT, BLOCK) as slab:
        images = store(slab, arena, 2)
        (path,) = slab.path.iterdir()
        with path.open("r+b") as file:
            data = file.read(2 * SLOT)
            file.seek(0)
            file.write(data[SLOT:] + data[:SLOT])
        assert [False, False] == load(slab, arena, images)


def test_equal_bytes_under_another_key_are_a_miss(tmp_path, arena):
    """The checksum is seeded with the key."""
    with Slab(tmp_path, 4 * SLOT, BLOCK) as slab:
        (image,) = store(slab, arena, 1)
        assert [False] == slab.read([image._replace(key=key(9))])


def test_a_truncated_file_is_a_miss(tmp_path, arena):
    """Short reads are failures, not zeros."""
    with Slab(tmp_path, 4 * SLOT, BLOCK) as slab:
        images = store(slab, arena, 2)
        (path,) = slab.path.iterdir()
        os.truncate(path, SLOT // 2)
        assert [False, False] == load(slab, arena, images)


def test_a_slot_that_was_never_written_is_a_miss(tmp_path, arena):
    """Its checksum is unknown."""
    with Slab(tmp_path, 4 * SLOT, BLOCK) as slab:
        (slot,) = slab.reserve(1)
        assert [False] == slab.read([SlotImage(slot, key(1), arena.slot(0))])


def test_without_o_direct_the_page_cache_does(tmp_path, arena, monkeypatch):
    """File systems that refuse O_DIRECT are served through the cache."""
    monkeypatch.setattr(segments, "open_direct", lambda *_, **__: None)
    with Slab(tmp_path, 4 * SLOT, BLOCK) as slab:
        images = store(slab, arena, 3)
        assert [True] * 3 == load(slab, arena, images)


def test_memory_that_o_direct_refuses_falls_back(tmp_path):
    """An unaligned buffer costs the speed of this file, not the answer."""
    with Slab(tmp_path, 4 * SLOT, BLOCK) as slab:
        view = memoryview(bytearray(SLOT + 1))[1:]
        view[:] = b"x" * SLOT
        (slot,) = slab.reserve(1)
        slab.write([SlotImage(slot, key(1), view)])
        assert [True] == slab.read([SlotImage(slot, key(1), view)])


def test_the_files_never_exceed_the_capacity(tmp_path, arena):
    """Segments are added as needed and the last one is cut (K8)."""
    with Slab(tmp_path, 10 * SLOT, BLOCK, segment_bytes=4 * SLOT) as slab:
        assert 4 == slab.slots
        images = [*store(slab, arena, 4), *store(slab, arena, 4, 4), *store(slab, arena, 2, 8)]
        assert 10 == slab.slots
        assert [] == slab.reserve(1)
        assert 10 * SLOT == sum(path.stat().st_size for path in slab.path.iterdir())
        assert [True] * 10 == load(slab, arena, images)


def test_only_the_user_may_read_the_files(tmp_path):
    """KV is prompt content: 0700 and 0600."""
    with Slab(tmp_path / "new", 4 * SLOT, BLOCK) as slab:
        assert 0o700 == stat.S_IMODE(slab.path.stat().st_mode)
        assert 0o700 == stat.S_IMODE((tmp_path / "new").stat().st_mode)
        assert [0o600] == [stat.S_IMODE(path.stat().st_mode) for path in slab.path.iterdir()]


def test_close_leaves_nothing(tmp_path):
    """Neither segment nor lock; twice is fine."""
    slab = Slab(tmp_path, 4 * SLOT, BLOCK)
    slab.close()
    slab.close()
    assert [] == list(tmp_path.iterdir())


def test_a_path_below_a_file_is_refused_at_construction(tmp_path):
    """The error names path and reason (K13)."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="Not a directory"):
        Slab(tmp_path / "file" / "below", 4 * SLOT, BLOCK)


def test_a_path_that_cannot_be_written_is_refused_at_construction():
    """Root ignores mode bits, so a file system that takes no files stands in."""
    with pytest.raises(ConfigError, match="the disk tier cannot use /proc"):
        Slab("/proc/agentkv", 4 * SLOT, BLOCK)


def test_a_full_disk_is_refused_at_construction(tmp_path, monkeypatch):
    """And leaves no half file behind."""
    monkeypatch.setattr(os, "posix_fallocate", no_space)
    with pytest.raises(ConfigError, match="No space left"):
        Slab(tmp_path, 4 * SLOT, BLOCK)
    assert [] == list(tmp_path.iterdir())


def no_space(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_disk_smaller_than_the_capacity_gives_smaller_segments(tmp_path, monkeypatch):
    """What fits is used, one warning says so, and growth is tried again once there is space (K10)."""
    monkeypatch.setattr(slab_module, "_SMALLEST_SEGMENT_BYTES", 2 * SLOT)
    room = [5 * SLOT]
    allocate = os.posix_fallocate

    def stingy(fd, offset, size):
        if size > room[0]:
            no_space()
        room[0] -= size
        allocate(fd, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", stingy)
    monkeypatch.setattr(log, "_warned", set())
    before = log.counters["kv_disk_short"]
    with Slab(tmp_path, 64 * SLOT, BLOCK, segment_bytes=16 * SLOT, retry_s=0) as slab:
        assert 4 == slab.slots
        assert 4 == len(slab.reserve(8))
        assert "No space left" in slab.short
        assert before < log.counters["kv_disk_short"]
        assert 1 == len(list(slab.path.iterdir()))
        room[0] = 1000 * SLOT
        assert 8 == len(slab.reserve(8))
        assert slab.short is None


def test_space_that_others_need_is_left_to_them(tmp_path, monkeypatch):
    """A file system that is nearly full is full for us."""
    monkeypatch.setattr(segments, "_spare_bytes", lambda _fd: SLOT)
    with pytest.raises(ConfigError, match="to spare"):
        Slab(tmp_path, 4 * SLOT, BLOCK)


def test_a_folder_that_vanishes_keeps_what_it_had(tmp_path, arena):
    """Open files live on; growth fails into `short`, not into an exception (K13)."""
    with Slab(tmp_path, 32 * SLOT, BLOCK, segment_bytes=4 * SLOT) as slab:
        images = store(slab, arena, 4)
        shutil.rmtree(slab.path)
        assert [] == slab.reserve(2)
        assert "No such file" in slab.short
        assert [True] * 4 == load(slab, arena, images)


def test_capacity_for_less_than_two_blocks_is_refused(tmp_path):
    """With the numbers."""
    with pytest.raises(ConfigError, match="holds 1 blocks"):
        Slab(tmp_path, SLOT, BLOCK)


CRASH = """
    import os, sys
    from agentkv.kv.slab import Slab
    slab = Slab(sys.argv[1], 8 * 4096, 3000)
    print(slab.path, flush=True)
    os.kill(os.getpid(), 9)
"""


def test_what_a_killed_process_left_is_swept_at_the_next_start(tmp_path):
    """Three crashes leave the garbage of one, and a start removes that (K11, K12)."""
    for _ in range(3):
        run = subprocess.run([sys.executable, "-c", textwrap.dedent(CRASH), str(tmp_path)], check=False)
        assert -9 == run.returncode
        assert 2 == len(list(tmp_path.iterdir()))
    with Slab(tmp_path, 4 * SLOT, BLOCK) as slab:
        assert {slab.path, slab.path.with_name(slab.path.name + ".lock")} == set(tmp_path.iterdir())


def test_the_files_of_a_living_process_are_left_alone(tmp_path, arena):
    """Two slabs share a root; neither sweeps the other (K12, K17)."""
    with Slab(tmp_path, 4 * SLOT, BLOCK) as first:
        images = store(first, arena, 2)
        with Slab(tmp_path, 4 * SLOT, BLOCK):
            assert [] == sweep(tmp_path)
        assert [True, True] == load(first, arena, images)


def test_a_foreign_file_in_the_root_is_left_alone(tmp_path):
    """We remove only what carries our name and a lock that nobody holds."""
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "agentkv-data").mkdir()
    (tmp_path / "agentkv-1-dead.lock").touch()
    (tmp_path / "agentkv-1-dead").mkdir()
    assert [tmp_path / "agentkv-1-dead"] == sweep(tmp_path)
    assert {"notes.txt", "agentkv-data"} == {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOTSUP])
def test_a_mount_without_locks_is_refused_at_construction(tmp_path, monkeypatch, code):
    """It used to be taken for a busy file, and the next one tried, for ever."""

    def no_locks(*_):
        assert len(list(tmp_path.iterdir())) < 10, "still trying"
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    (tmp_path / "agentkv-1-dead.lock").touch()
    with pytest.raises(DiskUnavailable, match=re.escape(os.strerror(code))):
        Slab(tmp_path, 4 * SLOT, BLOCK)
    assert ["agentkv-1-dead.lock"] == [path.name for path in tmp_path.iterdir()]
    assert [] == sweep(tmp_path)


def test_a_lock_file_that_is_swept_at_once_is_made_again(tmp_path, monkeypatch):
    """Another process may see it before it is locked."""
    flock, unlucky = fcntl.flock, [True, True]

    def swept(fd, flags):
        if unlucky:
            unlucky.pop()
            for path in tmp_path.glob("*.lock"):
                path.unlink()
        flock(fd, flags)

    monkeypatch.setattr(fcntl, "flock", swept)
    with Slab(tmp_path, 4 * SLOT, BLOCK) as slab:
        assert [slab.path.name + ".lock"] == [path.name for path in tmp_path.glob("*.lock")]
