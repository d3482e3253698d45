"""The embedded engine at a known speed: real batches, tiers, policy and threads over a tiny model; a step is a sleep.

A machine that others use as well is never twice as fast as it was (docs/validation.md). Here each step lasts what a
formula says, tools are sleeps, and what is left to predict is who waits for whom. Used by `validate.py` and by
tests/engine/local/test_paced_replay.py.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentkv_langgraph.demo import chronicle

from agentkv import AgentKV
from agentkv.core.task import Caller
from agentkv.engine.base import Request, Sampling
from agentkv.policy import make_policy
from agentkv.sim import record as records

BASE_S, PER_TOKEN_S, LINEAR_S, QUADRATIC_S = 0.03, 4e-6, 6e-4, 2e-7
TASKS, TURNS, ANSWER = 4, 5, 24
SIZES = ((60, 400), (90, 400), (200, 400), (60, 70))
"""Device and host blocks: short of memory, nearly enough, plenty; and so little of both that tasks are held back."""
LADDER = {"name": "ladder", "keep_s": 0.3, "host_s": 60.0, "drop_tokens": 16}


def paced(engine: Any) -> None:
    """Make each step last what the constants say."""
    forward = engine._runner.forward

    def slow(spans: Any) -> Any:
        began_s = time.perf_counter()
        logits = forward(spans)
        ones = [span for span in spans if len(span.token_ids) == 1]
        chunks = [span for span in spans if len(span.token_ids) > 1]
        lasts_s = BASE_S + PER_TOKEN_S * sum(span.end for span in ones)
        lasts_s += sum(LINEAR_S * len(c.token_ids) + QUADRATIC_S * (c.end**2 - c.start**2) for c in chunks)
        time.sleep(max(0.0, lasts_s - (time.perf_counter() - began_s)))
        return logits

    engine._runner.forward = slow


def work(kv: AgentKV, key: str, seed: int) -> None:
    """One task: calls with growing prompts and forced answers, and naps between them."""
    rng = random.Random(seed)  # noqa: S311  chance that can be repeated, no secret
    prompt = "".join(rng.choices("abcdefgh", k=120))
    with kv.task(key):
        for turn in range(TURNS):
            answer = tuple(rng.choices(range(70, 80), k=ANSWER))
            request = Request(
                prompt=prompt, sampling=Sampling(max_tokens=ANSWER), forced_ids=answer, caller=Caller(task=key)
            )
            prompt += kv.submit(request).result(120).text
            if turn < TURNS - 1:
                with kv.tool("nap", args={"cmd": "sleep"}):
                    time.sleep(rng.uniform(0.05, 0.7))
                prompt += "".join(rng.choices("abcdefgh", k=rng.randint(60, 180)))


def recorded(engine: Any, path: Path, *, seed: int = 0) -> records.Record:
    """All tasks at once on `engine`, and what became of them."""
    paced(engine)
    with AgentKV.with_engine(engine, policy=make_policy(**LADDER), ledger="memory") as kv:  # type: ignore[arg-type]
        receipts = chronicle.Receipts(kv)
        keys = [f"task-{n}" for n in range(TASKS)]
        tasks = [threading.Thread(target=work, args=(kv, key, 100 * seed + n)) for n, key in enumerate(keys)]
        for task in tasks:
            task.start()
        for task in tasks:
            task.join()
        bills = {key: kv.report(key) for key in keys}
        run = chronicle.Run(bills=bills, receipts=receipts, stats=kv.stats(), model=engine.model, policy=LADDER)
        chronicle.write(path, run)
    return records.read(path)


def tiny_engines(folder: Path) -> Callable[[int, int], Any]:
    """make(device blocks, host blocks): engines over a tiny model of random weights with a token for each byte."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    from agentkv.engine.local.engine import LocalEngine
    from agentkv.engine.local.loader import load_model

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>").save_pretrained(folder)  # noqa: S106
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, head_dim=16,
        num_key_value_heads=2, max_position_embeddings=1024, vocab_size=257, bos_token_id=256, eos_token_id=256,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    model = load_model(str(folder), device="cpu", dtype="float32")

    def make(blocks: int, host: int) -> Any:
        sizes = model.geometry
        return LocalEngine(model, device_memory=blocks * sizes.block_bytes, host_memory=host * sizes.slot_bytes)

    return make
