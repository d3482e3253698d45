"""A GGUF of a tiny Hugging Face folder, as llama.cpp's own converter would write it; for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_LEAVES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write(
    folder: Path,
    path: Path,
    *,
    kind: str = "F32",
    pre: str = "smollm",
    metadata: dict[str, Any] | None = None,
    skip: tuple[str, ...] = (),
    split_tensors: int = 0,
    permute: bool = True,
) -> Path:
    """Write `path` from the model and byte-level tokenizer in `folder`.

    `kind`: GGML's type of the matrices. `metadata`: more settings of the architecture. `skip`: tensors to leave out.
    `split_tensors`: so many in each of several files. `permute=False` makes the file wrong.
    """
    import gguf
    import numpy as np
    from gguf.quants import quantize
    from safetensors.numpy import load_file

    config = json.loads((folder / "config.json").read_text())
    arch = _ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=split_tensors)
    writer.add_name("tiny")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    for name, value in (metadata or {}).items():
        add = writer.add_string if isinstance(value, str) else writer.add_uint32
        add(f"{arch}.{name}", value)
    _vocabulary(writer, folder, pre)
    weights = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    for name, stored in weights.items():
        tensor = stored
        stem, part = name.rsplit(".", 1)
        if stem in _OUTER:
            told = f"{_OUTER[stem]}.{part}"
        else:
            _, _, layer, leaf = stem.split(".", 3)
            told = f"blk.{layer}.{_LEAVES[leaf]}.{part}"
        if told in skip:
            continue
        heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(told.split(".")[-2])
        if permute and arch == "llama" and heads:
            count = config[heads]
            shape = (count, 2, tensor.shape[0] // count // 2, *tensor.shape[1:])
            tensor = tensor.reshape(shape).swapaxes(1, 2).reshape(tensor.shape)
        if tensor.ndim > 1 and kind != "F32":
            quantum = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(told, quantize(np.ascontiguousarray(tensor), quantum), raw_dtype=quantum)
        else:
            writer.add_tensor(told, np.ascontiguousarray(tensor))
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", _factors(rope, config["head_dim"]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _factors(rope: dict[str, Any], head_dim: int) -> Any:
    """What each frequency is divided by, from transformers' own frequencies."""
    from types import SimpleNamespace

    import numpy as np
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = SimpleNamespace(
        rope_parameters=rope,
        head_dim=head_dim,
        hidden_size=64,
        num_attention_heads=4,
        standardize_rope_params=lambda: None,
    )
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, device="cpu")
    plain = 1.0 / rope["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    return (plain / frequencies.numpy()).astype(np.float32)


def _vocabulary(writer: Any, folder: Path, pre: str) -> None:
    data = json.loads((folder / "tokenizer.json").read_text())
    options = json.loads((folder / "tokenizer_config.json").read_text())
    added = {token["content"]: token["id"] for token in data["added_tokens"]}
    ids = {**data["model"]["vocab"], **added}
    tokens = sorted(ids, key=ids.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in added else 1 for token in tokens])
    pairs = [pair if isinstance(pair, str) else " ".join(pair) for pair in data["model"]["merges"]]
    writer.add_token_merges(pairs or ["t h"])
    writer.add_eos_token_id(ids[options["eos_token"]])
    writer.add_bos_token_id(ids[options["bos_token"]])
    writer.add_pad_token_id(ids[options["pad_token"]])
    writer.add_add_bos_token(False)
    template = folder / "chat_template.jinja"
    if template.is_file():
        writer.add_chat_template(template.read_text())
