"""Costs from configs and data sheets: anchors that are known, and errors that help."""

from __future__ import annotations

import json

import pytest

from agentkv.core.rates import Prefill, Rates
from agentkv.errors import ConfigError
from agentkv.sim.costs import Costs, costs_for, from_rates
from agentkv.sim.hardware import GPUS, MODELS, gpu_named
from agentkv.sim.shape import shape_from_config, shape_of

GIB = 1 << 30


@pytest.mark.parametrize(
    ("model", "milliards", "token_bytes"),
    [
        ("llama-3.1-8b", 8.03, 131_072),
        ("llama-3.1-70b", 70.6, 327_680),
        ("llama-2-7b", 6.74, 524_288),
        ("llama-3.2-1b", 1.236, 32_768),
        ("mistral-7b", 7.25, 131_072),
        ("qwen3-0.6b", 0.596, 114_688),
        ("qwen3-14b", 14.77, 163_840),
        ("qwen3-30b-a3b", 30.5, 98_304),
        ("deepseek-v3", 671, 70_272),
        ("qwen3-8b", 8.19, 147_456),
        ("qwen3-32b", 32.8, 262_144),
        ("smollm2-135m", 0.1345, 23_040),
    ],
)
def test_known_models_have_their_published_sizes(model, milliards, token_bytes):
    """Parameters within 1 % of the model card, bytes per token exactly."""
    shape = shape_of(model)
    assert milliards * 1e9 == pytest.approx(shape.parameters, rel=0.01)
    assert token_bytes == shape.token_bytes


def test_the_anchors_of_long_contexts_hold():
    """70B with GQA at 128K tokens holds well over 16 GB; 7B with MHA at 32,768 tokens 16 GiB."""
    assert 40 * GIB == shape_of("llama-3.1-70b").token_bytes * 131_072
    assert 16 * GIB == shape_of("llama-2-7b").token_bytes * 32_768


@pytest.mark.parametrize(
    ("config", "numbers"),
    [
        ({"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 8}, 2 * 8 * 8),
        ({"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2}, 2 * 2 * 8),
        ({"n_layer": 2, "n_embd": 64, "n_head": 8, "multi_query": True}, 2 * 1 * 8),
        ({"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 8, "head_dim": 32}, 2 * 8 * 32),
        ({"text_config": {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 8}}, 2 * 8 * 8),
        (MODELS["deepseek-v3"], 576),
    ],
)
def test_kv_per_token_follows_from_any_attention(config, numbers):
    """MHA, GQA, MQA, a head_dim of its own, a text part of a larger model, and MLA's latent."""
    shape = shape_from_config(config, "m")
    assert numbers == shape.kv_numbers
    assert shape.layers * numbers * 2 == shape.token_bytes


def test_a_mixture_of_experts_computes_with_a_part_of_its_weights():
    """DeepSeek-V3: 671 milliard parameters, 37 of them for a token."""
    shape = shape_of("deepseek-v3")
    assert 37e9 == pytest.approx(shape.active_parameters, rel=0.04)


@pytest.mark.parametrize(
    ("changes", "weight_bytes"),
    [
        ({}, 2.0),
        ({"torch_dtype": "float32"}, 4.0),
        ({"quantization_config": {"quant_method": "fp8"}}, 1.0),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, 0.5),
        ({"quantization_config": {"load_in_8bit": True}}, 1.0),
        ({"quantization_config": {"bits": "few"}}, 2.0),
    ],
)
def test_quantised_weights_are_smaller_and_their_kv_is_not(changes, weight_bytes):
    """What the config says of its weights; KV stays in the model's own type."""
    shape = shape_from_config(MODELS["qwen3-8b"] | changes, "m")
    assert weight_bytes == shape.weight_item_bytes
    assert max(2.0, 4.0 if "torch_dtype" in changes else 2.0) == shape.kv_item_bytes


def test_a_config_file_and_its_folder_say_the_same(tmp_path):
    """Any Hugging Face model."""
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODELS["qwen3-8b"]))
    assert shape_of(folder) == shape_of(folder / "config.json")
    assert ("my-model", shape_of("qwen3-8b").token_bytes) == (shape_of(folder).name, shape_of(folder).token_bytes)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"num_hidden_layers": "many"}', '{"num_hidden_layers": 0}'])
def test_a_broken_config_is_an_error_that_names_it(tmp_path, text):
    """Cut, another type, empty, not a size."""
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=tmp_path.name):
        shape_of(tmp_path)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: costs_for("lama-3.1-8b", "h200"), "the nearest known: llama-3.1-8b"),
        (lambda: costs_for("llama-3.1-8b", "h20"), "the nearest known: .*h200"),
        (lambda: costs_for("llama-3.1-8b", "0xh200"), "h200"),
        (lambda: costs_for("llama-3.1-70b", "rtx4090"), "leave no room for KV on rtx4090"),
        (lambda: costs_for("llama-3.1-8b", "h200", gpus=0), "gpus=0"),
        (lambda: costs_for("llama-3.1-8b", "h200", link_bytes_s=0), "link_bytes_s=0"),
    ],
)
def test_what_is_unknown_or_cannot_be_is_an_error_that_helps(call, words):
    """The nearest known name, or the number at fault."""
    with pytest.raises(ConfigError, match=words):
        call()


