"""Models all of whose layers have a window: blocks that every window has passed are dead, and a context of any length is
computed in few blocks. Tokens are transformers' own (eager, float32, no cache), whatever was freed.

A window of 32 tokens shows at most two blocks before the one that is written; with a place for a copy of a partial
block that others use too, four blocks are enough.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import threading

import pytest

from agentkv.core.residency import Action, Move, Outcome, Tier
from agentkv.engine.base import Sampling
from agentkv.engine.local.engine import LocalEngine
from agentkv.engine.local.features import window_tokens
from agentkv.engine.local.loader import load_model
from agentkv.engine.local.sequence import Outlives, Sequence
from agentkv.errors import PromptTooLong
from agentkv.kv.streams.adversarial import AdversarialStreams
from agentkv.kv.streams.cpu import CpuStreams
from agentkv.kv.window import Window

WORDS = [
    "the",
    "tool",
    "found",
    "seven",
    "errors",
    "in",
    "four",
    "files",
    "and",
    "stopped",
    "after",
    "a",
    "test",
    "line",
]
LEAST = 4
"""Blocks of the smallest pool for a window of 32."""


class Windowed:
    """A tiny model with a window of `window` tokens in both layers, and its oracle."""

    def __init__(self, models, folder, window) -> None:
        models.save(folder, "mistral-window", sliding_window=window)
        self.loaded = load_model(str(folder), device="cpu", dtype="float32")
        self.window = Window(tokens=window)
        self._oracle = models.Oracle(folder)
        self.greedy = functools.cache(self._greedy)

    def _greedy(self, prompt, count):
        ids = list(self.loaded.tokenizer(prompt, add_special_tokens=False)["input_ids"])
        return self._oracle.greedy(ids, count)

    def engine(self, blocks, host=64, *, freeing=True, **options):
        loaded = self.loaded if freeing else dataclasses.replace(self.loaded, window_tokens=0)
        geometry = loaded.geometry
        sizes = {"device_memory": blocks * geometry.block_bytes, "host_memory": host * geometry.slot_bytes}
        return LocalEngine(loaded, **sizes, **options)


@pytest.fixture(scope="module")
def windowed(models, tmp_path_factory):
    """`Windowed` by its window, built once."""
    return functools.cache(
        lambda window=32: Windowed(models, tmp_path_factory.mktemp("windowed") / str(window), window)
    )


def text_of(seed, length):
    """Words that do not repeat, exactly so long; a token is a letter."""
    dice = random.Random(seed)
    text = f"{seed}: "
    while len(text) < length:
        text += dice.choice(WORDS) + " "
    return text[:length]


def device(engine):
    return engine.stats()["kv"]["device"]


def move(engine, session, action, to):
    """Carry out a move; returns its receipt."""
    told, done = [], threading.Event()
    engine.apply(Move(session=session, action=action, to=to, reason="test"), lambda one: (told.append(one), done.set()))
    assert done.wait(20)
    engine.tiers.quiesce(20)
    return told[0]


def test_only_models_all_of_whose_layers_have_a_window_let_go(models):
    """One layer that sees everything needs all blocks; of several windows the widest counts."""
    assert 32 == window_tokens(models.config("mistral-window"))
    assert 33 == window_tokens(models.config("phi3-window"))
    for mixed in ("qwen2-window", "ministral", "gemma2", "gemma3", "gpt-oss", "mistral", "llama"):
        assert window_tokens(models.config(mixed)) == 0


@pytest.mark.parametrize("chunk", [5, 16, 33, 512])
@pytest.mark.parametrize("blocks", [LEAST, LEAST + 1, 9])
def test_a_context_of_hundreds_of_tokens_passes_through_a_few_blocks(windowed, ask, chunk, blocks):
    """400 tokens of prompt and 40 of answer in 64 to 144 tokens of device memory, without any host memory."""
    one, prompt = windowed(), text_of(blocks, 400)
    with one.engine(blocks, host=0, chunk_tokens=chunk) as engine:
        answer = engine.submit(ask(prompt, 40, task="t")).result(60)
        assert one.greedy(prompt, 40) == list(answer.token_ids)
        assert engine.stats()["preemptions"] == 0
        engine.tiers.check()
        facts = engine.residency(answer.session)
        assert one.window.live_blocks(400 + len(answer.token_ids) - 1) == facts.total_blocks
        engine.finish_task("t")
        assert blocks == device(engine)["free"]
    with one.engine(blocks, host=0, freeing=False) as engine, pytest.raises(PromptTooLong):  # the control
        engine.submit(ask(prompt, 40))


def test_a_pool_that_is_smaller_than_the_window_holds_what_it_holds(windowed, ask):
    """Three blocks are less than a window of 64 needs: contexts end at 48 tokens, with both numbers."""
    one = windowed(64)
    with one.engine(3, host=0) as engine:
        assert 48 == engine.context_tokens
        answer = engine.submit(ask(text_of(1, 40), 8)).result(60)
        assert one.greedy(text_of(1, 40), 8) == list(answer.token_ids)
        with pytest.raises(PromptTooLong, match="49 tokens do not fit into the device memory's 48"):
            engine.submit(ask(text_of(1, 41), 8))


def test_blocks_are_given_up_while_the_prompt_is_still_computed(windowed, ask):
    """Never more than what the window shows and a chunk has pins, at any step of a long prompt and of a long answer."""
    one, pinned = windowed(), []
    with one.engine(64, chunk_tokens=16) as engine:
        honest = engine._forward

        def watched(turns):
            pinned.append(device(engine)["pinned"])
            return honest(turns)

        engine._forward = watched
        answer = engine.submit(ask(text_of(2, 300), 60, task="t")).result(60)
        assert one.greedy(text_of(2, 300), 60) == list(answer.token_ids)
        assert len(pinned) > 12
        assert (
            max(pinned) <= one.window.reach_blocks + 2 + 1
        )  # 32 tokens at once, while nobody decodes, touch three blocks
        assert device(engine)["behind"] >= 15  # what was passed stays as long as nobody needs the room
        assert device(engine)["free"] < 64 - 15
        engine.finish_task("t")
        assert (64, 0) == (device(engine)["free"], device(engine)["behind"])


def test_dead_blocks_are_never_written_and_leave_host_and_disk(windowed, ask, tmp_path):
    """A write, a demotion and a second turn: below the device there is only what the window shows."""
    one, prompt = windowed(), text_of(3, 200)
    with one.engine(64, disk=tmp_path, disk_memory=32 << 20) as engine:
        first = engine.submit(ask(prompt, 8, task="t")).result(60)
        live = one.window.live_blocks(200 + len(first.token_ids) - 1)
        assert live <= 4
        for to in (Tier.HOST, Tier.DISK):
            receipt = move(engine, first.session, Action.WRITE, to)
            assert (Outcome.DONE, live) == (receipt.outcome, receipt.blocks)
        stats = engine.stats()["kv"]
        assert (live, live) == (stats["host"]["used"], stats["disk"]["used"])
        longer = prompt + first.text + text_of(4, 100)
        second = engine.submit(ask(longer, 8, task="t")).result(60)
        assert one.greedy(longer, 8) == list(second.token_ids)
        engine.tiers.quiesce(20)
        stats = engine.stats()["kv"]
        assert (0, 0) == (stats["host"]["used"], stats["disk"]["used"])  # all that was written is dead now
        assert 0 == stats["drops"]
        engine.tiers.check()


@pytest.mark.parametrize("to", [Tier.HOST, Tier.DISK])
@pytest.mark.parametrize("length", [31, 32, 33, 47, 48, 100, 203])
def test_a_turn_needs_only_what_its_window_shows_of_the_turns_before(  # noqa: PLR0917  fixtures
    windowed, ask, park, tmp_path, length, to
):
    """Everything behind the window is overwritten: the whole context counts as known, a few blocks are loaded."""
    one, prompt = windowed(), text_of(length, length)
    with one.engine(24, disk=tmp_path, disk_memory=32 << 20, chunk_tokens=48) as engine:
        first = engine.submit(ask(prompt, 9, task="t")).result(60)
        known = length + len(first.token_ids) - 1
        park(engine, first.session, to)
        engine.submit(ask(text_of(99, 370), 1, task="other")).result(60)  # it takes what nobody holds
        longer = prompt + first.text + " and then?"
        second = engine.submit(ask(longer, 12, task="t")).result(60)
        assert one.greedy(longer, 12) == list(second.token_ids)
        assert known == second.usage.cached_tokens
        assert {to.name.lower(): known} == second.cached_by
        live = one.window.live_blocks(known)
        assert live == second.restored_blocks
        assert live == engine.stats()["kv"]["hits"][to.name.lower()]
        engine.tiers.check()


def test_a_prompt_that_goes_back_finds_what_is_still_there_and_else_computes(windowed, ask):
    """It leaves the context before the window: in a large pool from there on, in a small one from the beginning."""
    one, prompt = windowed(), text_of(5, 200)
    for blocks, cached in ((64, 96), (8, 0)):
        with one.engine(blocks) as engine:
            engine.submit(ask(prompt, 8, task="t")).result(60)
            other = prompt[:100] + text_of(6, 60)
            answer = engine.submit(ask(other, 8, task="t")).result(60)
            assert one.greedy(other, 8) == list(answer.token_ids)
            assert cached == answer.usage.cached_tokens
            engine.tiers.check()
            engine.finish_task("t")
            assert blocks == device(engine)["free"]


@pytest.mark.parametrize("blocks", [7, 40])
def test_four_sessions_in_turn_repeat_and_extend_without_computing_again(windowed, ask, blocks):
    """In a pool for two windows, and in one for all: extended prompts reuse all that was known (M9)."""
    one = windowed()
    prompts = [text_of(10 + i, 90 + 9 * i) for i in range(4)]
    known = [0] * 4
    with one.engine(blocks) as engine:
        for turn in range(4):
            for i, prompt in enumerate(prompts):
                answer = engine.submit(ask(prompt, 6, task=f"s{i}")).result(60)
                assert one.greedy(prompt, 6) == list(answer.token_ids)
                assert known[i] == answer.usage.cached_tokens, (turn, i)
                known[i] = len(prompt) + len(answer.token_ids) - 1
                prompts[i] = prompt + answer.text + " more"
        for i, prompt in enumerate(prompts):  # an exact repeat goes back by an answer: what was passed is there or not
            first = engine.submit(ask(prompt, 6, task=f"s{i}")).result(60)
            again = engine.submit(ask(prompt, 6, task=f"s{i}")).result(60)
            assert first.token_ids == again.token_ids
            assert (len(prompt) - 1) // 16 * 16 == again.usage.cached_tokens
        engine.tiers.check()


def test_another_task_finds_the_template_while_nobody_needs_the_room(windowed, ask):
    """The last blocks of a system prompt are behind the first task's window, and enough for the second."""
    one, system = windowed(), text_of(7, 128)
    with one.engine(64) as engine:
        engine.submit(ask(system + text_of(8, 90), 8)).result(60)
        answer = engine.submit(ask(system + text_of(9, 50), 8)).result(60)
        assert one.greedy(system + text_of(9, 50), 8) == list(answer.token_ids)
        assert 128 == answer.usage.cached_tokens


