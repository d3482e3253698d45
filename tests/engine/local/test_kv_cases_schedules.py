"""Restore equals keep, bit for bit, over random schedules: once with room for everything, once with blocks on the move.

Covers batches played straight onto runner and tiers (so that both runs compute the same spans together) and calls
through the whole engine. Tokens over real concurrency are `test_schedules.py`.
"""

from __future__ import annotations

import random
import time

import pytest
import torch

from agentkv.core.residency import Action, Move, Tier
from agentkv.engine.local.runner import Runner, Span
from agentkv.kv.index import chain_keys, root_key
from agentkv.kv.slab import Slab
from agentkv.kv.streams.adversarial import AdversarialStreams
from agentkv.kv.streams.cpu import CpuStreams
from agentkv.kv.tiers import Tiers

MIB = 1 << 20
NAMES = "abcdef"
QUICK, ALL = range(20), range(20, 220)
MOVES = [
    (Action.WRITE, Tier.HOST), (Action.WRITE, Tier.DISK), (Action.DEMOTE, Tier.HOST), (Action.DEMOTE, Tier.DISK),
    (Action.PREFETCH, Tier.DEVICE), (Action.PREFETCH, Tier.HOST),
]  # fmt: skip


def schedule(seed):
    """Steps of [(session, new ids, ids to decode, chunk)]; the sessions of a step compute together."""
    dice = random.Random(seed)
    steps = []
    for _ in range(7):
        names = dice.sample(NAMES, dice.randrange(1, 4))
        decode = dice.randrange(4)
        steps.append([
            (
                name,
                [dice.randrange(256) for _ in range(dice.randrange(1, 45))],
                [dice.randrange(256) for _ in range(decode)],
                dice.choice([7, 16, 100]),
            )
            for name in names
        ])  # fmt: skip
    return steps


