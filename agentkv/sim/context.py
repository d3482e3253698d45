"""Context: one session's blocks and what is under way with them. Moved about by `memory.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from agentkv.core.forecast import Forecast
from agentkv.core.residency import Tier
from agentkv.policy.evict import EvictKey
from agentkv.sim import runs
from agentkv.sim.link import Job, Link
from agentkv.sim.runs import Runs


class Context:
    """One session's KV. `total` blocks are valid; the first `device` of them have a device copy.

    `seat`: device blocks that its running call has in hand (0: it does not run). `incoming`: device blocks that a
    prefetch has reserved. `fetched`: device blocks brought back ahead of use and not used yet.
    """

    __slots__ = (
        "background", "demoted_to", "device", "disk", "fetch", "fetched", "forecast", "gone", "host",
        "idle_share", "incoming", "jobs", "name", "order", "priority", "recompute_s", "seat", "tokens", "total", "used_s", "wait_started_s",
    )  # fmt: skip

    def __init__(self, name: str, order: int, *, priority: int = 0, background: bool = False) -> None:
        self.name = name
        self.order = order
        self.priority = priority
        self.background = background
        self.tokens = self.total = self.device = self.seat = self.incoming = self.fetched = 0
        self.host: Runs = runs.NONE
        self.disk: Runs = runs.NONE
        self.used_s = self.wait_started_s = self.recompute_s = self.idle_share = 0.0
        self.forecast: Forecast | None = None
        self.demoted_to: Tier | None = None
        self.gone = False
        self.jobs: list[Trip] = []
        self.fetch: Fetch | None = None

    @property
    def elsewhere(self) -> Runs:
        """Blocks with a copy on host or disk."""
        return runs.union(self.host, self.disk)

    @property
    def unwritten(self) -> Runs:
        """Blocks that only the device has."""
        return runs.minus(runs.span(0, self.device), self.elsewhere)

    @property
    def clean_tail(self) -> int:
        """How many of its last device blocks can go without loss."""
        dirty = self.unwritten
        return self.device - (dirty[-1][1] if dirty else 0)

    @property
    def under_way(self) -> Runs:
        """Blocks that are on their way down."""
        blocks: Runs = runs.NONE
        for trip in self.jobs:
            blocks = runs.union(blocks, trip.blocks)
        return blocks

    def copies(self, tier: Tier) -> bool:
        """Whether it has any in that tier."""
        return bool(self.device if tier is Tier.DEVICE else self.host if tier is Tier.HOST else self.disk)

    def leading(self) -> int:
        """How many blocks from the first on are somewhere: what is behind a hole is no hit."""
        return runs.leading(runs.union(runs.span(0, self.device), self.elsewhere))


class Trip:
    """Blocks on their way to `tier`; room there is reserved, and nothing is readable before the end."""

    __slots__ = ("blocks", "context", "source", "tier")

    def __init__(self, context: Context, blocks: Runs, tier: Tier, source: Tier) -> None:
        self.context = context
        self.blocks = blocks
        self.tier = tier
        self.source = source


class Fetch:
    """A prefetch under way; `done` is told at its end if somebody waits for it by then."""

    __slots__ = ("done", "job", "link")

    def __init__(self) -> None:
        self.done: Callable[[Job], None] | None = None
        self.job: Job | None = None
        self.link: Link | None = None


def in_order(
    contexts: Iterable[Context], tier: Tier, key: EvictKey, now_s: float, *, below: Context | None = None
) -> list[Context]:
    """Those with copies in `tier` that nobody uses, the first to give way in front: who was demoted below it, then by
    `key`. With `below` only who goes before that one.
    """
    rank = [
        ((one.demoted_to is not None and tier < one.demoted_to, key(one, now_s)), one)
        for one in contexts
        if one.seat == 0 and one.incoming == 0 and one.copies(tier)
    ]
    if below is not None:
        own = (False, key(below, now_s))
        rank = [each for each in rank if each[0] > own]
    rank.sort(key=lambda each: each[0], reverse=True)
    return [one for _, one in rank]


def recount(contexts: Iterable[Context], used: Mapping[Tier, int], capacity: Mapping[Tier, float]) -> None:
    """What each tier holds is what its contexts have there, and never more than there is."""
    every = list(contexts)
    device = sum(max(one.seat, one.device + one.incoming) for one in every)
    assert used[Tier.DEVICE] == device, (used[Tier.DEVICE], device)
    for tier, name in ((Tier.HOST, "host"), (Tier.DISK, "disk")):
        there = sum(runs.size(getattr(one, name)) for one in every)
        coming = sum(runs.size(trip.blocks) for one in every for trip in one.jobs if trip.tier is tier)
        assert used[tier] == there + coming, (name, used[tier], there, coming)
    for tier in Tier:
        assert 0 <= used[tier] <= capacity[tier], (tier, used, capacity)
    for one in every:
        assert one.device <= max(one.total, one.seat), one.name
        for held in (one.host, one.disk):
            assert not held or (held[0][0] >= 0 and held[-1][1] <= one.total), one.name
