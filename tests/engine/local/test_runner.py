"""One forward over packed spans against transformers' own, full-length one."""

import itertools
import random

import pytest
import torch

from agentkv.engine.local import attention
from agentkv.engine.local.attention import IMPLEMENTATION, no_mask
from agentkv.engine.local.runner import Runner, Span


def _pool(tiny, blocks=64, fill=0.0):
    pool = torch.full((blocks + 1, *tiny.loaded.geometry.block_shape), fill)
    pool[0] = 0  # the null block
    return pool


def _scattered(seed, count, blocks=64):
    """Disjoint block lists in random order."""
    free = list(range(1, blocks + 1))
    random.Random(seed).shuffle(free)
    return [list(itertools.islice(it, count)) for it in [iter(free)] for _ in range(blocks // count)]


def _close(expected, actual):
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("chunk", [1, 5, 16, 17, 64])
def test_chunked_prefill_gives_the_logits_of_one_forward(any_tiny, chunk):
    """Cutting a prompt into chunks of any length, over scattered blocks full of NaN, changes nothing."""
    ids = [(i * 37 + 5) % 256 for i in range(61)]
    runner = Runner(any_tiny.loaded.model, _pool(any_tiny, fill=torch.nan))
    blocks = _scattered(1, 4)[0]
    expected = any_tiny.logits(ids)
    for start in range(0, len(ids), chunk):
        part = ids[start : start + chunk]
        logits = runner.forward([Span(token_ids=part, start=start, blocks=blocks, sample=True)])
        _close(expected[start + len(part) - 1], logits[0])


@pytest.mark.parametrize("cuts", [(0, 130, 400), (0, 16, 145, 400), (0, 1, 400), (0, 255, 256, 385, 400)], ids=str)
def test_long_chunks_behind_a_context_give_the_logits_of_one_forward(any_tiny, cuts):
    """Chunks that see what is before them and themselves in two parts: no row sees more or less than in one."""
    ids = [(i * 37 + 5) % 256 for i in range(400)]
    runner = Runner(any_tiny.loaded.model, _pool(any_tiny, fill=torch.nan))
    blocks = _scattered(1, 25)[0]
    expected = any_tiny.logits(ids)
    for start, end in itertools.pairwise(cuts):
        drafted = end - start - 1  # all rows
        logits = runner.forward(
            [Span(token_ids=ids[start:end], start=start, blocks=blocks, sample=True, drafted=drafted)]
        )
        _close(expected[start:end], logits)


def test_decode_of_many_lengths_and_prefill_share_one_forward(any_tiny):
    """Sequences of 1 to 60 tokens decode together with two prompts; each sees its own context only."""
    lists = _scattered(2, 4)
    prompts = [
        [(i * k + k) % 256 for i in range(n)] for k, n in zip((3, 5, 7, 11, 13), (1, 17, 18, 40, 60), strict=True)
    ]
    runner = Runner(any_tiny.loaded.model, _pool(any_tiny, fill=torch.nan))
    for prompt, blocks in zip(prompts, lists, strict=False):
        runner.zero([blocks[len(prompt) // 16]])
        runner.forward([Span(token_ids=prompt, start=0, blocks=blocks, sample=False)])
    fresh = [list(range(20)), list(range(100, 150))]
    spans = [
        Span(token_ids=[9], start=len(prompt), blocks=blocks, sample=True)
        for prompt, blocks in zip(prompts, lists, strict=False)
    ]
    spans.insert(1, Span(token_ids=fresh[0], start=0, blocks=lists[6], sample=True))
    spans.append(Span(token_ids=fresh[1], start=0, blocks=lists[7], sample=False))
    logits = runner.forward(spans)
    wanted = [[*prompts[0], 9], fresh[0], *[[*prompt, 9] for prompt in prompts[1:]]]
    assert len(wanted) == len(logits)
    for ids, row in zip(wanted, logits, strict=True):
        _close(any_tiny.logits(ids)[-1], row)


def test_a_forward_without_samples_computes_no_logits(tiny):
    """The output layer is the dearest matrix: chunks in the middle of a prompt do not pay for it."""
    runner = Runner(tiny.loaded.model, _pool(tiny))
    logits = runner.forward([Span(token_ids=[1, 2, 3], start=0, blocks=[1], sample=False)])
    assert 0 == logits.shape[0]


def test_buffers_are_reused_between_steps(tiny):
    """A step of the same size allocates neither scratch nor output anew."""
    runner = Runner(tiny.loaded.model, _pool(tiny))
    spans = [
        Span(token_ids=[1], start=30, blocks=[1, 2], sample=True),
        Span(token_ids=[4, 5, 6], start=0, blocks=[3], sample=True),
    ]
    runner.forward(spans)
    before = runner._scratch.data_ptr(), runner._output.data_ptr()
    runner.forward(spans)
    assert before == (runner._scratch.data_ptr(), runner._output.data_ptr())


def test_no_quadratic_mask_is_built(tiny):
    """transformers gets no mask from us, so a packed batch of any length costs no T x T tensor."""
    from transformers.masking_utils import create_causal_mask

    assert no_mask(batch_size=1, q_length=10**9, kv_length=10**9) is None
    assert IMPLEMENTATION == tiny.loaded.model.config._attn_implementation
    embeddings = torch.zeros(1, 50_000, 1)
    positions = torch.arange(50_000).unsqueeze(0)
    mask = create_causal_mask(
        config=tiny.loaded.model.config, inputs_embeds=embeddings, attention_mask=None, position_ids=positions,
        **_no_cache(create_causal_mask),
    )  # fmt: skip
    assert mask is None


def _no_cache(function):
    """The cache argument has two names in the supported versions."""
    import inspect

    names = inspect.signature(function).parameters
    return {name: None for name in ("cache", "past_key_values") if name in names and names[name].default is not None}


def test_the_model_says_so_when_it_is_run_outside_of_an_engine(tiny):
    """A model that was given to an engine cannot be called by accident and answer nonsense."""
    with pytest.raises(RuntimeError, match="given to an agentkv engine"):
        tiny.loaded.model(input_ids=torch.tensor([[1, 2]]), use_cache=False)


def test_attention_kernels_may_return_any_strides(any_tiny, monkeypatch):
    """Some kernels lay their output out by token, not by head: decode, short and long chunks read it all the same."""
    kernel = attention.F.scaled_dot_product_attention

    def by_token(*args, **kwargs):
        return kernel(*args, **kwargs).transpose(1, 2).contiguous().transpose(1, 2)

    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", by_token)
    ids = [(i * 37 + 5) % 256 for i in range(200)]
    runner = Runner(any_tiny.loaded.model, _pool(any_tiny))
    blocks = _scattered(3, 13)[0]
    expected = any_tiny.logits(ids)
    for start, end in ((0, 20), (20, 30), (30, 31), (31, 190), (190, 200)):
        logits = runner.forward([Span(token_ids=ids[start:end], start=start, blocks=blocks, sample=True)])
        _close(expected[end - 1], logits[0])
