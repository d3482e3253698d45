"""Arena: how fast host memory is mapped and touched, and how fast it is page-locked."""

from __future__ import annotations

from agentkv.kv.host import _PIN_PIECE_BYTES, HostArena
from agentkv.kv.limits import available_bytes, page_lock_limit
from agentkv.kv.numa import node_of_cuda
from agentkv.kv.pins import Pins
from gpu_sections.scene import GEOMETRIES, GIB, MIB, Found, Line, Scene, timed

_MOST_BYTES = 32 * GIB


def run(scene: Scene) -> Found:
    """One arena, a quarter of what is available at most."""
    geometry = GEOMETRIES[2 * MIB]
    size = 64 * MIB if scene.small else min(_MOST_BYTES, available_bytes() // 4)
    made: list[HostArena] = []
    built_s = timed(lambda: made.append(HostArena(geometry, size)))
    (arena,) = made
    figures: dict[str, object] = {
        "gib": round(arena.size_bytes / GIB, 2),
        "available_gib": round(available_bytes() / GIB, 1),
        "map_and_touch_s": round(built_s, 3),
        "touch_gb_s": round(arena.size_bytes / built_s / 1e9, 2),
        "page_lock_limit": page_lock_limit(),
    }
    lines: list[Line] = []
    if scene.on_gpu:
        pins: list[Pins] = []
        pinned_s = timed(lambda: pins.append(Pins(arena.address, arena.size_bytes, _PIN_PIECE_BYTES)))
        figures |= {
            "node": node_of_cuda(0),
            "pin_s": round(pinned_s, 3),
            "pin_gb_s": round(pins[0].pinned_bytes / pinned_s / 1e9, 2),
            "unpin_s": round(timed(pins[0].close), 3) if pins[0].pinned_bytes == arena.size_bytes else None,
        }
        share = 1.0 if figures["unpin_s"] is not None else pins[0].pinned_bytes / arena.size_bytes
        pins[0].close()
        lines.append(Line(what="all of it is pinned", value=share, bound=">= 1", ok=share >= 1))
    arena.close()
    return Found(figures=figures, lines=lines)