def test_what_is_written_for_the_next_process_is_the_window(windowed, ask, tmp_path):
    """A context of 300 tokens is resumed from the few blocks that lie on disk, and counts as known."""
    one, prompt = windowed(), text_of(11, 300)
    options = {"disk": tmp_path, "disk_memory": 32 << 20, "persist": True}
    with one.engine(10, **options) as engine:
        first = engine.submit(ask(prompt, 9, task="t")).result(60)
    known = 300 + len(first.token_ids) - 1
    with one.engine(10, **options) as engine:
        assert one.window.live_blocks(known) == engine.stats()["kv"]["disk"]["used"]
        assert one.window.first_seen(known) == engine.tiers._book.holdings[first.session].first
        longer = prompt + first.text + " go on"
        second = engine.submit(ask(longer, 9, task="t")).result(60)
        assert one.greedy(longer, 9) == list(second.token_ids)
        assert known == second.usage.cached_tokens
        engine.tiers.check()


@pytest.mark.parametrize(("blocks", "others"), [(24, 1), (80, 0)])
def test_a_block_of_the_window_that_cannot_be_read_is_a_miss(  # noqa: PLR0917  fixtures
    windowed, ask, park, flip, slots_on_disk, tmp_path, blocks, others
):
    """One damaged byte on disk: what is left of the context before it is used, if its window is there, and no token is wrong."""
    one, prompt = windowed(), text_of(12, 200)
    with one.engine(blocks, disk=tmp_path, disk_memory=32 << 20) as engine:
        first = engine.submit(ask(prompt, 9, task="t")).result(60)
        known = 200 + len(first.token_ids) - 1
        park(engine, first.session, Tier.DISK)
        for _ in range(others):
            engine.submit(ask(text_of(99, 370), 1, task="other")).result(60)
        path, at = slots_on_disk(engine, tmp_path)[0]
        flip(path, at + 100)
        longer = prompt + first.text + " go on"
        second = engine.submit(ask(longer, 9, task="t")).result(60)
        assert one.greedy(longer, 9) == list(second.token_ids)
        assert (0 if others else 16 * one.window.first_seen(known)) == second.usage.cached_tokens
        assert engine.stats()["kv"]["checksum_failures"] == 1
        engine.tiers.check()


