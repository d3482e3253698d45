"""The gauge of the data plane: rates that are plausible, and nothing left behind."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import Counter
from dataclasses import replace

import pytest

from agentkv.core.rates import Prefill, Rates
from agentkv.errors import ConfigError, DiskUnavailable
from agentkv.kv import gauge
from agentkv.kv.gauge import measure_copies, measure_disk, reckoned
from agentkv.kv.geometry import Geometry
from agentkv.kv.slab import Slab
from agentkv.units import MIB

GEOMETRY = Geometry(layers=4, kv_heads=2, head_dim=32, dtype="bfloat16")  # blocks of 16 KiB
FLOOR_BYTES_S = 10e6
CEILING_BYTES_S = 1e13


def test_a_lane_starts_with_what_was_measured():
    """Rough figures only where nothing was: a disk may be unknown."""
    rates = Rates(memcpy_bytes_s=1.0, h2d_bytes_s=2.0, d2h_bytes_s=3.0, prefill=Prefill(linear_s=1.0))
    assert {"h2d": 2.0, "d2h": 3.0, "read": 1.5e9, "write": 0.8e9} == reckoned(rates, on_gpu=True)
    rates = replace(rates, read_bytes_s=4.0, write_bytes_s=5.0)
    assert {"h2d": 2.0, "d2h": 3.0, "read": 4.0, "write": 5.0} == reckoned(rates, on_gpu=False)
    assert reckoned(None, on_gpu=False)["h2d"] < reckoned(None, on_gpu=True)["h2d"]


def test_copies_are_timed_both_ways():
    """Three rates, each of which a machine can have."""
    found = measure_copies(GEOMETRY, seconds=0.05, size_bytes=4 * MIB)
    for rate in (found.memcpy_bytes_s, found.h2d_bytes_s, found.d2h_bytes_s):
        assert FLOOR_BYTES_S < rate < CEILING_BYTES_S


def test_a_slow_copy_has_a_low_rate(monkeypatch):
    """The copies that are timed are those of the real streams: 2 MiB that take 20 ms are 100 MB/s."""
    from agentkv.kv.streams.cpu import CpuStreams

    copy = CpuStreams.copy

    def slow(self, direction, runs, after):
        if direction == "d2h":
            time.sleep(0.02)
        return copy(self, direction, runs, after)

    monkeypatch.setattr(CpuStreams, "copy", slow)
    found = measure_copies(GEOMETRY, seconds=0.01, size_bytes=2 * MIB)
    assert found.d2h_bytes_s < 2 * MIB / 0.02 < found.h2d_bytes_s


def test_blocks_larger_than_the_time_allows_are_still_timed():
    """A block of megabytes: at least four of them, three rounds."""
    large = Geometry(layers=32, kv_heads=8, head_dim=128, dtype="float16")
    assert 2 * MIB == large.block_bytes
    assert FLOOR_BYTES_S < measure_copies(large, seconds=0.001, size_bytes=1).h2d_bytes_s < CEILING_BYTES_S


def test_the_disk_is_timed_through_the_slab_and_leaves_nothing(tmp_path):
    """Reads and writes at the block size; the folder is empty afterwards."""
    found = measure_disk(GEOMETRY, tmp_path / "disk", seconds=0.1, size_bytes=4 * MIB)
    assert FLOOR_BYTES_S / 10 < found.read_bytes_s < CEILING_BYTES_S
    assert FLOOR_BYTES_S / 10 < found.write_bytes_s < CEILING_BYTES_S
    assert [] == list((tmp_path / "disk").iterdir())


def test_as_many_threads_as_the_lanes_have_read_and_write(tmp_path, monkeypatch):
    """A disk shows its rate only to several at a time: each waits here until all are in."""
    wanted, inside, most = {"write": 4, "read": 8}, Counter(), Counter()
    changed = threading.Condition()

    def watched(name, real):
        def act(self, images, **options):
            with changed:
                inside[name] += 1
                most[name] = max(most[name], inside[name])
                changed.notify_all()
                changed.wait_for(lambda: most[name] >= wanted[name], timeout=5)
            try:
                return real(self, images, **options)
            finally:
                with changed:
                    inside[name] -= 1

        return act

    monkeypatch.setattr(Slab, "write", watched("write", Slab.write))
    monkeypatch.setattr(Slab, "read", watched("read", Slab.read))
    measure_disk(GEOMETRY, tmp_path, seconds=0.5, size_bytes=64 * MIB)
    assert wanted == most


def test_a_slow_disk_is_not_measured_for_longer_than_asked(tmp_path, monkeypatch):
    """Each thread stops at the first job after the time is over."""
    jobs = []
    write = Slab.write

    def slow(self, images):
        time.sleep(0.05)
        jobs.append(len(images))
        write(self, images)

    monkeypatch.setattr(Slab, "write", slow)
    measure_disk(GEOMETRY, tmp_path, seconds=0.1, size_bytes=256 * MIB)  # 64 jobs, of which four threads do a few
    assert 4 <= len(jobs) <= 16


def test_a_folder_that_cannot_be_used_is_refused_with_the_reason(tmp_path):
    """Below a regular file."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="Not a directory"):
        measure_disk(GEOMETRY, tmp_path / "file" / "below", seconds=0.1)


def test_a_disk_that_fails_is_refused_and_leaves_nothing(tmp_path, monkeypatch):
    """EIO in the middle of it."""

    def broken(self, images):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Slab, "write", broken)
    with pytest.raises(DiskUnavailable, match="Input/output error"):
        measure_disk(GEOMETRY, tmp_path, seconds=0.1, size_bytes=MIB)
    assert [] == list(tmp_path.iterdir())


def test_a_disk_that_gives_back_other_bytes_is_refused(tmp_path, monkeypatch):
    """A rate of wrong bytes is none."""
    monkeypatch.setattr(Slab, "read", lambda self, images: [False] * len(images))
    with pytest.raises(DiskUnavailable, match="did not come back"):
        measure_disk(GEOMETRY, tmp_path, seconds=0.1, size_bytes=MIB)


def test_an_interrupt_leaves_no_file_and_no_thread(tmp_path, monkeypatch):
    """Ctrl-C while blocks are written."""

    def interrupt(path):
        raise KeyboardInterrupt

    monkeypatch.setattr(gauge, "_empty_page_cache", interrupt)
    with pytest.raises(KeyboardInterrupt):
        measure_disk(GEOMETRY, tmp_path, seconds=0.1, size_bytes=MIB)
    assert [] == list(tmp_path.iterdir())
    assert [] == [t.name for t in threading.enumerate() if t.name.startswith("agentkv-gauge")]
