"""What a model's config says about its attention: windows, rotary embedding, context, and what we cannot run.

Covers reading a Hugging Face config, without torch or weights. Does not cover the proof on real weights (`support.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_LATENT = ("kv_lora_rank", "q_lora_rank")
_RECURRENT = (
    "ssm_state_size", "state_size", "mamba_d_state", "mamba_d_conv", "mamba_expand", "linear_num_key_heads",
    "linear_num_value_heads", "lru_width", "attn_layer_period", "block_types", "rwkv", "conv_L_cache",
)  # fmt: skip
_MODALITIES = ("vision_config", "audio_config", "speech_config", "image_token_id", "vision_start_token_id")
_SHARED = ("num_kv_shared_layers", "attention_k_eq_v", "global_head_dim", "num_global_key_value_heads")
_FULL, _SLIDING = "full_attention", "sliding_attention"
_ROPES = ("default", "linear", "llama3", "yarn", "dynamic", "longrope")
"""Rotary embeddings that a test proves; `dynamic` and `longrope` up to the length at which they would change."""
_CONTEXTS = ("max_position_embeddings", "n_positions", "max_sequence_length")


def windows(config: Any) -> tuple[int, ...]:
    """Per layer: how many tokens back it attends to, itself included; 0 for all of them."""
    text = config.get_text_config()
    layers: int = text.num_hidden_layers
    window: int = getattr(text, "sliding_window", None) or 0
    kinds = getattr(text, "layer_types", None)
    if kinds:
        return tuple(window if kind == _SLIDING else 0 for kind in kinds[:layers])
    return (window if getattr(text, "use_sliding_window", True) else 0,) * layers


def window_tokens(config: Any) -> int:
    """How far back the layer sees that sees furthest, the token itself included; 0: one of them sees everything."""
    found = windows(config)
    return max(found) if all(found) else 0


def rope_kinds(config: Any) -> set[str]:
    """The rotary embeddings of all layers, by transformers' names."""
    return {str(rope.get("rope_type", rope.get("type", "default"))) for rope in _ropes(config)}


def _ropes(config: Any) -> list[Mapping[str, Any]]:
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    if not isinstance(rope, Mapping):
        return []
    nested = [one for one in rope.values() if isinstance(one, Mapping)]
    return nested or [rope]


def context_tokens(config: Any) -> tuple[int, str]:
    """(the longest context whose KV stays as it was computed, why it is shorter than the model's own, or "").

    0 where the config does not say. A longrope embedding changes all keys when a context outgrows the length of its
    short factors, so blocks computed before would be wrong: the context ends there. A dynamic one does so behind
    `max_position_embeddings`, where the context ends anyway.
    """
    text = config.get_text_config()
    own = next((int(value) for name in _CONTEXTS if (value := getattr(text, name, None))), 0)
    lengths = [
        int(rope.get("original_max_position_embeddings") or text.original_max_position_embeddings)
        for rope in _ropes(config)
        if rope.get("rope_type", rope.get("type")) == "longrope"
    ]
    if lengths and own and min(lengths) < own:
        return min(lengths), f"its longrope embedding changes behind {min(lengths)} tokens"
    return own, ""


def refusal(config: Any) -> str | None:
    """Why a model of this config cannot be paged, naming the feature; None if nothing in the config forbids it."""
    text = config.get_text_config()
    return (
        _other_input(config)
        or _other_state(text)
        or _other_layers(text)
        or next(
            (f"has a rotary embedding that no test has proven ({kind})" for kind in rope_kinds(config) - set(_ROPES)),
            None,
        )
    )


def _other_input(config: Any) -> str | None:
    if getattr(config, "is_encoder_decoder", False):
        return "is an encoder-decoder model"
    if any(getattr(config, field, None) is not None for field in _MODALITIES):
        return "reads more than text"
    if getattr(config.get_text_config(), "use_bidirectional_attention", None):
        return "attends to later tokens too (use_bidirectional_attention)"
    return None


def _other_state(text: Any) -> str | None:
    for field in _LATENT:
        if getattr(text, field, None):
            return f"keeps a latent instead of keys and values ({field})"
    for field in _RECURRENT:
        if getattr(text, field, None):
            return f"has recurrent or linear-attention layers ({field})"
    for field in _SHARED:
        if getattr(text, field, None):
            return f"has layers whose keys and values differ in shape or are shared ({field})"
    return None


def _other_layers(text: Any) -> str | None:
    kinds = set(getattr(text, "layer_types", None) or ())
    strange = kinds - {_FULL, _SLIDING}
    if strange:
        return f"has layers that are neither full nor sliding-window attention ({', '.join(sorted(strange))})"
    if _SLIDING in kinds and not getattr(text, "sliding_window", None):
        return "has sliding-window layers but names no window (sliding_window)"
    return None