def test_several_choices_share_the_prompt_in_a_small_pool(windowed, ask):
    """n=3 over a long prompt: the blocks of one choice are not passed for the others, who stand elsewhere."""
    one, prompt = windowed(), text_of(13, 150)
    sampling = Sampling(max_tokens=40, temperature=0.9, seed=5)
    told = []
    for blocks, freeing in ((9, True), (64, True), (64, False)):
        with one.engine(blocks, freeing=freeing, speculate=False) as engine:
            answer = engine.submit(ask(prompt, sampling=sampling, n=3, task="t")).result(60)
            told.append([list(answer.token_ids), *(list(other.token_ids) for other in answer.others)])
            engine.tiers.check()
            engine.finish_task("t")
            assert blocks == device(engine)["free"]
    assert told[2] == told[1] == told[0]
    assert 3 == len({tuple(ids) for ids in told[0]})


def test_what_a_long_thought_has_passed_is_kept_for_the_prompt_that_drops_it(windowed, ask, monkeypatch):
    """The next prompt goes on where this one ended, far behind the window: in a small pool, too, it is there."""
    one, prompt = windowed(), text_of(15, 100)
    monkeypatch.setattr(
        Sequence, "lasting_tokens", property(lambda self: self.outlives.tokens if self.outlives else None)
    )
    with one.engine(7) as engine:
        honest = engine._intake.sequences

        def thinking(request, **more):
            made = honest(request, **more)
            for sequence in made:
                sequence.outlives = Outlives(tokens=98, in_loops=False)
            return made

        engine._intake.sequences = thinking
        engine.submit(ask(prompt, sampling=Sampling(max_tokens=150, logit_bias=((257, -100.0),)), task="t")).result(60)
        other = prompt[:98] + text_of(16, 30)
        answer = engine.submit(ask(other, 8, task="t")).result(60)
        assert one.greedy(other, 8) == list(answer.token_ids)
        assert 96 == answer.usage.cached_tokens
        engine.tiers.check()


