"""Rules: all that a policy decides, in one value. The runtime and the simulator call the very same functions.

Covers the bundle. The parts: `decide` what moves while a session waits (`core.residency.Policy`), `evict_key` who
gives way (`evict.py`), `turn_key` and `admit` who computes next and who waits outside (`schedule.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from agentkv.core.residency import Policy
from agentkv.policy.evict import EvictKey, least_recently_used
from agentkv.policy.schedule import Admit, TurnKey, always, first_come

Sight = Literal["learned", "elapsed", "oracle"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """A policy. The last four say how the rest of an engine that works so behaves; a real one knows it of itself.

    `sight`: whose forecasts it sees: learnt ones, none but the elapsed time, or the truth (bounds only).
    `offloads`: False: an engine without a host tier. `elsewhere_first`: host copies that the device has too give way
    before any that would be lost (ours); False: plain order of use. `prefetch_evicts`: a prefetch may take clean
    device copies of sessions that `evict_key` puts before it; False: free room only.
    """

    name: str
    decide: Policy
    evict_key: EvictKey = least_recently_used
    turn_key: TurnKey = first_come
    admit: Admit = always
    sight: Sight = "learned"
    offloads: bool = True
    elsewhere_first: bool = False
    prefetch_evicts: bool = False
