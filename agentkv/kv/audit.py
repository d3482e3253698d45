"""The audit: counts for people (`figures`) and policies (`facts`), and the recount of what is counted twice (`check`).

All are called with the lock of `Tiers` held and change nothing.
"""

from __future__ import annotations

from typing import Any

from agentkv.core.rates import OVERLAP
from agentkv.core.residency import Residency, Tier
from agentkv.kv.block import NOWHERE, Block
from agentkv.kv.book import Book, Holding
from agentkv.kv.device import NULL_BLOCK, DevicePool
from agentkv.kv.host import HostArena
from agentkv.kv.slab import Slab
from agentkv.kv.transfers import Transfers


def figures(
    book: Book, device: DevicePool, host: HostArena | None, slab: Slab | None, transfers: Transfers
) -> dict[str, Any]:
    """Plain JSON values: blocks and bytes per tier, what moved, measured rates."""
    blocks = book.blocks.values()
    size = device.geometry.block_bytes
    on_device = [block for block in blocks if block.has(Tier.DEVICE)]
    spare = _spare(book)
    counts = transfers.counts
    return {
        "block_bytes": size,
        "sessions": len(book.holdings),
        "device": {
            "blocks": device.num_blocks,
            "free": len(device.free),
            "used": device.num_blocks - len(device.free),
            "used_bytes": (device.num_blocks - len(device.free)) * size,
            "private": len(device.private),
            "keyed": len(on_device),
            "clean": sum(not block.unwritten for block in on_device),
            "dirty": sum(block.unwritten for block in on_device) - sum(block.unwritten for block in spare),
            "behind": len(spare),
            "pinned": sum(block.pins > 0 for block in on_device) + len(device.private),
        },
        "host": _slots(host.slots, len(host.free), size) | {"pinned_bytes": host.pinned_bytes} if host else None,
        "disk": _slots(slab.capacity, slab.capacity - slab.used, size)
        | slab.stats()
        | {"off": transfers.stalled or slab.off}
        if slab
        else None,
        "moving_blocks": len(transfers.under_way),
        "loads": counts["loaded"],
        "duplicate_loads": counts["duplicate_loads"],
        "restores": counts["restores"],
        "descriptors": {name: counts[f"{name}_descriptors"] for name in ("h2d", "d2h")},
        "descriptors_per_restore": counts["restore_descriptors"] / max(1, counts["restores"]),
        "prefetched": {
            "blocks": counts["prefetched"],
            "used": counts["prefetch_used"],
            "wasted": counts["prefetch_wasted"],
            "wasted_bytes": counts["prefetch_wasted"] * size,
        },
        "stalled_jobs": counts["stalled_jobs"],
        "evictions": {tier.name.lower(): counts[f"evicted_{tier.name.lower()}"] for tier in Tier},
        "drops": counts["dropped"],
        "forgotten": counts["forgotten"],
        "lost_on_disk": counts["lost_on_disk"],
        "checksum_failures": slab.checksum_failures if slab else 0,
        "bytes": {name: counts[f"{name}_bytes"] for name in transfers.lanes},
        "jobs": {name: counts[f"{name}_jobs"] for name in transfers.lanes},
        "rates_bytes_s": {name: lane.rate.bytes_s for name, lane in transfers.lanes.items()},
    }


def facts(holding: Holding, transfers: Transfers, *, recompute_s: float, pressed: bool) -> Residency:
    """Where a session's blocks are; prices from measured rates. A restore from disk is read and copied to the device
    at the same time, but for its last part.
    """
    block_bytes = transfers.device.geometry.block_bytes
    size_bytes = len(holding.chain) * block_bytes
    to_device_s = size_bytes / transfers.lanes["h2d"].rate.bytes_s
    return Residency(
        session=holding.session,
        tokens=holding.tokens,
        block_bytes=block_bytes,
        total_blocks=len(holding.chain),
        device_blocks=holding.copies[Tier.DEVICE],
        host_blocks=holding.copies[Tier.HOST],
        disk_blocks=holding.copies[Tier.DISK],
        missing_blocks=holding.missing,
        unwritten_blocks=holding.unwritten,
        restore_host_s=to_device_s,
        restore_disk_s=size_bytes / transfers.lanes["read"].rate.bytes_s + OVERLAP * to_device_s,
        recompute_s=recompute_s,
        has_host=transfers.has_host,
        has_disk=transfers.has_disk,
        pressed=pressed,
        background=holding.background,
        free_blocks=len(transfers.device.free) + len(_spare(transfers.book)),
        host_free_blocks=0 if transfers.host is None else len(transfers.host.free),
    )


def _spare(book: Book) -> list[Block]:
    """Blocks whose place on the device is as good as free: all windows have passed what is there."""
    return [block for block in book.orphans.values() if block.evictable(Tier.DEVICE)] if book.window else []


def _slots(capacity: int, free: int, size: int) -> dict[str, Any]:
    return {"blocks": capacity, "free": free, "used": capacity - free, "used_bytes": (capacity - free) * size}


def check(book: Book, device: DevicePool, host: HostArena | None, slab: Slab | None, transfers: Transfers) -> None:
    """Assert that every slot has exactly one owner or is free, and that all counts are right."""
    book.check()
    transfers.check()
    device.free.check()
    owned: dict[int, str] = {NULL_BLOCK: "padding"}
    for slot in device.private:
        _own(owned, slot, "private")
    for slot, pins in transfers.dead.items():
        assert pins > 0, "a dead block that nobody pins"
        _own(owned, slot, "dead")
    for block in book.blocks.values():
        for slot in (block.where[Tier.DEVICE], block.coming[Tier.DEVICE]):
            if slot != NOWHERE:
                _own(owned, slot, "keyed")
                assert device.owner[slot] is block, f"device block {slot} does not know its owner"
    for slot in range(device.num_blocks + 1):
        assert device.free.is_free(slot) == (slot not in owned), f"device block {slot}: free or owned, not both"
        assert (device.owner[slot] is not None) == (owned.get(slot) == "keyed"), f"device block {slot}: owner"
    if host is not None:
        host.free.check()
        transfers.family.check(Tier.HOST, host.slots - len(host.free))
    if slab is not None:
        slab.check()
        at_rest = not any(member.under_way or member.stuck[Tier.DISK] for member in transfers.family.members)
        transfers.family.check(Tier.DISK, slab.used if at_rest else None)


def _own(owned: dict[int, str], slot: int, how: str) -> None:
    assert slot not in owned, f"device block {slot} is {owned[slot]} and {how}"
    owned[slot] = how
