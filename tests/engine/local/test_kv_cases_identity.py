"""KV belongs to the exact model that computed it: a kept store is opened by a model that differs in one thing.

Users' reports K2 and K3: the same names, sizes and times, other content. Each time nothing is reused and the answer is
the changed model's own; the control with nothing changed, before and after, is reused.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil

import pytest
import torch

from agentkv.core.residency import Action, Move, Tier
from agentkv.engine.local.engine import LocalEngine
from agentkv.engine.local.loader import load_model

MIB = 1 << 20
PROMPT = "The tool ran for a while. Its output follows: line one, line two, and so on until the end of the file. " * 2


@contextlib.contextmanager
def _in_place(path):
    """What is written has the old file's times."""
    before = path.stat()
    yield
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert before.st_mtime_ns == path.stat().st_mtime_ns


def _one_weight(folder):
    from safetensors.torch import load_file, save_file

    (path,) = folder.glob("*.safetensors")
    size = path.stat().st_size
    with _in_place(path):
        weights = load_file(path)
        name = min(name for name in weights if "k_proj" in name)
        weights[name][3, 5] += 2.0
        save_file(weights, path, metadata={"format": "pt"})
    assert size == path.stat().st_size


def _edit(folder, name, change):
    path = folder / name
    with _in_place(path):
        data = json.loads(path.read_text())
        change(data)
        path.write_text(json.dumps(data))


def _rope(config):
    if config.get("rope_parameters"):
        config["rope_parameters"]["rope_theta"] = 9000.0
    config["rope_theta"] = 9000.0


def _tokenizer(data):
    vocab = data["model"]["vocab"]
    vocab["a"], vocab["e"] = vocab["e"], vocab["a"]


CHANGES = {
    "one weight": _one_weight,
    "rope": lambda folder: _edit(folder, "config.json", _rope),
    "norm": lambda folder: _edit(folder, "config.json", lambda config: config.update(rms_norm_eps=0.1)),
    "tokenizer": lambda folder: _edit(folder, "tokenizer.json", _tokenizer),
    "dtype": lambda _folder: None,
}


def _ask(ask, folder, disk, *, dtype="float32", salt=""):
    """What a fresh engine over the store answers: (cached tokens, token ids)."""
    loaded = load_model(str(folder), device="cpu", dtype=dtype)
    size = loaded.geometry.slot_bytes
    sizes = {"device_memory": 64 * size, "host_memory": 64 * size, "disk": disk, "disk_memory": 32 * MIB}
    with LocalEngine(loaded, persist=True, salt=salt, **sizes) as engine:
        answer = engine.submit(ask(PROMPT, 8, task="t")).result(60)
        engine.apply(Move(session=answer.session, action=Action.DEMOTE, to=Tier.DISK, reason="test"))
        engine.tiers.quiesce(20)
        return answer.usage.cached_tokens, list(answer.token_ids)


def _cold(folder):
    """The folder's own greedy tokens, by transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([AutoTokenizer.from_pretrained(folder)(PROMPT, add_special_tokens=False)["input_ids"]])
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, pad_token_id=258
        )
    return out[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("what", CHANGES)
def test_a_model_that_differs_in_one_thing_finds_nothing_in_the_same_store(save_tiny, ask, tmp_path, what):
    """Changed in place under the same name, size and time: 0 reuse, its own answer; changed back: reuse (K2, K3)."""
    folder, disk = save_tiny(tmp_path / "model"), tmp_path / "kv"
    shutil.copytree(folder, tmp_path / "before")
    assert (0, _cold(folder)) == _ask(ask, folder, disk)
    reused, tokens = _ask(ask, folder, disk)
    assert reused >= 192
    assert _cold(folder) == tokens
    CHANGES[what](folder)
    dtype = "bfloat16" if what == "dtype" else "float32"
    reused, tokens = _ask(ask, folder, disk, dtype=dtype)
    assert 0 == reused
    if what != "dtype":
        assert _cold(folder) == tokens
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "before", folder)
    reused, tokens = _ask(ask, folder, disk)
    assert reused >= 192
    assert _cold(folder) == tokens


def test_the_same_content_under_another_name_is_the_same_model(save_tiny, ask, tmp_path):
    """Moved, copied and touched folders reuse: identity is content, never a name or a time (K2)."""
    folder, disk = save_tiny(tmp_path / "model"), tmp_path / "kv"
    assert 0 == _ask(ask, folder, disk)[0]
    other = shutil.copytree(folder, tmp_path / "renamed", copy_function=shutil.copy)
    for path in other.iterdir():
        os.utime(path, (1, 1))
    assert _ask(ask, other, disk)[0] >= 192


@pytest.mark.parametrize("salt", ["", "tenant-b", "tenant-a ", "Tenant-a", "tenant-a\0"])
def test_another_tenant_finds_nothing_after_a_restart(save_tiny, ask, tmp_path, salt):
    """One store, one model: only the very same salt reuses what is on disk (K5)."""
    folder, disk = save_tiny(tmp_path / "model"), tmp_path / "kv"
    first = _ask(ask, folder, disk, salt="tenant-a")
    assert (0, first[1]) == _ask(ask, folder, disk, salt=salt)
    reused, tokens = _ask(ask, folder, disk, salt="tenant-a")
    assert reused >= 192
    assert first[1] == tokens


@pytest.mark.parametrize("name", ["../..", "a\0b", "\ud800", "-" * 4096, "é\n", " "], ids=range(6))
def test_hostile_names_come_back_after_a_restart(tiny, ask, tmp_path, name):
    """Task, session and branch are only names in the store's notes; no file is named after them."""
    size = tiny.loaded.geometry.slot_bytes
    options = {
        "device_memory": 64 * size, "host_memory": 64 * size, "disk": tmp_path / "kv", "disk_memory": 32 * MIB,
        "persist": True,
    }  # fmt: skip
    with LocalEngine(tiny.loaded, **options) as engine:
        first = engine.submit(ask(PROMPT, 4, task=name, branch=name, session=name)).result(60)
        files = sorted(path.name for path in tmp_path.rglob("*"))
    with LocalEngine(tiny.loaded, **options) as engine:
        again = engine.submit(ask(PROMPT + first.text, 4, task=name, branch=name)).result(60)
        assert name == again.session
        assert again.usage.cached_tokens >= 192
        assert tiny.greedy(PROMPT + first.text, 4) == list(again.token_ids)
        assert files == sorted(path.name for path in tmp_path.rglob("*"))
        engine.finish_task(name)
    with LocalEngine(tiny.loaded, **options) as engine:
        assert 0 == engine.stats()["sessions"]
        assert 0 == engine.submit(ask(PROMPT, 2, task=name)).result(60).usage.cached_tokens
