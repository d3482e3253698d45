"""Costs: seconds and bytes of one engine on one machine, computed from a model's config and a card's data sheet.

Covers parameters, bytes per token (MHA, GQA, MQA, MLA), prefill, decode, and the room for KV. Facts are `hardware.py`;
measured rates come in through `from_rates`. A roofline with stated efficiencies, no kernel model: trust it to ~30 %.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentkv.core.rates import OVERLAP, Prefill, Rates
from agentkv.errors import ConfigError
from agentkv.sim.hardware import MODELS, Gpu, gpu_named, nearest
from agentkv.units import GIB

MATMUL_EFFICIENCY = 0.55
"""Share of the data sheet's FLOP/s that prefill matmuls reach in serving engines (0.5-0.65 are reported)."""

ATTENTION_EFFICIENCY = 0.35
"""The same for causal attention over a long context."""

BANDWIDTH_EFFICIENCY = 0.75
"""Share of the memory bandwidth that decode reaches."""

MEMORY_SHARE = 0.9
"""Share of the device's memory that engines take."""

WORKSPACE_BYTES = 1.5e9
"""Activations, graphs and the runtime, per device."""

STEP_S = 0.004
"""What a step costs besides its matmuls: launches, sampling, scheduling."""

NVME_READ_BYTES_S = 6.5e9
NVME_WRITE_BYTES_S = 4.5e9
"""A PCIe 4 x4 NVMe drive's sequential rates, as data sheets give them (about 7 and 5 GB/s), less the file system."""

