"""Checkpoints whose weights are packed, as published ones are: GPTQ, AWQ, compressed-tensors. Each needs its package.

Packed numbers are random; what is proved is that they are loaded, and that the engine's tokens are those of transformers' own
cacheless forward over the same layers.
"""

import pytest
import torch

from agentkv.engine.base import Request, Sampling
from agentkv.engine.local.engine import LocalEngine
from agentkv.engine.local.loader import load_model
from agentkv.errors import ModelError

GROUP = 32
_FAMILIES = ["llama", "qwen2"]  # without and with biases
_LAYERS = ("self_attn", "mlp")
_dice = torch.Generator().manual_seed(3)
pytestmark = pytest.mark.filterwarnings("ignore")


def _words(*shape):
    """Eight numbers of four bits in each."""
    return torch.randint(-(2**31), 2**31 - 1, shape, generator=_dice, dtype=torch.int64).to(torch.int32)


def _scales(*shape):
    return (0.01 + 0.05 * torch.rand(*shape, generator=_dice)).to(torch.float16)


def _gptq(rows, columns):
    return {
        "qweight": _words(rows // 8, columns),
        "qzeros": _words(rows // GROUP, columns // 8),
        "scales": _scales(rows // GROUP, columns),
        "g_idx": (torch.arange(rows) // GROUP).to(torch.int32),
    }


def _awq(rows, columns):
    return {
        "qweight": _words(rows, columns // 8),
        "qzeros": _words(rows // GROUP, columns // 8),
        "scales": _scales(rows // GROUP, columns),
    }


def _compressed(rows, columns):
    return {
        "weight_packed": _words(columns, rows // 8),
        "weight_scale": _scales(columns, rows // GROUP),
        "weight_shape": torch.tensor([columns, rows]),
    }


METHODS = {
    "gptq": (("gptqmodel", "optimum"), _gptq, {"bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}),
    "awq": (("gptqmodel",), _awq, {"bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}),
    "compressed-tensors": (("compressed_tensors",), _compressed, {
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
            "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP,
        }}},
    }),
}  # fmt: skip


def _packed(models, folder, family, method):
    """A tiny checkpoint of that kind."""
    from safetensors.torch import load_file, save_file

    _, pack, options = METHODS[method]
    models.save(folder, family, intermediate_size=128)
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if name.endswith(".weight") and any(part in name for part in _LAYERS)]:
        columns, rows = weights.pop(name).shape
        weights |= {f"{name.removesuffix('weight')}{part}": value for part, value in pack(rows, columns).items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    models.edit(folder, "config.json", quantization_config={"quant_method": method, **options})
    return folder


@pytest.mark.parametrize("family", _FAMILIES)
@pytest.mark.parametrize("method", METHODS)
def test_packed_weights_are_loaded_where_their_package_is(models, tmp_path, family, method):
    """And the tokens are transformers' own, over several chunks of prompt."""
    for package in METHODS[method][0]:
        pytest.importorskip(package, reason=f"pip install {' '.join(METHODS[method][0]).replace('_', '-')}")
    folder = _packed(models, tmp_path, family, method)
    said = []
    loaded = load_model(str(folder), device="cpu", dtype="float32", progress=said.append)
    assert any(f"weights quantised with {method}" in line for line in said)
    prompt = "Hello there, you who read this. " * 4
    own = models.Oracle(folder, device_map={"": "cpu"})
    expected = own.greedy(list(loaded.tokenizer(prompt)["input_ids"]), 12)
    with LocalEngine(loaded, device_memory=40 * loaded.geometry.block_bytes, chunk_tokens=48) as engine:
        request = Request(prompt=prompt, sampling=Sampling(max_tokens=12))
        assert expected == list(engine.submit(request).result(120).token_ids)


SCALES = {  # of a packed KV and of activations
    "gptq": {"o_proj.bias": torch.zeros(64)},
    "awq": {"o_proj.bias": torch.zeros(64)},
    "compressed-tensors": {
        "k_proj.output_scale": torch.ones(1), "k_scale": torch.ones(1), "v_proj.input_scale": torch.ones(1),
        "v_proj.weight_zero_point": torch.zeros(1, dtype=torch.int8),
    },
}  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
def test_what_quantisers_write_besides_is_harmless_and_another_models_weights_are_not(models, tmp_path, method):
    """Biases of zeros and scales of what is not packed here do nothing; layers and biases that nothing reads would have."""
    from safetensors.torch import load_file, save_file

    for package in METHODS[method][0]:
        pytest.importorskip(package, reason=f"pip install {' '.join(METHODS[method][0]).replace('_', '-')}")
    folder = _packed(models, tmp_path, "llama", method)
    file = folder / "model.safetensors"
    weights = load_file(file)
    extra = {f"model.layers.0.self_attn.{name}": value for name, value in SCALES[method].items()}
    save_file({**weights, **extra}, file, metadata={"format": "pt"})
    assert load_model(str(folder), device="cpu", dtype="float32").vocabulary == 259
    save_file({**weights, "model.layers.0.mlp.up_proj.bias": torch.ones(128)}, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"brings 1 weights .*up_proj\.bias"):
        load_model(str(folder), device="cpu", dtype="float32")
    save_file({**weights, "model.layers.2.self_attn.k_scale": torch.ones(1)}, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"brings 1 weights .*layers\.2\.self_attn\.k_scale"):
        load_model(str(folder), device="cpu", dtype="float32")
