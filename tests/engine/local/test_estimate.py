"""What `agentkv doctor --model` says before loading is what loading then takes."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentkv.cli import app
from agentkv.engine.local.engine import LocalEngine
from agentkv.engine.local.estimate import estimate
from agentkv.engine.local.loader import load_model
from agentkv.errors import ModelError, ModelNotFound

_spec = importlib.util.spec_from_file_location("gguf_maker", Path(__file__).with_name("gguf_maker.py"))
maker = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(maker)


def _bytes_of(loaded):
    seen = {
        parameter.data_ptr(): parameter.numel() * parameter.element_size() for parameter in loaded.model.parameters()
    }
    return sum(seen.values())


def _doctor(*options):
    result = CliRunner().invoke(app, ["doctor", *map(str, options)], env={"COLUMNS": "300"})
    return result.exit_code, result.output


@pytest.mark.parametrize("family", ["llama", "smollm2", "gemma3", "gpt-oss", "phi4-mini", "qwen3-moe"])
def test_sizes_are_those_of_the_loaded_model(models, tmp_path, family):
    """Weights to the byte, KV of a token, context, window, and that it would run."""
    folder = models.save(tmp_path, family)
    found = estimate(str(folder), device="cpu", dtype="float32")
    loaded = load_model(str(folder), device="cpu", dtype="float32")
    assert _bytes_of(loaded) == found.weights_bytes
    assert (loaded.geometry.token_bytes, loaded.context_tokens) == (found.token_bytes, found.context_tokens)
    assert ("", "float32", True) == (found.refused, found.dtype, found.template)
    assert (family in ("gemma3", "gpt-oss")) == (found.window_tokens == (32,))
    room = found.available_bytes - found.weights_bytes - found.working_bytes
    assert 0 <= room - found.fits_tokens * found.token_bytes < 16 * found.token_bytes


@pytest.mark.parametrize(("family", "kept"), [("mistral-window", 48), ("phi3-window", 48), ("gemma2", 1024)])
def test_a_context_of_windows_only_needs_little_memory(models, tmp_path, ask, family, kept):
    """What the widest window shows is kept, and in one block more than that any context is computed; of a model with
    one full layer everything is kept.
    """
    folder = models.save(tmp_path, family)
    found = estimate(str(folder), device="cpu", dtype="float32")
    block_bytes = 16 * found.token_bytes
    assert kept == found.kept_tokens
    small = kept // 16 + 1 if kept < 1024 else 4
    longest = 1024 if kept < 1024 else 64
    assert longest == found.longest_tokens(small * block_bytes + 1)
    assert 16 * (small - 1) == found.longest_tokens(small * block_bytes - 1)
    loaded = load_model(str(folder), device="cpu", dtype="float32")
    with LocalEngine(loaded, device_memory=small * block_bytes) as engine:
        assert longest == engine.context_tokens
        answer = engine.submit(ask("x" * (longest - 4), 4)).result(60)
        assert 0 < len(answer.token_ids) <= 4
    code, text = _doctor("--model", folder, "--device", "cpu", "--dtype", "float32")
    assert code == 0
    assert (kept < 1024) == ("freed when all have passed them" in text) == ("a context of 1,024 passes" in text)
    assert (kept < 1024) == (f"of which {kept:,} are kept" in text)


def test_half_the_type_is_half_the_size(models, tmp_path):
    """Of weights and KV alike; the file is what it is."""
    folder = str(models.save(tmp_path))
    whole, half = (estimate(folder, device="cpu", dtype=dtype) for dtype in ("float32", "float16"))
    assert (whole.weights_bytes, whole.token_bytes) == (2 * half.weights_bytes, 2 * half.token_bytes)
    assert whole.files_bytes == half.files_bytes


def test_a_gguf_is_looked_at_without_being_unpacked(models, tmp_path, monkeypatch):
    """Its real size: what is on disk, what will be, what memory it takes (M1)."""
    monkeypatch.setenv("AGENTKV_CACHE", str(tmp_path / "cache"))
    folder = models.save(tmp_path / "model", merges=True)
    path = maker.write(folder, tmp_path / "tiny.gguf", kind="Q8_0")
    found = estimate(str(path), device="cpu", dtype="float32")
    assert not (tmp_path / "cache").exists()
    loaded = load_model(str(path), device="cpu", dtype="float32")
    assert _bytes_of(loaded) == found.weights_bytes == 2 * found.unpacked_bytes
    assert path.stat().st_size == found.files_bytes
    assert (loaded.context_tokens, loaded.geometry.token_bytes) == (found.context_tokens, found.token_bytes)


def test_the_command_prints_it_and_ends_well(models, tmp_path):
    """For people, and as JSON."""
    folder = models.save(tmp_path, "gemma2")
    models.edit(folder, "generation_config.json", temperature=0.7)
    code, text = _doctor("--model", folder, "--device", "cpu", "--dtype", "float32")
    assert 0 == code
    for part in ("would run", "yes", "as asked, stored as float32", "32 tokens; their blocks", "temperature 0.7"):
        assert part in text
    code, text = _doctor("--model", folder, "--json")
    data = json.loads(text)["Model"]
    assert (0, True, "gemma2") == (code, data["runs"], data["family"])


def test_a_model_that_would_not_run_says_why_and_ends_with_one(models, tmp_path):
    """Refused by its config, a missing package, or memory that is too small."""
    folder = models.save(tmp_path / "a", "gemma2")
    models.edit(folder, "config.json", use_bidirectional_attention=True)
    code, text = _doctor("--model", folder)
    assert (1, True) == (code, "use_bidirectional_attention" in text)
    folder = models.save(tmp_path / "b")
    models.edit(folder, "config.json", quantization_config={"quant_method": "vptq"})
    code, text = _doctor("--model", folder)
    assert (1, True) == (code, "quantised with vptq" in text)


def test_memory_that_is_too_small_is_told(models, tmp_path, monkeypatch):
    """Before anybody waits for the weights."""
    folder = models.save(tmp_path)
    monkeypatch.setattr("agentkv.engine.local.estimate.available_bytes", lambda: 1000)
    code, text = _doctor("--model", folder, "--device", "cpu")
    assert (1, True) == (code, "no: it does not fit" in text)


def test_damage_and_absence_are_errors_of_their_own(models, tmp_path):
    """As loading would say them."""
    with pytest.raises(ModelNotFound):
        estimate(str(tmp_path / "nothing"))
    with pytest.raises(ModelNotFound):
        estimate("someone/on-the-hub")
    folder = models.save(tmp_path / "cut")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ModelError, match="10 are missing"):
        estimate(str(folder))


@pytest.mark.slow
@pytest.mark.weights
def test_the_estimate_holds_for_the_real_model(tmp_path):
    """SmolLM2 in both types: loading and a chat take no more resident memory than was told, and not half of it."""
    code = (
        "import json, re, sys\n"
        "import torch, transformers\n"
        "from transformers import AutoTokenizer, AutoModelForCausalLM\n"
        "from agentkv import AgentKV, Request, Sampling\n"
        "from agentkv.engine.local import loader\n"
        "def peak(): return int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]) * 1024\n"
        "before = peak()\n"
        "with AgentKV.local('smollm2-135m', device='cpu', dtype=sys.argv[1], device_memory='64MiB', host_memory=None,"
        " ledger='memory') as kv:\n"
        "    kv.submit(Request(prompt='word ' * 1000, sampling=Sampling(max_tokens=8))).result(100)\n"
        "    print(peak() - before - (64 << 20))\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "AGENTKV_DATA": str(tmp_path)}
    load_model("smollm2-135m", device="cpu")  # unpacked from here on
    for dtype in ("float32", "bfloat16"):
        found = estimate("smollm2-135m", device="cpu", dtype=dtype)
        command = [sys.executable, "-c", code, dtype]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
        took = int(done.stdout.splitlines()[-1])
        mapped = found.unpacked_bytes  # the weight file's pages count as resident until somebody needs the room
        assert took < found.weights_bytes + found.working_bytes + mapped, done.stderr
        assert took > (found.weights_bytes + found.working_bytes) / 2