_ITEM_BYTES = {"bfloat16": 2.0, "float16": 2.0, "float32": 4.0, "float8_e4m3fn": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What the simulator and the planner reckon with.

    `token_bytes`: KV of one token in all layers. A decode step takes decode_base_s + decode_per_token_s x (tokens of
    context of all sessions in the step). `device_bytes`: room for KV. `read_bytes_s`, `write_bytes_s`: None without a
    disk. `token_budget`: new tokens in one step (chunked prefill).
    """

    token_bytes: int
    prefill: Prefill
    decode_base_s: float
    decode_per_token_s: float
    h2d_bytes_s: float
    d2h_bytes_s: float
    read_bytes_s: float | None = None
    write_bytes_s: float | None = None
    device_bytes: float
    host_bytes: float
    disk_bytes: float = 0.0
    token_budget: int = 8192
    context_tokens: int = 131_072
    model: str = ""
    gpu: str = ""

    def __post_init__(self) -> None:
        if self.token_bytes < 1 or self.device_bytes < self.token_bytes:
            raise ConfigError(f"device_bytes={self.device_bytes:.0f} holds no token of {self.token_bytes} bytes")
        if min(self.h2d_bytes_s, self.d2h_bytes_s) <= 0 or min(self.host_bytes, self.disk_bytes) < 0:
            raise ConfigError("links need rates > 0 and tiers sizes >= 0")

    @property
    def device_tokens(self) -> int:
        """Tokens of KV that the device holds."""
        return int(self.device_bytes // self.token_bytes)

    def load_s(self, tokens: int) -> float:
        """Seconds to copy the KV of `tokens` from host memory to the device on an idle link."""
        return tokens * self.token_bytes / self.h2d_bytes_s

    def read_s(self, tokens: int) -> float | None:
        """Seconds to bring the KV of `tokens` from disk to the device; None without a disk."""
        if self.read_bytes_s is None:
            return None
        return tokens * self.token_bytes / self.read_bytes_s + OVERLAP * self.load_s(tokens)

    def decode_s(self, context_tokens: int) -> float:
        """Seconds of one step that decodes one token each for sessions with `context_tokens` in all."""
        return self.decode_base_s + self.decode_per_token_s * context_tokens

    def rates(self) -> Rates:
        """The same as `agentkv calibrate` would have found it, for policies and crossovers."""
        return Rates(
            memcpy_bytes_s=max(self.h2d_bytes_s, self.d2h_bytes_s),
            h2d_bytes_s=self.h2d_bytes_s,
            d2h_bytes_s=self.d2h_bytes_s,
            read_bytes_s=self.read_bytes_s,
            write_bytes_s=self.write_bytes_s,
            prefill=self.prefill,
        )


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


def costs_for(
    model: str | Path,
    gpu: str,
    *,
    gpus: int = 1,
    link_bytes_s: float | None = None,
    host_bytes: float = 256 * GIB,
    disk_bytes: float = 0.0,
    read_bytes_s: float = NVME_READ_BYTES_S,
    write_bytes_s: float = NVME_WRITE_BYTES_S,
    device_bytes: float | None = None,
    token_budget: int = 8192,
) -> Costs:
    """Costs of `model` (a known name, a config.json or its folder) on `gpus` cards of the type `gpu`.

    Several cards are one tensor-parallel engine with a link each. `link_bytes_s` replaces one card's host link,
    `device_bytes` the computed room for KV. `disk_bytes` 0: no disk. Raises ConfigError on an unknown model or card
    (naming the nearest known) and where the weights leave no room.
    """
    shape = shape_of(model)
    card = gpu_named(gpu)
    card = card.times(card.count * gpus) if gpus > 1 else card
    link = (link_bytes_s or card.link_bytes_s) * card.count
    room = device_room(shape, card) if device_bytes is None else device_bytes
    matmul_s = 2 * shape.active_parameters / (card.flops_s * card.count * MATMUL_EFFICIENCY)
    memory_s = card.memory_bytes_s * card.count * BANDWIDTH_EFFICIENCY
    # causal attention: QK^T and PV over half of C^2 pairs, 2 FLOP each per head and dimension
    pair_flop = shape.layers * shape.heads * (shape.score_dim + shape.value_dim)
    return Costs(
        token_bytes=shape.token_bytes,
        prefill=Prefill(
            quadratic_s=pair_flop / (card.flops_s * card.count * ATTENTION_EFFICIENCY),
            linear_s=matmul_s,
            constant_s=STEP_S,
        ),
        decode_base_s=STEP_S + shape.active_parameters * shape.weight_item_bytes / memory_s,
        decode_per_token_s=shape.token_bytes / memory_s,
        h2d_bytes_s=link,
        d2h_bytes_s=link,
        read_bytes_s=read_bytes_s if disk_bytes else None,
        write_bytes_s=write_bytes_s if disk_bytes else None,
        device_bytes=room,
        host_bytes=host_bytes,
        disk_bytes=disk_bytes,
        token_budget=token_budget,
        context_tokens=shape.context_tokens,
        model=shape.name,
        gpu=card.name,
    )


def from_rates(
    rates: Rates,
    *,
    token_bytes: int,
    device_bytes: float,
    host_bytes: float,
    disk_bytes: float = 0.0,
    decode_base_s: float | None = None,
    decode_per_token_s: float = 0.0,
    token_budget: int = 512,
    context_tokens: int = 8192,
    model: str = "",
    gpu: str = "",
) -> Costs:
    """Costs from measured rates (`agentkv calibrate`). Without `decode_base_s` a step costs what one token's prefill does."""
    prefill = rates.prefill
    return Costs(
        token_bytes=token_bytes,
        prefill=prefill,
        decode_base_s=prefill.constant_s + prefill.linear_s if decode_base_s is None else decode_base_s,
        decode_per_token_s=decode_per_token_s,
        h2d_bytes_s=rates.h2d_bytes_s,
        d2h_bytes_s=rates.d2h_bytes_s,
        read_bytes_s=rates.read_bytes_s if disk_bytes else None,
        write_bytes_s=rates.write_bytes_s if disk_bytes else None,
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        disk_bytes=disk_bytes,
        token_budget=token_budget,
        context_tokens=context_tokens,
        model=model,
        gpu=gpu,
    )


def device_room(shape: Shape, card: Gpu) -> float:
    """Bytes for KV on all cards: share x memory - weights - workspace. Raises ConfigError if nothing is left."""
    room = card.count * (MEMORY_SHARE * card.memory_bytes - WORKSPACE_BYTES) - shape.weight_bytes
    if room < shape.token_bytes:
        raise ConfigError(
            f"{shape.name}: weights of {shape.weight_bytes / 1e9:.1f} GB leave no room for KV on {card.name} "
            f"({card.count * card.memory_bytes / 1e9:.0f} GB); use more or larger cards"
        )
    return room


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
    item = _ITEM_BYTES.get(str(source.get("torch_dtype") or source.get("dtype") or config.get("torch_dtype")), 2.0)
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
        weight_item_bytes=item,
        kv_item_bytes=max(item, 2.0),
        context_tokens=_size(source, name, "max_position_embeddings", "n_positions", default=131_072),
    )


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
