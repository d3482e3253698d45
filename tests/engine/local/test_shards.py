"""Damaged and mixed-up weight files are refused before a weight is read, by name and bytes (M5)."""

import json
import shutil

import pytest

from agentkv.engine.local.loader import load_model
from agentkv.engine.local.shards import INDEX, header_of, weights_of
from agentkv.errors import ModelError


@pytest.fixture(scope="module")
def sharded(models, tmp_path_factory):
    """A model in several files of about 40 kB."""
    return models.save(tmp_path_factory.mktemp("sharded") / "model", shard_bytes=40_000)


@pytest.fixture
def folder(sharded, tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(sharded, tmp_path / "copy")


def _load(folder):
    return load_model(str(folder), device="cpu", dtype="float32")


def test_a_sharded_model_is_that_of_one_file(models, sharded, tmp_path):
    """The control: several files, every weight in one of them, and it computes what the single file does."""
    import torch

    assert len(list(sharded.glob("*.safetensors"))) > 2
    single = models.save(tmp_path / "single")
    assert weights_of(single) == weights_of(sharded)
    ids = list(range(40))
    assert torch.equal(models.Oracle(single).logits(ids), models.Oracle(sharded).logits(ids))
    assert _load(sharded).context_tokens == 1024


def test_a_missing_shard_is_named(folder):
    """Instead of random weights in its place."""
    gone = sorted(folder.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(ModelError, match=f"lacks {gone.name}, which {INDEX} names"):
        _load(folder)


def test_two_missing_shards_are_counted(folder):
    """The first by its name."""
    files = sorted(folder.glob("*.safetensors"))
    for gone in files[1:3]:
        gone.unlink()
    with pytest.raises(ModelError, match=rf"lacks {files[1].name}.*and 1 more of {len(files)} files"):
        _load(folder)


@pytest.mark.parametrize("cut", [1, 1000])
def test_a_shard_that_was_cut_off_is_named_with_the_missing_bytes(folder, cut):
    """A download that ended early: memory-mapped, its last weights would be zeros."""
    file = min(folder.glob("*.safetensors"))
    data = file.read_bytes()
    file.write_bytes(data[:-cut])
    with pytest.raises(
        ModelError, match=rf"{file.name} was cut off: it has {len(data) - cut:,} bytes of {len(data):,}"
    ):
        _load(folder)


def test_a_single_file_that_was_cut_off_by_a_megabyte_is_named(models, tmp_path):
    """The same without an index."""
    file = models.save(tmp_path, hidden_size=256) / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: -(1 << 20)])
    with pytest.raises(ModelError, match=rf"model\.safetensors was cut off.* {1 << 20:,} are missing"):
        _load(tmp_path)


def test_an_index_of_another_download_is_refused(folder):
    """It names weights elsewhere than they are."""
    data = json.loads((folder / INDEX).read_text())
    places = list(data["weight_map"].values())
    full = next(place for place in places if places.count(place) > 1)
    name = next(name for name, place in data["weight_map"].items() if place == full)
    data["weight_map"][name] = next(place for place in places if place != full)
    (folder / INDEX).write_text(json.dumps(data))
    with pytest.raises(ModelError, match=rf"(holds|lacks) {name}, other than {INDEX} says"):
        _load(folder)


def test_an_index_that_names_a_weight_too_many_is_refused(folder):
    """Likewise."""
    data = json.loads((folder / INDEX).read_text())
    place = min(set(data["weight_map"].values()))
    data["weight_map"]["model.layers.9.mlp.up_proj.weight"] = place
    (folder / INDEX).write_text(json.dumps(data))
    with pytest.raises(ModelError, match=rf"{place} lacks model\.layers\.9"):
        _load(folder)


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"weight_map": 3}'])
def test_a_damaged_index_is_refused(folder, text):
    """With its name."""
    (folder / INDEX).write_text(text)
    with pytest.raises(ModelError, match=r"index\.json is damaged"):
        _load(folder)


def test_a_shard_that_the_index_does_not_know_is_refused(folder):
    """Files of two downloads are mixed; nobody knows which are right."""
    first = min(folder.glob("*.safetensors"))
    shutil.copy(first, folder / "model-00009-of-00009.safetensors")
    with pytest.raises(ModelError, match=r"model-00009-of-00009\.safetensors, which .* does not name"):
        _load(folder)


def test_other_peoples_files_are_no_shards(folder):
    """Some repositories hold the same weights in another layout as well; transformers ignores those, and so do we."""
    first = min(folder.glob("*.safetensors"))
    shutil.copy(first, folder / "consolidated.safetensors")
    assert _load(folder).vocabulary == 259


def test_shards_without_an_index_are_refused(folder):
    """transformers would find no weights at all."""
    (folder / INDEX).unlink()
    with pytest.raises(ModelError, match=f"but no {INDEX}"):
        _load(folder)


def test_a_whole_file_beside_old_shards_is_refused(models, folder):
    """Which of the two would be loaded is anybody's guess."""
    (folder / INDEX).unlink()
    shutil.copy(models.save(folder.parent / "single") / "model.safetensors", folder)
    with pytest.raises(ModelError, match=r"model\.safetensors and also model-00001"):
        _load(folder)


@pytest.mark.parametrize(
    "data", [b"", b"1234567", b"\xff" * 8, b"\x10\0\0\0\0\0\0\0{}", b"\x02\0\0\0\0\0\0\0[]", b'\4\0\0\0\0\0\0\0{"a"']
)
def test_what_is_no_safetensors_file_is_said_to_be_so(tmp_path, data):
    """Never a traceback of json or struct."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(data)
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        header_of(file)


def test_bytes_behind_the_end_are_damage(folder):
    """Two files in one, or a page of zeros."""
    file = min(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes() + b"\0" * 4096)
    with pytest.raises(ModelError, match="4,096 bytes more than its header names"):
        _load(folder)
