"""The embedded engine on a tiny random model: what was restored computes what was kept, bit for bit."""

from __future__ import annotations

import os

import pytest
import torch
from gpu_sections.model import engine, ids_of, random_llama, send_down, text_of

from agentkv.core.residency import Tier
from agentkv.core.task import Caller
from agentkv.engine.base import Request, Sampling
from agentkv.errors import Closed, GenerationCancelled

CONTEXT, ANSWER = 150, 24


@pytest.fixture
def model(device):
    return random_llama(device, small=True)


def ask(kv, prompt, *, task="t", tokens=None, forced=None):
    sampling = Sampling(max_tokens=tokens)
    return kv.submit(Request(prompt=prompt, caller=Caller(task=task), forced_ids=forced, sampling=sampling))


def second_turn(scene, model, tier):
    """(tokens, logits of every step, blocks that were restored) of a session's second call, its KV kept or not."""
    logits = []
    with engine(scene, model, tokens=1024, disk=scene.scratch) as kv:
        forward = kv._runner.forward

        def recording(spans):
            found = forward(spans)
            logits.append(found.clone())
            return found

        prompt = text_of(CONTEXT)
        first = ask(kv, prompt, forced=ids_of("the answer")).result(60)
        if tier is not None:
            send_down(kv, first.session, tier)
        kv._runner.forward = recording
        again = ask(kv, prompt + first.text + text_of(40, seed=5), tokens=ANSWER).result(60)
        kv.tiers.check()
    return again.token_ids, [one for one in logits if one.numel()], again.restored_blocks


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK])
def test_restored_is_kept_bit_for_bit(scene, model, tier):
    """Tokens and all logits, with every full block gone from the device meanwhile."""
    kept_tokens, kept_logits, kept_blocks = second_turn(scene, model, None)
    tokens, logits, blocks = second_turn(scene, model, tier)
    assert 0 == kept_blocks
    assert blocks >= CONTEXT // 16
    assert kept_tokens == tokens
    assert len(kept_logits) == len(logits) >= 1
    assert all(map(torch.equal, kept_logits, logits))


def test_a_cancelled_call_leaves_a_working_engine(scene, model):
    """Its blocks are free again and the next call answers."""
    with engine(scene, model, tokens=1024) as kv:
        stream = ask(kv, text_of(100), task="gone", forced=ids_of(text_of(400)))
        next(iter(stream))
        stream.cancel()
        with pytest.raises(GenerationCancelled):
            stream.result(60)
        kv.finish_task("gone")
        assert 3 == len(ask(kv, text_of(900, seed=2), forced=ids_of("yes")).result(60).token_ids)
        kv.tiers.quiesce(20)
        kv.tiers.check()


def test_two_engines_share_one_device(scene, model):
    """Neither reads the other's blocks: both answer as one alone does."""
    prompts = [text_of(90, seed=number) for number in range(4)]
    with engine(scene, model, tokens=1024) as kv:
        alone = [ask(kv, prompt, task=f"a{i}", tokens=12).result(60).token_ids for i, prompt in enumerate(prompts)]
    with engine(scene, model, tokens=512) as left, engine(scene, model, tokens=512) as right:
        for kv, mine in ((left, prompts[:2]), (right, prompts[2:])):
            for i, prompt in enumerate(mine):
                ask(kv, prompt, task=f"w{i}", tokens=1)
        answers = []
        for number, prompt in enumerate(prompts):
            kv = left if number % 2 else right
            answers.append(ask(kv, prompt, task=f"b{number}", tokens=12))
        found = [stream.result(60).token_ids for stream in answers]
    assert [len(ids) for ids in alone] == [len(ids) for ids in found]
    if model.geometry.dtype == "float32":  # batches of other shapes round differently, but not by a token here
        assert alone == found


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_is_refused_its_parents_engine(scene, model):
    """At once and in words, instead of waiting for threads that it does not have (E26); the parent goes on."""
    with engine(scene, model, tokens=1024) as kv:
        ask(kv, text_of(60), forced=ids_of("yes")).result(60)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                ask(kv, text_of(60, seed=1), forced=ids_of("yes"))
            except Closed as error:
                code = 0 if "forked child" in str(error) else 2
            finally:
                os._exit(code)
        assert 0 == os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert 3 == len(ask(kv, text_of(60, seed=2), forced=ids_of("yes")).result(60).token_ids)
