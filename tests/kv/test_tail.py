"""The last, partial block of a context: kept like any other, and private again when its sequence goes on."""

from __future__ import annotations

import pytest
import torch

from agentkv.core.residency import Action, Tier
from agentkv.kv.index import chain_keys, root_key, tail_key
from agentkv.kv.streams.adversarial import AdversarialStreams

from .conftest import content

ROOT = root_key(fingerprint=b"test", salt="")


def test_a_partial_block_has_a_key_of_its_own():
    """It depends on every token and on what came before, and is no full block's key."""
    tokens = list(range(7))
    keys = {tail_key(ROOT, tokens[:n]) for n in range(1, 8)}
    assert 7 == len(keys)
    assert tail_key(chain_keys(ROOT, [1] * 16)[0], tokens) not in keys


@pytest.mark.parametrize("count", [0, 16])
def test_a_full_or_an_empty_block_is_no_partial_one(count):
    """Such a key would stand for something else."""
    with pytest.raises(ValueError):
        tail_key(ROOT, [1] * count)


def _reopened(r, keys):
    """Lease all of `keys`; go on writing into the last one. Returns (blocks, the block written to)."""
    lease = r.start("a", keys)
    r.until(lambda: lease.ticket.done or None)
    (spare,) = r.until(lambda: r.tiers.allocate(1))
    block = r.tiers.reopen("a", lease.blocks[-1], spare)
    r.read("a", [block], keys[-1:])
    r.streams.launch(lambda: r.tiers.pool[block].mul_(2))
    return lease.blocks[:-1], block


def test_it_is_reopened_where_it_is(rig):
    """Nobody else uses it: no byte is copied, the spare block is free again, slower copies stay as they were."""
    r = rig()
    keys = r.keys("a", 3)
    r.turn_of("a", keys)
    r.moved("a", Action.WRITE, Tier.HOST)
    before = r.tiers.stats()["device"]["free"]
    blocks, block = _reopened(r, keys)
    r.settle()
    assert before == r.tiers.stats()["device"]["free"]
    assert (2, 3, 0, 0) == r.where("a")
    assert torch.equal(r.tiers.pool[block], 2 * content(keys[-1]))
    r.tiers.release("a", [*blocks, block], used=r.streams.record())
    lease = r.turn_of("a", keys)  # what it was comes back from the host
    assert 1 == lease.from_host
    assert [] == r.wrong


@pytest.mark.parametrize("writing", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_it_is_copied_while_it_is_shared(rig, seed, writing):
    """Another sequence reads it, or a write-back is under way too: both see the bytes that its key stands for."""
    r = rig(streams=AdversarialStreams(seed))
    keys = r.keys("a", 3)
    r.turn_of("a", keys)
    other = r.start("b", keys)
    if writing:
        r.move("a", Action.WRITE, Tier.HOST)
        r.tiers.pump()
    blocks, block = _reopened(r, keys)
    assert block != other.blocks[-1]
    r.read("b", other.blocks, keys)
    r.settle()
    assert torch.equal(r.tiers.pool[block], 2 * content(keys[-1]))
    r.tiers.release("b", other.blocks, used=r.streams.record())
    r.tiers.release("a", [*blocks, block], used=r.streams.record())
    r.settle()
    if writing:
        r.evict("a", Tier.DEVICE)
    r.turn_of("a", keys)
    r.settle()
    assert [] == r.wrong


@pytest.mark.parametrize("seed", range(10))
def test_a_reopened_block_is_not_freed_under_its_write_back(rig, seed):
    """The write-back of the reopened block was planned before; its slot is reused only after its end (R3)."""
    r = rig(device=6, streams=AdversarialStreams(seed))
    keys = r.keys("a", 3)
    r.turn_of("a", keys)
    r.move("a", Action.WRITE, Tier.HOST)
    r.tiers.pump()
    blocks, block = _reopened(r, keys)
    r.tiers.release("a", [*blocks, block], used=r.streams.record())
    r.turn_of("c", r.keys("c", 5))
    r.settle()
    r.turn_of("a", keys)
    r.settle()
    assert [] == r.wrong


def test_a_block_that_is_not_leased_cannot_be_reopened(rig):
    """It may be evicted at any moment."""
    r = rig()
    keys = r.keys("a", 2)
    r.turn_of("a", keys)
    (spare,) = r.tiers.allocate(1)
    with pytest.raises(ValueError, match="not leased"):
        r.tiers.reopen("a", 1, spare)
    r.tiers.release("a", [spare], used=r.streams.record())
