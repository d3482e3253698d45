"""Damaged GGUF headers: refused in our own words with file and byte, or the weights are those that were written (M5).

Covers each kind of field by hand. Changed bytes by the hundred: `test_gguf_fuzz.py`. Files that were cut off: `test_gguf.py`.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from agentkv.engine.local.estimate import estimate
from agentkv.engine.local.gguf_file import read_gguf
from agentkv.engine.local.gguf_model import config_of
from agentkv.engine.local.loader import load_model
from agentkv.errors import ModelError, UnsupportedModel


def _module(name):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    made = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


draft = _module("gguf_draft")
maker = draft.maker
folder, whole, made, weights = draft.folder, draft.whole, draft.made, draft.weights
F32, I32, Q8_0 = 0, 26, 8
array, long, text, word = draft.array, draft.long, draft.text, draft.word


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("AGENTKV_CACHE", str(tmp_path / "cache"))


def _refused(tmp_path, raw, reason):
    """By loading and by looking (`agentkv doctor`), naming the file; nothing is left in the cache."""
    path = tmp_path / "damaged.gguf"
    path.write_bytes(raw)
    for way in (lambda: load_model(str(path), device="cpu", dtype="float32"), lambda: estimate(str(path))):
        with pytest.raises(ModelError, match=reason) as refused:
            way()
        assert "damaged.gguf" in str(refused.value)
    assert not (tmp_path / "cache" / "models").exists()


def test_a_file_taken_apart_and_put_together_is_the_file(whole, made):
    """The control."""
    assert whole == made.bytes()


@pytest.mark.parametrize(
    ("kind", "raw"),
    [
        (draft.UINT32, word(0)), (draft.UINT32, word(48)), (draft.INT32, word(2**32 - 32)), (draft.STRING, text("abc")),
        (draft.ARRAY, array(draft.UINT32)), (draft.ARRAY, array(draft.UINT8, *[b"x"] * 128)), (draft.BOOL, b"\1"),
        (draft.FLOAT32, word(0x42000000)),
    ],
    ids=["0", "48", "-32", "text", "array", "128 items", "true", "32.0"],
)  # fmt: skip
def test_an_alignment_that_is_no_power_of_two_is_refused(tmp_path, made, kind, raw):
    """Where data begins hangs on it."""
    made.set("general.alignment", kind, raw)
    _refused(tmp_path, made.bytes(), r"before byte [\d,]+: general\.alignment at byte [\d,]+ is .* no power of two")


@pytest.mark.parametrize("align", [1, 8, 64, 4096])
def test_another_alignment_is_kept(whole, made, weights, align):
    """One that the tensors keep: the same weights."""
    made.set("general.alignment", draft.UINT32, word(align))
    made.align, data, made.data = align, made.data, b""
    for info in made.infos:
        start, size = info.offset, 4
        for side in info.dims:
            size *= side
        info.offset = len(made.data)
        made.data += data[start : start + size] + bytes(-size % align)
    before, after = weights(whole), weights(made.bytes())
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_an_alignment_that_the_tensors_do_not_keep_is_refused(tmp_path, made):
    """Every tensor would be read from elsewhere."""
    _refused(tmp_path, made.set("general.alignment", draft.UINT32, word(2048)).bytes(), "it puts .* at byte")


@pytest.mark.parametrize(
    ("kind", "raw"),
    [
        (draft.ARRAY, (word(9) + long(1)) * 5000 + array(draft.UINT32)),
        (draft.ARRAY, word(draft.STRING) + long(2**40)), (draft.ARRAY, word(draft.STRING) + long(2**63)),
        (draft.ARRAY, word(draft.UINT64) + long(2**62)), (draft.ARRAY, word(99) + long(1)), (13, b""),
        (draft.STRING, long(2**60)), (draft.STRING, long(2) + b"\xff\xfe"),
    ],
    ids=[
        "5000 deep", "2^40 strings", "2^63 strings", "2^62 numbers", "items of no type", "no type", "endless text",
        "no UTF-8",
    ],
)  # fmt: skip
def test_a_setting_that_cannot_be_read_is_refused_in_a_moment(tmp_path, made, kind, raw):
    """Whether or not anybody wants it."""
    _refused(tmp_path, made.set("general.odd", kind, raw).bytes(), "damaged in its header, before byte")


@pytest.mark.parametrize(("name", "count"), [("tensors", 2**31), ("settings", 2**63), ("tensors", 2**16)])
def test_counts_that_make_no_sense_are_refused(tmp_path, made, name, count):
    """However many the file says there are."""
    made.more[name] = count
    _refused(tmp_path, made.bytes(), "damaged in its header, before byte")


@pytest.mark.parametrize(("name", "less"), [("tensors", 1), ("tensors", 3), ("settings", 1), ("settings", -1)])
def test_counts_that_are_near_are_refused_too(tmp_path, made, name, less):
    """A tensor less moves where data begins; a head left out would have been taken for a tied one."""
    made.more[name] = len(getattr(made, {"tensors": "infos", "settings": "settings"}[name])) - less
    _refused(tmp_path, made.bytes(), "damaged|more than its header|not known here|lacks|GGML type|makes no sense")


def test_what_is_named_twice_is_refused(tmp_path, made):
    """Which of the two counts is anybody's guess."""
    made.settings.append(("general.name", draft.STRING, text("other")))
    _refused(tmp_path, made.bytes(), "before byte .* general.name is set twice")
    made.settings.pop()
    made.info("blk.0.attn_norm.weight").name = "blk.1.attn_norm.weight"
    _refused(tmp_path, made.bytes(), r"at byte [\d,]+ of its header: it names blk\.1\.attn_norm\.weight twice")


