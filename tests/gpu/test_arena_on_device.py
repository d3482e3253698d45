"""Pinned host memory for real: it is page-locked, a refusal does not linger, and a fork does no harm (E26, K14)."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from agentkv.kv.geometry import Geometry
from agentkv.kv.host import HostArena
from agentkv.kv.pins import Pins
from agentkv.units import MIB

GEOMETRY = Geometry(layers=24, kv_heads=1, head_dim=128, dtype="bfloat16")
ROOT = Path(__file__).resolve().parents[2]
needs_cuda = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


class TestPinned:
    pytestmark = needs_cuda

    def test_the_arena_is_page_locked(self):
        """All of it, and no more once it is closed."""
        arena = HostArena(GEOMETRY, 64 * MIB, pin=True)
        assert arena.size_bytes == arena.pinned_bytes
        assert torch.frombuffer(arena.view(3), dtype=torch.uint8).is_pinned()
        arena.close()
        again = HostArena(GEOMETRY, 64 * MIB, pin=True)
        assert again.size_bytes == again.pinned_bytes
        again.close()

    def test_a_refused_registration_does_not_fail_the_next_kernel(self):
        """Memory that is registered already is refused; the launch behind it works."""
        arena = HostArena(GEOMETRY, 8 * MIB, pin=True)
        refused = Pins(arena.address, arena.size_bytes, arena.size_bytes)
        assert 0 == refused.pinned_bytes
        assert 3.0 == float(torch.ones(3, device="cuda").sum())
        torch.cuda.synchronize()
        refused.close()
        arena.close()

    def test_under_a_small_page_lock_limit_everything_still_works(self):
        """Pinned where the driver ignores the limit, pageable where it does not; the next kernel runs (K14)."""
        script = textwrap.dedent(LIMITED).format(root=ROOT)
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200, check=False)
        assert (0, "3.0") == (done.returncode, done.stdout.split()[-1]), done.stderr
        assert ("RLIMIT_MEMLOCK is 64.0 KiB" in done.stderr) == ("pinned 0" in done.stdout)


LIMITED = """
    import resource, sys
    sys.path.insert(0, r"{root}")
    hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, hard))
    import torch
    from agentkv.kv.geometry import Geometry
    from agentkv.kv.host import HostArena
    arena = HostArena(Geometry(layers=24, kv_heads=1, head_dim=128, dtype="bfloat16"), 64 << 20, pin=True)
    print("pinned", arena.pinned_bytes)
    print(float(torch.ones(3, device="cuda").sum()))
    arena.close()
"""
CHILD = """
    import os, sys, tempfile, time
    from pathlib import Path
    sys.path[:0] = [r"{root}", r"{root}/benchmarks"]
    import torch
    import agentkv.kv.tiers, agentkv.engine.local.engine
    from gpu_sections.player import Player, keys_of
    from gpu_sections.scene import Scene, GEOMETRIES, KIB
    from agentkv.kv.tiers import Tiers
    from agentkv.core.residency import Action, Move, Tier

    def play():
        torch.set_num_threads(1)
        geometry = GEOMETRIES[32 * KIB]
        scene = Scene(device="{device}", small=True, scratch=Path(tempfile.gettempdir()), deadline_s=0)
        with Tiers(geometry=geometry, device="{where}", device_bytes=12 * geometry.block_bytes,
                   host_bytes=24 * geometry.slot_bytes) as tiers:
            player = Player(scene, tiers)
            player.turn("s", keys_of(1, 8))
            tiers.apply(Move(session="s", action=Action.DEMOTE, to=Tier.HOST, reason="test"))
            tiers.quiesce(20)
            tiers.vacate("s", Tier.DEVICE)
            assert player.turn("s", keys_of(1, 8)).loaded_blocks == 8
            assert player.wrong == 0

    child = os.fork()
    if child == 0:
        try:
            play()
        except BaseException as error:
            print(repr(error), flush=True)
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, "the child failed"
    play()
    print("both fine")
"""


def test_a_child_of_a_process_that_only_imported_us_has_tiers_of_its_own(device):
    """Importing touches no CUDA; parent and child both work (E26)."""
    script = textwrap.dedent(CHILD).format(root=ROOT, device=device, where="cuda:0" if device == "cuda" else "cpu")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200, check=False)
    assert (0, "both fine\n") == (done.returncode, done.stdout), done.stderr
