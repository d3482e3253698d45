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
from agentkv.engine.local.gguf_settings import Settings, damaged
from agentkv.engine.local.unread import shapes_of
from agentkv.errors import AgentKVError, ModelError, UnsupportedModel

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
    """Transformers' config, of which the file has every weight and no other.

    Raises UnsupportedModel naming the architecture or setting that no test has proven, ModelError naming what is damaged.
    """
    arch, name = file.architecture, file.files[0].name
    if arch not in _KINDS:
        raise UnsupportedModel(
            f"{name} is a GGUF of architecture {arch!r}; proven are {', '.join(_KINDS)}. Give the model's original "
            f"folder (config.json and safetensors) instead"
        )
    given = {key.removeprefix(f"{arch}.") for key in file.metadata if not key.startswith(_FREE)}
    strange = sorted(given - _KNOWN)
    if strange:
        raise UnsupportedModel(
            f"{name} has a setting that is not known here: {arch}.{strange[0]} = {file.metadata.get(f'{arch}.{strange[0]}')}"
        )
    try:
        config = _config(file, Settings(file))
        end_ids(file)
        _compare(file, config)
    except AgentKVError:
        raise
    except Exception as error:  # numbers that fit each other in no way break a model's class in any way
        raise ModelError(f"{file.files[0]} has settings of which no model can be made: {error!r}") from error
    return config


def _config(file: GgufFile, settings: Settings) -> dict[str, Any]:
    arch = file.architecture
    kind = _KINDS[arch]
    hidden, heads = settings.whole("embedding_length"), settings.whole("attention.head_count")
    head_dim = settings.whole("attention.key_length", hidden // heads)
    kv_heads = settings.whole("attention.head_count_kv", heads)
    rotated = settings.whole("rope.dimension_count", head_dim)
    if rotated != head_dim or settings.whole("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModel(f"{file.files[0].name} rotates {rotated} of {head_dim} dimensions of a head")
    if heads % kv_heads or head_dim % 2:
        raise ModelError(
            f"{file.files[0]} is damaged: it has {heads} heads of {head_dim} dimensions over {kv_heads} of keys and values"
        )
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.files[0]} lacks token_embd.weight")
    config = {
        "model_type": kind,
        "architectures": [f"{kind.capitalize()}ForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": settings.whole("feed_forward_length"),
        "num_hidden_layers": _layers(file, settings),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": settings.whole("context_length"),
        "rms_norm_eps": settings.number("attention.layer_norm_rms_epsilon"),
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_parameters": _rope(file, settings),
        **{f"{name}_token_id": _token_id(file, name) for name in ("bos", "eos")},
        "pad_token_id": _token_id(file, "padding"),
        **({"attention_bias": "blk.0.attn_q.bias" in file.tensors} if kind != "qwen2" else {}),
    }
    if window := settings.whole("attention.sliding_window", 0, least=0):
        if arch != "llama":
            raise UnsupportedModel(
                f"{file.files[0].name} has a setting that is not known here: {arch}.attention.sliding_window = {window}"
            )
        config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": window}
    return config


def _layers(file: GgufFile, settings: Settings) -> int:
    """How many the file says it has, if its tensors are of so many."""
    layers = settings.whole("block_count")
    found = {int(match["layer"]) for name in file.tensors if (match := _LAYER.fullmatch(name))}
    if max(found, default=-1) >= layers:
        raise ModelError(f"{file.files[0]} has weights of layer {max(found)}, but says that it has {layers} layers")
    missing = next((layer for layer in range(layers) if layer not in found), None)
    if missing is not None:
        raise ModelError(f"{file.files[0]} says that it has {layers} layers, but lacks the weights of layer {missing}")
    return layers


def _compare(file: GgufFile, config: dict[str, Any]) -> None:
    """Raise ModelError where the file's weights are not those that a model of this config reads, by name and shape."""
    wanted = shapes_of(config)
    found = {weight: tensor for name, tensor in file.tensors.items() if (weight := weight_name(file, name)) is not None}
    missing = sorted(set(wanted) - set(found))
    if missing:
        raise ModelError(
            f"{file.files[0].name} lacks {len(missing)} weights, for instance {missing[0]}; the file is incomplete"
        )
    extra = [found[name].name for name in sorted(set(found) - set(wanted))]
    if extra:
        raise ModelError(
            f"{file.files[0].name} brings {len(extra)} tensors that a model of its settings does not read, for instance "
            f"{', '.join(extra[:3])}"
        )
    wrong = [name for name in sorted(wanted) if wanted[name] != found[name].shape]
    if wrong:
        raise ModelError(
            f"{file.files[0].name} has {len(wrong)} weights of another shape than its settings say, for instance "
            f"{found[wrong[0]].name}: {found[wrong[0]].shape}, not {wanted[wrong[0]]}"
        )
    factors = file.tensors.get(ROPE_FACTORS)
    if factors is not None and (factors.kind, factors.shape) != (0, (config["head_dim"] // 2,)):
        raise ModelError(f"{file.files[0].name} has rotary factors that are not one float32 for each frequency")


def _rope(file: GgufFile, settings: Settings) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": settings.number("rope.freq_base", 10_000.0)}
    scaled = "linear" if settings.has("rope.scaling.factor") else "none"  # as llama.cpp takes a factor without a type
    kind = settings.value("rope.scaling.type", scaled)
    if kind == "linear":
        rope |= {"rope_type": "linear", "factor": settings.number("rope.scaling.factor")}
    elif kind == "yarn":
        original = settings.whole("rope.scaling.original_context_length")
        factor = settings.number("rope.scaling.factor")
        rope |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    elif kind != "none":
        raise UnsupportedModel(f"{file.files[0].name} scales its rotary embedding in a way not known here: {kind}")
    return rope


def end_ids(file: GgufFile) -> list[int]:
    """The tokens that end a turn, by all names there are for them."""
    found = {_token_id(file, name) for name in ("eos", "eot", "eom")}
    return sorted(id_ for id_ in found if id_ is not None)


def _token_id(file: GgufFile, name: str) -> int | None:
    """The id of the tokenizer's "eos", "padding", ...; None where it has none. Raises ModelError if no token has it."""
    key, rows = f"tokenizer.ggml.{name}_token_id", file.tensors["token_embd.weight"].shape[0]
    id_ = file.metadata.get(key)
    if id_ is None or (type(id_) is int and 0 <= id_ < rows):
        return id_
    raise damaged(file, key, f"a vocabulary of {rows} has no such token")


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


def weight_name(file: GgufFile, name: str) -> str | None:
    """Transformers' name of a tensor; None for one that is no weight (rotary factors, which are part of the config)."""
    if name == ROPE_FACTORS:
        return None
    stem, _, part = name.rpartition(".")
    if stem in _OUTER:
        return f"{_OUTER[stem]}.{part}"
    match = _LAYER.fullmatch(name)
    if match is None or match["leaf"] not in _LEAVES:
        raise UnsupportedModel(f"{file.files[0].name} has a tensor that is not known here: {name}")
    return f"model.layers.{match['layer']}.{_LEAVES[match['leaf']]}.{match['part']}"


def interleaved_heads(file: GgufFile, name: str) -> int:
    """How many heads' rows of this tensor llama.cpp stores in pairs (its rotary order); 0: as transformers has them."""
    if file.architecture != "llama":
        return 0
    heads = int(file.metadata["llama.attention.head_count"])
    if ".attn_q." in name:
        return heads
    return int(file.metadata.get("llama.attention.head_count_kv", heads)) if ".attn_k." in name else 0
