"""What a GGUF's metadata and tensors mean for transformers, for the architectures that a test has proven.

Covers the config, the names and the order of weights. A setting that we do not know is a refusal: left out, it would
give a model that computes nonsense without an error. Does not cover files (`gguf_file.py`), writing (`convert.py`).
llama.cpp's names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from agentkv.engine.local.gguf_file import GgufFile
from agentkv.errors import UnsupportedModel

_KINDS = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""Architecture -> transformers' model type."""
_KNOWN = {
    "block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count", "vocab_size",
    "attention.head_count_kv", "attention.layer_norm_rms_epsilon", "attention.key_length", "attention.value_length",
    "rope.freq_base", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.finetuned",
    "rope.scaling.original_context_length", "attention.sliding_window",
}  # fmt: skip
_FREE = ("general.", "tokenizer.", "split.", "quantize.", "GGUF.")
_LEAVES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = re.compile(r"blk\.(?P<layer>\d+)\.(?P<leaf>[a-z_]+)\.(?P<part>weight|bias)")
ROPE_FACTORS = "rope_freqs.weight"
"""Llama 3's rotary embedding, as one factor for each frequency."""


def config_of(file: GgufFile) -> dict[str, Any]:
    """Transformers' config. Raises UnsupportedModel naming the architecture or setting that no test has proven."""
    arch, name = file.architecture, file.files[0].name
    if arch not in _KINDS:
        raise UnsupportedModel(
            f"{name} is a GGUF of architecture {arch!r}; proven are {', '.join(_KINDS)}. Give the model's original "
            f"folder (config.json and safetensors) instead"
        )
    given = {key.removeprefix(f"{arch}."): value for key, value in file.metadata.items() if not key.startswith(_FREE)}
    strange = sorted(set(given) - _KNOWN)
    if strange:
        raise UnsupportedModel(
            f"{name} has a setting that is not known here: {arch}.{strange[0]} = {given[strange[0]]}"
        )
    try:
        config = _config(file, given)
    except KeyError as error:
        raise UnsupportedModel(f"{name} lacks {arch}.{error.args[0]}") from error
    if (window := given.get("attention.sliding_window")) and arch == "llama":
        config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": window}
    elif window:
        raise UnsupportedModel(
            f"{name} has a setting that is not known here: {arch}.attention.sliding_window = {window}"
        )
    return config


def _config(file: GgufFile, given: dict[str, Any]) -> dict[str, Any]:
    arch, metadata = file.architecture, file.metadata
    kind = _KINDS[arch]
    heads, hidden = given["attention.head_count"], given["embedding_length"]
    head_dim = given.get("attention.key_length", hidden // heads)
    rotated = given.get("rope.dimension_count", head_dim)
    if rotated != head_dim or given.get("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModel(f"{file.files[0].name} rotates {rotated} of {head_dim} dimensions of a head")
    ids = {
        name: metadata.get(f"tokenizer.ggml.{field}_token_id")
        for name, field in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding"))
    }
    biased = "blk.0.attn_q.bias" in file.tensors
    return {
        "model_type": kind,
        "architectures": [f"{kind.capitalize()}ForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": given["feed_forward_length"],
        "num_hidden_layers": given["block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": given.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": given["context_length"],
        "rms_norm_eps": given["attention.layer_norm_rms_epsilon"],
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_parameters": _rope(file, given),
        **ids,
        **({"attention_bias": biased} if kind != "qwen2" else {}),
    }


def _rope(file: GgufFile, given: dict[str, Any]) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(given.get("rope.freq_base", 10_000.0))}
    kind = given.get("rope.scaling.type", "none")
    if kind == "linear":
        rope |= {"rope_type": "linear", "factor": float(given["rope.scaling.factor"])}
    elif kind == "yarn":
        original = given["rope.scaling.original_context_length"]
        factor = float(given["rope.scaling.factor"])
        rope |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    elif kind != "none":
        raise UnsupportedModel(f"{file.files[0].name} scales its rotary embedding in a way not known here: {kind}")
    return rope


def llama3_rope(factors: Sequence[float], *, theta: float, head_dim: int) -> dict[str, Any] | None:
    """The parameters of Llama 3's rotary embedding that give these factors; None if none do.

    A GGUF keeps the factor of each frequency only. The largest is `factor`; the original context follows from the
    others, and what is found is checked against all of them. (Formula: Llama 3.1's reference code.)
    """
    factor = float(max(factors))
    for exponent in range(5, 21):
        original = 1 << exponent
        wanted = [
            _llama3_factor(2 * math.pi * theta ** (2 * i / head_dim), factor, original) for i in range(len(factors))
        ]
        if all(math.isclose(one, other, rel_tol=1e-4) for one, other in zip(wanted, factors, strict=True)):
            return {
                "rope_type": "llama3", "rope_theta": theta, "factor": factor, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": original,
            }  # fmt: skip
    return None


def _llama3_factor(wavelength: float, factor: float, original: int, low: float = 1.0, high: float = 4.0) -> float:
    if wavelength < original / high:
        return 1.0
    if wavelength > original / low:
        return factor
    smooth = (original / wavelength - low) / (high - low)
    return 1 / ((1 - smooth) / factor + smooth)


def weight_name(name: str) -> str | None:
    """Transformers' name of a tensor; None for one that is no weight (rotary factors, which are part of the config)."""
    if name == ROPE_FACTORS:
        return None
    stem, _, part = name.rpartition(".")
    if stem in _OUTER:
        return f"{_OUTER[stem]}.{part}"
    match = _LAYER.fullmatch(name)
    if match is None or match["leaf"] not in _LEAVES:
        raise UnsupportedModel(f"a GGUF with a tensor that is not known here: {name}")
    return f"model.layers.{match['layer']}.{_LEAVES[match['leaf']]}.{match['part']}"


def interleaved_heads(file: GgufFile, name: str) -> int:
    """How many heads' rows of this tensor llama.cpp stores in pairs (its rotary order); 0: as transformers has them."""
    if file.architecture != "llama":
        return 0
    heads = int(file.metadata["llama.attention.head_count"])
    if ".attn_q." in name:
        return heads
    return int(file.metadata.get("llama.attention.head_count_kv", heads)) if ".attn_k." in name else 0
