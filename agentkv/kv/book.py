"""The book: which block has a copy in which tier, who holds it, and in which order copies are given up.

Covers Holding (a session's blocks) and Book; a block is `block.py`. Every change of a copy goes through `place` and
`vacate`, which keep the sessions' counts; `check()` recounts them. Does not move a byte: that is `transfers.py`. Not
thread-safe: the lock of `Tiers` guards it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from agentkv.core.forecast import Forecast
from agentkv.core.residency import Tier
from agentkv.kv.block import NOWHERE, Block
from agentkv.kv.geometry import BLOCK_TOKENS
from agentkv.kv.index import BlockKey
from agentkv.kv.window import Window


class Holding:
    """What one session's context consists of, in order, and how many copies of it each tier has.

    `chain` begins with block number `first`: those before it are behind every window of the model. `past` has what was
    known of them when they fell behind, by number: nobody needs them, but a prompt that goes back may find them.
    """

    __slots__ = (
        "background",
        "chain",
        "copies",
        "demoted_to",
        "expected_s",
        "first",
        "forecast",
        "idle_share",
        "missing",
        "order",
        "past",
        "priority",
        "recompute_s",
        "session",
        "task",
        "template_blocks",
        "tokens",
        "unwritten",
        "used_s",
        "wait_started_s",
    )

    def __init__(self, session: str, task: str, now_s: float) -> None:
        self.session = session
        self.task = task
        self.tokens = 0
        self.template_blocks = 0
        """So many of its first blocks are a template that other tasks begin with too."""
        self.background = False
        """A side branch that nobody waits for."""
        self.chain: list[Block] = []
        self.first = 0
        self.past: dict[int, Block] = {}
        self.copies = [0, 0, 0]
        self.unwritten = 0
        self.missing = 0
        self.expected_s: float | None = None
        self.used_s = now_s
        self.demoted_to: Tier | None = None
        self.wait_started_s = now_s
        self.forecast: Forecast | None = None
        """What was expected of its wait when that began; None: nothing is known, or it is back."""
        self.order = 0
        """Its task's place in order of arrival."""
        self.priority = 0
        self.recompute_s = 0.0
        self.idle_share = 0.0

    def back_in_s(self, now_s: float) -> float:
        """How long until the session is back: as told, else as long as it has been away already (Lindy), which
        orders sessions of which nothing is known as LRU does.
        """
        if self.expected_s is None:
            return now_s - self.used_s
        return abs(self.expected_s - now_s)

    @property
    def template(self) -> list[Block]:
        """The blocks of its template that are known."""
        past = [block for number, block in self.past.items() if number < self.template_blocks]
        return past + self.chain[: max(0, self.template_blocks - self.first)]

    def _count(self, block: Block, sign: int) -> None:
        device, host, disk = block.where
        if device != NOWHERE:
            self.copies[Tier.DEVICE] += sign
            self.unwritten += sign * (host == NOWHERE == disk)
        if host != NOWHERE:
            self.copies[Tier.HOST] += sign
        if disk != NOWHERE:
            self.copies[Tier.DISK] += sign
        self.missing += sign * (device == host == disk == NOWHERE)


Rank = Callable[[Holding, float], tuple[float, ...]]
"""rank(holding, now_s): a policy's sort key; it must depend on nothing else."""


