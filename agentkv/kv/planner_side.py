"""The planner's side of the front door: where sessions are, moves, ends, expectations, what outlives the process.

Covers what any thread may ask of a session, quickly. The engine's side, and the parts themselves, are `tiers.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from agentkv.clock import Clock
from agentkv.core.forecast import Forecast
from agentkv.core.rates import Rates
from agentkv.core.residency import Action, Move, Outcome, Receipt, Residency, Tier
from agentkv.errors import Closed
from agentkv.kv.audit import facts
from agentkv.kv.book import Book, Rank
from agentkv.kv.guard import Guard
from agentkv.kv.keep import Describe, Keep
from agentkv.kv.moves import Moves
from agentkv.kv.transfers import Transfers
from agentkv.log import failed


class PlannerSide:
    """Set up by `Tiers`."""

    prefill_tokens_s: float
    _book: Book
    _clock: Clock
    _closed: bool
    _guard: Guard
    _keep: Keep
    _moved: Counter[str]
    _moves: Moves
    _pressed: bool
    _rates: Rates | None
    _transfers: Transfers

    def quiesce(self, timeout_s: float) -> None:
        """See `Tiers`."""
        raise NotImplementedError

    def residency(self, session: str) -> Residency | None:
        """Where the session's blocks are and what bringing them back would cost; None if unknown."""
        with self._guard.lock:
            holding = self._book.holdings.get(session)
            if holding is None:
                return None
            recompute_s = self._recompute_s(holding.tokens)
            return facts(holding, self._transfers, recompute_s=recompute_s, pressed=self._pressed)

    def apply(self, move: Move, on_receipt: Callable[[Receipt], None] | None = None) -> bool:
        """Carry out `move`, now. True if it was handed to a mover's thread, from which the receipt will come; else the
        receipt has come when this returns. Costs the same for any context. Never raises.
        """

        def deliver(receipt: Receipt) -> None:
            self._moved[receipt.outcome.value] += 1
            if receipt.blocks and move.to == Tier.DISK:
                self._keep.note(move.session)
            elif move.action == Action.DROP and receipt.outcome == Outcome.DONE:
                self._keep.forget(move.session)
            if on_receipt is not None:
                on_receipt(receipt)

        try:
            with self._guard.locked():
                self._refuse_if_closed()
                self._moved[move.action.value] += 1
                self._guard.room_changed |= move.action == Action.DROP
                return self._moves.carry_out(move, deliver)
        except Exception as error:
            failed("kv_move_failed", session=move.session, action=move.action.value, error=repr(error))
            receipt = self._moves.failure(move, repr(error))
            self._guard.call(lambda: deliver(receipt))
            return False

    def drop(self, session: str) -> None:
        """Forget the session without writing a byte (A6). Blocks that others hold stay; so do those that a sequence
        uses, until it releases them.
        """
        with self._guard.locked():
            if self._closed:
                return
            self._moves.forget(session)
            self._guard.room_changed = True
        self._keep.forget(session)

    def drop_task(self, task: str) -> None:
        """`drop` each of the task's sessions; their templates stay for a short window, if nobody needs the room."""
        with self._guard.locked():
            if self._closed:
                return
            sessions = [one.session for one in self._book.holdings.values() if one.task == task]
            for session in sessions:
                self._moves.forget(session, keep_template=True)
            self._guard.room_changed = True
        for session in sessions:
            self._keep.forget(session)

    def describe(self, fn: Describe) -> None:
        """Have `fn` asked, from any thread, what to keep of a session beside its blocks, when it goes to disk."""
        self._keep.describe = fn

    def save(self, timeout_s: float) -> bool:
        """Write every session to disk for the next process, latest used first. False if there is no lasting disk, or
        not all was written in time.
        """
        if not self._keep.lasting:
            return False
        with self._guard.lock:
            sessions = [one.session for one in sorted(self._book.holdings.values(), key=lambda one: -one.used_s)]
        return self._keep.save(sessions, self.apply, lambda: self.quiesce(timeout_s), timeout_s)

    def vacate(self, session: str, tier: Tier) -> int:
        """Give up the session's unused copies in `tier` that are elsewhere too, pressed or not; returns how many."""
        with self._guard.locked():
            holding = None if self._closed else self._book.holdings.get(session)
            found = [] if holding is None else [b for b in reversed(holding.chain) if b.has(tier) and b.evictable(tier)]
            spare = [b for b in found if any(b.has(other) for other in Tier if other != tier)]
            for block in spare:
                self._transfers.evict(block, tier)
            self._guard.room_changed = True
            return len(spare)

    def expect(
        self, session: str, at_s: float | None, forecast: Forecast | None = None, started_s: float | None = None
    ) -> None:
        """When the session is expected back (monotonic; None = unknown), and the forecast from which that follows, made
        when its wait began: victims are chosen by it.
        """
        with self._guard.lock:
            holding = self._book.holdings.get(session)
            if holding is not None:
                holding.expected_s, holding.forecast = at_s, forecast
                holding.wait_started_s = self._clock.now_s() if started_s is None else started_s

    def rank_by(self, rank: Rank) -> None:
        """Have a policy's key say who gives way; without one it is whoever is expected back last."""
        with self._guard.lock:
            self._book.rank = rank

    def _recompute_s(self, tokens: int) -> float:
        return tokens / self.prefill_tokens_s if self._rates is None else self._rates.recompute_s(tokens)

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise Closed("the KV tiers are closed")
