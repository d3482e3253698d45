"""A config.json that makes no sense: refused in our own words, by loading and by looking, and in a moment (M5)."""

import contextlib

import pytest

from agentkv.engine.local.estimate import estimate
from agentkv.engine.local.loader import load_model
from agentkv.errors import AgentKVError, ModelError

NONSENSE = [
    {"num_attention_heads": 0}, {"num_key_value_heads": 0}, {"num_hidden_layers": 0}, {"num_hidden_layers": -1},
    {"num_hidden_layers": "2"}, {"head_dim": 0}, {"max_position_embeddings": "x"}, {"sliding_window": "x"},
    {"hidden_size": 1e30}, {"rope_parameters": 3}, {"layer_types": 3}, {"quantization_config": 3},
]  # fmt: skip


@pytest.fixture(params=["llama", "mistral-window"])
def folder(models, tmp_path, request):
    """A model whose config may be damaged."""
    return models.save(tmp_path / "model", request.param)


@pytest.mark.parametrize("changes", NONSENSE, ids=[str(one) for one in NONSENSE])
def test_a_config_that_makes_no_sense_is_refused(models, folder, changes):
    """Whatever breaks on it; never a traceback of another library."""
    models.edit(folder, "config.json", **changes)
    with contextlib.suppress(AgentKVError):  # looking sees less than loading does
        estimate(str(folder))
    if "sliding_window" in changes and "mistral" not in (folder / "config.json").read_text():
        return  # a field that this family does not have
    with pytest.raises(AgentKVError):
        load_model(str(folder), device="cpu", dtype="float32")


@pytest.mark.parametrize("layers", [2**31, 5000, 1e300])
def test_layers_without_end_are_refused_in_a_moment(models, folder, layers):
    """Rather than made first."""
    models.edit(folder, "config.json", num_hidden_layers=layers)
    for way in (lambda: load_model(str(folder), device="cpu", dtype="float32"), lambda: estimate(str(folder))):
        with pytest.raises(ModelError, match=r"config\.json says that it has .* layers"):
            way()
