"""GGUF files: right or refused. Made here from tiny models, whole and split, plain and quantised (M1 to M4, E8)."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from agentkv.core.message import Message
from agentkv.core.task import Caller
from agentkv.engine.base import Request, Sampling
from agentkv.engine.local import convert
from agentkv.engine.local.engine import LocalEngine
from agentkv.engine.local.gguf_file import find_gguf, read_gguf
from agentkv.engine.local.gguf_model import llama3_rope
from agentkv.engine.local.loader import load_model
from agentkv.errors import ModelError, ModelNotFound, UnsupportedModel

_spec = importlib.util.spec_from_file_location("gguf_maker", Path(__file__).with_name("gguf_maker.py"))
maker = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(maker)

FAMILIES = ["llama", "llama-3", "smollm2", "linear-rope", "qwen2", "qwen2.5-yarn", "qwen3", "mistral"]
IDS = [(i * 37 + 5) % 256 for i in range(90)]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("AGENTKV_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def original(models, tmp_path_factory):
    """The folder of a family, built once, with a tokenizer that has merges and cuts at digits."""
    made = {}

    def of(family="llama", **sizes):
        key = (family, *sizes.items())
        if key not in made:
            made[key] = models.save(tmp_path_factory.mktemp(family) / "model", family, merges=True, **sizes)
        return made[key]

    return of


def _load(path, dtype="float32", **more):
    return load_model(str(path), device="cpu", dtype=dtype, **more)


def _logits(folder, ids=IDS):
    """Transformers' logits of an unpacked folder."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def _unpacked(tmp_path):
    (folder,) = (path for path in (tmp_path / "cache" / "models").iterdir() if path.is_dir())
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_a_gguf_computes_what_the_model_it_was_made_of_does(models, original, tmp_path, family):
    """Grouped heads in llama.cpp's order, rotary embeddings of all proven kinds, tied and untied heads (M3)."""
    folder = original(family)
    path = maker.write(folder, tmp_path / "tiny.gguf")
    loaded = _load(path)
    torch.testing.assert_close(_logits(_unpacked(tmp_path)), models.Oracle(folder).logits(IDS), rtol=1e-4, atol=1e-4)
    plain = _load(folder)
    assert (plain.geometry, plain.context_tokens, plain.vocabulary) == (
        loaded.geometry, loaded.context_tokens, loaded.vocabulary,
    )  # fmt: skip
    assert plain.eos_ids == loaded.eos_ids


@pytest.mark.parametrize(("kind", "error"), [("F16", 0.01), ("BF16", 0.05), ("Q8_0", 0.1), ("Q4_1", 0.8)])
def test_quantised_files_are_close_in_bfloat16(models, original, tmp_path, kind, error):
    """All weights have the type that was asked for, whatever the file had (M1, M3)."""
    folder = original("llama", hidden_size=128, intermediate_size=128, head_dim=32)
    path = maker.write(folder, tmp_path / "tiny.gguf", kind=kind)
    loaded = _load(path, "bfloat16")
    assert {torch.bfloat16} == {parameter.dtype for parameter in loaded.model.parameters()}
    wanted, got = models.Oracle(folder).logits(IDS), _logits(_unpacked(tmp_path))
    assert 0 < float((wanted - got).std() / wanted.std()) < error


def test_heads_in_the_wrong_order_would_be_seen(models, original, tmp_path):
    """The control: a file whose heads are not in llama.cpp's order computes something else."""
    folder = original()
    maker.write(folder, tmp_path / "wrong.gguf", permute=False)
    _load(tmp_path / "wrong.gguf")
    assert float((models.Oracle(folder).logits(IDS) - _logits(_unpacked(tmp_path))).abs().max()) > 0.1


STRINGS = [
    f"{'é' * (n % 3)} {n}  {n**3} 👩‍🔬{'  ' * (n % 4)}def f_{n}():\n\treturn '{chr(0x4E00 + n)}' 12  {n % 100}\n\n the thin 3.14"
    for n in range(200)
]


def test_two_hundred_texts_have_the_ids_of_the_original_tokenizer(original, tmp_path):
    """Accents, digits, double spaces between digits, emoji, code (M2)."""
    folder = original()
    loaded, plain = _load(maker.write(folder, tmp_path / "tiny.gguf")), _load(folder)
    for text in STRINGS:
        assert plain.tokenizer(text)["input_ids"] == loaded.tokenizer(text)["input_ids"]
    assert plain.tokenizer.chat_template == loaded.tokenizer.chat_template


