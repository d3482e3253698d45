"""Which models the paged engine can run: refusals from the config, then a trial against the model's own attention.

Covers: `refuse` (before any weight is read) and `prove` (two tiny forwards after loading). The config check names the
reason; the trial catches whatever no config check thinks of: a wrong answer is worse than a refusal.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from agentkv.engine.local.attention import IMPLEMENTATION, register
from agentkv.engine.local.packing import pack
from agentkv.engine.local.runner import Runner, Span
from agentkv.errors import ModelError, UnsupportedModel
from agentkv.kv.geometry import BLOCK_TOKENS, Geometry

_LATENT = ("kv_lora_rank", "q_lora_rank")
_RECURRENT = (
    "ssm_state_size", "state_size", "mamba_d_state", "mamba_d_conv", "mamba_expand", "linear_num_key_heads",
    "linear_num_value_heads", "lru_width", "attn_layer_period", "block_types", "rwkv", "conv_L_cache",
)  # fmt: skip
_MODALITIES = ("vision_config", "audio_config", "speech_config", "image_token_id", "vision_start_token_id")
_MOVING_ROPE = ("dynamic", "longrope")
_TRIAL_TOKENS = 24
_TRIAL_CHUNK_TOKENS = 3
# Root mean square difference from the model's own attention, as a share of the logits' spread. Measured: 4e-6 in
# float32, 0.04 in bfloat16 (other matrix shapes round differently); a missing soft cap or bias gives 0.3 and more.
_TOLERANCE = {torch.float32: 0.001, torch.float16: 0.05, torch.bfloat16: 0.15}


def refuse(config: Any, name: str) -> None:
    """Raise UnsupportedModel, with the reason, for an architecture whose KV cannot be kept in our blocks."""
    reason = _reason(config)
    if reason is not None:
        raise UnsupportedModel(
            f"{name} ({config.model_type}) {reason}; the embedded engine runs decoder models in which every layer has"
            f" full attention over keys and values (Llama, Qwen, Mistral without a window and their kin)"
        )


def _reason(config: Any) -> str | None:  # noqa: PLR0911  a list of reasons
    if getattr(config, "is_encoder_decoder", False):
        return "is an encoder-decoder model"
    if any(getattr(config, field, None) is not None for field in _MODALITIES):
        return "reads more than text"
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ()) - {"full_attention"}
    if kinds:
        return f"has layers that are not full attention ({', '.join(sorted(kinds))})"
    window = getattr(text, "sliding_window", None)
    if window is not None and getattr(text, "use_sliding_window", True) and not getattr(text, "layer_types", None):
        return f"attends through a sliding window of {window} tokens"
    for field in _LATENT:
        if getattr(text, field, None):
            return f"keeps a latent instead of keys and values ({field})"
    for field in _RECURRENT:
        if getattr(text, field, None):
            return f"has recurrent or linear-attention layers ({field})"
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    kind = rope.get("rope_type", rope.get("type")) if isinstance(rope, dict) else None
    if kind in _MOVING_ROPE:
        return f"changes its rotary embedding with the context's length ({kind})"
    return None


@torch.inference_mode()
def prove(model: Any, geometry: Geometry, name: str) -> None:
    """Give the model our attention and packed weights, and try that it computes what it did with its own.

    Raises ModelError if its logits are NaN or uniform (broken weights), UnsupportedModel if paged attention fails or
    differs.
    """
    if not getattr(model, "_supports_attention_backend", False):
        raise UnsupportedModel(f"{name} ({model.config.model_type}) does not take attention from outside")
    vocabulary = model.config.get_text_config().vocab_size
    ids = [(7919 * place + 13) % vocabulary for place in range(_TRIAL_TOKENS)]
    device = model.get_input_embeddings().weight.device
    own = model(input_ids=torch.tensor([ids], device=device), use_cache=False).logits[0].float()
    if not bool(own.isfinite().all()) or float(own.std(dim=-1).min()) < 1e-6:  # noqa: PLR2004
        raise ModelError(f"{name} computes NaN or the same score for every token: its weights are broken")
    register()
    pack(model)
    model.set_attn_implementation(IMPLEMENTATION)
    try:
        positions, paged = _paged_trial(model, geometry, ids)
    except Exception as error:
        raise UnsupportedModel(f"{name} ({model.config.model_type}) fails under paged attention: {error}") from error
    own = own[positions]
    difference = float(((paged - own).std(dim=-1) / own.std(dim=-1)).max())
    if not difference <= _TOLERANCE[model.dtype]:
        raise UnsupportedModel(
            f"{name} ({model.config.model_type}) differs from its own attention by {difference:.3f} of its logits'"
            f" spread when paged; it uses something that we do not know"
        )


def _paged_trial(model: Any, geometry: Geometry, ids: list[int]) -> tuple[list[int], torch.Tensor]:
    """Positions and their logits, from a chunk of one block, a short one behind it and then token by token, over
    blocks in reverse order.
    """
    count = -(-len(ids) // BLOCK_TOKENS)
    device = model.get_input_embeddings().weight.device
    pool = torch.zeros(count + 1, *geometry.block_shape, dtype=model.dtype, device=device)
    blocks = list(range(count, 0, -1))
    runner = Runner(model, pool)
    borders = [0, BLOCK_TOKENS, *range(BLOCK_TOKENS + _TRIAL_CHUNK_TOKENS, len(ids) + 1)]
    spans = [
        Span(token_ids=ids[start:end], start=start, blocks=blocks, sample=True)
        for start, end in itertools.pairwise(borders)
    ]
    logits = torch.stack([runner.forward([span])[0].float() for span in spans])
    return [span.end - 1 for span in spans], logits
