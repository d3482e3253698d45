"""Batch: who computes in the next step, and with which blocks.

Covers: admission by memory, chunked prefill mixed with decode, restores, preemption. Does not cover: the forward
(`runner.py`), tokens (`sampler.py`, `answer.py`), tiers (`kv/`). Used by the engine's thread only; no tensors here.

Nobody waits while holding what others need: a sequence gets all blocks of its prompt or none, and only while others run
may a policy keep it outside (`admission.py`). When a running one cannot grow, the youngest is sent back to the queue; its full blocks stay in the index, so it usually gets them back.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from agentkv.clock import Clock
from agentkv.core.residency import Tier
from agentkv.engine.local.admission import Admission
from agentkv.engine.local.runner import Span
from agentkv.engine.local.seats import Seats
from agentkv.engine.local.sequence import Sequence, in_order
from agentkv.kv.geometry import BLOCK_TOKENS
from agentkv.kv.streams import Event
from agentkv.kv.ticket import Lease, Ticket
from agentkv.kv.tiers import Tiers

_LONELY = 2
"""A chunk of prompt is so many times as long while nobody decodes, whose next token it would hold up: longer matrix products
cost less per token.
"""
PATIENCE_S = 0.05
"""How long a starving sequence waits for writes under way before the youngest is sent back."""
_CHEAP_ROWS = 16
"""So many decoded tokens cost a step about what one does: what is left of them goes to drafts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What one sequence computes in a step."""

    sequence: Sequence
    span: Span
    draft: Seq[int] = ()
    """The last tokens of the span that are guesses."""


class Batch:
    """Sequences waiting for memory, waiting for their blocks (`loading`), and running."""

    def __init__(self, tiers: Tiers, *, clock: Clock, chunk_tokens: int, max_batch: int) -> None:
        self.waiting: list[Sequence] = []
        self.loading: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions = 0
        kv = tiers.stats()
        sizes = {tier: (kv[tier.name.lower()] or {}).get("blocks", 0) for tier in (Tier.HOST, Tier.DISK)}
        self.admission = Admission(
            {Tier.DEVICE: tiers.num_blocks, **sizes},
            block_bytes=tiers.geometry.block_bytes,
            window=tiers.window,
            clock=clock,
        )
        self._tiers = tiers
        self._seats = Seats(tiers, chunk_tokens=chunk_tokens)
        self.take_fresh = self._seats.take_fresh
        self._clock = clock
        self._chunk_tokens = chunk_tokens
        self._max_batch = max_batch
        self._starving_since_s: float | None = None

    def everyone(self) -> list[Sequence]:
        """All sequences, in no order."""
        return [*self.waiting, *self.loading, *self.running]

    # -- admission

    def admit(self) -> None:
        """Start what may run now: loads that have ended, then the queue in order while there is room."""
        self._collect()
        short = False
        admitted = self.admission.gate(self.everyone()) if self.waiting else None
        for sequence in in_order(self.waiting):
            if len(self.running) + len(self.loading) >= self._max_batch:
                break
            if self._computed_soon(sequence):
                continue
            others = [*self.running, *self.loading]
            beside = any(one.session is sequence.session for one in others)  # its context has its place already
            if admitted is not None and not beside and not admitted(sequence, bool(others)):
                short = True
                continue
            if not self._seat(sequence):
                short = True
                break
        self._tiers.set_pressed(short or self._starving_since_s is not None)

    def _collect(self) -> None:
        """Loads that are on their way may be computed behind; whose load failed goes back to the queue."""
        for sequence in [one for one in self.loading if one.ticket is not None and one.ticket.ready]:
            ticket = sequence.ticket
            assert ticket is not None
            self.loading.remove(sequence)
            sequence.clock.spend("restore_s", self._clock.now_s())
            if ticket.failed_from is None:
                self._start(sequence, ticket)
                continue
            self._distrust(sequence, ticket.failed_from)

    def _distrust(self, sequence: Sequence, failed_from: int) -> None:
        """A load failed: from that one of its leased blocks on, nothing is taken from the tiers."""
        sequence.trusted_blocks = sequence.passed + failed_from
        sequence.cached_tokens = min(sequence.cached_tokens or 0, sequence.trusted_blocks * BLOCK_TOKENS)
        self.waiting.append(sequence)
        self._seats.give_up(sequence)

    def confirm(self, turns: Seq[Turn]) -> list[Turn]:
        """After the step: the turns whose loads have all ended well. Others, which computed on nonsense, start again."""
        good: list[Turn] = []
        for turn in turns:
            sequence, ticket = turn.sequence, turn.sequence.ticket
            if ticket is not None:
                ticket.wait()  # its copies ended before the step did: only the mover's thread has to say so
                sequence.ticket = None
                if ticket.failed_from is not None:
                    self.running.remove(sequence)
                    self._distrust(sequence, ticket.failed_from)
                    continue
            good.append(turn)
        return good

    def _computed_soon(self, sequence: Sequence) -> bool:
        """True if the next block that this one lacks is part of a running prefill: then it is better to wait."""
        busy = [one for one in self.running if not one.decoding]
        if not busy:
            return False
        keys = sequence.reusable_keys()
        have = self._tiers.match(keys)
        return have < len(keys) and any(keys[have] in one.keys[one.committed :] for one in busy)

    def _seat(self, sequence: Sequence) -> bool:
        """Give the sequence all its blocks, or change nothing and return False."""
        now_s = self._clock.now_s()
        lease = self._seats.take(sequence, beside_others=bool(self.running or self.loading))
        if lease is None:
            return False
        if sequence.cached_tokens is None:
            sequence.cached_tokens = sequence.computed
            sequence.loaded = _by_tier(lease)
        elif sequence.trusted_blocks is not None:  # a load had failed
            sequence.cached_tokens = min(sequence.cached_tokens, sequence.computed)
        sequence.restored_blocks += lease.loaded_blocks
        sequence.clock.spend("queued_s", now_s)
        self.waiting.remove(sequence)
        sequence.ticket = lease.ticket
        self.loading.append(sequence)
        if lease.ticket.ready:
            self._collect()
        return True

    def _start(self, sequence: Sequence, ticket: Ticket) -> None:
        """Every load of the sequence is on its stream: it computes behind them (R7)."""
        self.running.append(sequence)
        for event in ticket.events:
            self._tiers.streams.compute_wait(event)
        if sequence.spare is not None:
            place = sequence.committed
            sequence.blocks[place] = self._tiers.reopen(sequence.session.key, sequence.blocks[place], sequence.spare)
            sequence.spare = None

    # -- a step

    def plan(self) -> list[Turn]:
        """The next step: a token for everyone who decodes, and up to a chunk (or two) of prompt, earliest first."""
        turns: list[Turn] = []
        left = self._chunk_tokens * (1 if any(one.decoding for one in self.running) else _LONELY)
        rows = _CHEAP_ROWS - sum(one.decoding for one in self.running)
        starved = False
        for sequence in in_order(self.running):
            if sequence not in self.running:
                continue  # sent back for one before it
            count = min(left, len(sequence.ids) - sequence.computed)
            draft: Seq[int] = ()
            if sequence.decoding:
                count = 1
                if not self._grow(sequence):
                    starved = True
                    continue
                draft = self._draft(sequence, rows)
                rows -= len(draft)
            elif count == 0:
                continue
            else:
                count = self._prefill(sequence, count)
                if count == 0:
                    starved = True
                    continue
                left -= count
            end = sequence.computed + count
            span = Span(
                token_ids=[*sequence.ids[sequence.computed : end], *draft],
                start=sequence.computed,
                blocks=sequence.blocks,
                sample=end == len(sequence.ids),
                drafted=len(draft),
            )
            turns.append(Turn(sequence=sequence, span=span, draft=draft))
        if not starved:
            self._starving_since_s = None
        return [turn for turn in turns if turn.sequence in self.running]

    def _prefill(self, sequence: Sequence, count: int) -> int:
        """So many of the next `count` prompt tokens can be computed now."""
        placed = self._seats.room_for(sequence, count)
        if placed or not self._grow(sequence):
            return placed
        return self._seats.room_for(sequence, count)

    def _draft(self, sequence: Sequence, most: int) -> Seq[int]:
        """Guesses for a sequence that decodes; as many as there is room for without anybody giving way."""
        most = min(most, sequence.answer.left_tokens - 1)
        draft = sequence.guesses(most) if most > 0 else ()
        while draft:
            room = len(sequence.blocks) * BLOCK_TOKENS - len(sequence.ids)
            if room >= len(draft):
                break
            if not self._seats.grow(sequence):
                return draft[:room]
        return draft

    def _grow(self, sequence: Sequence) -> bool:
        """Make sure that the next token has a place."""
        if len(sequence.blocks) * BLOCK_TOKENS > sequence.computed or self._seats.grow(sequence):
            return True
        if not self._out_of_patience():
            return False
        youngest = in_order([*self.running, *self.loading])[-1]
        if youngest is sequence:
            return False
        self.send_back(youngest)
        return self._seats.grow(sequence)

    def _out_of_patience(self) -> bool:
        now_s = self._clock.now_s()
        if self._starving_since_s is None:
            self._starving_since_s = now_s
        if now_s - self._starving_since_s < PATIENCE_S:
            return False
        self._starving_since_s = now_s
        return True

    def commit(self, turns: Seq[Turn], written: Event) -> None:
        """The step is computed and its tokens are chosen: full blocks become immutable and findable.

        What stands in the pool behind the last chosen token came from guesses: the next step writes over it.
        """
        for turn in turns:
            sequence = turn.sequence
            sequence.computed = min(turn.span.end, len(sequence.ids) - 1) if turn.span.sample else turn.span.end
            sequence.reached_tokens = max(sequence.reached_tokens, sequence.computed)
            full = sequence.computed // BLOCK_TOKENS
            if full != sequence.committed:
                sequence.extend_keys()
            for place in range(sequence.committed, full):
                parent = sequence.keys[place - 1] if place else None
                sequence.blocks[place] = self._tiers.commit(
                    sequence.session.key, sequence.blocks[place], sequence.keys[place], parent, written
                )
            sequence.committed = full
            self._seats.pass_by(sequence, written)

    # -- leaving

    def send_back(self, sequence: Sequence) -> None:
        """Preempt: back to the queue without blocks; the full ones stay findable."""
        self.preemptions += 1
        now_s = self._clock.now_s()
        loading = sequence in self.loading
        sequence.clock.spend("restore_s" if loading else "queued_s", now_s)
        (self.loading if loading else self.running).remove(sequence)
        self.keep_tail(sequence)
        self.hold(sequence)
        sequence.tail_tokens = sequence.computed or sequence.tail_tokens
        self._seats.give_up(sequence)
        self.waiting.append(sequence)

    def leave(self, sequence: Sequence) -> None:
        """The call has ended, well or not: it has no blocks any more and is in no list."""
        self.strike(sequence)
        self._seats.give_up(sequence)

    def strike(self, sequence: Sequence) -> None:
        """Nobody computes the call any more, whatever becomes of its blocks."""
        for members in (self.waiting, self.loading, self.running):
            if sequence in members:
                members.remove(sequence)

    def keep_tail(self, sequence: Sequence) -> None:
        """The sequence stops here for a while: its last block can be found again, though it is partial."""
        full = sequence.computed // BLOCK_TOKENS
        key = sequence.partial_key(sequence.computed)
        if key is None or full != sequence.committed:
            return
        if sequence.spare is not None:  # still the leased one
            sequence.tail = key
            return
        ticket = sequence.ticket
        if ticket is not None and not (ticket.done and ticket.failed_from is None):
            return
        parent = sequence.keys[full - 1] if full else None
        written = self._tiers.streams.record()
        sequence.blocks[full] = self._tiers.commit(sequence.session.key, sequence.blocks[full], key, parent, written)
        sequence.tail = key

    def hold(self, sequence: Sequence) -> None:
        """Tell the tiers what the session's context consists of now."""
        session, keys = sequence.session, sequence.keys[: sequence.committed]
        if sequence.tail is not None:
            keys.append(sequence.tail)
        tokens, lasting = sequence.computed, sequence.lasting_tokens
        if lasting is not None:  # what comes behind is dead on arrival: nobody carries it to another tier
            keys, tokens = keys[: lasting // BLOCK_TOKENS], min(tokens, lasting)
        outlives = sequence.outlives if sequence.answer.reason is None else None  # who knows whether it will think
        self.admission.note(sequence)
        self._tiers.hold(
            sequence.holder,
            session.task,
            keys,
            tokens,
            also_at=None if outlives is None else outlives.tokens,
            template_tokens=session.template_tokens,
            background=sequence.background,
            order=sequence.rank[1],
            priority=-sequence.rank[0],
        )


def _by_tier(lease: Lease) -> dict[str, int]:
    """Blocks that were not on the device, by where they were; those that a window has passed came with the slowest."""
    loaded = {"host": lease.from_host, "disk": lease.from_disk}
    slowest = "disk" if lease.from_disk else "host" if lease.from_host else None
    if slowest is not None:
        loaded[slowest] += lease.first
    return loaded
