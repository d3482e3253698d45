"""Moves: what WRITE, DEMOTE, PREFETCH and DROP do to a session's blocks.

Covers choosing the blocks and starting their trips, and forgetting a session. Carrying out a move costs its caller
nothing that grows with the context: it queues a plan, and the lane's thread plans the trips slice by slice. When a
move is due is the planner's concern: one that is given here is carried out at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from agentkv.core.residency import Action, Move, Outcome, Receipt, Tier
from agentkv.kv.block import NOWHERE, Block
from agentkv.kv.book import Book, Holding
from agentkv.kv.device import DevicePool
from agentkv.kv.mover import Job
from agentkv.kv.ticket import Consignment
from agentkv.kv.transfers import Transfers

_SLICE_BLOCKS = 128
"""Planned under one hold of the lock: a fraction of a millisecond."""


class Moves:
    """Called with the lock of `Tiers` held (`locked` takes it for the lanes); receipts are given without it."""

    def __init__(
        self,
        *,
        book: Book,
        device: DevicePool,
        transfers: Transfers,
        locked: Callable[[], AbstractContextManager[None]],
        now_s: Callable[[], float],
        template_window_s: float,
    ) -> None:
        self._book = book
        self._device = device
        self._transfers = transfers
        self._locked = locked
        self._now_s = now_s
        self._template_window_s = template_window_s
        self._templates: deque[tuple[float, Block]] = deque()

    def carry_out(self, move: Move, deliver: Callable[[Receipt], None]) -> bool:
        """Queue the move's plan: True. Else there is nothing to do, and the receipt comes with the lock's release."""
        holding = self._book.holdings.get(move.session)
        if holding is None:
            return self._nothing(move, deliver, "an unknown session")
        if move.action == Action.DROP:
            return self._at_once(move, deliver, Outcome.DONE, blocks=self.forget(move.session))
        upwards = move.action == Action.PREFETCH
        to = move.to if move.to is not None else (Tier.DEVICE if upwards else Tier.HOST)
        if (refusal := self._refusal(to, upwards=upwards)) is not None:
            return self._nothing(move, deliver, refusal)
        holding.demoted_to = to if move.action == Action.DEMOTE else None if upwards else holding.demoted_to
        if holding.copies[to] == len(holding.chain) - holding.missing:
            return self._nothing(move, deliver, "every block is there already")
        consignment = Consignment(
            move,
            block_bytes=self._device.geometry.block_bytes,
            submitted_s=self._now_s(),
            deliver=deliver,
            now_s=self._now_s,
            known=lambda: self._book.holdings.get(move.session) is holding,
        )
        self._transfers.plans.add(consignment)
        steps = self._fetch(holding, to, consignment) if upwards else self._write(holding, to, consignment)
        self._transfers.lanes["h2d" if upwards else "d2h"].put([self._job(upwards, steps, consignment)], urgent=False)
        return True

    def _refusal(self, to: Tier, *, upwards: bool) -> str | None:
        """Why nothing can go to `to`; None if it can."""
        if upwards and to == Tier.DISK:
            return "nothing can be fetched to disk"
        if not upwards and to == Tier.DEVICE:
            return "nothing is above the device"
        if (to == Tier.HOST and not self._transfers.has_host) or (to == Tier.DISK and not self._transfers.has_disk):
            return f"there is no {to.name.lower()} tier"
        return None

    def _job(self, upwards: bool, steps: Iterator[None], consignment: Consignment) -> Job:
        def plan() -> bool:
            with self._locked():
                if consignment not in self._transfers.plans:  # closed meanwhile
                    return False
                try:
                    for _ in steps:
                        return True
                except BaseException:
                    self._transfers.plans.discard(consignment)
                    self._transfers.calls.append(consignment.call_off())
                    raise
                self._transfers.plans.discard(consignment)
                if (call := consignment.sealed()) is not None:
                    self._transfers.calls.append(call)
                return False

        return Job(lane="h2d" if upwards else "d2h", plan=plan)

    def _write(self, holding: Holding, to: Tier, consignment: Consignment) -> Iterator[None]:
        """Send down what has no copy in `to` and one above it; each step is one slice."""
        wanted = [block for block in holding.chain if _lacks(block, to)]
        wanted.sort(key=lambda block: block.where[Tier.DEVICE])
        for at in range(0, len(wanted), _SLICE_BLOCKS):
            if at:
                yield
            part = [
                one for one in wanted[at : at + _SLICE_BLOCKS] if _lacks(one, to) and holding.session in one.holders
            ]
            if to == Tier.DISK and not self._transfers.has_disk:
                consignment.skip(len(part))
                continue
            consignment.add(len(part))
            self._transfers.down(part, to, urgent=False, errand=consignment, below=holding)

    def _fetch(self, holding: Holding, to: Tier, consignment: Consignment) -> Iterator[None]:
        """Bring up what has no copy in `to` or above, in order; each step is one slice. Ends where the room ends."""
        disk = self._transfers.stalled is None
        wanted = [block for block in holding.chain if _is_below(block, to, disk=disk)]
        for at in range(0, len(wanted), _SLICE_BLOCKS):
            if at:
                yield
            disk = self._transfers.stalled is None
            part = [
                one
                for one in wanted[at : at + _SLICE_BLOCKS]
                if _is_below(one, to, disk=disk) and holding.session in one.holders
            ]
            sent = part if to == Tier.HOST else self._seated(part, holding)
            consignment.add(len(sent))
            try:
                self._transfers.up(sent, to, urgent=False, errand=consignment, below=holding)
            except BaseException:
                self._unseat(sent)
                raise
            if len(sent) < len(part):
                consignment.skip(len(part) - len(sent) + len(wanted[at + _SLICE_BLOCKS :]))
                return

    def _seated(self, blocks: list[Block], holding: Holding) -> list[Block]:
        """The first of `blocks` for which the device has room that nobody else needs more; it is theirs now."""
        new = [block for block in blocks if block.coming[Tier.DEVICE] == NOWHERE]
        self._transfers.room.on_device(len(new), below=holding, write=False)
        slots = self._device.take(min(len(new), len(self._device.free)))
        for block, slot in zip(new, slots, strict=False):
            block.coming[Tier.DEVICE] = slot
            self._device.owner[slot] = block
        self._transfers.taken(slots)
        return [block for block in blocks if block.coming[Tier.DEVICE] != NOWHERE]

    def _unseat(self, blocks: list[Block]) -> None:
        """Those of `blocks` that set out on no trip give their device blocks back."""
        for block in blocks:
            slot = block.coming[Tier.DEVICE]
            if block.up is None and slot != NOWHERE:
                block.coming[Tier.DEVICE] = NOWHERE
                self._transfers.give(Tier.DEVICE, slot)

    # -- ends

    def forget(self, session: str, *, keep_template: bool = False) -> int:
        """Forget the session without writing a byte; returns how many blocks nobody else holds.

        With `keep_template` the blocks of its template stay for the window: the first to make room, but there for a
        task that begins with the same words.
        """
        holding = self._book.holdings.get(session)
        template = set(holding.template) if holding is not None and keep_template else set()
        alone = self._book.let_go(session)
        until_s = self._now_s() + self._template_window_s
        for block in reversed(alone):
            if block in template and self._template_window_s > 0:
                block.kept_until_s = until_s
                self._templates.append((until_s, block))
            else:
                self._transfers.forget(block)
        return len(alone)

    def expire(self) -> None:
        """Forget the templates whose window is over."""
        while self._templates and self._templates[0][0] <= self._now_s():
            until_s, block = self._templates.popleft()
            gone = self._book.blocks.get(block.key) is not block  # evicted meanwhile; a new block may have its key
            if block.kept_until_s == until_s and not gone:  # else it was taken over, or kept again for longer
                block.kept_until_s = None
                self._transfers.forget(block)

    @property
    def template_blocks(self) -> int:
        """Blocks of ended tasks that are kept for the next one."""
        return sum(block.kept_until_s == until_s and block.resident for until_s, block in self._templates)

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


def _lacks(block: Block, tier: Tier) -> bool:
    """No copy in `tier`, and one above it from which it can be made."""
    return block.up is None and block.where[tier] == NOWHERE and max(block.where[:tier], default=NOWHERE) != NOWHERE


def _is_below(block: Block, tier: Tier, *, disk: bool) -> bool:
    """No copy in `tier` or above, and one below it from which it can be made."""
    return not any(block.has(Tier(above)) for above in range(tier + 1)) and (
        block.resident if disk else block.in_memory
    )
