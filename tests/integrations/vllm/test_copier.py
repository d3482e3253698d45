"""Copies between a pool and a tier in main memory: every byte where it belongs, loads first, and waits that end."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import pytest
from agentkv_vllm import copier as copiers
from agentkv_vllm.copier import Copier, Group, Plane


@pytest.fixture
def copier():
    copier = Copier(blocks_per_chunk=2)
    yield copier
    copier.close()
    copier.close()


def planes(pool, tier):
    """pool: [layers, blocks, 8]; tier: [chunks, layers, 2, 8], as vLLM's shared region has a worker's rows."""
    return [
        Plane(
            pool=pool[layer].ctypes.data, pool_stride=pool.strides[1],
            tier=tier.ctypes.data + layer * tier.strides[1], tier_stride=tier.strides[0],
            tier_page=tier.strides[2], page_bytes=8,
        )
        for layer in range(len(pool))
    ]  # fmt: skip


def test_blocks_go_out_and_come_back_into_others(copier):
    """Odd numbers of blocks, a first one in the middle of its chunk, several groups."""
    random = np.random.default_rng(7)
    pool = random.integers(0, 255, (3, 10, 8), dtype=np.uint8)
    before, tier = pool.copy(), np.zeros((6, 3, 2, 8), dtype=np.uint8)
    both = planes(pool, tier)
    groups = [
        Group(planes=both[:2], blocks=[7, 1, 4], chunks=[5, 0], skip=1),
        Group(planes=both[2:], blocks=[2, 3], chunks=[2], skip=0),
    ]
    copier.submit(1, groups, load=False)
    copier.wait([1])
    assert np.array_equal(tier[5, :2, 1], before[:2, 7])
    assert np.array_equal(tier[0, :2, 0], before[:2, 1])
    assert np.array_equal(tier[0, :2, 1], before[:2, 4])
    assert np.array_equal(tier[2, 2, 0], before[2, 2])
    assert 0 == tier[5, :, 0].sum()
    (done,) = copier.done()
    assert (1, 3 * 2 * 8 + 2 * 8) == (done.job, done.size_bytes)
    assert [] == copier.done()
    pool[:] = 0
    back = [Group(planes=both[:2], blocks=[9, 8, 0], chunks=[5, 0], skip=1)]
    copier.submit(2, back, load=True)
    copier.wait([2, 99])
    assert np.array_equal(pool[:2, 9], before[:2, 7])
    assert np.array_equal(pool[:2, 0], before[:2, 4])
    assert 0 == pool[2].sum()


def test_loads_go_before_stores_that_have_not_begun(copier, monkeypatch):
    """A request waits for them; within each kind the order stays."""
    began, go = threading.Event(), threading.Event()

    def held(*args):
        began.set()
        go.wait(5)

    monkeypatch.setattr(copiers.ctypes, "memmove", held)
    plane = Plane(pool=0, pool_stride=0, tier=0, tier_stride=0, tier_page=0, page_bytes=0)
    group = [Group(planes=[plane], blocks=[0], chunks=[0])]
    copier.submit(1, group, load=False)
    began.wait(5)
    for job, load in ((2, False), (3, True), (4, False), (5, True)):
        copier.submit(job, group, load=load)
    go.set()
    copier.wait([1, 2, 3, 4, 5])
    assert [1, 3, 5, 2, 4] == [one.job for one in copier.done()]
    assert ctypes is copiers.ctypes


def test_closing_finishes_what_was_submitted():
    """Nothing is lost half-way."""
    copier = Copier(1)
    plane = Plane(pool=0, pool_stride=0, tier=0, tier_stride=0, tier_page=0, page_bytes=0)
    for job in range(20):
        copier.submit(job, [Group(planes=[plane], blocks=[], chunks=[])], load=False)
    copier.close()
    assert 20 == len(copier.done())