@pytest.mark.parametrize("length", [98, 110, 130])
def test_what_a_thought_will_leave_is_kept_from_the_first_token_on(windowed, ask, length):
    """Until the answer is complete nobody knows whether it thinks: neither context gives way as if it were dead."""
    one, prompt, seen = windowed(), text_of(15, length), []
    with one.engine(16) as engine:
        intake, deliver = engine._intake.sequences, engine._deliver

        def thinking(request, **more):
            made = intake(request, **more)
            made[0].outlives = Outlives(tokens=98, in_loops=False)
            return made

        def looking(fresh):
            deliver(fresh)
            (holding,) = engine.tiers._book.holdings.values()
            seen.append(range(holding.first, holding.first + len(holding.chain)))

        engine._intake.sequences, engine._deliver = thinking, looking
        engine.submit(ask(prompt, sampling=Sampling(max_tokens=60, logit_bias=((257, -100.0),)), task="t")).result(60)
    assert 30 < len(seen)
    assert 4 == one.window.first_seen(96)
    assert all({4, 5} <= set(numbers) for numbers in seen[:-1])


def test_a_long_thought_that_is_cancelled_is_not_held_from_its_beginning(windowed, ask):
    """Between what the prompt ends with and what the thought ends with is nothing that anybody goes on with."""
    one, prompt = windowed(), text_of(15, 100)
    with one.engine(32) as engine:
        intake = engine._intake.sequences

        def thinking(request, **more):
            made = intake(request, **more)
            made[0].outlives = Outlives(tokens=98, in_loops=False)
            return made

        engine._intake.sequences = thinking
        stream = engine.submit(ask(prompt, sampling=Sampling(max_tokens=300, logit_bias=((257, -100.0),)), task="t"))
        for _ in zip(range(150), stream, strict=False):
            pass
        stream.cancel()
        assert stream.wait_settled(20)
        (holding,) = engine.tiers._book.holdings.values()
        assert one.window.first_seen(holding.tokens) == holding.first
        engine.tiers.check()


