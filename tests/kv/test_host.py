"""The host arena: mapping, pinning and its failure."""

from __future__ import annotations

import pytest

from agentkv import log
from agentkv.errors import ConfigError
from agentkv.kv import host as host_module
from agentkv.kv.geometry import Geometry
from agentkv.kv.host import HostArena

GEOMETRY = Geometry(layers=2, kv_heads=1, head_dim=8, dtype="float32")


class Cudart:
    """A CUDA runtime that page-locks up to a limit."""

    def __init__(self, limit_bytes):
        self.left = limit_bytes
        self.pinned = []

    def cudaHostRegister(self, address, size, _flags):  # noqa: N802
        if size > self.left:
            return 2
        self.left -= size
        self.pinned.append(address)
        return 0

    def cudaHostUnregister(self, address):  # noqa: N802
        self.pinned.remove(address)
        return 0


@pytest.fixture
def cudart(monkeypatch):
    made = Cudart(6 * 4096)
    cleared = []
    monkeypatch.setattr(host_module, "_cudart", lambda: made)
    monkeypatch.setattr(host_module, "_clear_cuda_error", lambda: cleared.append(True))
    monkeypatch.setattr(host_module, "_PIN_PIECE_BYTES", 4 * 4096)
    monkeypatch.setattr(log, "_warned", set())
    made.cleared = cleared
    return made


def test_slots_are_page_aligned_and_disjoint():
    """As O_DIRECT wants them."""
    arena = HostArena(GEOMETRY, 4 * 4096 + 100)
    assert 4 == arena.slots
    assert 0 == arena.address % 4096
    for i in range(4):
        arena.view(i)[:] = bytes([i]) * 4096
    assert [0, 1, 2, 3] == [arena.view(i)[4095] for i in range(4)]
    arena.close()


def test_all_of_it_is_pinned_in_pieces_and_unpinned_at_close(cudart):
    """No page stays locked."""
    arena = HostArena(GEOMETRY, 6 * 4096, pin=True)
    assert 6 * 4096 == arena.pinned_bytes
    assert 2 == len(cudart.pinned)
    arena.close()
    assert [] == cudart.pinned
    assert [] == cudart.cleared


def test_what_cannot_be_pinned_stays_pageable_with_one_warning(cudart):
    """The tier works, and the failure does not linger as the next kernel's error (K14)."""
    before = log.counters["host_memory_not_pinned"]
    arena = HostArena(GEOMETRY, 16 * 4096, pin=True)
    assert 4 * 4096 == arena.pinned_bytes
    assert 16 == arena.slots
    assert [True] == cudart.cleared
    assert before + 1 == log.counters["host_memory_not_pinned"]
    arena.close()
    assert [] == cudart.pinned


def test_more_than_the_address_space_is_refused():
    """With the size that was asked for."""
    with pytest.raises(ConfigError, match="cannot be mapped"):
        HostArena(GEOMETRY, 2**60)


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
