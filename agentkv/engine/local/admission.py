"""Admission: which queued calls wait outside, so that whole tasks pause rather than all of them lose their contexts.

Covers what each session claims (its blocks, its place, what it waits for) and the question to a policy's rule
(`policy/schedule.py`). Does not cover seats (`batch.py`) nor blocks (`kv/`): it reckons with sizes only, so a context that
shares blocks with others counts whole. Thread-safe: waits are told from any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass

from agentkv.clock import Clock
from agentkv.core.forecast import Forecast
from agentkv.core.residency import Tier
from agentkv.engine.local.sequence import Sequence
from agentkv.kv.window import Window
from agentkv.policy.schedule import Admit, Claims, Demand, Place, competes, without_loss

ANSWERED_S = 0.5
"""An agent that goes on starts its tool within this time; who is silent for longer has ended, or waits for a person."""


@dataclass(slots=True, eq=False)
class Claim:
    """One session's context: an `Awaited` of the policies, with its size and its place in program order."""

    place: Place
    blocks: int
    used_s: float
    wait_started_s: float
    forecast: Forecast | None = None


class Admission:
    """What each tier holds, in blocks. Of a context whose layers all have a `window`, only what that shows is kept.

    `admit` may be set at any time; `always`: nobody waits outside.
    """

    def __init__(
        self, blocks: dict[Tier, int], *, block_bytes: int, clock: Clock, window: Window | None = None
    ) -> None:
        self.admit: Admit = without_loss
        self._tiers = blocks
        self._block_bytes = block_bytes
        self._blocks_for = (window or Window()).live_blocks
        self._clock = clock
        self._claims: dict[str, Claim] = {}
        self._total = 0
        self._lock = threading.Lock()

    def note(self, sequence: Sequence) -> None:
        """The session's context is what the sequence has computed."""
        now_s = self._clock.now_s()
        claim = Claim(sequence.rank[:2], self._blocks_for(sequence.computed), now_s, now_s)
        with self._lock:
            before = self._claims.get(sequence.session.key)
            self._total += claim.blocks - (before.blocks if before else 0)
            self._claims[sequence.session.key] = claim

    def expect(self, session: str, forecast: Forecast | None, started_s: float | None) -> None:
        """The session waits since `started_s`, for what the forecast says."""
        with self._lock:
            claim = self._claims.get(session)
            if claim is not None:
                claim.forecast = forecast
                claim.wait_started_s = self._clock.now_s() if started_s is None else started_s

    def forget(self, session: str) -> None:
        """The session is over."""
        self._take(session)

    def hand_over(self, session: str, to: Admission) -> None:
        """The session lives on another device from now on."""
        claim = self._take(session)
        if claim is not None:
            with to._lock:
                to._claims[session] = claim
                to._total += claim.blocks

    def _take(self, session: str) -> Claim | None:
        with self._lock:
            claim = self._claims.pop(session, None)
            self._total -= claim.blocks if claim else 0
            return claim

    def gate(self, here: Iterable[Sequence]) -> Callable[[Sequence, bool], bool]:
        """Ask `gate(...)(sequence, busy)`: may the queued call have a seat? `here`: all calls, `busy`: some have one.

        Answers hold for one round: claims are looked at once, and only if all that there ever were might be too many.
        """
        calls = {one.session.key: one for one in here}
        present = [(one.rank[:2], self._blocks_for(len(one.ids) + 1)) for one in calls.values()]
        most = self._total + sum(size for _, size in present)
        found: list[Claims] = []

        def admitted(sequence: Sequence, busy: bool) -> bool:
            if not busy or self.admit(self._demand(sequence, most)):
                return True
            if not found:
                found.append(Claims((*present, *self._soon_back(calls))))
            return self.admit(self._demand(sequence, found[0].before(sequence.rank[:2])))

        return admitted

    def _soon_back(self, calls: Container[str]) -> list[tuple[Place, int]]:
        """What sessions without a call claim that are soon back."""
        now_s = self._clock.now_s()
        with self._lock:
            away = [claim for key, claim in self._claims.items() if key not in calls]
        return [(claim.place, claim.blocks) for claim in away if _counts(claim, now_s)]

    def _demand(self, sequence: Sequence, ahead: float) -> Demand:
        size = self._block_bytes
        return Demand(
            own_bytes=self._blocks_for(len(sequence.ids) + 1) * size,
            ahead_bytes=ahead * size,
            device_bytes=self._tiers[Tier.DEVICE] * size,
            host_bytes=self._tiers[Tier.HOST] * size,
            disk_bytes=self._tiers[Tier.DISK] * size,
            busy=True,
            started=sequence.session.computed_tokens > 0,
        )


def _counts(claim: Claim, now_s: float) -> bool:
    """Whether a session without a call is soon back: one of which nothing is known only if it has just answered."""
    if claim.forecast is None:
        return now_s - claim.used_s <= ANSWERED_S
    return competes(claim, now_s, is_here=False)
