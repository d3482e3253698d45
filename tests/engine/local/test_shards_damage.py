"""Damaged safetensors headers: refused by name, or the weights are those that were written (M5).

Covers each kind of field by hand, then changed bytes by the hundred. Missing and cut-off files: `test_shards.py`.
"""

import json
import random
import shutil

import pytest
import torch
from safetensors.torch import load_file

from agentkv.engine.local.estimate import estimate
from agentkv.engine.local.loader import load_model
from agentkv.engine.local.shards import INDEX, header_of, weights_of
from agentkv.errors import AgentKVError, ModelError

NAME = "model.layers.0.mlp.up_proj.weight"  # [96, 64] of F32
OTHER = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def original(models, tmp_path_factory):
    """A model in one file."""
    return models.save(tmp_path_factory.mktemp("original") / "model")


@pytest.fixture
def folder(original, tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(original, tmp_path / "copy")


def _parts(folder):
    """(the header's text, the data)."""
    raw = (folder / "model.safetensors").read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    return raw[8:end], raw[end:]


def _write(folder, header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)


def _refused(folder, reason):
    """By loading and by looking (`agentkv doctor`)."""
    for way in (lambda: load_model(str(folder), device="cpu", dtype="float32"), lambda: estimate(str(folder))):
        with pytest.raises(ModelError, match=reason) as refused:
            way()
        assert "model.safetensors" in str(refused.value)


def test_a_header_written_again_is_the_same_file(folder):
    """The control."""
    text, data = _parts(folder)
    before = weights_of(folder)
    _write(folder, json.loads(text), data)
    assert before == weights_of(folder)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("data_offsets", "[0, 1e999]", "at 0 to inf"), ("data_offsets", "[0, 24576.0]", "at 0 to 24576.0"),
        ("data_offsets", "[-24576, 0]", "at -24576 to 0"), ("data_offsets", "[24576, 0]", "has the bytes 24,576 to 0"),
        ("data_offsets", "[0]", "not enough values"), ("data_offsets", "[0, 1, 2]", "too many values"),
        ("data_offsets", "7", "TypeError"), ("data_offsets", "null", "TypeError"), ("data_offsets", '["0", "1"]', "at '0'"),
        ("data_offsets", "[false, true]", "at False"), ("data_offsets", "[0, 24577]", "has the bytes 0 to 24,577"),
        ("shape", "[96, 65]", r"\[96, 65\]"), ("shape", "[]", r"\[\]"), ("shape", "[-96, -64]", r"\[-96, -64\]"),
        ("shape", '"6144"', "'6144'"), ("shape", "[96.0, 64]", r"\[96\.0, 64\]"), ("shape", "[1e999]", r"\[inf\]"),
        ("shape", "[NaN]", r"\[nan\]"), ("shape", "{}", r"\{\}"), ("shape", "[[96], 64]", r"\[\[96\], 64\]"),
        ("dtype", '"BF16"', "BF16"), ("dtype", '"F3"', "the type 'F3', which is not known"), ("dtype", "3", "the type 3"), ("dtype", '"F64"', "F64"), ("dtype", "[]", "TypeError"),
    ],
)  # fmt: skip
def test_a_field_that_makes_no_sense_is_refused(folder, field, value, reason):
    """Numbers are whole, none is negative, and shape, type and bytes belong together."""
    text, data = _parts(folder)
    header = json.loads(text)
    header[NAME][field] = "HERE"
    _write(folder, json.dumps(header).replace('"HERE"', value).encode(), data)
    _refused(folder, f"is no safetensors file: .*{reason}")


@pytest.mark.parametrize("moved", [4, 4096, 10**15])
def test_weights_that_overlap_or_leave_room_are_refused(folder, moved):
    """Both ways; read from there it would be another's."""
    text, data = _parts(folder)
    for sign in (1, -1):
        header = json.loads(text)
        header[OTHER]["data_offsets"] = [max(0, place + sign * moved) for place in header[OTHER]["data_offsets"]]
        start, end = header[OTHER]["data_offsets"]
        header[OTHER]["data_offsets"] = [start, start + 24576] if end - start != 24576 else [start, end]
        _write(folder, header, data)
        _refused(folder, r"its header puts .* at byte [\d,]+, but what comes before it ends at [\d,]+")


def test_two_weights_in_one_place_are_refused(folder):
    """The one whose place nobody names has gone with it."""
    text, data = _parts(folder)
    header = json.loads(text)
    header[OTHER] = header[NAME]
    _write(folder, header, data)
    _refused(folder, "but what comes before it ends at")


def test_a_weight_that_is_named_twice_is_refused(folder):
    """Readers differ in which of the two they take."""
    text, data = _parts(folder)
    again = json.dumps({NAME: json.loads(text)[OTHER]}).encode()
    _write(folder, text.rstrip()[:-1] + b"," + again[1:], data)
    _refused(folder, rf"it names {NAME} twice")


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 100_000 + b"]" * 100_000, b'{"a":' * 100_000 + b"1" + b"}" * 100_000, b"null", b"[1]", b'"a"', b"3", b"{",
        b'{"a": 1}', b'{"a": null}', b'{"a": {"dtype": "F32", "shape": [1]}}', b'{"__metadata__": 3}',
        b'{"__metadata__": {"a": 1}}', b'{"a": ' + b"1" * 5000 + b"}", "{}".encode("utf-16"), b"\xff\xfe{}",
    ],
    ids=range(15),
)  # fmt: skip
def test_a_header_that_is_none_is_refused(folder, text):
    """However it is nested; only UTF-8."""
    _write(folder, text, b"")
    _refused(folder, "is no safetensors file")


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"weight_map":' * 100_000, '{"weight_map": {"a": 3}}', '{"weight_map": {"a": ["b"]}}',
             '{"weight_map": {"a": "../other/model.safetensors"}}', '{"weight_map": {"a": ""}}'],
)  # fmt: skip
def test_an_index_that_makes_no_sense_is_refused(folder, text):
    """Likewise; files are those of the folder."""
    (folder / INDEX).write_text(text)
    for way in (lambda: load_model(str(folder), device="cpu", dtype="float32"), lambda: estimate(str(folder))):
        with pytest.raises(ModelError, match=r"index\.json is damaged|lacks"):
            way()


@pytest.mark.parametrize("seed", range(4))
def test_changed_bytes_give_the_same_weights_or_a_refusal(original, tmp_path, seed):
    """Wherever in the header; never another exception, never a weight that is silently another's."""
    rng, raw = random.Random(seed), (original / "model.safetensors").read_bytes()
    wanted, end = load_file(original / "model.safetensors"), 8 + int.from_bytes(raw[:8], "little")
    file, seen = tmp_path / "model.safetensors", {"same": 0, "refused": 0}
    for number in range(400):
        out = bytearray(raw)
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            at = rng.randrange(end)
            out[at] = rng.choice((*b'0123456789[]{},:"', rng.randrange(256), out[at] ^ 1 << rng.randrange(8)))
        file.write_bytes(out)
        try:
            told = header_of(file)
        except AgentKVError:
            seen["refused"] += 1
            continue
        found = load_file(file)  # what is whole to us is whole to its own reader
        seen["same"] += 1
        assert told.keys() == found.keys(), (seed, number)
        for name in wanted.keys() & found.keys():  # of a name that was changed the loading knows (`unread.py`)
            assert torch.equal(wanted[name], found[name]), (seed, number, name)
        assert all(told[name].shape == tuple(found[name].shape) for name in told), (seed, number)
    assert min(seen.values()) > 10, seen
