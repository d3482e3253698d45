"""Tiers over CUDA streams without CUDA: compute, copies and their ends come in any order that CUDA allows."""

from __future__ import annotations

import random

import pytest

from agentkv.core.residency import Action, Move, Tier
from agentkv.kv.geometry import Geometry
from agentkv.kv.index import chain_keys, root_key
from agentkv.kv.streams.pretend import ANY_ORDER, STREAM_ORDER, PretendStreams
from agentkv.kv.tiers import Tiers

PADDED = Geometry(layers=2, kv_heads=1, head_dim=8, dtype="float32")
WHOLE = Geometry(layers=2, kv_heads=1, head_dim=16, dtype="float32")


@pytest.mark.parametrize("seed", range(8))
def test_tiers_over_it_never_read_a_wrong_byte(seed):
    """Sessions that share a prefix move through small tiers; compute, copies and their ends come in any legal order."""
    geometry = PADDED if seed % 2 else WHOLE
    streams = PretendStreams(seed)
    chance = random.Random(seed)
    tiers = Tiers(
        geometry=geometry,
        device_bytes=10 * geometry.block_bytes,
        host_bytes=14 * geometry.slot_bytes,
        streams=streams,
        threads=False,
    )
    wrong = []

    def until(ask):
        for _ in range(100_000):
            if (answer := ask()) is not None:
                return answer
            tiers.pump()
            streams.driver.maybe_step()
        raise AssertionError("no progress")

    def look(block, key):
        streams.launch(lambda: wrong.append(block) if (tiers.pool[block] != key[0] + key[1]).any() else None)

    for _ in range(60):
        session = chance.choice("abcd")
        keys = chain_keys(root_key(fingerprint=b"cuda", salt=""), [1] * 32 + [ord(session)] * 64)
        lease = until(lambda session=session, keys=keys: tiers.acquire(session, keys))
        until(lambda lease=lease: lease.ticket.done or None)
        streams.compute_wait(lease.ticket.event)
        blocks = list(lease.blocks)
        for block, key in zip(blocks, keys, strict=False):
            look(block, key)
        for at in range(len(blocks), len(keys)):
            (block,) = until(lambda: tiers.allocate(1))
            streams.launch(lambda block=block, key=keys[at]: tiers.pool[block].fill_(key[0] + key[1]))
            blocks.append(tiers.commit(session, block, keys[at], keys[at - 1] if at else None, streams.record()))
        tiers.hold(session, session, keys, 96)
        tiers.release(session, blocks, used=streams.record())
        tiers.apply(Move(session=chance.choice("abcd"), action=Action.DEMOTE, to=Tier.HOST, reason="test"))
        tiers.check()
    for _ in range(2000):
        tiers.pump()
        streams.driver.maybe_step()
    streams.record().wait()
    assert [] == wrong
    assert {"h2d", "d2h"} <= {way for way, moved in tiers.stats()["bytes"].items() if moved}
    assert {STREAM_ORDER, ANY_ORDER} == {call.order for call in streams.binding.calls}
    assert "cudaMemcpyBatchAsync" == streams.copy_path
    tiers.close()
