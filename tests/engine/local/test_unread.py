"""A checkpoint with weights that its config does not read is of another model: refused by name, never half loaded (M5, M11)."""

import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from agentkv.engine.local.loader import load_model
from agentkv.errors import ModelError


def _load(folder):
    return load_model(str(folder), device="cpu", dtype="float32")


def _add(folder, **weights):
    """Weights by name ("__" is a dot) that the folder's file gets on top of its own."""
    file = folder / "model.safetensors"
    more = {name.replace("__", "."): value for name, value in weights.items()}
    save_file({**load_file(file), **more}, file, metadata={"format": "pt"})


def _move(folder, rename):
    file = folder / "model.safetensors"
    save_file({rename(name): value for name, value in load_file(file).items()}, file, metadata={"format": "pt"})


@pytest.mark.parametrize("sharded", [None, 40_000], ids=["one file", "shards"])
def test_a_config_with_fewer_layers_than_the_weights_is_refused(models, tmp_path, sharded):
    """The layers behind them would be left out, and the model would answer all the same."""
    folder = models.save(tmp_path, shard_bytes=sharded)
    models.edit(folder, "config.json", num_hidden_layers=1)
    with pytest.raises(
        ModelError, match=r"brings 9 weights that .* does not read, .* model\.layers\.1\.input_layernorm"
    ):
        _load(folder)


@pytest.mark.parametrize(
    ("family", "other", "named"),
    [("qwen2", "llama", "q_proj.bias"), ("qwen3", "llama", "q_norm.weight"), ("llama-3", "mistral", "q_proj.bias")],
)
def test_a_config_of_another_family_is_refused(models, tmp_path, family, other, named):
    """Their weights have the same names and shapes but for biases and norms, which nobody would add or apply."""
    folder = models.save(tmp_path, family)
    models.edit(
        folder, "config.json", model_type=other, architectures=[f"{other.capitalize()}ForCausalLM"],
        attention_bias=False,
    )  # fmt: skip
    with pytest.raises(ModelError, match=rf"does not read, for instance .*{re.escape(named.split('.')[-1])}"):
        _load(folder)


@pytest.mark.parametrize(
    "name",
    [
        "model__layers__0__mlp__up_proj__bias", "model__layers__0__self_attn__sinks", "v_head__weight", "lm_head__bias",
        "model__layers__0__self_attn__k_scale", "model__vision_tower__patch__weight",
    ],
)  # fmt: skip
def test_a_weight_that_nothing_reads_is_named(models, tmp_path, name):
    """One is enough: what it was for is not computed."""
    folder = models.save(tmp_path)
    _add(folder, **{name: torch.ones(3)})
    with pytest.raises(ModelError, match=rf"brings 1 weights .*for instance {re.escape(name.replace('__', '.'))};"):
        _load(folder)


@pytest.mark.parametrize(
    ("family", "weights"),
    [
        ("llama", {"model__layers__1__self_attn__rotary_emb__inv_freq": torch.ones(8)}),
        ("llama", {"model__layers__1__self_attn__o_proj__bias": torch.zeros(64)}),
        ("smollm2", {"lm_head__weight": None}),
        ("ernie4_5_moe", {"model__mtp_block__0__norm__weight": torch.ones(3)}),
    ],
    ids=["rotary buffer", "bias of zeros", "tied head", "what the class ignores"],
)
def test_what_is_known_to_be_harmless_is_no_reason(models, tmp_path, family, weights):
    """Published checkpoints bring them; the model computes what it did without."""
    sizes = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 48} if family == "ernie4_5_moe" else {}
    folder = models.save(tmp_path, family, **sizes)
    before = models.Oracle(folder).logits(list(range(40)))
    if "lm_head__weight" in weights:
        weights = {"lm_head__weight": load_file(folder / "model.safetensors")["model.embed_tokens.weight"].clone()}
    _add(folder, **weights)
    model = _load(folder).model
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        after = model(input_ids=torch.arange(40)[None], use_cache=False).logits[0]
    torch.testing.assert_close(before, after, rtol=1e-4, atol=1e-4)


def test_a_folder_without_the_models_prefix_is_read_all_the_same(models, tmp_path):
    """Those saved from the bare model; transformers adds it."""
    folder = models.save(tmp_path, "smollm2")
    _move(folder, lambda name: name.removeprefix("model."))
    assert _load(folder).vocabulary == 259