class Book:
    """All blocks and all sessions. `window`: of a model all of whose layers have one."""

    def __init__(self, window: Window | None = None) -> None:
        self.window = window or Window()
        self.blocks: dict[BlockKey, Block] = {}
        self.holdings: dict[str, Holding] = {}
        self.orphans: dict[BlockKey, Block] = {}
        """Blocks that no session holds: a running sequence's newest, or left over by a cancelled one."""
        self.rank: Rank = back_last
        """Who gives way: the greater, the sooner."""
        self.host_changes = 0
        """Grows whenever a search for host copies to give up could end differently."""

    # -- copies

    def place(self, block: Block, tier: Tier, slot: int) -> None:
        """The block has a readable copy in `slot` of `tier` from now on."""
        assert block.where[tier] == NOWHERE, f"{tier.name} already has a copy"
        self._set(block, tier, slot)

    def vacate(self, block: Block, tier: Tier) -> int:
        """The copy in `tier` is no more; returns its slot, which the caller frees."""
        slot = block.where[tier]
        assert slot != NOWHERE, f"{tier.name} has no copy"
        self._set(block, tier, NOWHERE)
        return slot

    def _set(self, block: Block, tier: Tier, slot: int) -> None:
        where = block.where
        self.host_changes += tier == Tier.HOST or where[Tier.HOST] != NOWHERE
        copies = (slot != NOWHERE) - (where[tier] != NOWHERE)
        was_unwritten, was_resident = block.unwritten, block.resident
        where[tier] = slot
        unwritten, missing = block.unwritten - was_unwritten, was_resident - block.resident
        for holding in block.holders.values():
            holding.copies[tier] += copies
            holding.unwritten += unwritten
            holding.missing += missing

    # -- blocks and holders

    def leading(self, keys: Sequence[BlockKey], *, disk: bool = True) -> list[Block]:
        """The blocks of the leading keys that have a copy anywhere (without `disk`: in memory): what is behind a hole
        is no hit.
        """
        found: list[Block] = []
        for key in keys:
            block = self._there(key, disk=disk)
            if block is None:
                break
            found.append(block)
        return found

    def in_sight(
        self, keys: Sequence[BlockKey], tokens: int | None = None, *, disk: bool = True
    ) -> tuple[int, list[Block]]:
        """The longest context of leading keys that can be gone on with: (number of its first block that the next token
        sees, the blocks from there on), all of them with a copy. `tokens`: the length of all keys' content, if the last
        one is partial.
        """
        if not self.window:
            return 0, self.leading(keys, disk=disk)
        count = len(keys)
        whole = count * BLOCK_TOKENS if tokens is None else tokens
        found: list[Block] = []
        while count:
            at, found = count, []
            first = self.window.first_seen(whole if count == len(keys) else count * BLOCK_TOKENS)
            while at > first and (block := self._there(keys[at - 1], disk=disk)) is not None:
                found.append(block)
                at -= 1
            if at == first:
                return first, found[::-1]
            count = at - 1  # every context that ends behind this hole and before `count` needs what is missing
        return 0, []

    def reaching(self, keys: Sequence[BlockKey], first: int) -> int:
        """The first of the keys, but none before number `first`, from which on all have a copy."""
        at = len(keys)
        while at > first and self._there(keys[at - 1], disk=True) is not None:
            at -= 1
        return at

    def _there(self, key: BlockKey, *, disk: bool) -> Block | None:
        block = self.blocks.get(key)
        return block if block is not None and (block.resident if disk else block.in_memory) else None

    def ensure(self, key: BlockKey, parent: BlockKey | None) -> Block:
        """The block of that key, new if unknown."""
        block = self.blocks.get(key)
        if block is None:
            block = self.blocks[key] = self.orphans[key] = Block(key, parent)
        return block

    def tidy(self, block: Block) -> None:
        """Forget a block that has neither copy nor holder nor trip."""
        if not block.holders and not block.resident and block.idle:
            self.blocks.pop(block.key, None)
            self.orphans.pop(block.key, None)

    def hold(
        self,
        session: str,
        task: str,
        keys: Sequence[BlockKey],
        tokens: int,
        now_s: float,
        *,
        past: Sequence[BlockKey] = (),
        first: int = 0,
    ) -> list[Block]:
        """Set what the session consists of: blocks from number `first` on. Its window has passed those before, whose
        keys are `past`, as far as they are known. Returns the blocks that nobody needs any more and no window has passed.

        Raises ValueError, and changes nothing, if a key comes twice: a chain cannot contain itself.
        """
        if len(set(keys)) != len(keys):
            raise ValueError("a session's keys must differ")
        self.host_changes += 1
        holding = self.holdings.get(session)
        if holding is None:
            holding = self.holdings[session] = Holding(session, task, now_s)
        holding.task, holding.tokens, holding.used_s = task, tokens, now_s
        old = self._pass_by(holding, past, first)
        chain = holding.chain
        same = 0
        while same < min(len(chain), len(keys)) and chain[same].key == keys[same]:
            same += 1
        for block in chain[same:]:
            self._unhold(block, holding)
        old += chain[same:]
        del chain[same:]
        for i in range(same, len(keys)):
            block = self.ensure(keys[i], keys[i - 1] if i else past[-1] if past else None)
            block.holders[session] = holding
            block.doomed = False
            block.kept_until_s = None
            self.orphans.pop(block.key, None)
            holding._count(block, +1)
            chain.append(block)
        return [block for block in old if not block.holders and not block.behind]

    def _pass_by(self, holding: Holding, past: Sequence[BlockKey], first: int) -> list[Block]:
        """The window has passed the keys `past`, and what it had passed before only as far as that is among them.
        Returns blocks that may have nobody any more.
        """
        chain, left = holding.chain, list(holding.past.values())
        known = {number: block for number, key in enumerate(past) if (block := self.blocks.get(key)) is not None}
        for block in known.values():
            block.behind += 1
            block.kept_until_s = None
        for block in left:
            block.behind -= 1
        holding.past, step = known, first - holding.first
        holding.first = first
        gone = chain[:step] if step > 0 else chain[:] if step < 0 else []
        del chain[: len(gone)]
        for block in gone:
            self._unhold(block, holding)
        return [block for block in (*left, *gone) if self.blocks.get(block.key) is block]

    def shed(self, session: str, block: Block) -> bool:
        """The session's window has passed `block`: True if it was in the session's chain, and nobody else holds it."""
        holding = self.holdings.get(session)
        if holding is None or not holding.chain or holding.chain[0] is not block:
            return False
        del holding.chain[0]
        self._unhold(block, holding)
        holding.past[holding.first] = block
        holding.first += 1
        block.behind += 1
        return not block.holders

    def let_go(self, session: str) -> list[Block]:
        """Forget the session. Returns the blocks that lost their last holder by it."""
        holding = self.holdings.pop(session, None)
        if holding is None:
            return []
        self.host_changes += 1
        for block in holding.chain:
            self._unhold(block, holding)
        for block in holding.past.values():
            block.behind -= 1
        known = [block for block in holding.past.values() if self.blocks.get(block.key) is block]
        return [block for block in (*known, *holding.chain) if not block.holders and not block.behind]

    def _unhold(self, block: Block, holding: Holding) -> None:
        del block.holders[holding.session]
        holding._count(block, -1)
        if not block.holders:
            self.orphans[block.key] = block

    # -- the order of eviction

    def victims(self, tier: Tier, now_s: float, *, below: Holding | None = None) -> Iterator[Block]:
        """Blocks with a copy in `tier`, the one to lose it first in front; the caller skips what is in use.

        Orphans, then sessions that were demoted below `tier`, then by `rank`; within a session from its
        end, so that leaves go before what they stand on. A block of several sessions counts for the one that is
        ranked lowest. With `below`, only what goes before that session's own blocks.
        """
        orphans = list(self.orphans.values())
        for block in orphans if self.window else reversed(orphans):  # behind a window the latest are worth most
            if block.has(tier):
                yield block
        seen: dict[BlockKey, int] = {}
        order = sorted(
            (holding for holding in self.holdings.values() if holding.copies[tier]),
            key=lambda holding: self._rank(holding, tier, now_s),
            reverse=True,
        )
        limit = None if below is None else self._rank(below, tier, now_s)
        for holding in order:
            if holding is below or (limit is not None and self._rank(holding, tier, now_s) <= limit):
                return
            for block in reversed(holding.chain):
                if not block.has(tier):
                    continue
                if len(block.holders) > 1:
                    seen[block.key] = seen.get(block.key, 0) + 1
                    if seen[block.key] < len(block.holders):
                        continue
                yield block

    def _rank(self, holding: Holding, tier: Tier, now_s: float) -> tuple[float, ...]:
        """The greater, the sooner its copies in `tier` go: demoted ones before all others."""
        demoted = holding.demoted_to is not None and tier < holding.demoted_to
        return (demoted, *self.rank(holding, now_s))

    def check(self) -> None:
        """Recount what `place`, `vacate` and `hold` counted."""
        for session, holding in self.holdings.items():
            assert holding.session == session
            fresh = Holding(session, holding.task, 0.0)
            for block in holding.chain:
                assert block.holders.get(session) is holding, "a held block does not know its holder"
                assert self.blocks.get(block.key) is block, "a held block is not in the book"
                fresh._count(block, +1)
            assert fresh.copies == holding.copies, (session, fresh.copies, holding.copies)
            assert fresh.unwritten == holding.unwritten, session
            assert fresh.missing == holding.missing, session
            assert holding.past.keys() <= set(range(holding.first)), "a block behind the window is in front of it"
        behind = Counter(id(block) for holding in self.holdings.values() for block in holding.past.values())
        for key, block in self.blocks.items():
            assert block.key == key
            assert block.behind == behind[id(block)], "windows that passed a block are miscounted"
            assert (key in self.orphans) == (not block.holders), "orphans are the blocks without holder"
            assert min(block.users) >= 0, "a copy has fewer than no users"
            assert block.pins >= 0, "a block has fewer than no pins"
            for tier in Tier:
                assert block.users[tier] == 0 or block.has(tier), "a copy that is not there is used"
                assert not (block.has(tier) and block.coming[tier] != NOWHERE), "a copy comes to where one is"
            for holding in block.holders.values():
                assert self.holdings.get(holding.session) is holding, "a holder is not in the book"


def back_last(holding: Holding, now_s: float) -> tuple[float, ...]:
    """Whoever is expected back last gives way first."""
    return (holding.back_in_s(now_s),)
