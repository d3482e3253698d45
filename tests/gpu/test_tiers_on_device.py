"""The tiers on a real device: the same bytes after every trip; write-back and loads close behind compute."""

from __future__ import annotations

import pytest
from gpu_sections.player import Player, keys_of
from gpu_sections.scene import GEOMETRIES, KIB

from agentkv.core.residency import Action, Move, Tier
from agentkv.kv.slab import Slab
from agentkv.kv.tiers import Tiers

GEOMETRY = GEOMETRIES[192 * KIB]
BLOCKS = 32


@pytest.fixture
def tiers(scene, tmp_path):
    slab = Slab(tmp_path / "disk", 4 * BLOCKS * GEOMETRY.slot_bytes, GEOMETRY.block_bytes)
    with Tiers(
        geometry=GEOMETRY,
        device="cuda:0" if scene.on_gpu else "cpu",
        device_bytes=(BLOCKS + 8) * GEOMETRY.block_bytes,
        host_bytes=2 * BLOCKS * GEOMETRY.slot_bytes,
        slab=slab,
    ) as made:
        yield made


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK])
def test_three_sessions_take_turns_on_a_device_that_holds_one(scene, tiers, tier):
    """Write-back starts right behind the compute that wrote (R1), loads into blocks just read (R2); bytes hold."""
    player = Player(scene, tiers)
    for turn in range(3):
        for number in (1, 2, 3):
            lease = player.turn(f"s{number}", keys_of(number, BLOCKS))
            assert turn == 0 or lease.loaded_blocks > 0
            tiers.apply(Move(session=f"s{number}", action=Action.DEMOTE, to=tier, reason="test"))
    tiers.quiesce(20)
    tiers.check()
    assert 0 == player.wrong
    stats = tiers.stats()
    assert stats["bytes"]["h2d"] > 0
    assert (stats["host"]["pinned_bytes"] > 0) == scene.on_gpu


def test_two_sessions_that_share_a_prefix_load_it_once(scene, tiers):
    """R9: the second one joins the first one's load, and both read the right bytes."""
    player = Player(scene, tiers)
    mine, yours = (keys_of(1, 16, branch=branch, shared=10) for branch in (1, 2))
    for name, keys in (("mine", mine), ("yours", yours)):
        player.turn(name, keys)
        tiers.apply(Move(session=name, action=Action.DEMOTE, to=Tier.DISK, reason="test"))
        tiers.quiesce(20)
    for name in ("mine", "yours"):
        tiers.vacate(name, Tier.DEVICE)
        tiers.vacate(name, Tier.HOST)
    assert player.begin("mine", mine) is not None
    assert player.begin("yours", yours) is not None
    for name, keys in (("mine", mine), ("yours", yours)):
        player.arrive(name)
        player.end(name, keys)
    tiers.quiesce(20)
    assert 0 == player.wrong
    assert 22 == tiers.stats()["hits"]["disk"]
    assert 10 == tiers.stats()["hits"]["joined"]