NUMBERS = (
    "block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
    "attention.head_count_kv", "attention.layer_norm_rms_epsilon", "attention.key_length", "rope.freq_base",
)  # fmt: skip
NONSENSE = {
    "0": (draft.UINT32, word(0)), "-1": (draft.INT32, word(2**32 - 1)), "text": (draft.STRING, text("4")),
    "true": (draft.BOOL, b"\1"), "array": (draft.ARRAY, array(draft.UINT32, word(4), word(4))),
    "long array": (draft.ARRAY, array(draft.UINT32, *[word(4)] * 80)), "2^40": (draft.UINT64, long(2**40)),
    "nan": (draft.FLOAT32, word(0x7FC00000)), "infinite": (draft.FLOAT32, word(0x7F800000)),
}  # fmt: skip


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_that_makes_no_sense_is_refused_by_name_and_byte(tmp_path, whole, name):
    """Zero heads, negative layers, text: nobody divides by it first."""
    for label, (kind, raw) in NONSENSE.items():
        if label == "2^40" and "." in name and name not in ("attention.head_count", "attention.head_count_kv"):
            continue  # a number like any other
        made = draft.Draft.of(whole).set(f"llama.{name}", kind, raw)
        _refused(tmp_path, made.bytes(), rf"damaged at byte [\d,]+ of its header: llama\.{name} = ")


@pytest.mark.parametrize("count", [2**31, 2**20, 3, 1])
def test_layers_are_those_of_the_tensors(tmp_path, made, count):
    """Never so many that nobody comes back, never fewer than there are weights for."""
    made.set("llama.block_count", draft.UINT32, word(count))
    told = "has weights of layer 1, but says" if count == 1 else r"layers, but lacks the weights of layer 2"
    _refused(tmp_path, made.bytes(), told)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("embedding_length", 32), ("feed_forward_length", 95), ("attention.head_count", 2), ("attention.head_count", 8),
        ("attention.head_count_kv", 4), ("attention.head_count_kv", 1), ("attention.head_count_kv", 3),
        ("attention.head_count", 2**31), ("feed_forward_length", 2**31), ("embedding_length", 2**31),
    ],
)  # fmt: skip
def test_sizes_that_are_not_those_of_the_weights_are_refused(tmp_path, made, name, value):
    """Before anything is unpacked."""
    _refused(
        tmp_path, made.set(f"llama.{name}", draft.UINT32, word(value)).bytes(), "another shape|damaged|no model can"
    )


