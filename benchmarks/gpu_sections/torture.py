"""Torture: random deeds of many sessions over three small tiers with poison, and not one wrong byte.

Sessions of one family share a prefix, so loads are joined; tiers are too small for them, so everything moves all the
time; calls overlap, so blocks are pinned while others are loaded into what was just read (R1-R4, R7-R9).
"""

from __future__ import annotations

import random
import tempfile
import time
from collections import Counter

import torch

from agentkv.core.residency import Action, Move, Tier
from agentkv.kv.slab import Slab
from agentkv.kv.streams import Streams
from agentkv.kv.tiers import Tiers
from gpu_sections.player import Player, Poisoned, keys_of
from gpu_sections.scene import GEOMETRIES, KIB, Found, Line, Scene, at_most

_FAMILIES, _BRANCHES, _SHARED, _LONGEST = 4, 5, 8, 16
_DEVICE, _HOST, _DISK = 48, 56, 160
_CALLS = 5
_NAP_S = 0.0005
_KINDS = [
    "call",
    "call",
    "call",
    "pair",
    "arrive",
    "arrive",
    "arrive",
    "arrive",
    "end",
    "end",
    "end",
    "move",
    "move",
    "move",
    "vacate",
    "drop",
]


class Torture:
    """Random deeds; `deeds` counts them by name."""

    def __init__(self, scene: Scene, tiers: Tiers, seed: int) -> None:
        self.player = Player(scene, tiers)
        self.deeds: Counter[str] = Counter()
        self._tiers = tiers
        self._chance = random.Random(seed)  # noqa: S311
        self._lengths: dict[str, int] = {}
        self._wanted: dict[str, list[bytes]] = {}
        self._names = [f"{family}/{branch}" for family in range(_FAMILIES) for branch in range(_BRANCHES)]

    def deed(self) -> None:
        """One of them."""
        held, loading = list(self.player.held), list(self.player.loading)
        name = self._chance.choice(self._names)
        kind = self._chance.choice(_KINDS)
        if kind == "call" and name not in self._calls and len(self._calls) < _CALLS:
            self._call(name)
        elif kind == "pair":
            self._pair(name)
        elif kind == "arrive" and loading:
            self._arrive(self._chance.choice(loading))
        elif kind in ("call", "end") and held:
            self._end(self._chance.choice(held))
            kind = "end"
        elif kind == "vacate":
            self._tiers.vacate(name, self._chance.choice((Tier.DEVICE, Tier.HOST)))
        elif kind == "drop" and self._chance.random() < 0.3:
            self._tiers.drop(name)
            self._lengths.pop(name, None)
        else:
            kind = self._move(name)
        self.deeds[kind] += 1

    def finish(self) -> None:
        """Every call ends, everything that moves arrives, all counts are right."""
        for name in list(self.player.loading):
            self._arrive(name)
        for name in list(self.player.held):
            self._end(name)
        self._tiers.quiesce(60)
        self._tiers.check()

    def _keys(self, name: str, blocks: int) -> list[bytes]:
        family, branch = map(int, name.split("/"))
        return keys_of(family, blocks, branch=branch, shared=_SHARED)

    def _call(self, name: str) -> None:
        longer = min(_LONGEST, self._lengths.get(name, 0) + self._chance.randint(1, 6))
        keys = self._keys(name, longer)
        if self.player.begin(name, keys) is None:
            self.deeds["no_room"] += 1
            return
        self._wanted[name] = keys

    def _pair(self, name: str) -> None:
        """Two calls of one family begin at once: what they share is loaded once (R9)."""
        family = name.split("/", maxsplit=1)[0] + "/"
        names = [other for other in self._names if other.startswith(family) and other not in self._calls][:2]
        for other in names:
            self._tiers.vacate(other, Tier.DEVICE)
        for other in names:
            if len(self._calls) < _CALLS:
                self._call(other)

    @property
    def _calls(self) -> set[str]:
        return {*self.player.held, *self.player.loading}

    def _arrive(self, name: str) -> None:
        self.player.arrive(name)
        self.player.extend(name, self._wanted.pop(name))
        self._lengths[name] = max(1, len(self.player.held[name]))

    def _end(self, name: str) -> None:
        self.player.end(name, self._keys(name, len(self.player.held[name])))

    def _move(self, name: str) -> str:
        action, to = self._chance.choice(
            (
                (Action.WRITE, Tier.HOST),
                (Action.DEMOTE, Tier.HOST),
                (Action.DEMOTE, Tier.DISK),
                (Action.PREFETCH, Tier.HOST),
                (Action.PREFETCH, Tier.DEVICE),
            )
        )
        self._tiers.apply(Move(session=name, action=action, to=to, reason="torture"))
        return f"{action.value}_{to.name.lower()}"


def _dawdle() -> None:
    """Half a millisecond or so of nothing, on the stream that is current."""
    torch.cuda._sleep(1_000_000)  # type: ignore[no-untyped-call]


def torture(scene: Scene, operations: int, *, seed: int = 0, inner: Streams | None = None) -> dict[str, object]:
    """So many deeds over fresh tiers and, if given, other streams than the device's; what happened."""
    geometry = GEOMETRIES[32 * KIB if scene.small else 192 * KIB]
    streams = Poisoned(inner or scene.streams(), seed=seed, dawdle=_dawdle if scene.on_gpu else None)
    with tempfile.TemporaryDirectory(dir=scene.scratch) as folder:
        slab = Slab(folder, _DISK * geometry.slot_bytes, geometry.block_bytes)
        with Tiers(
            geometry=geometry,
            device="cuda:0" if scene.on_gpu else "cpu",
            device_bytes=_DEVICE * geometry.block_bytes,
            host_bytes=_HOST * geometry.slot_bytes,
            slab=slab,
            streams=streams,
        ) as tiers:
            one = Torture(scene, tiers, seed)
            done = 0
            while done < operations and (done % 100 or scene.left_s > 0):
                one.deed()
                done += 1
                if done % 8 == 0:
                    time.sleep(_NAP_S)  # or the deeds outrun the copies
            one.finish()
            stats = tiers.stats()
            return {
                "operations": done,
                "mismatches": one.player.wrong,
                "blocks_compared": one.player.read_blocks,
                "poisoned": streams.poisoned,
                "hits": stats["hits"],
                "bytes": stats["bytes"],
                "deeds": dict(one.deeds),
            }


def run(scene: Scene) -> Found:
    """5,000 deeds; 1,000 where small."""
    wanted = 1000 if scene.small else 5000
    figures = torture(scene, wanted)
    done, wrong = int(str(figures["operations"])), int(str(figures["mismatches"]))
    enough = Line(what="operations", value=done, bound=f">= {wanted}", ok=done >= wanted)
    return Found(figures=figures, lines=[at_most(scene, "mismatches", wrong, 0, anywhere=True), enough])
