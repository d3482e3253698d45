"""Slab: a session comes back from disk to the device, read and copied in a pipeline; and each leg alone."""

from __future__ import annotations

import tempfile

from agentkv.core.residency import Action, Move, Tier
from agentkv.kv.slab import Slab
from agentkv.kv.tiers import Tiers
from gpu_sections.player import Player, keys_of
from gpu_sections.scene import GEOMETRIES, KIB, MIB, Found, Line, Scene, at_most, middle, timed

SESSION = "s"


def run(scene: Scene) -> Found:
    """One session of 2 GiB (small: 8 MiB)."""
    geometry = GEOMETRIES[192 * KIB if scene.small else 2 * MIB]
    blocks = 40 if scene.small else 1024
    keys = keys_of(1, blocks)
    size = blocks * geometry.block_bytes
    with tempfile.TemporaryDirectory(dir=scene.scratch) as folder:
        slab = Slab(folder, (blocks + 16) * geometry.slot_bytes, geometry.block_bytes)
        with Tiers(
            geometry=geometry,
            device="cuda:0" if scene.on_gpu else "cpu",
            device_bytes=(blocks + 8) * geometry.block_bytes,
            host_bytes=(blocks + 8) * geometry.slot_bytes,
            slab=slab,
        ) as tiers:
            player = Player(scene, tiers)
            player.turn(SESSION, keys)
            write_s = timed(lambda: _down(tiers, Tier.DISK))

            def back() -> None:
                lease = player.lease(SESSION, keys)
                assert lease is not None
                assert lease.ticket.wait(120)
                assert lease.ticket.failed_from is None, f"block {lease.ticket.failed_from} did not come back"
                assert lease.loaded_blocks == blocks, f"{lease.loaded_blocks} of {blocks} were loaded"
                scene.sync()
                player.held[SESSION] = list(lease.blocks)

            def read_only() -> None:
                tiers.apply(Move(session=SESSION, action=Action.PREFETCH, to=Tier.HOST, reason="benchmark"))
                tiers.quiesce(120)

            times: dict[str, list[float]] = {"disk_to_device": [], "disk_to_host": [], "host_to_device": []}
            for _ in scene.repeats(2 if scene.small else 4):
                for leg, target in (("disk_to_device", Tier.DISK), ("host_to_device", Tier.HOST)):
                    _down(tiers, target)
                    times[leg].append(timed(back))
                    player.end(SESSION, keys)
                _down(tiers, Tier.DISK)
                times["disk_to_host"].append(timed(read_only))
            wrong = player.wrong
    figures = {
        "gib": round(size / (1 << 30), 3),
        "device_to_disk_gb_s": round(size / write_s / 1e9, 2),
        **{f"{leg}_gb_s": round(size / middle(values) / 1e9, 2) for leg, values in times.items()},
    }
    legs = middle(times["disk_to_host"]) + middle(times["host_to_device"])
    figures["pipelined_over_serial"] = round(middle(times["disk_to_device"]) / legs, 3)
    return Found(figures=figures, lines=[at_most(scene, "mismatches", wrong, 0, anywhere=True), _overlap(figures)])


def _overlap(figures: dict[str, float]) -> Line:
    """For information: the two legs overlap if together they take less than one after the other."""
    return Line(what="pipelined over serial", value=figures["pipelined_over_serial"], bound="< 1", ok=None)


def _down(tiers: Tiers, tier: Tier) -> None:
    tiers.apply(Move(session=SESSION, action=Action.DEMOTE, to=tier, reason="benchmark"))
    tiers.quiesce(120)
    for dearer in (Tier.DEVICE, Tier.HOST)[: int(tier)]:
        tiers.vacate(SESSION, dearer)
