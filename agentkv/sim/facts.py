"""Facts: what policies are told of a simulated session, as the engine tells them of a real one. No state of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from agentkv.core.residency import Residency, Tier
from agentkv.policy.schedule import Claims, Demand, Place, Queued, competes
from agentkv.sim import runs
from agentkv.sim.context import Context
from agentkv.sim.costs import Costs
from agentkv.sim.device import Call
from agentkv.sim.memory import Memory
from agentkv.sim.workload import Session, Turn

BLOCK_TOKENS = 16


class Task:
    """A session on its way: the turn it is in, and since when it waits or is queued."""

    __slots__ = (
        "arrived_s",
        "call",
        "context",
        "hit",
        "index",
        "lost_s",
        "order",
        "queued",
        "reusable",
        "session",
        "started_s",
        "turn_key",
        "version",
    )  # fmt: skip

    def __init__(self, session: Session, order: int, context: Context, started_s: float) -> None:
        self.session = session
        self.order = order
        self.context = context
        self.index = 0
        self.started_s = self.arrived_s = started_s
        self.queued: Queued | None = None
        self.turn_key: tuple[float, ...] = ()
        self.hit = 0
        self.lost_s = 0.0
        self.reusable = 0
        self.call: Call | None = None
        self.version = 0

    @property
    def turn(self) -> Turn:
        return self.session.turns[self.index]

    @property
    def blocks(self) -> int:
        turn = self.turn
        return -(-(turn.prompt_tokens + turn.output_tokens) // BLOCK_TOKENS)


def residency_of(context: Context, memory: Memory, costs: Costs, *, offloads: bool, queue: Sequence[Task]) -> Residency:
    """Where the context is, what bringing it back would cost, and who waits for room."""
    somewhere = runs.union(runs.span(0, context.device), context.elsewhere)
    tokens = context.total * BLOCK_TOKENS
    disk_s = costs.read_s(tokens) if offloads and memory.capacity[Tier.DISK] > 0 else None
    return Residency(
        session=context.name, tokens=tokens, block_bytes=memory.block_bytes, total_blocks=context.total,
        device_blocks=context.device + context.incoming, host_blocks=runs.size(context.host),
        disk_blocks=runs.size(context.disk), missing_blocks=context.total - runs.size(somewhere),
        unwritten_blocks=runs.size(context.unwritten), restore_host_s=costs.load_s(tokens),
        restore_disk_s=disk_s or 0.0, recompute_s=costs.prefill.recompute_s(tokens),
        has_host=offloads and memory.capacity[Tier.HOST] > 0, has_disk=disk_s is not None, pressed=bool(queue),
        background=context.background, free_blocks=_whole(memory.free(Tier.DEVICE)),
        host_free_blocks=_whole(memory.free(Tier.HOST)), queued=len(queue), demand_blocks=_lacking(memory, queue),
    )  # fmt: skip


def claims_of(contexts: Iterable[Context], now_s: float) -> Claims:
    """What those contexts claim that compute, are queued, or are soon back, in blocks."""
    return Claims(
        (place_of(each), max(each.total, each.seat))
        for each in contexts
        if competes(each, now_s, is_here=each.forecast is None)
    )


def place_of(context: Context) -> Place:
    """Its task's place in program order."""
    return (-context.priority, context.order)


def demand_of(task: Task, claims: Claims, capacity: Mapping[Tier, float], block_bytes: int, *, busy: bool) -> Demand:
    """The memory that a queued call competes for."""
    return Demand(
        own_bytes=task.blocks * block_bytes, ahead_bytes=claims.before(place_of(task.context)) * block_bytes,
        device_bytes=capacity[Tier.DEVICE] * block_bytes, host_bytes=capacity[Tier.HOST] * block_bytes,
        disk_bytes=capacity[Tier.DISK] * block_bytes, busy=busy, started=task.index > 0,
    )  # fmt: skip


def worth_restoring(context: Context, hit: int, costs: Costs, *, has_disk: bool, shared: int) -> int:
    """How many of the `hit` leading blocks are brought back: those that only the disk has are computed again where that
    is faster, and with them what comes behind.
    """
    if not has_disk or hit <= context.device:
        return hit
    from_disk = runs.minus(runs.span(context.device, hit), context.host)
    if not from_disk:
        return hit
    first = from_disk[0][0]
    read_s = costs.read_s(runs.size(from_disk) * BLOCK_TOKENS) or 0.0
    again_s = costs.prefill.extend_s((first + shared) * BLOCK_TOKENS, (hit + shared) * BLOCK_TOKENS)
    return first if again_s < read_s else hit


def _lacking(memory: Memory, queue: Sequence[Task]) -> int:
    """Device blocks that the queued calls lack."""
    if not queue:
        return 0
    need = sum(task.blocks - task.context.device for task in queue)
    return max(1, int(need - min(memory.free(Tier.DEVICE), need)))


def _whole(blocks: float) -> int:
    return int(min(max(0.0, blocks), 1 << 40))