def test_a_way_of_cutting_text_that_is_not_known_is_warned_about(original, tmp_path):
    """And its KV is never the original's: another fingerprint (M2, K2)."""
    folder, said = original(), []
    fine = _load(maker.write(folder, tmp_path / "fine.gguf"), progress=said.append)
    assert not any("tokenizer" in line for line in said)
    odd = _load(maker.write(folder, tmp_path / "odd.gguf", pre="a-new-one"), progress=said.append)
    (warning,) = [line for line in said if "tokenizer" in line]
    assert "'a-new-one'" in warning
    assert 3 == len({_load(folder).fingerprint, fine.fingerprint, odd.fingerprint})


@pytest.mark.parametrize("given", ["first", "second", "last", "folder"])
def test_a_split_file_is_found_by_any_part(models, original, tmp_path, given):
    """Part 1, another part or the folder: the same model (M4)."""
    folder = original()
    split = tmp_path / "split"
    split.mkdir()
    maker.write(folder, split / "tiny.gguf", split_tensors=6)
    parts = sorted(split.glob("*.gguf"))
    assert len(parts) == 4
    path = {"first": parts[0], "second": parts[1], "last": parts[-1], "folder": split}[given]
    _load(path)
    assert torch.equal(models.Oracle(folder).logits(IDS), _logits(_unpacked(tmp_path)))


@pytest.mark.parametrize("number", [0, 1, 3])
def test_a_missing_part_is_named(original, tmp_path, number):
    """In one sentence, whichever part was given (M4)."""
    maker.write(original(), tmp_path / "tiny.gguf", split_tensors=6)
    parts = sorted(tmp_path.glob("*.gguf"))
    parts[number].unlink()
    for given in (parts[2], tmp_path):
        with pytest.raises(ModelNotFound, match=rf"lacks {parts[number].name}, part of a GGUF that was split into 4"):
            _load(given)


def test_parts_of_different_models_are_refused(original, tmp_path):
    """The header of the first one counts the tensors of all (M4)."""
    for name, skip in (("a", ()), ("b", ("blk.1.ffn_up.weight",))):
        (tmp_path / name).mkdir()
        maker.write(original(), tmp_path / name / "tiny.gguf", split_tensors=6, skip=skip)
    shutil.copy(max((tmp_path / "b").iterdir()), max((tmp_path / "a").iterdir()))
    with pytest.raises(ModelError, match="parts are of different models"):
        _load(tmp_path / "a")


def test_a_renamed_part_is_refused(original, tmp_path):
    """Its own header says which part it is (M4)."""
    maker.write(original(), tmp_path / "tiny.gguf", split_tensors=6)
    parts = sorted(tmp_path.glob("*.gguf"))
    shutil.copy(parts[1], parts[2])
    with pytest.raises(ModelError, match="says that it is part 2, not 3"):
        _load(parts[0])


def test_a_folder_with_two_models_asks_which(original, tmp_path):
    """Rather than taking the first."""
    for name in ("a.gguf", "b.gguf"):
        maker.write(original(), tmp_path / name)
    with pytest.raises(ModelNotFound, match=r"holds 2 GGUF models \(a\.gguf, b\.gguf\)"):
        _load(tmp_path)


@pytest.mark.parametrize("cut", [100, 40_000])
def test_a_file_that_was_cut_off_is_named_with_the_missing_bytes(original, tmp_path, cut):
    """A download that ended early (M5)."""
    path = maker.write(original(), tmp_path / "tiny.gguf")
    data = path.read_bytes()
    end = max(tensor.at + tensor.size_bytes for tensor in read_gguf((path,)).tensors.values())
    path.write_bytes(data[: end - cut])
    with pytest.raises(
        ModelError, match=rf"tiny\.gguf was cut off: it has {end - cut:,} bytes of {end:,}, {cut:,} are"
    ):
        _load(path)


