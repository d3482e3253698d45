"""Every family of docs/engine.md against transformers' eager float32 attention without a cache.

The proof for each: logits of chunked prefill and decode over blocks that were full of NaN, then tokens of mixed batches,
and of sessions that went to the host or to disk, whose device blocks were overwritten with NaN meanwhile. Contexts of
100 tokens cross the borders of all windows (32 or 33 tokens).
"""

from __future__ import annotations

import itertools

import pytest
import torch

from agentkv.core.residency import Tier
from agentkv.engine.local.attention import Scores
from agentkv.engine.local.engine import LocalEngine
from agentkv.engine.local.features import windows
from agentkv.engine.local.loader import load_model
from agentkv.engine.local.runner import Runner, Span
from agentkv.errors import PromptTooLong, UnsupportedModel

FAMILIES = [
    "llama", "llama-3", "smollm2", "smollm3", "qwen2", "qwen2.5-yarn", "qwen2-window", "qwen3", "qwen3-moe", "mistral",
    "mistral-window", "ministral", "mixtral", "phi3", "phi3-window", "phi4-mini", "gemma", "gemma2", "gemma3", "gpt-oss",
    "linear-rope", "dynamic-rope",
]  # fmt: skip
SLIDING = ["qwen2-window", "mistral-window", "ministral", "phi3-window", "gemma2", "gemma3", "gpt-oss"]
IDS = [(i * 37 + i * i * 11 + 5) % 256 for i in range(100)]


class Case:
    """A tiny model of a family, loaded by us and by transformers."""

    def __init__(self, models, folder, family) -> None:
        models.save(folder, family)
        self.loaded = load_model(str(folder), device="cpu", dtype="float32")
        self.oracle = models.Oracle(folder)

    def pool(self, blocks=24):
        pool = torch.full((blocks + 1, *self.loaded.geometry.block_shape), torch.nan)
        pool[0] = 0
        return pool

    def sizes(self, blocks=64):
        slot = self.loaded.geometry.slot_bytes
        return {"device_memory": blocks * self.loaded.geometry.block_bytes, "host_memory": blocks * slot}

    def engine(self, blocks=64, **options):
        return LocalEngine(self.loaded, **{**self.sizes(blocks), **options})

    def greedy(self, prompt, count):
        ids = list(self.loaded.tokenizer(prompt, add_special_tokens=False)["input_ids"])
        return self.oracle.greedy(ids, count)


@pytest.fixture(scope="module")
def case(models, tmp_path_factory):
    """`Case` of a family, built once."""
    made = {}

    def of(family):
        if family not in made:
            made[family] = Case(models, tmp_path_factory.mktemp(family) / "model", family)
        return made[family]

    return of


def _close(expected, actual):
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=2e-3)


