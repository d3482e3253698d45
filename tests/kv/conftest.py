"""A rig that plays the engine over small tiers. Each block's bytes derive from its key, so a wrong byte is seen."""

from __future__ import annotations

import functools
import time

import numpy as np
import pytest
import torch

from agentkv.clock import ManualClock
from agentkv.core.residency import Action, Move, Tier
from agentkv.kv.geometry import BLOCK_TOKENS, Geometry
from agentkv.kv.index import chain_keys, root_key
from agentkv.kv.slab import Slab
from agentkv.kv.streams.adversarial import AdversarialStreams
from agentkv.kv.tiers import Tiers

GEOMETRY = Geometry(layers=2, kv_heads=1, head_dim=8, dtype="float32")
ROOT = root_key(fingerprint=b"test", salt="")


@functools.lru_cache(maxsize=4096)
def content(key):
    """What the block of `key` must hold, float32 [layers, 2, 16, kv_heads, head_dim]."""
    generator = np.random.default_rng(int.from_bytes(key, "little"))
    return torch.from_numpy(generator.random(GEOMETRY.block_shape, dtype=np.float32))


class Rig:
    """Tiers and what an engine does with them. Wrong reads end up in `wrong`, as (session, index)."""

    def __init__(
        self, *, device=8, host=8, disk=0, directory=None, streams=None, threads=False, slab=None, family=None, window=0
    ):
        self.clock = ManualClock()
        if slab is None and disk:
            slab = Slab(directory, disk * GEOMETRY.slot_bytes, GEOMETRY.block_bytes)
        self.slab = slab
        self.streams = streams if streams is not None else AdversarialStreams(0)
        self.threads = threads
        self.tiers = Tiers(
            geometry=GEOMETRY,
            device_bytes=device * GEOMETRY.block_bytes,
            window_tokens=window,
            host_bytes=0 if family else host * GEOMETRY.slot_bytes,
            slab=slab,
            family=family,
            streams=self.streams,
            clock=self.clock,
            threads=threads,
        )
        self.wrong = []
        self.receipts = []

    # -- time

    def turn(self):
        """A little time passes. False if nothing is left to happen."""
        if self.threads:
            time.sleep(0.0005)
            return True
        pumped = self.tiers.pump()
        stepped = isinstance(self.streams, AdversarialStreams) and self.streams.step()
        return pumped or stepped

    def settle(self):
        """Everything that is under way ends."""
        if self.threads:
            self.tiers.quiesce(10)
            if isinstance(self.streams, AdversarialStreams):
                self.streams.close()
            return
        idle = 0
        while idle < 3:
            idle = 0 if self.turn() else idle + 1
        self.tiers.check()

    def until(self, ask, turns=20_000):
        """The first answer of `ask` that is not None; time passes between."""
        for _ in range(turns):
            answer = ask()
            if answer is not None:
                return answer
            self.turn()
        raise AssertionError("no progress")

    # -- an engine's deeds

    @staticmethod
    def keys(name, blocks):
        seed = sum(ord(letter) * 131**i for i, letter in enumerate(name)) % 100_000
        return chain_keys(ROOT, [seed * 100 + i for i in range(BLOCK_TOKENS * blocks)])

    def start(self, session, keys, *, wait=True):
        """Lease what is there and read it on the compute stream."""
        lease = self.until(lambda: self.tiers.acquire(session, keys))
        if not self.threads and not isinstance(self.streams, AdversarialStreams):
            self.until(lambda: lease.ticket.done or None)
        if wait:
            self.streams.compute_wait(lease.ticket.event)
        self.read(session, lease.blocks, keys[lease.first :], lease.ticket)
        return lease

    def read(self, session, blocks, keys, ticket=None):
        pairs = list(zip(blocks, keys, strict=False))

        def look():
            last = len(pairs) if ticket is None or ticket.failed_from is None else ticket.failed_from
            for i, (block, key) in enumerate(pairs[:last]):
                if not torch.equal(self.tiers.pool[block], content(key)):
                    self.wrong.append((session, i))

        self.streams.launch(look)

    def write(self, session, blocks, keys, at):
        """Compute the block number `at`; appends the device block to use."""
        (block,) = self.until(lambda: self.tiers.allocate(1))
        blocks.append(self.compute(session, block, keys, at))

    def compute(self, session, block, keys, at):
        """Compute the block number `at` into a private one; returns the device block to use."""
        self.streams.launch(lambda: self.tiers.pool[block].copy_(content(keys[at])))
        return self.tiers.commit(session, block, keys[at], keys[at - 1] if at else None, self.streams.record())

    def turn_of(self, session, keys, *, task=None):
        """A whole model call: lease, read, compute what is missing, read all again, hold, release. Behind a window blocks
        are given up on the way.
        """
        lease = self.start(session, keys)
        self.until(lambda: lease.ticket.done or None)
        blocks, first = [0] * lease.first + lease.blocks, lease.first
        if lease.ticket.failed_from is not None:
            bad = first + lease.ticket.failed_from
            kept = bad if first == 0 else 0  # behind a hole nothing is of use
            self.tiers.release(session, blocks[max(first, kept) :], used=self.streams.record())
            blocks, first = blocks[:kept], 0
        for at in range(len(blocks), len(keys)):
            self.write(session, blocks, keys, at)
            seen = self.tiers.window.first_seen((at + 1) * BLOCK_TOKENS)
            self.read(session, blocks[first:], keys[first:])
            self.tiers.release(session, blocks[first:seen], used=self.streams.record(), behind=True)
            first = max(first, seen)
        self.read(session, blocks[first:], keys[first:])
        self.tiers.hold(session, task or session, keys, len(keys) * BLOCK_TOKENS)
        self.tiers.release(session, blocks[first:], used=self.streams.record())
        self.clock.advance(1.0)
        return lease

    def move(self, session, action, to=None):
        """Apply a move; its receipt goes to `receipts`."""
        move = Move(session=session, action=action, to=to, reason="test")
        return self.tiers.apply(move, self.receipts.append)

    def moved(self, session, action, to=None):
        """Apply a move, let it end, return the receipt."""
        before = len(self.receipts)
        self.move(session, action, to)
        self.settle()
        self.until(lambda: len(self.receipts) > before or None)  # with threads it comes just after all is quiet
        return self.receipts[-1]

    def park(self, session, tier=Tier.HOST):
        """Write the session down to `tier` and take its copies above away, by nothing but the public surface."""
        assert self.moved(session, Action.DEMOTE, tier).outcome in {"done", "nothing"}
        blocks = self.until(lambda: self.tiers.allocate(self.tiers.num_blocks))
        self.tiers.release("-", blocks, used=self.streams.record())
        self.settle()
        assert 0 == self.tiers.residency(session).device_blocks

    def evict(self, session, tier):
        """Take the session's copies in `tier` away, as if somebody had needed the room."""
        with self.tiers._locked():
            for block in reversed(self.tiers._book.holdings[session].chain):
                if block.evictable(tier):
                    self.tiers._transfers.evict(block, tier)

    def where(self, session):
        """(device, host, disk, missing) blocks."""
        facts = self.tiers.residency(session)
        return facts.device_blocks, facts.host_blocks, facts.disk_blocks, facts.missing_blocks

    def close(self):
        self.settle()
        self.tiers.close()


@pytest.fixture
def rig(tmp_path):
    """Makes rigs; closes them."""
    made = []

    def make(**options):
        made.append(Rig(directory=tmp_path / f"disk{len(made)}", **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def rig_class():
    """The class, for tests that make many."""
    return Rig
