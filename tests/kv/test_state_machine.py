"""Random lives of sessions over three small tiers, on the adversary's streams, with the audit after every step."""

from __future__ import annotations

import random
import shutil
import tempfile

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from agentkv.core.residency import Action, Tier
from agentkv.kv.geometry import BLOCK_TOKENS
from agentkv.kv.index import chain_keys, root_key
from agentkv.kv.streams.adversarial import AdversarialStreams

NAMES = st.sampled_from(["a", "b", "c", "d", "e"])
SIZES = st.integers(1, 4)
ROOT = root_key(fingerprint=b"test", salt="")
DEVICE, PINNED_MOST = 12, 6


def machine(rig_class):
    """The state machine over rigs of that class."""

    class Lives(RuleBasedStateMachine):
        def __init__(self):
            super().__init__()
            self.directory = tempfile.mkdtemp()
            self.running = []
            self.private = []

        @initialize(seed=st.integers(0, 2**16), host=st.sampled_from([2, 5, 16]), disk=st.sampled_from([0, 3, 32]))
        def build(self, seed, host, disk):
            self.random = random.Random(seed)
            self.r = rig_class(
                device=DEVICE, host=host, disk=disk, directory=self.directory, streams=AdversarialStreams(seed)
            )

        def keys(self, name, size):
            """Every chain starts with the same block; d and e share two more."""
            family = 3 if name in "de" else ord(name)
            tokens = [1] * BLOCK_TOKENS + [family] * 2 * BLOCK_TOKENS + [ord(name)] * BLOCK_TOKENS
            return chain_keys(ROOT, tokens)[:size]

        @rule(name=NAMES, size=SIZES, template=st.integers(0, 2))
        def model_call(self, name, size, template):
            keys = self.keys(name, size)
            self.r.turn_of(name, keys, task=name)
            tokens = size * BLOCK_TOKENS
            self.r.tiers.hold(name, name, keys, tokens, template_tokens=min(tokens, template * BLOCK_TOKENS))

        @precondition(lambda self: sum(len(blocks) for _, blocks, _, _ in self.running) <= PINNED_MOST - 4)
        @rule(name=NAMES, size=SIZES)
        def start_sequence(self, name, size):
            keys = self.keys(name, size)
            lease = self.r.start(name, keys)
            if lease.blocks:
                self.running.append((name, lease.blocks, keys, lease.ticket))

        @precondition(lambda self: self.running)
        @rule(data=st.data())
        def read_again_and_release(self, data):
            name, blocks, keys, ticket = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
            self.r.until(lambda: ticket.done or None)
            self.r.read(name, blocks, keys, ticket)
            self.r.tiers.release(name, blocks, used=self.r.streams.record())

        @precondition(lambda self: self.running)
        @rule(data=st.data())
        def write_on_in_the_last_block(self, data):
            """A sequence goes on behind a partial block: what the block's key stands for stays right for all others."""
            name, blocks, keys, ticket = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
            self.r.until(lambda: ticket.done or None)
            spare = self.r.tiers.allocate(1) if ticket.failed_from is None else None
            if spare is not None:
                blocks[-1] = self.r.tiers.reopen(name, blocks[-1], spare[0])
                self.r.read(name, blocks, keys)
                self.r.streams.launch(lambda: self.r.tiers.pool[blocks[-1]].fill_(7.0))
            self.r.tiers.release(name, blocks, used=self.r.streams.record())

        @rule()
        def minutes_pass(self):
            """The windows of ended tasks' templates end."""
            self.r.clock.advance(100)
            self.r.tiers.tick()

        @precondition(lambda self: len(self.private) < 2)
        @rule()
        def take_a_private_block(self):
            self.private += self.r.tiers.allocate(1) or []

        @precondition(lambda self: self.private)
        @rule()
        def give_a_private_block(self):
            self.r.tiers.release("-", [self.private.pop()], used=self.r.streams.record())

        @rule(
            name=NAMES,
            action=st.sampled_from(list(Action)),
            to=st.sampled_from([None, *Tier]),
        )
        def move(self, name, action, to):
            self.r.move(name, action, to)

        @rule(name=NAMES)
        def drop(self, name):
            self.r.tiers.drop_task(name)

        @rule(name=NAMES, in_s=st.one_of(st.none(), st.floats(0, 100)))
        def expect(self, name, in_s):
            self.r.tiers.expect(name, None if in_s is None else self.r.clock.now_s() + in_s)

        @rule(turns=st.integers(1, 12))
        def time_passes(self, turns):
            for _ in range(turns):
                self.r.turn()

        @rule()
        def settle(self):
            self.r.settle()

        @precondition(lambda self: self.r.slab is not None)
        @rule()
        def rot(self):
            """A random bit of the disk tier flips."""
            path = min(self.r.slab.path.iterdir())
            with path.open("r+b") as file:
                at = self.random.randrange(path.stat().st_size)
                file.seek(at)
                byte = file.read(1)[0]
                file.seek(at)
                file.write(bytes([byte ^ (1 << self.random.randrange(8))]))

        @invariant()
        def the_books_add_up(self):
            if hasattr(self, "r"):
                self.r.tiers.check()
                assert [] == self.r.wrong

        def teardown(self):
            if hasattr(self, "r"):
                while self.running:
                    name, blocks, _, _ = self.running.pop()
                    self.r.tiers.release(name, blocks, used=self.r.streams.record())
                self.r.tiers.release("-", self.private, used=self.r.streams.record())
                for name in "abcde":
                    self.r.tiers.drop(name)
                self.r.settle()
                assert [] == self.r.wrong
                # what is left are blocks that nobody ever held; they are free for the taking
                blocks = self.r.until(lambda: self.r.tiers.allocate(DEVICE))
                self.r.tiers.release("-", blocks, used=self.r.streams.record())
                self.r.settle()
                stats = self.r.tiers.stats()
                assert 0 == stats["device"]["used"]
                assert 0 == stats["device"]["pinned"]
                self.r.close()
            shutil.rmtree(self.directory, ignore_errors=True)

    return Lives


@pytest.mark.parametrize("lives", [60, pytest.param(1500, marks=[pytest.mark.slow, pytest.mark.timeout(400)])])
def test_no_life_of_sessions_spoils_a_byte_or_the_books(rig_class, lives):
    """Whatever happens in whatever order: every read sees its block's own bytes, and every count can be recounted."""
    run_state_machine_as_test(
        machine(rig_class),
        settings=settings(
            max_examples=lives,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )
