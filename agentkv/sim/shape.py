"""A model's sizes from its Hugging Face config: parameters, and bytes of KV per token (MHA, GQA, MQA, MLA).

Covers dense models and mixtures of experts. Does not load anything, and does not say whether our engine can run it.
Norms and biases are left out of the parameters (under 0.1 %).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentkv.errors import ConfigError
from agentkv.sim.hardware import MODELS, nearest

_ITEM_BYTES = {"bfloat16": 2.0, "float16": 2.0, "float32": 4.0, "float8_e4m3fn": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model's sizes as costs need them. `kv_numbers`: numbers kept per token and layer."""

    name: str
    layers: int
    hidden: int
    heads: int
    score_dim: int
    value_dim: int
    kv_numbers: int
    parameters: float
    active_parameters: float
    weight_item_bytes: float
    kv_item_bytes: float
    context_tokens: int

    @property
    def token_bytes(self) -> int:
        """KV of one token in all layers: layers x kv_numbers x item bytes (MHA, GQA, MQA: 2 x kv_heads x head_dim)."""
        return int(self.layers * self.kv_numbers * self.kv_item_bytes)

    @property
    def weight_bytes(self) -> float:
        """All weights."""
        return self.parameters * self.weight_item_bytes


def shape_of(model: str | Path) -> Shape:
    """The sizes of a known model, or of a config.json given as a path or as its folder. Raises ConfigError."""
    name = str(model)
    key = name.lower().rsplit("/", 1)[-1].removesuffix("-instruct")
    path = Path(model)
    if path.is_dir():
        path /= "config.json"
    if not path.is_file():
        if key in MODELS:
            return shape_from_config(MODELS[key], key)
        raise ConfigError(f"model={name!r} is neither a known name nor a config.json; {nearest(key, MODELS)}")
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"model={name!r}: {path} is not a readable config: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"model={name!r}: {path} holds no JSON object")
    return shape_from_config(config, path.parent.name if path.name == "config.json" else path.stem)


def shape_from_config(config: Mapping[str, Any], name: str) -> Shape:
    """Sizes from a Hugging Face config; a `text_config` inside it is used if there is one. Raises ConfigError."""
    text = config.get("text_config")
    source: Mapping[str, Any] = text if isinstance(text, Mapping) else config
    layers = _size(source, name, "num_hidden_layers", "n_layer", "num_layers")
    heads = _size(source, name, "num_attention_heads", "n_head", "num_heads")
    hidden = _size(source, name, "hidden_size", "n_embd", "d_model")
    wide = 1 if source.get("multi_query") else heads
    kv_heads = _size(source, name, "num_key_value_heads", "num_kv_heads", default=wide)
    head_dim = _size(source, name, "head_dim", default=max(1, hidden // heads))
    vocab = _size(source, name, "vocab_size", default=0)
    inner = _size(source, name, "intermediate_size", "n_inner", "ffn_dim", default=4 * hidden)
    latent = source.get("kv_lora_rank")
    if latent:
        rank = _size(source, name, "kv_lora_rank")
        rope = _size(source, name, "qk_rope_head_dim", default=0)
        nope = _size(source, name, "qk_nope_head_dim", default=head_dim)
        value = _size(source, name, "v_head_dim", default=head_dim)
        query = source.get("q_lora_rank")
        queries = hidden * query + query * heads * (nope + rope) if query else hidden * heads * (nope + rope)
        attention = queries + hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden
        kv_numbers, score_dim, value_dim = rank + rope, nope + rope, value
    else:
        attention = 2 * hidden * heads * head_dim + 2 * hidden * kv_heads * head_dim
        kv_numbers, score_dim, value_dim = 2 * kv_heads * head_dim, head_dim, head_dim
    total, active = _feed_forward(source, name, layers, hidden, inner)
    embeddings = vocab * hidden * (1 if source.get("tie_word_embeddings") else 2)
    item = _item_bytes(config, source)
    return Shape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        score_dim=score_dim,
        value_dim=value_dim,
        kv_numbers=kv_numbers,
        parameters=float(layers * attention + total + embeddings),
        active_parameters=float(layers * attention + active + vocab * hidden),
        weight_item_bytes=_quantised(config, source, item),
        kv_item_bytes=max(item, 2.0),
        context_tokens=_size(source, name, "max_position_embeddings", "n_positions", default=131_072),
    )


def _item_bytes(config: Mapping[str, Any], source: Mapping[str, Any]) -> float:
    """Bytes of a number in the model's own type; 2 where it names none."""
    for part in (source, config):
        for name in ("torch_dtype", "dtype"):
            if part.get(name) is not None:
                return _ITEM_BYTES.get(str(part[name]).removeprefix("torch."), 2.0)
    return 2.0


def _quantised(config: Mapping[str, Any], source: Mapping[str, Any], item_bytes: float) -> float:
    """Bytes of a weight: 8 bits for fp8, `bits` for the others that name them (scales left out)."""
    told = config.get("quantization_config") or source.get("quantization_config")
    if not isinstance(told, Mapping):
        return item_bytes
    if told.get("quant_method") == "fp8":
        return 1.0
    bits = told.get("bits", 4 if told.get("load_in_4bit") else 8 if told.get("load_in_8bit") else None)
    return bits / 8 if isinstance(bits, int) and bits in (2, 3, 4, 8) else item_bytes


def _feed_forward(source: Mapping[str, Any], name: str, layers: int, hidden: int, inner: int) -> tuple[float, float]:
    """Parameters of all feed-forward layers, and those that one token uses (mixtures of experts)."""
    experts = _size(source, name, "n_routed_experts", "num_local_experts", "num_experts", default=0)
    matrices = 2 if "n_inner" in source or "ffn_dim" in source or source.get("n_embd") else 3
    dense = matrices * hidden * inner
    if not experts:
        return float(layers * dense), float(layers * dense)
    expert = matrices * hidden * _size(source, name, "moe_intermediate_size", default=inner)
    used = _size(source, name, "num_experts_per_tok", default=1)
    shared = _size(source, name, "n_shared_experts", default=0)
    first = min(layers, _size(source, name, "first_k_dense_replace", default=0))
    mixed = layers - first
    return (
        float(first * dense + mixed * (experts + shared) * expert),
        float(first * dense + mixed * (used + shared) * expert),
    )


def _size(source: Mapping[str, Any], model: str, *names: str, default: int | None = None) -> int:
    for name in names:
        value = source.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < (0 if default == 0 else 1):
            raise ConfigError(f"{model}: {name}={value!r} in the config is not a size")
        return value
    if default is None:
        raise ConfigError(f"{model}: the config has none of {', '.join(names)}")
    return default
