"""Models the paged engine can run: refusals from the config, then a trial against the model's own attention.

Covers: `refuse` (before any weight is read) and `prove` (two tiny forwards after loading). The config check names the
reason; the trial catches whatever no config check thinks of: a wrong answer is worse than a refusal.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch

from agentkv.engine.local.attention import IMPLEMENTATION, register
from agentkv.engine.local.features import refusal, windows
from agentkv.engine.local.packing import pack
from agentkv.engine.local.runner import Runner, Span
from agentkv.errors import ModelError, UnsupportedModel
from agentkv.kv.geometry import BLOCK_TOKENS, Geometry

_TRIAL_TOKENS = 24
_TRIAL_CHUNK_TOKENS = 3
_TRIAL_WINDOW = 6
"""What windows shrink to for the trial, so that it crosses their borders."""
# Root mean square difference from the model's own attention, as a share of the logits' spread. Measured: 4e-6 in
# float32, 0.04 in bfloat16 (other matrix shapes round differently); a missing soft cap or bias gives 0.3 and more.
_TOLERANCE = {torch.float32: 0.001, torch.float16: 0.05, torch.bfloat16: 0.15}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def refuse(config: Any, name: str) -> None:
    """Raise UnsupportedModel, with the reason, for an architecture whose KV cannot be kept in our blocks."""
    reason = refusal(config)
    if reason is not None:
        raise UnsupportedModel(
            f"{name} ({config.model_type}) {reason}; the embedded engine runs decoder models in which every layer has"
            f" full or sliding-window attention over keys and values of its own (docs/engine.md lists them)"
        )


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
    try:
        with _short_windows(model):
            own = model(input_ids=torch.tensor([ids], device=device), use_cache=False).logits[0].float()
    except Exception as error:  # any library's kernel may be at work here
        raise ModelError(f"{name} ({model.config.model_type}) cannot compute a single token: {error}") from error
    if not bool(own.isfinite().all()) or float(own.std(dim=-1).min()) < 1e-6:  # noqa: PLR2004
        raise ModelError(f"{name} computes NaN or the same score for every token: its weights are broken")
    register()
    pack(model)
    model.set_attn_implementation(IMPLEMENTATION)
    try:
        with _short_windows(model):
            positions, paged = _paged_trial(model, geometry, ids)
    except Exception as error:
        raise UnsupportedModel(f"{name} ({model.config.model_type}) fails under paged attention: {error}") from error
    own = own[positions]
    differences = (paged - own).std(dim=-1) / own.std(dim=-1)
    # An expert that is chosen by a hair's breadth may be another one after other roundings: then most positions count.
    difference = float(differences.median() if _has_experts(model.config) else differences.max())
    if not difference <= _TOLERANCE[model.dtype]:
        raise UnsupportedModel(
            f"{name} ({model.config.model_type}) differs from its own attention by {difference:.3f} of its logits'"
            f" spread when paged; it uses something that we do not know"
        )


def _has_experts(config: Any) -> bool:
    return any(getattr(config.get_text_config(), field, None) for field in _EXPERTS)


@contextlib.contextmanager
def _short_windows(model: Any) -> Iterator[None]:
    """Sliding windows of _TRIAL_WINDOW tokens, in the config and in its layers, while it lasts."""
    text = model.config.get_text_config()
    owners = [text, *(module for module in model.modules() if getattr(module, "sliding_window", None))]
    if not any(windows(model.config)):
        owners = []
    before = [owner.sliding_window for owner in owners]
    try:
        for owner in owners:
            owner.sliding_window = _TRIAL_WINDOW
        yield
    finally:
        for owner, window in zip(owners, before, strict=True):
            owner.sliding_window = window


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
