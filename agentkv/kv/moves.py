"""Moves: what WRITE, DEMOTE, PREFETCH and DROP do to a session's blocks.

Covers choosing the blocks and starting their trips, and forgetting a session. When a move is due is the planner's concern: one that is given
here is carried out at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from agentkv.core.residency import Action, Move, Outcome, Receipt, Tier
from agentkv.kv.book import NOWHERE, Block, Book, Holding
from agentkv.kv.device import DevicePool
from agentkv.kv.ticket import Consignment
from agentkv.kv.transfers import Transfers


class Moves:
    """Called with the lock of `Tiers` held; receipts are given without it."""

    def __init__(
        self,
        *,
        book: Book,
        device: DevicePool,
        transfers: Transfers,
        has_disk: bool,
        now_s: Callable[[], float],
    ) -> None:
        self._book = book
        self._device = device
        self._transfers = transfers
        self._has_disk = has_disk
        self._now_s = now_s

    def carry_out(self, move: Move, deliver: Callable[[Receipt], None]) -> bool:
        """Start the move's trips. True if there are any; else the receipt is delivered with the lock's release."""
        holding = self._book.holdings.get(move.session)
        if holding is None:
            return self._nothing(move, deliver, "an unknown session")
        if move.action == Action.DROP:
            return self._at_once(move, deliver, Outcome.DONE, blocks=self.forget(move.session))
        if move.action == Action.PREFETCH:
            return self._prefetch(move, holding, deliver)
        to = move.to if move.to is not None else Tier.HOST
        if to == Tier.DEVICE:
            return self._nothing(move, deliver, "nothing is above the device")
        if not (self._transfers.has_host if to == Tier.HOST else self._has_disk):
            return self._nothing(move, deliver, f"there is no {to.name.lower()} tier")
        if move.action == Action.DEMOTE:
            holding.demoted_to = to
        blocks = [block for block in holding.chain if block.resident and not block.has(to) and _above(block, to)]
        return self._send(move, blocks, 0, deliver, to=to, holding=holding, upwards=False)

    def _prefetch(self, move: Move, holding: Holding, deliver: Callable[[Receipt], None]) -> bool:
        to = move.to if move.to is not None else Tier.DEVICE
        if to == Tier.DISK or (to == Tier.HOST and not self._transfers.has_host):
            return self._nothing(move, deliver, f"nothing can be fetched to {to.name.lower()}")
        holding.demoted_to = None
        blocks = [block for block in holding.chain if block.resident and not _at_least(block, to)]
        skipped = 0
        if to == Tier.DEVICE:
            new = [block for block in blocks if block.coming[Tier.DEVICE] == NOWHERE]
            self._transfers.room.on_device(len(new), below=holding, write=False)
            got = min(len(new), len(self._device.free))
            skipped = len(new) - got
            for block, slot in zip(new, self._device.take(got), strict=False):
                block.coming[Tier.DEVICE] = slot
                self._device.owner[slot] = block
            blocks = [block for block in blocks if block.coming[Tier.DEVICE] != NOWHERE]
        return self._send(move, blocks, skipped, deliver, to=to, holding=holding, upwards=True)

    def _send(
        self,
        move: Move,
        blocks: Sequence[Block],
        skipped: int,
        deliver: Callable[[Receipt], None],
        *,
        to: Tier,
        holding: Holding,
        upwards: bool,
    ) -> bool:
        if not blocks:
            if skipped:
                return self._at_once(move, deliver, Outcome.FAILED, detail=f"no room for {skipped} blocks")
            return self._nothing(move, deliver, "every block is there already")
        consignment = Consignment(
            move,
            blocks=len(blocks),
            skipped=skipped,
            block_bytes=self._device.geometry.block_bytes,
            submitted_s=self._now_s(),
            deliver=deliver,
            now_s=self._now_s,
            known=lambda: self._book.holdings.get(move.session) is holding,
        )
        if upwards:
            self._transfers.up(blocks, to, urgent=False, errand=consignment, below=holding)
        else:
            ordered = sorted(blocks, key=lambda block: block.where[Tier.DEVICE])
            self._transfers.down(ordered, to, urgent=False, errand=consignment, below=holding)
        return True

    def forget(self, session: str) -> int:
        """Forget the session without writing a byte; returns how many blocks nobody else holds."""
        alone = self._book.let_go(session)
        for block in reversed(alone):
            self._transfers.forget(block)
        return len(alone)

    def failure(self, move: Move, detail: str) -> Receipt:
        """The receipt of a move that could not be carried out."""
        now_s = self._now_s()
        return Receipt(move=move, outcome=Outcome.FAILED, submitted_s=now_s, finished_s=now_s, detail=detail)

    def _nothing(self, move: Move, deliver: Callable[[Receipt], None], detail: str) -> bool:
        return self._at_once(move, deliver, Outcome.NOTHING, detail=detail)

    def _at_once(
        self, move: Move, deliver: Callable[[Receipt], None], outcome: Outcome, *, blocks: int = 0, detail: str = ""
    ) -> bool:
        now_s = self._now_s()
        receipt = Receipt(move=move, outcome=outcome, blocks=blocks, submitted_s=now_s, finished_s=now_s, detail=detail)
        self._transfers.calls.append(lambda: deliver(receipt))
        return False


def _above(block: Block, tier: Tier) -> bool:
    """A copy in a dearer tier, from which one can be made."""
    return any(block.has(Tier(above)) for above in range(tier))


def _at_least(block: Block, tier: Tier) -> bool:
    return block.has(tier) or _above(block, tier)
