"""Where a session's KV is, what should be done with it, and what became of that.

Tier, Residency (facts for a policy), Move (an instruction), Decision (a policy's answer), Receipt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum, StrEnum

from agentkv.core.forecast import Forecast


class Tier(IntEnum):
    """Memory from dear to cheap."""

    DEVICE = 0
    HOST = 1
    DISK = 2


class Action(StrEnum):
    """What a Move asks for.

    WRITE: copy to `to` what has no copy there; nothing is freed, device blocks become clean.
    DEMOTE: WRITE to `to`, then make the copies in dearer tiers the first to be evicted.
    PREFETCH: bring every block back up to `to` (DEVICE or HOST), into room that is free or evictable.
    DROP: forget the session's blocks in every tier without writing a byte.
    """

    WRITE = "write"
    DEMOTE = "demote"
    PREFETCH = "prefetch"
    DROP = "drop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Residency:
    """Where one session's blocks are, and what bringing them back would cost (measured rates).

    A block may be in several tiers (copies are inclusive): the three counts overlap. `missing_blocks` are in none.
    `unwritten_blocks` are on the device only. `restore_host_s` / `restore_disk_s` / `recompute_s` are for the
    whole context. `pressed`: somebody waits for device memory. `background`: a side branch nobody waits for.
    `free_blocks`, `host_free_blocks`: room on device and host that nobody has (None: unknown); `queued` calls wait for `demand_blocks` more than there are.
    """

    session: str
    tokens: int
    block_bytes: int
    total_blocks: int
    device_blocks: int = 0
    host_blocks: int = 0
    disk_blocks: int = 0
    missing_blocks: int = 0
    unwritten_blocks: int = 0
    restore_host_s: float = 0.0
    restore_disk_s: float = 0.0
    recompute_s: float = 0.0
    has_host: bool = True
    has_disk: bool = False
    pressed: bool = False
    background: bool = False
    free_blocks: int | None = None
    host_free_blocks: int | None = None
    queued: int = 0
    demand_blocks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """An instruction for one session's blocks, to be carried out from `not_before_s` (monotonic) on."""

    session: str
    action: Action
    to: Tier | None = None
    not_before_s: float = 0.0
    needed_by_s: float | None = None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A policy's answer: moves that are due now, and when to ask again (monotonic; None = not by itself)."""

    moves: tuple[Move, ...] = ()
    ask_again_s: float | None = None
    reason: str = ""


class Outcome(StrEnum):
    """What became of a Move."""

    DONE = "done"
    PARTIAL = "partial"
    NOTHING = "nothing"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """What a Move did. On PARTIAL and FAILED the blocks that did not move are where they were.

    Monotonic times: the first copy was submitted, its first byte moved (0 when nothing moved), the last one ended.
    """

    move: Move
    outcome: Outcome
    blocks: int = 0
    size_bytes: int = 0
    submitted_s: float = 0.0
    first_byte_s: float = 0.0
    finished_s: float = 0.0
    detail: str = ""


Policy = Callable[[Residency, Forecast, float, float], Decision]
"""decide(residency, forecast, started_s, now_s) -> Decision: pure. `forecast` is the one made at the start of the
wait; the policy conditions it on now_s - started_s itself."""