@pytest.mark.parametrize("name", ["H200", "h100-80", "RTX 4090", "2xh200", "rtx4090_12gbs"])
def test_names_are_taken_as_people_write_them(name):
    """Case, spaces, dashes; a count in front."""
    assert gpu_named(name).name in (*GPUS, "2xh200")


def test_two_cards_have_twice_the_room_for_weights_and_twice_the_speed():
    """Tensor parallel: weights once, everything else twice."""
    one, two = costs_for("llama-3.1-8b", "h100-80"), costs_for("llama-3.1-8b", "h100-80", gpus=2)
    assert two == costs_for("llama-3.1-8b", "2xh100-80")
    assert 2 * one.h2d_bytes_s == two.h2d_bytes_s
    assert one.prefill.linear_s == pytest.approx(2 * two.prefill.linear_s)
    assert two.device_bytes > 2 * one.device_bytes


def test_costs_are_of_the_size_that_engines_report():
    """8B on H100: 20-45 thousand prompt tokens/s, a decode step of 6-14 ms, over 350,000 tokens of KV."""
    costs = costs_for("llama-3.1-8b", "h100-80")
    assert 20_000 < 4096 / costs.prefill.recompute_s(4096) < 45_000
    assert 0.006 < costs.decode_s(8 * 4096) < 0.014
    assert 350_000 < costs.device_tokens < 500_000


def test_recompute_grows_faster_than_a_load():
    """A2: one is quadratic, the other linear."""
    costs = costs_for("llama-3.1-8b", "h100-80")
    assert costs.prefill.recompute_s(131_072) > 20 * costs.prefill.recompute_s(8192)
    assert costs.load_s(131_072) == pytest.approx(16 * costs.load_s(8192))
    assert costs.prefill.recompute_s(8192) > 10 * costs.load_s(8192)


def test_a_disk_is_there_when_it_has_a_size():
    """None otherwise, in costs and in the rates that policies see."""
    without, with_disk = costs_for("qwen3-8b", "l40s"), costs_for("qwen3-8b", "l40s", disk_bytes=1e12)
    assert (None, None) == (without.read_s(1000), without.rates().read_bytes_s)
    assert with_disk.read_s(1000) == pytest.approx(with_disk.rates().restore_disk_s(1000 * with_disk.token_bytes))


def test_measured_rates_become_costs():
    """`agentkv calibrate`'s file instead of a data sheet."""
    prefill = Prefill(linear_s=1e-4, quadratic_s=1e-9, constant_s=0.01)
    rates = Rates(
        memcpy_bytes_s=5e9, h2d_bytes_s=4e9, d2h_bytes_s=3e9, read_bytes_s=2e9, write_bytes_s=1e9, prefill=prefill
    )
    costs = from_rates(rates, token_bytes=23_040, device_bytes=1e9, host_bytes=2e9, disk_bytes=3e9)
    assert (prefill, 4e9, 3e9, 2e9, 1e9) == (
        costs.prefill, costs.h2d_bytes_s, costs.d2h_bytes_s, costs.read_bytes_s, costs.write_bytes_s,
    )  # fmt: skip
    assert rates.h2d_bytes_s == costs.rates().h2d_bytes_s
    assert None is from_rates(rates, token_bytes=1, device_bytes=1, host_bytes=0).read_bytes_s


def test_costs_without_room_for_a_token_are_refused():
    """A simulation of nothing."""
    with pytest.raises(ConfigError, match="holds no token"):
        Costs(
            token_bytes=10, prefill=Prefill(linear_s=1), decode_base_s=1, decode_per_token_s=0, h2d_bytes_s=1,
            d2h_bytes_s=1, device_bytes=5, host_bytes=0,
        )  # fmt: skip