@pytest.mark.parametrize("length", [5, 30, 3000])
def test_a_file_that_ends_in_its_header_is_refused(original, tmp_path, length):
    """Never a traceback of struct."""
    path = maker.write(original(), tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ModelError, match="cut off or damaged in its header"):
        _load(path)


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({"expert_count": 4}, r"llama\.expert_count = 4"),
        ({"attention.clamp_kqv": 8}, r"llama\.attention\.clamp_kqv"),
        ({"rope.scaling.attn_factor": 2}, r"llama\.rope\.scaling\.attn_factor"),
        ({"rope.scaling.type": "longrope"}, "longrope"),
        ({"rope.dimension_count": 8}, "rotates 8 of 16"),
    ],
)
def test_a_setting_that_no_test_has_proven_is_refused_by_name(original, tmp_path, metadata, reason):
    """Left out, it would give a model that computes nonsense (M3)."""
    path = maker.write(original(), tmp_path / "tiny.gguf", metadata=metadata)
    with pytest.raises(UnsupportedModel, match=reason):
        _load(path)
    assert not (tmp_path / "cache" / "models").exists()


def test_an_architecture_that_no_test_has_proven_is_refused(original, tmp_path):
    """With the way out."""
    path = maker.write(original(), tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes().replace(b"llama", b"grokk"))
    with pytest.raises(UnsupportedModel, match="architecture 'grokk'; proven are llama, qwen2, qwen3"):
        _load(path)


def test_rotary_factors_that_are_not_llama_3s_are_refused(original, tmp_path, monkeypatch):
    """They are recognised by recomputing all of them."""
    import numpy as np

    monkeypatch.setattr(maker, "_factors", lambda *_args: np.array([1, 1, 1, 2, 3, 4, 5, 7], dtype=np.float32))
    path = maker.write(original("llama-3"), tmp_path / "tiny.gguf")
    with pytest.raises(UnsupportedModel, match="not those of Llama 3"):
        _load(path)
    assert not [entry for entry in (tmp_path / "cache" / "models").iterdir() if entry.suffix != ".lock"]


@pytest.mark.parametrize(
    ("factor", "original_tokens", "theta"), [(8.0, 8192, 5e5), (32.0, 8192, 5e5), (4.0, 2048, 1e4)]
)
def test_llama_3s_rotary_parameters_follow_from_its_factors(factor, original_tokens, theta):
    """Those of published models are found again."""
    from types import SimpleNamespace

    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {
        "rope_type": "llama3", "rope_theta": theta, "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": original_tokens,
    }  # fmt: skip
    config = SimpleNamespace(
        rope_parameters=rope, head_dim=128, hidden_size=256, num_attention_heads=2, standardize_rope_params=lambda: None
    )
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, device="cpu")
    plain = 1.0 / theta ** (torch.arange(0, 128, 2) / 128)
    assert rope == llama3_rope((plain / frequencies).tolist(), theta=theta, head_dim=128)


def test_a_missing_tensor_is_named(original, tmp_path):
    """transformers would invent it (M3, M5)."""
    path = maker.write(original(), tmp_path / "tiny.gguf", skip=("blk.1.ffn_up.weight",))
    with pytest.raises(ModelError, match=r"lacks 1 weights, for instance model\.layers\.1\.mlp\.up_proj\.weight"):
        _load(path)


def test_a_gguf_with_a_template_chats(original, tmp_path):
    """The template travels in the metadata (E8); the answer is that of the folder."""
    folder = original()
    path = maker.write(folder, tmp_path / "tiny.gguf")
    turns = (Message(role="user", content="Say 12  34."),)
    answers = []
    for where in (folder, path):
        loaded = _load(where)
        with LocalEngine(loaded, device_memory=40 * loaded.geometry.block_bytes) as engine:
            request = Request(messages=turns, sampling=Sampling(max_tokens=12), caller=Caller(task="t"))
            answers.append(engine.submit(request).result(60).token_ids)
    assert answers[0] == answers[1]


def test_a_split_model_is_one_set_of_files(tmp_path):
    """Numbers and counts come from the names."""
    names = [f"m-{number:05}-of-00012.gguf" for number in range(1, 13)]
    for name in names:
        (tmp_path / name).touch()
    assert names == [path.name for path in find_gguf(tmp_path / names[6])]
    with pytest.raises(ModelNotFound, match="there is no file"):
        find_gguf(tmp_path / "other.gguf")


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
    """And leaves nothing in the cache."""
    (tmp_path / "x.gguf").write_bytes(b"PK" + b"\0" * 100)
    with pytest.raises(ModelError, match=r"x\.gguf is not a GGUF file"):
        _load(tmp_path / "x.gguf")
    assert not (tmp_path / "cache" / "models").exists()


