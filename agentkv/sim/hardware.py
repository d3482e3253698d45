"""GPUs and models by name: the published facts that costs are computed from, each with its source.

GPU figures are the vendors' data sheets, dense (no sparsity) bf16. Link figures are what one direction of the host link
moves in practice: about 80-85 % of PCIe's raw rate. Model facts are the fields of the models' own config.json.
Arithmetic on them is `costs.py`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from agentkv.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One card. FLOP/s dense bf16, bytes/s of its memory, bytes of memory, bytes/s of its host link in one direction."""

    name: str
    flops_s: float
    memory_bytes_s: float
    memory_bytes: float
    link_bytes_s: float
    count: int = 1

    def times(self, count: int) -> Gpu:
        """`count` of them side by side, each with its own link (tensor parallel)."""
        return replace(self, name=f"{count}x{self.name}" if count > 1 else self.name, count=count)


# PCIe 5 x16: 64 GB/s raw, 50-55 in practice; PCIe 4 x16: 32 raw, 25 in practice; PCIe 4 x8 or PCIe 3 x16: 12.
_PCIE5, _PCIE4, _NARROW = 50e9, 25e9, 12e9

GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        # NVIDIA H100 data sheet, SXM5 80 GB: 989 TFLOP/s bf16 dense, 3.35 TB/s
        Gpu(name="h100-80", flops_s=989e12, memory_bytes_s=3.35e12, memory_bytes=80e9, link_bytes_s=_PCIE5),
        # NVIDIA H200 data sheet, SXM: 989 TFLOP/s bf16 dense, 141 GB at 4.8 TB/s
        Gpu(name="h200", flops_s=989e12, memory_bytes_s=4.8e12, memory_bytes=141e9, link_bytes_s=_PCIE5),
        # NVIDIA B200 (HGX data sheet, per GPU): 2.25 PFLOP/s bf16 dense, 180 GB at 7.7 TB/s
        Gpu(name="b200", flops_s=2.25e15, memory_bytes_s=7.7e12, memory_bytes=180e9, link_bytes_s=_PCIE5),
        # NVIDIA A100 data sheet, SXM4 80 GB: 312 TFLOP/s bf16, 2.039 TB/s
        Gpu(name="a100-80", flops_s=312e12, memory_bytes_s=2.039e12, memory_bytes=80e9, link_bytes_s=_PCIE4),
        # NVIDIA L40S data sheet: 362 TFLOP/s bf16 dense, 48 GB at 864 GB/s
        Gpu(name="l40s", flops_s=362e12, memory_bytes_s=864e9, memory_bytes=48e9, link_bytes_s=_PCIE4),
        # NVIDIA L4 data sheet: 121 TFLOP/s bf16 dense, 24 GB at 300 GB/s
        Gpu(name="l4", flops_s=121e12, memory_bytes_s=300e9, memory_bytes=24e9, link_bytes_s=_PCIE4),
        # NVIDIA Ada architecture paper, RTX 4090: 165 TFLOP/s bf16 dense (fp32 accumulate), 24 GB at 1,008 GB/s
        Gpu(name="rtx4090", flops_s=165e12, memory_bytes_s=1.008e12, memory_bytes=24e9, link_bytes_s=_PCIE4),
        # the same card in a narrow or PCIe 3 slot
        Gpu(name="rtx4090-12gbs", flops_s=165e12, memory_bytes_s=1.008e12, memory_bytes=24e9, link_bytes_s=_NARROW),
        # NVIDIA Ampere GA102 paper, RTX 3090: 71 TFLOP/s bf16 dense (fp32 accumulate), 24 GB at 936 GB/s
        Gpu(name="rtx3090", flops_s=71e12, memory_bytes_s=936e9, memory_bytes=24e9, link_bytes_s=_PCIE4),
    )
}

_LLAMA3_8B = {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072, "torch_dtype": "bfloat16"}  # fmt: skip
_LLAMA3_70B = {"num_hidden_layers": 80, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072, "torch_dtype": "bfloat16"}  # fmt: skip
_SMOLLM2_135M = {"num_hidden_layers": 30, "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192, "tie_word_embeddings": True, "torch_dtype": "bfloat16"}  # fmt: skip
_QWEN3_8B = {"num_hidden_layers": 36, "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960, "torch_dtype": "bfloat16"}  # fmt: skip
_QWEN3_32B = {"num_hidden_layers": 64, "hidden_size": 5120, "intermediate_size": 25600, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960, "torch_dtype": "bfloat16"}  # fmt: skip
_LLAMA2_7B = {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "vocab_size": 32000, "max_position_embeddings": 4096, "torch_dtype": "float16"}  # fmt: skip

_LLAMA32_1B = {"num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "max_position_embeddings": 131072, "tie_word_embeddings": True, "torch_dtype": "bfloat16"}  # fmt: skip
_MISTRAL_7B = {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32768, "max_position_embeddings": 32768, "torch_dtype": "bfloat16"}  # fmt: skip
_QWEN3_06B = {"num_hidden_layers": 28, "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960, "tie_word_embeddings": True, "torch_dtype": "bfloat16"}  # fmt: skip
_QWEN3_14B = {"num_hidden_layers": 40, "hidden_size": 5120, "intermediate_size": 17408, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960, "torch_dtype": "bfloat16"}  # fmt: skip
_QWEN3_30B_A3B = {"num_hidden_layers": 48, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960, "torch_dtype": "bfloat16"}  # fmt: skip
_DEEPSEEK_V3 = {"num_hidden_layers": 61, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "num_attention_heads": 128, "num_key_value_heads": 128, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 129280, "max_position_embeddings": 163840, "torch_dtype": "bfloat16", "quantization_config": {"quant_method": "fp8"}}  # fmt: skip

MODELS: dict[str, dict[str, Any]] = {
    "llama-2-7b": _LLAMA2_7B,
    "llama-3.2-1b": _LLAMA32_1B,
    "llama-3.1-8b": _LLAMA3_8B,
    "llama-3.1-70b": _LLAMA3_70B,
    "llama-3.3-70b": _LLAMA3_70B,
    "mistral-7b": _MISTRAL_7B,
    "qwen3-0.6b": _QWEN3_06B,
    "qwen3-8b": _QWEN3_8B,
    "qwen3-14b": _QWEN3_14B,
    "qwen3-30b-a3b": _QWEN3_30B_A3B,
    "qwen3-32b": _QWEN3_32B,
    "deepseek-v3": _DEEPSEEK_V3,
    "smollm2-135m": _SMOLLM2_135M,
}


def gpu_named(name: str) -> Gpu:
    """The card of that name; "2xh200" is two of them. Raises ConfigError that names the nearest known."""
    wanted = name.strip().lower()
    number, times, rest = wanted.partition("x")
    count = int(number) if times and number.isdigit() and rest not in ("", "-") else 1
    card = rest if count >= 1 and times and number.isdigit() else wanted
    found = GPUS.get(_plain(card)) or next((gpu for key, gpu in GPUS.items() if _plain(key) == _plain(card)), None)
    if found is None or count < 1:
        raise ConfigError(f"gpu={name!r} is unknown; {nearest(card, GPUS)}")
    return found.times(count)


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error's sentence: the names most like `name`, and all of them."""
    names = list(known)
    near = difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.4)
    words = f"the nearest known: {', '.join(near)}; " if near else ""
    return f"{words}all known: {', '.join(names)}"


def _plain(name: str) -> str:
    return "".join(letter for letter in name if letter not in " _-.")
