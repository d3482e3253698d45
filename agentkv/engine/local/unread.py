"""Weights that a checkpoint brings and its model does not read: mostly a sign that its config is of another model.

Covers the report of transformers' own loading, from which it has taken what the model's class lists as harmless (layers
that guess several tokens, rotary buffers of old files). Does not cover weights that are missing (`loader.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_FREQUENCIES = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
_HEAD = "lm_head.weight"
_SCALES = {
    "k_scale", "v_scale", "q_scale", "kv_scale", "prob_scale", "k_zero_point", "v_zero_point", "input_scale",
    "input_zero_point", "input_global_scale", "output_scale", "output_zero_point", "weight_shape",
}  # fmt: skip
"""What quantised checkpoints tell of activations and of a packed KV, neither of which is packed here."""
_ADDED = ("bias", "weight_zero_point")
"""Old quantisers write these also where they are 0 everywhere; anything else would be missed."""


def unread(model: Any, keys: Iterable[str], folder: Path, *, quantised: bool) -> list[str]:
    """Those of `keys`, which the model did not take, that would have changed what it computes; sorted."""
    tied = bool(getattr(model.config.get_text_config(), "tie_word_embeddings", False))
    found = []
    for key in sorted(keys):
        owner, _, leaf = key.rpartition(".")
        if _FREQUENCIES.search(key) or (tied and key == _HEAD):
            continue
        if quantised and leaf in _SCALES and _has(model, owner):
            continue
        if leaf in _ADDED and _has(model, owner) and _is_zero(folder, key):
            continue
        found.append(key)
    return found


def _has(model: Any, name: str) -> bool:
    try:
        model.get_submodule(name)
    except AttributeError:
        return False
    return True


def _is_zero(folder: Path, key: str) -> bool:
    """Whether the folder's safetensors files hold this weight and it is 0 everywhere."""
    from safetensors import safe_open

    for file in sorted(folder.glob("model*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            if key in weights.keys():  # noqa: SIM118  not a mapping
                return not bool(weights.get_tensor(key).any())
    return False