class Stage:
    """Tiers and a runner; `disturb` is called between forwards."""

    def __init__(self, model, directory, *, blocks, streams, seed=None):
        size = model.geometry.slot_bytes
        self.moving = None if seed is None else random.Random(seed)
        self.tiers = Tiers(
            geometry=model.geometry,
            device_bytes=blocks * model.geometry.block_bytes,
            host_bytes=60 * size,
            slab=Slab(directory, 8 * MIB, model.geometry.block_bytes) if directory else None,
            streams=streams,
        )
        self.runner = Runner(model.model, self.tiers.pool)
        self.root = root_key(fingerprint=model.fingerprint, salt="")
        self.ids = {name: [] for name in NAMES}
        self.logits = []

    def disturb(self):
        """Blocks of some session move, or their copies above are given up."""
        if self.moving is None:
            return
        for _ in range(self.moving.randrange(3)):
            name = self.moving.choice(NAMES)
            action, to = self.moving.choice(MOVES)
            self.tiers.apply(Move(session=name, action=action, to=to, reason="test"))
            if self.moving.random() < 0.3:
                self.tiers.quiesce(20)
            if self.moving.random() < 0.7:
                self.tiers.vacate(name, self.moving.choice([Tier.DEVICE, Tier.DEVICE, Tier.HOST]))

    def asked(self, ask):
        """The first answer of `ask` that is not None."""
        end_s = time.monotonic() + 20
        while (answer := ask()) is None:
            assert time.monotonic() < end_s, "no progress"
            time.sleep(0.0005)
        return answer

    def play(self, steps):
        """Every step: lease what is known, compute the rest in chunks, decode together, commit, release."""
        for step in steps:
            self.disturb()
            parts = [self._seat(name, new, len(decode)) for name, new, decode, _ in step]
            at = [len(blocks) * 16 for _, blocks, _ in parts]
            blocks = [[*leased, *private] for _, leased, private in parts]
            while any(at[i] < len(self.ids[name]) for i, (name, *_) in enumerate(step)):
                spans = []
                for i, (name, _, _, chunk) in enumerate(step):
                    ids = self.ids[name][at[i] : at[i] + chunk]
                    if ids:
                        spans.append(Span(token_ids=ids, start=at[i], blocks=blocks[i], sample=True))
                        at[i] += len(ids)
                self._forward(spans)
            for turn in range(len(step[0][2])):
                spans = []
                for i, (name, _, decode, _) in enumerate(step):
                    self.ids[name].append(decode[turn])
                    spans.append(Span(token_ids=[decode[turn]], start=at[i], blocks=blocks[i], sample=True))
                    at[i] += 1
                self._forward(spans)
            self._leave(step, parts, blocks)

    def _seat(self, name, new, decode):
        keys = self.keys(name)
        lease = self.asked(lambda: self.tiers.acquire(name, keys))
        assert len(keys) == len(lease.blocks), "a block was lost"
        assert lease.ticket.wait(20)
        assert lease.ticket.failed_from is None
        self.tiers.streams.compute_wait(lease.ticket.event)
        self.ids[name] += new
        more = -(-(len(self.ids[name]) + decode) // 16) - len(keys)
        private = self.asked(lambda: self.tiers.allocate(more))
        self._compute(lambda: self.runner.zero(private))
        return name, lease.blocks, private

    def _leave(self, step, parts, blocks):
        written = self.tiers.streams.record()
        for (name, leased, _), mine in zip(parts, blocks, strict=True):
            keys = self.keys(name)
            for place in range(len(leased), len(keys)):
                parent = keys[place - 1] if place else None
                mine[place] = self.tiers.commit(name, mine[place], keys[place], parent, written)
            self.tiers.hold(name, name, keys, len(self.ids[name]))
            self.tiers.release(name, mine, used=written)

    def keys(self, name):
        return chain_keys(self.root, self.ids[name])

    def _forward(self, spans):
        self.disturb()
        self._compute(lambda: self.logits.append(self.runner.forward(spans).clone()))

    def _compute(self, fn):
        self.tiers.streams.launch(fn)
        self.tiers.streams.record().wait()

    def contents(self, name):
        """The bytes of all full blocks of a session, once they are on the device."""
        lease = self.asked(lambda: self.tiers.acquire(name, self.keys(name)))
        assert lease.ticket.wait(20)
        found = self.tiers.pool[lease.blocks].clone()
        self.tiers.release(name, lease.blocks, used=self.tiers.streams.record())
        return found


def _same_bits(a, b):
    return a.view(torch.int32).equal(b.view(torch.int32))


def _kept_and_moved(model, directory, seed):
    """Play one schedule twice and compare; returns how many bytes were loaded in the run that moves."""
    steps = schedule(seed)
    adversarial = seed % 2
    kept = Stage(model, None, blocks=200, streams=CpuStreams())
    moved = Stage(
        model, directory / str(seed), blocks=48, streams=AdversarialStreams(seed) if adversarial else CpuStreams(),
        seed=seed,
    )  # fmt: skip
    with kept.tiers, moved.tiers:
        kept.play(steps)
        moved.play(steps)
        assert len(kept.logits) == len(moved.logits) > 7
        for a, b in zip(kept.logits, moved.logits, strict=True):
            assert _same_bits(a, b)
        for name in NAMES:
            assert _same_bits(kept.contents(name), moved.contents(name))
        assert 0 == kept.tiers.stats()["bytes"]["h2d"]
        moved.tiers.quiesce(20)
        moved.tiers.check()
        return moved.tiers.stats()["bytes"]["h2d"]


def test_batches_over_moving_blocks_have_the_bits_of_batches_over_kept_ones(tiny, tmp_path):
    """Twenty schedules of seven steps, half of them on the adversary's streams: equal logits, equal KV."""
    loaded = [_kept_and_moved(tiny.loaded, tmp_path, seed) for seed in QUICK]
    assert sum(n > 0 for n in loaded) >= 0.9 * len(QUICK)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_hundred_more_schedules_have_the_same_bits(tiny, tmp_path):
    """The same with other seeds."""
    loaded = [_kept_and_moved(tiny.loaded, tmp_path, seed) for seed in ALL]
    assert sum(n > 0 for n in loaded) >= 0.9 * len(ALL)


# -- through the whole engine


def _calls(tiny, seed):
    """A conversation of several agents as (task, text to add, forced answer)."""
    dice = random.Random(seed)
    words = ["the", "tool", "found", "seven", "errors", "in", "four", "files", "and", "stopped", "after", "a", "test"]
    return [
        (
            dice.choice("abcd"),
            " ".join(dice.choices(words, k=dice.randrange(3, 25))),
            tuple(tiny.ids(" ".join(dice.choices(words, k=2)))),
        )
        for _ in range(12)
    ]


def _engine_run(engine, ask, calls, moving):
    """Logits of every step and (cached, generated) of every call; with `moving`, its sessions move in between."""
    rows, answers, texts, sessions = [], [], dict.fromkeys("abcd", "You are an agent. "), []
    forward = engine._runner.forward
    engine._runner.forward = lambda spans: rows.append(forward(spans).clone()) or rows[-1]
    for task, more, forced in calls:
        texts[task] += more
        answer = engine.submit(ask(texts[task], None, task=task, forced_ids=forced)).result(60)
        texts[task] += answer.text
        answers.append((answer.usage.cached_tokens, answer.token_ids))
        sessions.append(answer.session)
        for _ in range(moving.randrange(4) if moving else 0):
            session = moving.choice(sessions)
            action, to = moving.choice(MOVES)
            engine.apply(Move(session=session, action=action, to=to, reason="test"))
            if moving.random() < 0.5:
                engine.tiers.quiesce(20)
                engine.tiers.vacate(session, moving.choice([Tier.DEVICE, Tier.HOST]))
    return rows, answers


def _engines_agree(tiny, start, ask, directory, seed):
    """One conversation on an engine that keeps everything and on one whose blocks move; bytes loaded by the latter."""
    calls, chunk = _calls(tiny, seed), random.Random(seed).choice([16, 48, 512])
    with start(blocks=200, host=0, chunk_tokens=chunk) as kept:
        expected = _engine_run(kept, ask, calls, None)
        assert 0 == kept.stats()["kv"]["bytes"]["d2h"]
    streams = AdversarialStreams(seed) if seed % 2 else CpuStreams()
    options = {"disk": directory / f"engine-{seed}", "disk_memory": 8 * MIB, "chunk_tokens": chunk, "streams": streams}
    with start(blocks=56, host=90, **options) as moved:
        rows, answers = _engine_run(moved, ask, calls, random.Random(seed))
        moved.tiers.quiesce(20)
        loaded = moved.stats()["kv"]["bytes"]["h2d"]
    assert expected[1] == answers
    assert len(expected[0]) == len(rows)
    assert all(_same_bits(a, b) for a, b in zip(expected[0], rows, strict=True))
    return loaded


def test_calls_over_moving_blocks_have_the_bits_of_calls_over_kept_ones(tiny, start, ask, tmp_path):
    """Four conversations of four agents: the same reuse, the same tokens, equal logits at every step."""
    loaded = [_engines_agree(tiny, start, ask, tmp_path, seed) for seed in range(4)]
    assert sum(n > 0 for n in loaded) >= 3


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_hundred_more_conversations_have_the_same_bits(tiny, start, ask, tmp_path):
    """The same with other seeds."""
    loaded = [_engines_agree(tiny, start, ask, tmp_path, seed) for seed in range(4, 204)]
    assert sum(n > 0 for n in loaded) >= 150
