"""A Llama with random weights and a tokenizer of one token per byte, made here: no file, no download.

On a GPU it has Llama 3 8B's shape in bfloat16 (the KV geometry too), small it has two layers in float32.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from agentkv.core.residency import Action, Move, Tier
from agentkv.engine.local.engine import LocalEngine
from agentkv.engine.local.loader import LoadedModel
from agentkv.engine.local.support import prove
from agentkv.errors import UnsupportedModel
from agentkv.kv.geometry import Geometry
from gpu_sections.scene import MIB, Scene

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
END = "<|im_end|>"
_SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2, "vocab_size": 259, "initializer_range": 0.4, "max_position_embeddings": 4096,
}  # fmt: skip
_LARGE = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "head_dim": 128, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 65536,
}  # fmt: skip


def tokenizer() -> Any:
    """One token per byte and an end token."""
    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(LETTERS)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END)


@functools.lru_cache(maxsize=1)
def random_llama(device: str, *, small: bool, seed: int = 0) -> LoadedModel:
    """The model, proven to run on paged attention as a loaded one is."""
    torch.manual_seed(seed)
    config = LlamaConfig(**(_SMALL if small else _LARGE), bos_token_id=None, eos_token_id=256, pad_token_id=None)
    where = torch.device("cuda:0" if device == "cuda" else device)
    dtype = torch.float32 if small else torch.bfloat16
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with where:  # weights are drawn where they stay: on a CPU 8 billion would take minutes
            model = LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)
    geometry = Geometry.from_hf_config(config, str(dtype).removeprefix("torch."))
    try:
        prove(model, geometry, "random llama")
    except UnsupportedModel as error:  # its rounding in bfloat16 over many random layers is not the question here
        print(f"the trial said: {error}", file=sys.stderr)
    return LoadedModel(
        name="random-llama",
        model=model,
        tokenizer=tokenizer(),
        device=where,
        geometry=geometry,
        fingerprint=b"random-llama-%d" % seed,
        context_tokens=config.max_position_embeddings,
        vocabulary=config.vocab_size,
        eos_ids=frozenset({256}),
    )


def text_of(tokens: int, *, seed: int = 0) -> str:
    """So many bytes, hence tokens, of something like prose; `seed` changes it from the first word on."""
    words = (f"{seed}:{n * 7919 % 10007} the ledger says {n}, " for n in range(tokens))
    text = ""
    while len(text) < tokens:
        text += next(words)
    return text[:tokens]


def ids_of(text: str) -> tuple[int, ...]:
    """The tokens of a text in ASCII."""
    place = {letter: i for i, letter in enumerate(LETTERS)}
    return tuple(place["\u0120" if letter == " " else letter] for letter in text)


@contextmanager
def engine(scene: Scene, model: LoadedModel, *, tokens: int, disk: Path | None = None) -> Iterator[LocalEngine]:
    """An engine whose device and host memory hold so many tokens each, and its disk as many."""
    size = tokens * model.geometry.token_bytes
    with LocalEngine(
        model,
        device_memory=size,
        host_memory=max(size, 2 * model.geometry.slot_bytes),
        disk=disk,
        disk_memory=max(2 * size, 64 * MIB) if disk else 0,
        chunk_tokens=256 if scene.small else 2048,
    ) as made:
        yield made


def send_down(kv: LocalEngine, session: str, tier: Tier) -> None:
    """Write the session to `tier` and give up its copies in the dearer ones, whatever the pressure."""
    kv.apply(Move(session=session, action=Action.DEMOTE, to=tier, reason="benchmark"))
    kv.tiers.quiesce(120)
    for dearer in (Tier.DEVICE, Tier.HOST)[: int(tier)]:
        kv.tiers.vacate(session, dearer)
    facts = kv.residency(session)
    assert facts is not None
    assert facts.device_blocks == 0, f"{facts.device_blocks} blocks are still on the device"
    assert tier == Tier.HOST or facts.host_blocks == 0, f"{facts.host_blocks} blocks are still in host memory"
