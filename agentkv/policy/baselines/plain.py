"""Rules that need no forecast: keep and drop, LRU write-through, and bringing back at once."""

from __future__ import annotations

from agentkv.core.forecast import Forecast
from agentkv.core.residency import Action, Decision, Residency, Tier
from agentkv.policy.moves import away_blocks, later, move, nothing, write_through, written
from agentkv.policy.rules import Rules


def keep_lru() -> Rules:
    """An engine without offload: under pressure the least recently used context is dropped and computed again.

    Source: the prefix caches of vLLM and SGLang without a second tier.
    """
    return Rules(name="drop", decide=nothing, offloads=False)


def lru() -> Rules:
    """LRU write-through: new full blocks are copied to host when produced, evicted by last use, loaded on demand.

    Source: LMCache, vLLM's OffloadingConnector, SGLang's HiCache (write_through). The one to beat.
    """
    return Rules(name="lru", decide=write_through)


def pause_prefetch() -> Rules:
    """LRU write-through, and what is away is brought back as soon as there is room, whatever the prediction.

    Source: "prefetch at pause" in the project's notes on published policies.
    """
    return Rules(name="pause-prefetch", decide=_bring_back)


def _bring_back(residency: Residency, forecast: Forecast, started_s: float, now_s: float) -> Decision:  # noqa: ARG001
    moves, away = written(residency, now_s), away_blocks(residency)
    if away and not residency.pressed and away <= (residency.free_blocks or 0):
        back = move(residency, Action.PREFETCH, Tier.DEVICE, now_s, f"room for {away} blocks: brought back")
        return Decision(moves=(*moves, back), reason=back.reason)
    again_s = later(now_s, max(1.0, (now_s - started_s) / 8))
    return Decision(moves=moves, ask_again_s=again_s, reason="brought back as soon as there is room")
