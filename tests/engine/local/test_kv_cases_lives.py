"""Random lives of engines over one kept store: calls, branches, cancels, moves, rot, ends of tasks, restarts.

Whatever happens in whatever order, an answer is that of a cold run, and the books add up.
"""

from __future__ import annotations

import contextlib
import random
import time

import pytest

from agentkv.core.residency import Action, Move, Tier
from agentkv.engine.local.engine import LocalEngine
from agentkv.errors import GenerationCancelled
from agentkv.kv.streams.adversarial import AdversarialStreams
from agentkv.kv.streams.cpu import CpuStreams

MIB = 1 << 20
TASKS = "abcde"
WORDS = ["the", "tool", "found", "seven", "errors", "in", "four", "files", "and", "stopped", "after", "a", "test"]
SYSTEM = "You are an agent that works on a repository. Answer in one line and stop."


class Life:
    """One engine after another; `seen` counts what happened."""

    def __init__(self, tiny, ask, directory, seed):
        self.tiny, self.ask, self.directory, self.seed = tiny, ask, directory, seed
        self.dice = random.Random(seed)
        self.persist = self.dice.random() < 0.7
        self.texts = dict.fromkeys(TASKS, SYSTEM)
        self.sessions = {}
        self.cached = self.restored = self.restarts = self.rotten = 0
        self.engine = self.open()

    def open(self):
        size = self.tiny.loaded.geometry.slot_bytes
        streams = AdversarialStreams(self.seed) if self.seed % 2 else CpuStreams()
        return LocalEngine(
            self.tiny.loaded, device_memory=self.dice.choice([20, 40]) * size,
            host_memory=self.dice.choice([4, 30, 90]) * size, disk=self.directory,
            disk_memory=self.dice.choice([1, 4]) * MIB, persist=self.persist, streams=streams,
            chunk_tokens=self.dice.choice([16, 512]),
        )  # fmt: skip

    def step(self):
        self.dice.choices(
            [self.call, self.crowd, self.cancelled, self.move, self.vacate, self.rot, self.finish, self.branch, self.restart],
            [30, 10, 8, 25, 12, 4, 3, 5, 3],
        )[0]()  # fmt: skip
        if self.dice.random() < 0.3:  # slab and journal are compared at rest
            self.engine.tiers.quiesce(20)
            self.engine.tiers.check()

    def _more(self, task):
        text = f"{self.texts[task]} {task} " + " ".join(self.dice.choices(WORDS, k=self.dice.randrange(1, 12)))
        return text if len(text) < 260 else SYSTEM + text[-60:]

    def _judge(self, task, prompt, answer):
        assert self.tiny.greedy(prompt, 5) == list(answer.token_ids), f"seed {self.seed}: {task} got a wrong token"
        self.texts[task] = prompt + answer.text
        self.sessions[task] = answer.session
        self.cached += answer.usage.cached_tokens
        self.restored += answer.restored_blocks

    def call(self):
        task = self.dice.choice(TASKS)
        prompt = self._more(task)
        self._judge(task, prompt, self.engine.submit(self.ask(prompt, 5, task=task)).result(30))

    def crowd(self):
        prompts = {task: self._more(task) for task in self.dice.sample(TASKS, 3)}
        streams = {task: self.engine.submit(self.ask(prompt, 5, task=task)) for task, prompt in prompts.items()}
        if self.dice.random() < 0.5:
            self.move()
        for task, stream in streams.items():
            self._judge(task, prompts[task], stream.result(30))

    def cancelled(self):
        task = self.dice.choice(TASKS)
        ids = tuple(self.tiny.ids("x" * 40))
        with self.engine.submit(self.ask(self._more(task), None, task=task, forced_ids=ids)) as stream:
            time.sleep(self.dice.choice([0, 0.002, 0.01]))
            stream.cancel()
        with contextlib.suppress(GenerationCancelled):
            stream.result(20)

    def branch(self):
        """An edited history: the context goes on from an earlier point."""
        task = self.dice.choice(TASKS)
        text = self.texts[task]
        self.texts[task] = text[: self.dice.randrange(len(SYSTEM), len(text) + 1)]

    def move(self):
        if self.sessions:
            session = self.dice.choice(sorted(self.sessions.values()))
            action = self.dice.choice([*Action, Action.WRITE, Action.DEMOTE, Action.DEMOTE])
            self.engine.apply(Move(session=session, action=action, to=self.dice.choice([None, *Tier]), reason="test"))
            if self.dice.random() < 0.5:
                self.engine.tiers.quiesce(20)

    def vacate(self):
        if self.sessions:
            session = self.dice.choice(sorted(self.sessions.values()))
            self.engine.tiers.vacate(session, self.dice.choice([Tier.DEVICE, Tier.HOST]))

    def rot(self):
        """A random bit of a random block on disk turns."""
        size = self.tiny.loaded.geometry.slot_bytes
        for path in self.directory.rglob("segment-*"):
            data = path.read_bytes()
            full = [at for at in range(0, len(data), size) if any(data[at : at + 64])]
            if full:
                at = self.dice.choice(full) + self.dice.randrange(size)
                with path.open("r+b") as file:
                    file.seek(at)
                    file.write(bytes([data[at] ^ (1 << self.dice.randrange(8))]))
                self.rotten += 1

    def finish(self):
        task = self.dice.choice(TASKS)
        self.engine.finish_task(task)
        self.texts[task] = SYSTEM
        self.sessions.pop(task, None)

    def restart(self):
        self.engine.close()
        self.restarts += 1
        self.engine = self.open()

    def end(self):
        self.engine.tiers.quiesce(20)
        for task in TASKS:
            self.engine.finish_task(task)
        self.engine.tiers.check()
        self.engine.close()


def _live(tiny, ask, directory, seed, steps):
    life = Life(tiny, ask, directory / f"life-{seed}", seed)
    try:
        for _ in range(steps):
            life.step()
    finally:
        life.end()
    return life


def test_no_life_of_an_engine_writes_a_wrong_token(tiny, ask, tmp_path):
    """Three lives of fifty steps."""
    lives = [_live(tiny, ask, tmp_path, seed, 50) for seed in range(3)]
    assert min(sum(life.cached for life in lives), sum(life.restored for life in lives)) > 0
    assert min(sum(life.restarts for life in lives), sum(life.rotten for life in lives)) > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_life_among_forty_writes_a_wrong_token(tiny, ask, tmp_path):
    """Forty lives of eighty steps."""
    for seed in range(100, 140):
        _live(tiny, ask, tmp_path, seed, 80)