def test_each_choice_passes_its_own_blocks(windowed, ask):
    """What one of them has passed is not taken from the other, and none keeps what it has passed."""
    one, seen = windowed(), []
    with one.engine(32) as engine:
        deliver = engine._deliver

        def looking(fresh):
            deliver(fresh)
            for sequence in engine._batch.running:
                holding = engine.tiers._book.holdings.get(sequence.holder)
                if holding is not None and holding.chain:
                    seen.append((sequence.choice, holding.first - sequence.passed))

        engine._deliver = looking
        sampling = Sampling(max_tokens=60, temperature=1.0, seed=3, logit_bias=((257, -100.0),))
        engine.submit(dataclasses.replace(ask(text_of(2, 70), sampling=sampling, task="t"), n=2)).result(60)
        engine.tiers.check()
    assert {(0, 0), (1, 0)} == set(seen)


def test_guesses_ahead_change_nothing_where_blocks_are_passed(windowed, ask):
    """A repetitive prompt: guesses cross the borders of blocks and of the window, some of them wrong."""
    one = windowed()
    few = tuple((ord(letter) - 33, 60.0) for letter in "abc")
    drafted = 0
    for blocks in (LEAST, 9):
        with one.engine(blocks, host=0) as engine, one.engine(64, freeing=False, speculate=False) as plain:
            for seed in range(4):
                request = {"sampling": Sampling(max_tokens=90, logit_bias=few)}
                prompt = f"{seed} " + "FAILED test_a - got abcabcabc\n" * 4
                told = [each.submit(ask(prompt, **request)).result(60) for each in (engine, plain)]
                assert told[0].token_ids == told[1].token_ids
                drafted += told[0].drafted_tokens
            engine.tiers.check()
    assert drafted


@pytest.mark.parametrize("seed", range(8))
def test_tokens_are_right_whatever_was_freed(windowed, ask, tmp_path, seed):
    """Random windows, pools, chunks, lengths; sessions repeat, extend, go back; moves, cancels, up to three at a time."""
    dice = random.Random(seed)
    one = windowed(dice.choice([16, 17, 31, 32, 33, 50]))
    blocks = one.window.least_blocks + dice.choice([0, 1, 3, 8, 30])
    streams = AdversarialStreams(seed) if seed % 2 else CpuStreams()
    options = {"chunk_tokens": dice.choice([1, 7, 16, 40, 512]), "streams": streams}
    if dice.random() < 0.6:
        options |= {"disk": tmp_path, "disk_memory": 32 << 20}
    contexts = [text_of(20 + i, dice.randrange(1, 120)) for i in range(4)]
    reused = 0
    with one.engine(blocks, host=dice.choice([4, 40]), **options) as engine:
        for _round in range(7):
            running = []
            for i in dice.sample(range(4), dice.choice([1, 1, 2, 3])):
                deed, prompt = dice.randrange(4), contexts[i]
                if deed == 0:
                    prompt = prompt[: dice.randrange(len(prompt)) + 1] + text_of(dice.random(), dice.randrange(20))
                elif deed > 1:
                    prompt += text_of(dice.random(), dice.choice([1, 15, 16, 17, 60, 130]))
                count = dice.choice([1, 3, 18, 40])
                if dice.random() < 0.15:
                    with engine.submit(ask(prompt, count, task=f"s{i}")) as stream:
                        if dice.random() < 0.5:
                            next(iter(stream), None)
                        stream.cancel()
                running.append((i, prompt, count, engine.submit(ask(prompt, count, task=f"s{i}"))))
            for i, prompt, count, stream in running:
                answer = stream.result(60)
                assert one.greedy(prompt, count) == list(answer.token_ids), (one.window, blocks, options)
                contexts[i] = prompt + answer.text if len(prompt) < 600 else text_of(dice.random(), 30)
                reused += answer.usage.cached_tokens
                for action, to in dice.choices(MOVES, k=dice.randrange(3)):
                    engine.apply(Move(session=answer.session, action=action, to=to, reason="test"))
            engine.tiers.check()
        assert reused > 0
        for i in range(4):
            engine.finish_task(f"s{i}")
        engine.tiers.quiesce(20)
        assert blocks == device(engine)["free"]
        engine.tiers.check()