@pytest.mark.parametrize("name", ["bos", "eos", "padding", "eot"])
@pytest.mark.parametrize(
    "raw", [(draft.UINT32, word(10**6)), (draft.INT32, word(2**32 - 1)), (draft.STRING, text("x"))]
)
def test_a_token_that_there_is_none_of_is_refused(tmp_path, made, name, raw):
    """As an end token it would never be written."""
    made.set(f"tokenizer.ggml.{name}_token_id", *raw)
    _refused(tmp_path, made.bytes(), rf"damaged at byte [\d,]+ .* tokenizer\.ggml\.{name}_token_id = ")


@pytest.mark.parametrize("moved", [32, 4096, 1, -32, 2**63])
def test_tensors_that_overlap_or_leave_room_are_refused(tmp_path, made, moved):
    """Read from there, its weights would be another's."""
    for info in (made.infos[0], made.infos[3], made.infos[-1]):
        before = info.offset
        info.offset = (before + moved) % 2**64
        _refused(tmp_path, made.bytes(), rf"at byte [\d,]+ of its header: it puts {info.name} at byte")
        info.offset = before


def test_two_tensors_that_changed_places_are_refused(tmp_path, made):
    """Both have the same size; the order of the infos is that of the data, as llama.cpp wants it, too."""
    one, other = made.info("blk.0.ffn_up.weight"), made.info("blk.1.ffn_up.weight")
    one.offset, other.offset = other.offset, one.offset
    _refused(tmp_path, made.bytes(), "it puts blk")


def test_bytes_behind_the_end_are_damage(tmp_path, whole):
    """A header that lost a tensor has the same look."""
    _refused(tmp_path, whole + bytes(1000), "has 1,000 bytes more than its header names")


@pytest.mark.parametrize(
    ("dims", "kind"),
    [([], F32), ([0, 96], F32), ([64, 2**60], F32), ([2**32, 2**32], F32), ([33, 96], Q8_0), ([1] * 9, F32)],
)
def test_shapes_that_no_tensor_has_are_refused(tmp_path, made, dims, kind):
    """Empty, endless, or of half a block."""
    info = made.infos[-1]
    info.dims, info.kind = dims, kind
    _refused(tmp_path, made.bytes(), "has the shape|a tensor of 9 dimensions")


@pytest.mark.parametrize("kind", [99, 2**32 - 1, 4])
def test_a_type_that_is_not_known_is_refused(tmp_path, made, kind):
    """By number."""
    made.infos[2].kind = kind
    _refused(tmp_path, made.bytes(), rf"GGML type that is not known here \({kind}\)")


@pytest.mark.parametrize(
    ("name", "dims", "reason"),
    [
        ("blk.2.attn_q.weight", [64, 64], "has weights of layer 2, but says that it has 2 layers"),
        ("blk.18446744073709551616.attn_norm.weight", [64], "has weights of layer 18446744073709551616"),
        ("blk.0.attn_q_norm.weight", [16], r"brings 1 tensors .*blk\.0\.attn_q_norm\.weight"),
        ("blk.1.ffn_up.bias", [96], r"brings 1 tensors .*blk\.1\.ffn_up\.bias"),
        ("blk.1.attn_k.bias", [32], r"brings 1 tensors .*blk\.1\.attn_k\.bias"),
        ("output.bias", [267], r"brings 1 tensors .*output\.bias"),
        ("output_norm.bias", [64], r"brings 1 tensors .*output_norm\.bias"),
        ("blk.0.ffn_gate_exps.weight", [64, 96, 4], r"not known here: blk\.0\.ffn_gate_exps"),
        ("v.patch_embd.weight", [64], r"not known here: v\.patch_embd"),
    ],
)  # fmt: skip
def test_a_tensor_that_nothing_reads_is_named(tmp_path, made, name, dims, reason):
    """Before anything is unpacked: what it was for would not be computed."""
    count = 4
    for side in dims:
        count *= side
    _refused(tmp_path, made.add(name, dims, bytes(count)).bytes(), reason)