def test_every_family_is_tested_here(models):
    """A family that is added to the list of tiny models gets its proof."""
    assert sorted(FAMILIES) == sorted(models.FAMILIES)
    assert sorted(SLIDING) == sorted(name for name in FAMILIES if any(windows(models.config(name))))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_chunks_and_decode_are_those_of_one_forward(case, family):
    """Chunks of 1 to 100 tokens, short and long, behind none or some of the context, then token by token (M8)."""
    one = case(family)
    expected = one.oracle.logits(IDS)
    assert float(expected.std(-1).mean()) > 1  # the control: a flat answer would be close to anything
    runner = Runner(one.loaded.model, one.pool())
    blocks = [11, 3, 7, 5, 2, 13, 1]
    for chunk in (7, 16, 33, 100):
        for start in range(0, 100, chunk):
            part = IDS[start : start + chunk]
            logits = runner.forward([Span(token_ids=part, start=start, blocks=blocks, sample=True)])
            _close(expected[start + len(part) - 1], logits[0])
    for place in (30, 31, 32, 33, 64, 99):
        logits = runner.forward([Span(token_ids=IDS[place : place + 1], start=place, blocks=blocks, sample=True)])
        _close(expected[place], logits[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_long_chunks_behind_a_context_are_those_of_one_forward(case, family, monkeypatch):
    """What chunks of more than 128 tokens take (two parts without a mask, tiles of what SDPA does not know), tried on 9 and more."""
    monkeypatch.setattr("agentkv.engine.local.runner._FOLDED_TOKENS", 8)
    one = case(family)
    expected = one.oracle.logits(IDS)
    runner = Runner(one.loaded.model, one.pool())
    for start, end in ((0, 5), (5, 40), (40, 49), (49, 100)):
        span = Span(
            token_ids=IDS[start:end], start=start, blocks=[11, 3, 7, 5, 2, 13, 1], sample=True, drafted=end - start - 1
        )
        _close(expected[start:end], runner.forward([span]))


@pytest.mark.parametrize("family", FAMILIES)
def test_sequences_of_all_lengths_share_a_forward(case, family):
    """Decode rows short of, at and behind a window's border beside prompts that cross it."""
    one = case(family)
    runner = Runner(one.loaded.model, one.pool(40))
    lengths = (31, 32, 33, 70, 1)
    lists = [list(range(1 + 6 * i, 7 + 6 * i)) for i in range(6)]
    prompts = [[(token + 3 * i) % 256 for token in IDS[:length]] for i, length in enumerate(lengths)]
    for prompt, blocks in zip(prompts, lists, strict=False):
        runner.zero([blocks[len(prompt) // 16]])
        runner.forward([Span(token_ids=prompt, start=0, blocks=blocks, sample=False)])
    spans = [
        Span(token_ids=[9], start=len(prompt), blocks=blocks, sample=True)
        for prompt, blocks in zip(prompts, lists, strict=False)
    ]
    spans.insert(2, Span(token_ids=IDS[:40], start=0, blocks=lists[5], sample=True))
    logits = runner.forward(spans)
    wanted = [[*prompt, 9] for prompt in prompts]
    wanted.insert(2, IDS[:40])
    for ids, row in zip(wanted, logits, strict=True):
        _close(one.oracle.logits(ids)[-1], row)


TEXT = "The tool ran. Its output: line one, line two, and so on until the very end of the file. " * 2


@pytest.mark.parametrize("family", FAMILIES)
def test_a_session_that_was_offloaded_goes_on_with_the_same_tokens(case, family, ask, park):
    """Three calls mixed in chunks; one goes to the host, its device blocks become NaN, and it continues (M8)."""
    one = case(family)
    prompts = [TEXT[:20], TEXT[5:88], TEXT[:120]]
    with one.engine(chunk_tokens=24) as engine:
        streams = [engine.submit(ask(prompt, 12, task=str(i))) for i, prompt in enumerate(prompts)]
        answers = [stream.result(60) for stream in streams]
        assert [one.greedy(prompt, 12) for prompt in prompts] == [list(answer.token_ids) for answer in answers]
        park(engine, answers[2].session)
        longer = prompts[2] + answers[2].text + " Go on, please."
        again = engine.submit(ask(longer, 12, task="2")).result(60)
        assert one.greedy(longer, 12) == list(again.token_ids)
        assert again.usage.cached_tokens >= 112  # the control: it was reused, and it came from the host
        assert engine.stats()["kv"]["hits"]["host"] >= (2 if one.loaded.window_tokens else 7)
        engine.tiers.check()


@pytest.mark.parametrize("at", list(itertools.product(["mistral-window", "gemma3", "gpt-oss"], [31, 32, 33, 100])))
def test_windows_are_crossed_by_prompts_answers_and_reloads(case, at, ask, park, tmp_path):
    """A window of 32: prompts short of it, at it and behind it, decode across it, then back from disk (M8)."""
    family, length = at
    one = case(family)
    prompt = TEXT[:length]
    with one.engine(chunk_tokens=24, disk=tmp_path, disk_memory=32 << 20) as engine:
        first = engine.submit(ask(prompt, 20, task="t")).result(60)
        assert one.greedy(prompt, 20) == list(first.token_ids)
        park(engine, first.session, Tier.DISK)
        longer = prompt + first.text + "?"
        second = engine.submit(ask(longer, 20, task="t")).result(60)
        assert one.greedy(longer, 20) == list(second.token_ids)
        seen = length // 16 if family != "mistral-window" else min(2, length // 16)  # the rest is behind all windows
        assert engine.stats()["kv"]["hits"]["disk"] >= seen  # the control


@pytest.mark.parametrize("family", ["mistral-window", "gemma2"])
def test_windows_and_prefix_reuse_in_round_robin(case, family, ask):
    """Four sessions in turn repeat a prompt and extend it: tokens as cold, reuse reported as it was (M9)."""
    one = case(family)
    prompts, known = [f"{i}{i}: " + TEXT[: 60 + 9 * i] for i in range(4)], [0] * 4
    with one.engine() as engine:
        for turn in range(3):
            for i, prompt in enumerate(prompts):
                answer = engine.submit(ask(prompt, 6, task=f"s{i}")).result(60)
                assert one.greedy(prompt, 6) == list(answer.token_ids)
                cached, full = answer.usage.cached_tokens, (len(prompt) - 1) // 16 * 16
                assert (0, full, known[i])[turn] == cached
                if turn == 1:  # then more than it: all that was computed is known
                    known[i] = len(prompt) + len(answer.token_ids) - 1
                    prompts[i] = prompt + answer.text + " more"
        engine.tiers.check()


@pytest.mark.parametrize("family", SLIDING)
def test_a_window_that_is_ignored_or_off_by_one_would_be_seen(case, family, monkeypatch):
    """The control of the proofs above: with a window one token wider, or none, logits of long contexts differ."""
    one = case(family)
    expected = one.oracle.logits(IDS)[-1]
    honest = windows(one.loaded.model.config)
    for wrong in (tuple(w + 1 if w else 0 for w in honest), (0,) * len(honest)):
        runner = Runner(one.loaded.model, one.pool())
        runner._windows, runner._kinds = wrong, sorted(set(wrong))
        monkeypatch.setattr("agentkv.engine.local.attention._checked", lambda *_args: None)
        logits = runner.forward([Span(token_ids=IDS, start=0, blocks=list(range(1, 8)), sample=True)])
        assert float((logits[0] - expected).abs().max()) > 0.01


def test_the_trial_at_loading_crosses_the_borders_of_windows(models, tmp_path, monkeypatch):
    """A window that is one token too wide is refused at load, though the model's own is longer than the trial."""
    models.save(tmp_path, "mistral-window", sliding_window=512)
    load_model(str(tmp_path), device="cpu", dtype="float32")
    honest = Runner._chunk_mask

    def wider(self, count, tokens, window):
        return honest(self, count, tokens, window + 1 if window else 0)

    monkeypatch.setattr(Runner, "_chunk_mask", wider)
    with pytest.raises(UnsupportedModel, match="differs from its own attention"):
        load_model(str(tmp_path), device="cpu", dtype="float32")


def test_a_layer_that_asks_for_another_window_than_the_config_is_refused(models, tmp_path, monkeypatch):
    """Blocks are read by the config; a model class that means something else by it must not run."""
    from agentkv.engine.local import features

    models.save(tmp_path, "ministral")
    monkeypatch.setattr("agentkv.engine.local.runner.windows", lambda config: (0,) * len(features.windows(config)))
    with pytest.raises(UnsupportedModel, match="has a window of 6, but the config says None"):
        load_model(str(tmp_path), device="cpu", dtype="float32")


@pytest.mark.parametrize(("family", "change"), [("gemma2", {"softcap": None}), ("gpt-oss", {"sinks": None})])
def test_a_soft_cap_or_sinks_that_are_ignored_would_be_seen(case, family, change, monkeypatch):
    """Likewise for what changes the scores."""
    from agentkv.engine.local import attention

    one = case(family)
    expected = one.oracle.logits(IDS)[-1]

    def deaf(**fields):
        return Scores(**{**fields, **change})

    monkeypatch.setattr(attention, "Scores", deaf)
    runner = Runner(one.loaded.model, one.pool())
    logits = runner.forward([Span(token_ids=IDS, start=0, blocks=list(range(1, 8)), sample=True)])
    assert float((logits[0] - expected).abs().max()) > 0.01


@pytest.mark.parametrize("what", [("phi4-mini", {}, 256), ("dynamic-rope", {"max_position_embeddings": 128}, 128)])
def test_a_rotary_embedding_that_would_change_later_ends_the_context_there(models, ask, tmp_path, what):
    """Behind it transformers rotates all keys anew, so kept blocks would be wrong; up to it they are right."""
    family, sizes, limit = what
    models.save(tmp_path, family, **sizes)
    said = []
    loaded = load_model(str(tmp_path), device="cpu", dtype="float32", progress=said.append)
    assert limit == loaded.context_tokens
    assert (family == "phi4-mini") == any("longrope" in line for line in said)
    oracle = models.Oracle(tmp_path)
    prompt = (TEXT * 2)[: limit - 12]
    ids = list(loaded.tokenizer(prompt)["input_ids"])
    with LocalEngine(loaded, device_memory=40 * loaded.geometry.block_bytes) as engine:
        answer = engine.submit(ask(prompt, 12)).result(60)
        assert oracle.greedy(ids, 12) == list(answer.token_ids)
        with pytest.raises(PromptTooLong, match=f"context of {limit}"):
            engine.submit(ask(prompt, 13))
    changed = oracle.logits([*ids, *IDS])[: limit - 12]
    assert float((changed - oracle.logits(ids)).abs().max()) > 0.1  # the control


def test_tiles_change_no_score(case, monkeypatch):
    """Scores by hand are made a tile of rows at a time; tiles of one row give the same."""
    from agentkv.engine.local import attention

    monkeypatch.setattr(attention, "_TILE_SCORES", 1)
    for family in ("gemma2", "gpt-oss"):
        one = case(family)
        expected = one.oracle.logits(IDS)
        runner = Runner(one.loaded.model, one.pool())
        for start, end in ((0, 60), (60, 100)):
            spans = [Span(token_ids=IDS[start:end], start=start, blocks=list(range(1, 8)), sample=True)]
            _close(expected[end - 1], runner.forward(spans)[0])


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_is_no_reason_to_refuse(models, tmp_path, family):
    """Roundings, and experts that change with them, stay within what the trial at loading allows."""
    for seed in (1, 2):
        folder = models.save(tmp_path / str(seed), family, seed=seed)
        for dtype in ("bfloat16", "float16"):
            assert dtype == load_model(str(folder), device="cpu", dtype=dtype).geometry.dtype
