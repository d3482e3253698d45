"""Whole programs paused and resumed by memory: MORI and ThunderAgent."""

from __future__ import annotations

from agentkv.policy.evict import Held
from agentkv.policy.moves import write_through
from agentkv.policy.rules import Rules
from agentkv.policy.schedule import Demand, program_order

DECAY_S = 1.0


def mori() -> Rules:
    """The busiest programs hold the device until it is full, then host; admission per tier.

    Source: MORI (arXiv 2606.00866). Idleness = the share of recent wall time spent in tools.
    """
    return Rules(name="mori", decide=write_through, evict_key=_idlest, admit=_fits)


def thunderagent() -> Rules:
    """When memory is short, whole programs in a tool phase are paused, and resumed when there is room; no prediction.

    Source: ThunderAgent (arXiv 2602.13692): a program's claim on memory decays as 2^-t while its tool runs, so the one
    whose tool runs longest is paused first; the earliest program is resumed first.
    """
    return Rules(name="thunderagent", decide=write_through, evict_key=_decayed, turn_key=program_order, admit=_fits)


def _fits(demand: Demand) -> bool:
    return not demand.busy or demand.ahead_bytes + demand.own_bytes <= demand.device_bytes + demand.host_bytes


def _idlest(held: Held, now_s: float) -> tuple[float, ...]:
    return (held.idle_share, now_s - held.used_s)


def _decayed(held: Held, now_s: float) -> tuple[float, ...]:
    elapsed_s = max(0.0, now_s - held.wait_started_s)
    return (1.0 - held.tokens * 2.0 ** -min(elapsed_s / DECAY_S, 60.0), elapsed_s)