def test_what_a_killed_conversion_left_is_removed_by_the_next(original, tmp_path, monkeypatch):
    """Hundreds of megabytes each; those of other files, and what is not ours, stay."""
    file = maker.write(original(), tmp_path / "x.gguf")
    folder = tmp_path / "cache" / "models" / f"x-{convert._digest(file)}-{convert._FORMAT}"
    dead, other = folder.with_name(f"{folder.name}.abc.part"), folder.with_name("y-0-1.abc.part")
    for path in (dead, other):
        path.mkdir(parents=True)
        (path / "model.safetensors").write_bytes(b"half")
    seen = []
    monkeypatch.setattr(convert, "_convert", lambda _read, _config, made: (seen.append(dead.exists()), made.mkdir()))
    assert folder == convert.converted(file, progress=lambda _line: None)
    assert [False] == seen
    assert {f"{folder.name}.lock", folder.name, other.name} == {path.name for path in folder.parent.iterdir()}


def test_a_conversion_shows_no_bars_of_others(original, tmp_path, monkeypatch, capsys):
    """`progress` says what happens; afterwards bars are as they were."""
    import transformers
    from transformers.utils import logging

    def bars(*_args, **_kwargs):
        list(logging.tqdm([1], desc="tokens"))
        raise ValueError("no vocabulary")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", bars)
    file = maker.write(original(), tmp_path / "x.gguf")
    with pytest.raises(ModelError, match="no vocabulary"):
        convert.converted(file, progress=lambda _line: None)
    assert "" == capsys.readouterr().err
    with pytest.raises(ValueError, match="no vocabulary"):
        bars()
    assert "tokens" in capsys.readouterr().err
    assert not [path for path in (tmp_path / "cache" / "models").iterdir() if path.suffix != ".lock"]


def test_a_full_disk_is_told_before_it_is_full(original, tmp_path, monkeypatch):
    """With both numbers and the way out."""
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(convert.shutil, "disk_usage", lambda _path: usage._replace(free=1000))
    with pytest.raises(ModelError, match=r"are needed, 1000 B are free; set AGENTKV_CACHE"):
        _load(maker.write(original(), tmp_path / "tiny.gguf"))


@pytest.mark.slow
@pytest.mark.weights
def test_unpacking_needs_little_memory_and_loading_what_the_weights_need(tmp_path):
    """A Q4 file of 94 MiB: 257 MiB in bfloat16. Unpacking it never holds more than a few rows (M1)."""
    code = (
        "import json, re, sys\n"
        "import torch, transformers\n"
        "from agentkv.engine.local import convert, loader\n"
        "def peak(): return int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]) / 1024\n"
        "from transformers import AutoTokenizer, LlamaForCausalLM\n"
        "before = peak()\n"
        "folder = convert.converted(loader._packaged_file(), progress=lambda line: None)\n"
        "unpacked = peak()\n"
        "loaded = loader.load_model('smollm2-135m', device='cpu', dtype='bfloat16')\n"
        "kinds = sorted({str(p.dtype) for p in loaded.model.parameters()})\n"
        "print(json.dumps([before, unpacked, peak(), kinds]))\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    before, unpacked, loaded, kinds = json.loads(done.stdout.splitlines()[-1])
    assert ["torch.bfloat16"] == kinds
    assert unpacked - before < 257, done.stderr
    assert loaded - before < 3.3 * 257  # the file as mapped, packed copies, libraries


@pytest.mark.slow
@pytest.mark.weights
def test_the_packaged_tokenizer_cuts_text_as_llama_cpp_does(monkeypatch, tmp_path):
    """Two hundred texts against an independent reader of the same file (M2)."""
    import httpx

    pytest.importorskip("xllamacpp")
    sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
    import llamacpp

    loaded = _load("smollm2-135m")
    with llamacpp.server(slots=1) as url:
        root = url.removesuffix("/v1")
        for text in STRINGS:
            told = httpx.post(f"{root}/tokenize", json={"content": text, "add_special": False}, timeout=30).json()
            assert told["tokens"] == loaded.tokenizer(text, add_special_tokens=False)["input_ids"], text
