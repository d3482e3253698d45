"""What a model reads, and weights that a checkpoint brings besides: mostly a sign that its config is of another model.

Covers the report of transformers' own loading, from which it has taken what the model's class lists as harmless (layers
that guess several tokens, rotary buffers of old files), and what a config's model reads. Does not cover weights that are
missing (`loader.py`, `gguf_model.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from agentkv.engine.local.quiet import quiet

_FREQUENCIES = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
_HEAD = "lm_head.weight"
_SCALES = {
    "k_scale", "v_scale", "q_scale", "kv_scale", "prob_scale", "k_zero_point", "v_zero_point", "input_scale",
    "input_zero_point", "input_global_scale", "output_scale", "output_zero_point", "weight_shape",
}  # fmt: skip
"""What quantised checkpoints tell of activations and of a packed KV, neither of which is packed here."""
_ADDED = ("bias", "weight_zero_point")
"""Old quantisers write these also where they are 0 everywhere; anything else would be missed."""


def shapes_of(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The weights that a model of this config (with its `model_type`) reads, by name; of tied ones the first."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = dict(config)
    with quiet(), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields))
    tied = model.get_submodule(_HEAD.rpartition(".")[0]).weight is model.get_input_embeddings().weight
    return {name: tuple(value.shape) for name, value in model.state_dict().items() if not (tied and name == _HEAD)}


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
