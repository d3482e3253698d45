"""The tiers on a real device: the same bytes after every trip, rules R1 and R2 against real streams."""

from __future__ import annotations

import pytest
import torch

from agentkv.core.residency import Action, Move, Tier
from agentkv.kv.geometry import Geometry
from agentkv.kv.index import chain_keys, root_key
from agentkv.kv.slab import Slab
from agentkv.kv.tiers import Tiers

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

GEOMETRY = Geometry(layers=30, kv_heads=3, head_dim=64, dtype="bfloat16")
BLOCKS = 64


@pytest.fixture
def tiers(tmp_path):
    slab = Slab(tmp_path, 4 * BLOCKS * GEOMETRY.slot_bytes, GEOMETRY.block_bytes)
    with Tiers(
        geometry=GEOMETRY,
        device="cuda:0",
        device_bytes=(BLOCKS + 8) * GEOMETRY.block_bytes,
        host_bytes=2 * BLOCKS * GEOMETRY.slot_bytes,
        slab=slab,
    ) as made:
        yield made


def keys(seed):
    return chain_keys(root_key(fingerprint=b"gpu", salt=""), [seed] * 16 * BLOCKS)


def compute(tiers, session, seed):
    """A session whose block i holds random bytes of seed + i, written by the compute stream."""
    chain = keys(seed)
    lease = tiers.acquire(session, chain)
    while lease is None:
        tiers.quiesce(10)
        lease = tiers.acquire(session, chain)
    tiers.streams.compute_wait(lease.ticket.event)
    blocks = list(lease.blocks)
    wrong = []
    for i, block in enumerate(blocks):
        tiers.streams.launch(lambda i=i, block=block: wrong.append((tiers.pool[block] != content(seed, i)).any()))
    for i in range(len(blocks), BLOCKS):
        fresh = tiers.allocate(1)
        while fresh is None:
            tiers.quiesce(10)
            fresh = tiers.allocate(1)
        tiers.streams.launch(lambda i=i, fresh=fresh: tiers.pool[fresh[0]].copy_(content(seed, i)))
        blocks.append(tiers.commit(session, fresh[0], chain[i], chain[i - 1] if i else None, tiers.streams.record()))
    tiers.hold(session, session, chain, 16 * BLOCKS)
    tiers.release(session, blocks, used=tiers.streams.record())
    tiers.streams.record().wait()
    assert not any(bool(flag) for flag in wrong)
    tiers.check()
    return lease


def content(seed, i):
    generator = torch.Generator(device="cuda").manual_seed(1000 * seed + i)
    return torch.rand(GEOMETRY.block_shape, generator=generator, device="cuda").to(torch.bfloat16)


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK])
def test_two_sessions_take_turns_on_a_device_that_holds_one(tiers, tier):
    """Write-back starts right behind the compute that wrote (R1), loads into blocks just read (R2); bytes hold."""
    for turn in range(3):
        for seed in (1, 2, 3):
            lease = compute(tiers, f"s{seed}", seed)
            assert turn == 0 or lease.loaded_blocks > 0
            tiers.apply(Move(session=f"s{seed}", action=Action.DEMOTE, to=tier, reason="test"))
    tiers.quiesce(10)
    stats = tiers.stats()
    assert stats["bytes"]["h2d"] > 0
    assert stats["host"]["pinned_bytes"] > 0
