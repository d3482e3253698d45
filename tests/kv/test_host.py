"""The host arena: mapping, its bounds, pinning and its failure."""

from __future__ import annotations

import os
import resource

import pytest

from agentkv import log
from agentkv.errors import ConfigError
from agentkv.kv import host as host_module
from agentkv.kv import pins as pins_module
from agentkv.kv.geometry import Geometry
from agentkv.kv.host import HostArena

GEOMETRY = Geometry(layers=2, kv_heads=1, head_dim=8, dtype="float32")


class Cudart:
    """A CUDA runtime that page-locks up to a limit, and whose next launch fails while a refusal is not cleared."""

    def __init__(self, limit_bytes):
        self.left = limit_bytes
        self.pinned = []
        self.pending_error = 0

    def cudaHostRegister(self, address, size, _flags):  # noqa: N802
        if size > self.left:
            self.pending_error = 2
            return 2
        self.left -= size
        self.pinned.append(address)
        return 0

    def cudaHostUnregister(self, address):  # noqa: N802
        self.pinned.remove(address)
        return 0

    def clear(self):
        self.pending_error = 0


@pytest.fixture
def cudart(monkeypatch):
    made = Cudart(6 * 4096)
    monkeypatch.setattr(pins_module, "cudart", lambda: made)
    monkeypatch.setattr(pins_module, "clear_cuda_error", made.clear)
    monkeypatch.setattr(host_module, "_PIN_PIECE_BYTES", 4 * 4096)
    monkeypatch.setattr(log, "_warned", set())
    return made


@pytest.fixture
def lines(monkeypatch):
    written = []
    monkeypatch.setattr(log, "_write", lambda event, fields: written.append((event, fields)))
    return written


def test_slots_are_page_aligned_and_disjoint():
    """As O_DIRECT wants them."""
    arena = HostArena(GEOMETRY, 4 * 4096 + 100)
    assert 4 == arena.slots
    assert 0 == arena.address % 4096
    for i in range(4):
        arena.view(i)[:] = bytes([i]) * 4096
    assert [0, 1, 2, 3] == [arena.view(i)[4095] for i in range(4)]
    arena.close()


def test_all_of_it_is_pinned_in_pieces_and_unpinned_at_close(cudart, lines):
    """No page stays locked."""
    arena = HostArena(GEOMETRY, 6 * 4096, pin=True)
    assert 6 * 4096 == arena.pinned_bytes
    assert 2 == len(cudart.pinned)
    arena.close()
    arena.close()
    assert [] == cudart.pinned
    assert [] == lines


def test_what_cannot_be_pinned_stays_pageable_with_one_warning(cudart, lines):
    """The tier works, the line names the limit and what to do, and the refusal is not the next kernel's error (K14)."""
    for _ in range(2):
        arena = HostArena(GEOMETRY, 16 * 4096, pin=True)
        assert 16 == arena.slots
        assert 4 * 4096 == arena.pinned_bytes
        assert 0 == cudart.pending_error
        arena.close()
        cudart.left = 6 * 4096
    assert [] == cudart.pinned
    ((event, fields),) = lines
    assert "host_memory_not_pinned" == event
    assert "RLIMIT_MEMLOCK" in fields["limit"]
    assert "ulimit -l" in fields["advice"]


def test_a_small_page_lock_limit_is_named(cudart, lines):
    """With its number, as `ulimit -l` would set it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 * 1024, hard))
    try:
        cudart.left = 0
        arena = HostArena(GEOMETRY, 8 * 4096, pin=True)
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))
    assert 0 == arena.pinned_bytes
    assert "RLIMIT_MEMLOCK is 64.0 KiB" == lines[0][1]["limit"]
    arena.close()


def test_more_than_there_is_is_refused(tmp_path):
    """With both numbers, before anything is mapped."""
    with pytest.raises(ConfigError, match=r"host memory of 1048576.0 TiB is more than the [\d.]+ GiB that"):
        HostArena(GEOMETRY, 2**60)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 999 kB\nMemAvailable:   64 kB\n")
    with pytest.raises(ConfigError, match=r"128.0 KiB is more than the 64.0 KiB"):
        HostArena(GEOMETRY, 128 * 1024, root=tmp_path)
    HostArena(GEOMETRY, 64 * 1024, root=tmp_path).close()


def test_no_slot_lies_in_two_registrations(cudart, monkeypatch):
    """A copy must stay inside of one: pieces hold whole slots, and say how many."""
    monkeypatch.setattr(host_module, "_PIN_PIECE_BYTES", 5 * 4096)
    geometry = Geometry(layers=2, kv_heads=2, head_dim=16, dtype="float32")
    assert 2 * 4096 == geometry.slot_bytes
    arena = HostArena(geometry, 6 * 4096, pin=True)
    assert [arena.address, arena.address + 4 * 4096] == cudart.pinned
    assert 2 == arena.piece_slots
    arena.close()
    assert [] == cudart.pinned


def in_a_child(fn):
    """What `fn` returned in a forked child, as its exit status; 99 if it raised."""
    child = os.fork()
    if child == 0:
        code = 99
        try:
            code = fn()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_never_unregisters(cudart):
    """Its parent's registration stays, and the child may close what it inherited (E26)."""
    arena = HostArena(GEOMETRY, 6 * 4096, pin=True)

    def close_in_child():
        arena.close()
        return len(cudart.pinned)

    assert 2 == in_a_child(close_in_child)
    arena.close()
    assert [] == cudart.pinned


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_shares_no_page_with_its_parent():
    """A shared page would be copied at the parent's next write, away from what the copy engines were told."""
    arena = HostArena(GEOMETRY, 4 * 4096)
    arena.view(0)[:] = b"\x07" * 4096
    assert 0 == in_a_child(lambda: arena.view(0)[5])
    assert 7 == arena.view(0)[5]
    arena.close()
