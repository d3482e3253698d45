"""Bytes per token and block, against the anchors of the KV size model."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from agentkv.errors import ConfigError
from agentkv.kv.geometry import Geometry
from agentkv.units import GIB


def test_a_70b_model_with_grouped_heads_at_128k_tokens_takes_well_over_16_gb():
    """80 layers, 8 KV heads of 128, fp16: 40 GiB."""
    config = {"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "hidden_size": 8192}
    geometry = Geometry.from_hf_config(config, "float16")
    assert 327_680 == geometry.token_bytes
    assert 40 * GIB == geometry.token_bytes * 128 * 1024


def test_a_7b_model_with_full_heads_at_32k_tokens_takes_16_gb():
    """32 layers, hidden 4096, fp16, no grouping."""
    config = SimpleNamespace(num_hidden_layers=32, num_attention_heads=32, hidden_size=4096)
    assert 16 * GIB == Geometry.from_hf_config(config, "float16").token_bytes * 32_768


def test_smollm2_takes_23040_bytes_per_token():
    """30 layers x 3 KV heads x 64, bf16; one block is 90 pages without padding."""
    config = {
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "hidden_size": 576,
        "head_dim": None,
    }
    geometry = Geometry.from_hf_config(config, "bfloat16")
    assert (23_040, 368_640, 368_640) == (geometry.token_bytes, geometry.block_bytes, geometry.slot_bytes)


def test_one_head_for_all_queries():
    """`multi_query` without a number of KV heads means one."""
    config = {"n_layer": 24, "n_head": 16, "n_embd": 2048, "multi_query": True}
    assert 1 == Geometry.from_hf_config(config, "bfloat16").kv_heads


def test_a_declared_head_size_wins_over_hidden_by_heads():
    """Some models' heads are wider than hidden_size / heads."""
    config = {"num_hidden_layers": 2, "num_attention_heads": 16, "hidden_size": 1024, "head_dim": 128}
    assert 128 == Geometry.from_hf_config(config, "bfloat16").head_dim


def test_a_nested_text_config_is_used():
    """Multimodal models keep the language model's numbers one level down."""
    inner = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    assert 2 == Geometry.from_hf_config({"text_config": inner}, "float32").layers


def test_slots_are_rounded_up_to_a_page():
    """A block of 2,048 bytes takes 4,096."""
    geometry = Geometry(layers=2, kv_heads=1, head_dim=8, dtype="float32")
    assert (2048, 4096) == (geometry.block_bytes, geometry.slot_bytes)


@pytest.mark.parametrize(
    "config",
    [{}, {"num_hidden_layers": 2}, {"num_hidden_layers": 2, "num_attention_heads": 4}],
)
def test_a_config_without_the_numbers_is_refused(config):
    """The error says which number is missing."""
    with pytest.raises(ConfigError, match="config names neither"):
        Geometry.from_hf_config(config, "float16")


def test_an_unknown_dtype_is_refused():
    """The error lists the known ones."""
    with pytest.raises(ConfigError, match="bfloat16"):
        Geometry(layers=1, kv_heads=1, head_dim=8, dtype="int4")