@pytest.mark.parametrize(("kind", "dims"), [(1, [16]), (F32, [16]), (F32, [7]), (I32, [8])])
def test_rotary_factors_of_another_form_are_refused(tmp_path, made, kind, dims):
    """They are read as one float32 for each frequency."""
    _refused(
        tmp_path, made.add("rope_freqs.weight", dims, bytes(4 * dims[0] // (1 + kind % 2)), kind).bytes(), "one float32"
    )


def test_a_file_without_its_first_tensors_is_refused(tmp_path, made):
    """Its vocabulary is counted by them."""
    made.info("token_embd.weight").name = "output_norm.bias"
    _refused(tmp_path, made.bytes(), r"lacks token_embd\.weight")


def test_a_factor_without_a_type_scales_as_llama_cpp_does(tmp_path, made):
    """Left out, every position would be another one."""
    made.set("llama.rope.scaling.factor", draft.FLOAT32, word(0x40000000))
    path = tmp_path / "scaled.gguf"
    path.write_bytes(made.bytes())
    assert {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0} == config_of(read_gguf((path,)))["rope_parameters"]
    path.write_bytes(made.set("llama.rope.scaling.type", draft.STRING, text("none")).bytes())
    assert "default" == config_of(read_gguf((path,)))["rope_parameters"]["rope_type"]


def test_a_tokenizer_that_is_damaged_is_refused(tmp_path, made):
    """By two libraries, in whatever way; said in our words."""
    path = tmp_path / "x.gguf"
    for name, kind, raw in (
        ("tokenizer.ggml.tokens", draft.ARRAY, array(draft.STRING, text("a"))),
        ("tokenizer.ggml.tokens", draft.UINT32, word(3)),
        ("tokenizer.ggml.merges", draft.ARRAY, array(draft.UINT32, word(3))),
        ("tokenizer.ggml.model", draft.ARRAY, array(draft.STRING)),
        ("tokenizer.ggml.pre", draft.ARRAY, array(draft.STRING, text("a"))),
    ):
        path.write_bytes(draft.Draft.of(made.bytes()).set(name, kind, raw).bytes())
        if name == "tokenizer.ggml.pre":  # a way of cutting text that is not known is a warning
            assert load_model(str(path), device="cpu", dtype="float32").vocabulary
            continue
        with pytest.raises(ModelError, match=r"x\.gguf"):
            load_model(str(path), device="cpu", dtype="float32")


def test_a_setting_that_is_not_proven_stays_a_refusal_of_its_own(tmp_path, made):
    """Nothing is damaged there."""
    path = tmp_path / "x.gguf"
    path.write_bytes(made.drop("llama.context_length").bytes())
    with pytest.raises(UnsupportedModel, match=r"x\.gguf lacks llama\.context_length"):
        load_model(str(path), device="cpu", dtype="float32")


@pytest.mark.parametrize(
    ("kind", "raw"), [(draft.UINT32, word(7)), (draft.STRING, text("1")), (draft.ARRAY, array(draft.UINT8))]
)
def test_a_part_with_a_damaged_number_is_refused(tmp_path, folder, kind, raw):
    """Also where it is no number."""
    parts = _split(tmp_path, folder)
    parts[1].write_bytes(draft.Draft.of(parts[1].read_bytes()).set("split.no", kind, raw).bytes())
    with pytest.raises(ModelError, match=rf"{parts[1].name} says that it is part .*, not 2"):
        load_model(str(parts[0]), device="cpu", dtype="float32")


def test_a_tensor_in_two_parts_is_refused(tmp_path, folder):
    """Of the two, the later one would have been taken."""
    parts = _split(tmp_path, folder)
    made = draft.Draft.of(parts[1].read_bytes())
    twice = draft.Draft.of(parts[0].read_bytes()).infos[0].name
    made.infos[0].name = twice
    parts[1].write_bytes(made.bytes())
    with pytest.raises(ModelError, match=rf"{parts[1].name} has {twice}, which a part before it has, too"):
        load_model(str(parts[0]), device="cpu", dtype="float32")


def _split(tmp_path, folder):
    maker.write(folder, tmp_path / "tiny.gguf", split_tensors=6)
    return sorted(tmp_path.glob("*.gguf"))