MOVES = [
    (Action.WRITE, Tier.HOST), (Action.DEMOTE, Tier.HOST), (Action.DEMOTE, Tier.DISK), (Action.PREFETCH, Tier.DEVICE),
    (Action.PREFETCH, Tier.HOST),
]  # fmt: skip


def test_one_block_too_early_would_be_seen(windowed, ask, monkeypatch):
    """The control of all the above: freeing what the window still shows gives other tokens."""
    one, prompt = windowed(), text_of(14, 300)
    honest = Window.first_seen
    monkeypatch.setattr(Window, "first_seen", lambda self, computed: honest(self, computed + 16))
    with one.engine(64) as engine:
        answer = engine.submit(ask(prompt, 24)).result(60)
        assert one.greedy(prompt, 24) != list(answer.token_ids)


def test_calls_that_would_send_each_other_back_run_side_by_side(windowed, ask):
    """Two answers that together outgrow the pool: what both have passed is room enough, and nobody is sent back."""
    one = windowed()
    never_ends = Sampling(max_tokens=90, logit_bias=((257, -100.0),))
    told = {}
    for freeing in (True, False):
        with one.engine(16, freeing=freeing, speculate=False) as engine:
            asked = []
            engine._batch.admission.admit = lambda demand, asked=asked: asked.append(demand.own_bytes) or True
            streams = [
                engine.submit(ask(text_of(i, 100), sampling=never_ends, task=f"t{i}", session=f"s{i}"))
                for i in range(2)
            ]
            told[freeing] = [stream.result(60).token_ids for stream in streams]
            assert freeing == (engine.stats()["preemptions"] == 0)  # the control: without freeing they do
            live = one.window.live_blocks(101) if freeing else 7
            assert live * one.loaded.geometry.block_bytes == asked[0]  # nobody waits outside for what is not kept
    assert told[False] == told[True]


def test_what_a_block_held_before_reaches_nobody_that_grows_into_it(windowed, ask):
    """Prompts take their blocks one by one out of a pool of NaN, and decode in one batch over partial last ones."""
    one, prompts = windowed(), [text_of(40 + i, 105 + 7 * i) for i in range(3)]
    with one.engine(64, chunk_tokens=16) as engine:
        engine.tiers.pool[1:] = float("nan")
        streams = [engine.submit(ask(prompt, 20, task=str(i))) for i, prompt in enumerate(prompts)]
        for prompt, stream in zip(prompts, streams, strict=True):
            assert one.greedy(prompt, 20) == list(stream.result(60).token_ids)


def test_many_long_calls_at_once_share_a_pool_that_could_not_hold_one(windowed, ask):
    """Six prompts of 160 to 300 tokens over 12 blocks, host memory for their windows: all end, nobody computes twice."""
    one = windowed()
    with one.engine(12, host=64, chunk_tokens=48) as engine:
        prompts = [text_of(30 + i, 160 + 28 * i) for i in range(6)]
        streams = [engine.submit(ask(prompt, 20, task=str(i))) for i, prompt in enumerate(prompts)]
        for prompt, stream in zip(prompts, streams, strict=True):
            assert one.greedy(prompt, 20) == list(stream.result(60).token_ids)
        stats = engine.stats()
        assert sum(map(len, prompts)) == stats["prefill_tokens"]
        engine.tiers.check()
    with one.engine(12, host=64, chunk_tokens=48, freeing=False) as engine, pytest.raises(PromptTooLong):
        engine.submit(ask(prompts[-1], 20))
