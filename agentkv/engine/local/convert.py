"""GGUF files: unpacked once into a Hugging Face folder in the user's cache, then loaded from there in seconds.

Covers: where the cache is, the conversion, two processes that convert at once. Does not cover: reading GGUF
(`gguf_file.py`), what its settings mean (`gguf_model.py`), loading (`loader.py`).
The folder is complete or absent: it is written beside its place and renamed. Weights are unpacked a few rows at a time
straight into the file, so that a model of any size needs some 200 MiB of memory here.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from agentkv.engine.local.gguf_file import GgufFile, read_gguf
from agentkv.engine.local.gguf_header import Tensor
from agentkv.engine.local.gguf_model import (
    ROPE_FACTORS,
    config_of,
    end_ids,
    interleaved_heads,
    llama3_rope,
    weight_name,
)
from agentkv.engine.local.quiet import quiet
from agentkv.errors import AgentKVError, ModelError, ModelNotFound, UnsupportedModel
from agentkv.units import format_bytes

_FORMAT = "3"  # part of the folder's name: a change of what we write makes a new folder
_CHUNK_NUMBERS = 1 << 22  # unpacked at a time: 16 MiB of float32, and some copies
_PLAIN = {0: "float32", 1: "float16", 30: "bfloat16"}  # GGML's own numbers of these types
_SAFETENSORS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
"""Vocabularies whose text is cut at each digit, then as GPT-2's; transformers knows the second half only."""
_PLAIN_SPLIT = ("default", "gpt-2", "gpt2", "phi-2", "olmo", "jais", "mpt", "roberta-bpe")
"""Vocabularies that cut text as GPT-2 does."""


def cache_folder() -> Path:
    """Where converted models are kept: $AGENTKV_CACHE, else the user's cache directory."""
    given = os.environ.get("AGENTKV_CACHE")
    if given:
        return Path(given)
    import platformdirs

    return Path(platformdirs.user_cache_dir("agentkv"))


def converted(file: Path, *more: Path, progress: Callable[[str], None]) -> Path:
    """The folder with the weights and tokenizer of `file` (and of the parts behind it); made if it is not there yet.

    Weights keep the file's float type; quantised ones become bfloat16. Raises ModelNotFound if a file is missing,
    UnsupportedModel for what no test has proven, ModelError if a file cannot be read or the cache not be written.
    """
    if not file.is_file():
        raise ModelNotFound(f"there is no file {file}")
    models = cache_folder() / "models"
    folder = models / f"{file.stem}-{_digest(file, *more)}-{_FORMAT}"
    if folder.is_dir():
        return folder
    read = read_gguf((file, *more))
    config = config_of(read)
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _only_one(models / f"{folder.name}.lock"):
            if not folder.is_dir():
                for half in models.glob(f"{glob.escape(folder.name)}.*.part"):  # a process was killed in the middle
                    shutil.rmtree(half, ignore_errors=True)
                _check_room(models, read)
                progress(f"unpacking {file.name} once into {folder} ({format_bytes(unpacked_bytes(read))})")
                _convert(read, config, folder)
    except OSError as error:
        raise ModelError(f"{file} could not be unpacked into {models}: {error}; set AGENTKV_CACHE") from error
    return folder


def stored_dtype(file: GgufFile) -> str:
    """The type that the unpacked weights have: the file's own, or bfloat16 for quantised ones."""
    kinds = {tensor.kind for tensor in file.tensors.values() if len(tensor.shape) > 1}
    return _PLAIN[max(kinds)] if kinds and kinds <= set(_PLAIN) else "bfloat16"


def unpacked_bytes(file: GgufFile) -> int:
    """Size of the folder's weights."""
    size = 4 if stored_dtype(file) == "float32" else 2
    return sum(size * tensor.count for name, tensor in file.tensors.items() if name != ROPE_FACTORS)


def _check_room(models: Path, file: GgufFile) -> None:
    free, needed = shutil.disk_usage(models).free, unpacked_bytes(file)
    if free < needed:
        raise OSError(f"{format_bytes(needed)} are needed, {format_bytes(free)} are free")


def _convert(file: GgufFile, config: dict[str, Any], folder: Path) -> None:
    working = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".part", dir=folder.parent))
    try:
        with _own_errors(file):
            dtype = stored_dtype(file)
            if ROPE_FACTORS in file.tensors:
                config = {**config, "rope_parameters": _factored_rope(file, config)}
            _write_json(working / "config.json", {**config, "dtype": dtype})
            _write_json(working / "generation_config.json", {"eos_token_id": end_ids(file)})
            _write_tokenizer(file, working)
            _write_weights(file, working / "model.safetensors", dtype)
            working.chmod(0o755)
            working.rename(folder)
    finally:
        shutil.rmtree(working, ignore_errors=True)


@contextlib.contextmanager
def _own_errors(file: GgufFile) -> Iterator[None]:
    """Two libraries read foreign bytes within it: they raise anything."""
    try:
        yield
    except (AgentKVError, OSError):
        raise
    except Exception as error:
        raise ModelError(f"{file.files[0]} is not a GGUF file that can be unpacked: {error!r}") from error


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2), encoding="utf-8")


def _factored_rope(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    import numpy as np

    tensor = file.tensors[ROPE_FACTORS]
    factors = [float(one) for one in np.fromfile(tensor.file, dtype=np.float32, count=tensor.count, offset=tensor.at)]
    rope = config["rope_parameters"]
    found = llama3_rope(factors, theta=rope["rope_theta"], head_dim=config["head_dim"])
    if found is None or rope["rope_type"] != "default":
        raise UnsupportedModel(
            f"{file.files[0].name} has rotary factors that are not those of Llama 3 ({ROPE_FACTORS})"
        )
    return found


def _write_tokenizer(file: GgufFile, folder: Path) -> None:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    first, kind = file.files[0], file.metadata.get("tokenizer.ggml.pre", "default")
    with quiet():
        tokenizer = AutoTokenizer.from_pretrained(str(first.parent), gguf_file=first.name)
    if file.metadata.get("tokenizer.ggml.model") == "gpt2" and kind in _DIGITS:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    tokenizer.save_pretrained(folder)


def doubtful_tokenizer(file: GgufFile) -> str:
    """Why the tokenizer that transformers makes of this file may cut text otherwise than the original; "" if it does not.

    Byte-level vocabularies name how text is cut before merges; transformers falls back to GPT-2's way for names that
    it does not know.
    """
    kind = str(file.metadata.get("tokenizer.ggml.pre", "default"))
    if file.metadata.get("tokenizer.ggml.model") != "gpt2" or kind in (*_DIGITS, *_PLAIN_SPLIT):
        return ""
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    except ImportError:  # other versions of transformers have other places, and know fewer names
        GGUF_PRE_TOKENIZER_SPLITS = {}  # noqa: N806  their name
    return "" if kind in GGUF_PRE_TOKENIZER_SPLITS else f"it cuts text in a way that is not known here ({kind!r})"


def _write_weights(file: GgufFile, path: Path, dtype: str) -> None:
    """One safetensors file, written from front to back."""
    names = {name: weight for name in file.tensors if (weight := weight_name(file, name)) is not None}
    size = 4 if dtype == "float32" else 2
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, weight in names.items():
        tensor = file.tensors[name]
        end = at + size * tensor.count
        header[weight] = {"dtype": _SAFETENSORS[dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            _unpack(file, file.tensors[name], out, dtype)


def _unpack(file: GgufFile, tensor: Tensor, out: BinaryIO, dtype: str) -> None:
    import numpy as np
    import torch
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    rows, width = (1, tensor.count) if len(tensor.shape) == 1 else (tensor.count // tensor.shape[-1], tensor.shape[-1])
    heads = interleaved_heads(file, tensor.name)
    unit = tensor.shape[0] // heads if heads and len(tensor.shape) > 1 else 1
    step = max(unit, _CHUNK_NUMBERS // width // unit * unit)
    row_bytes = tensor.size_bytes // rows
    with tensor.file.open("rb") as source:
        source.seek(tensor.at)
        for first in range(0, rows, step):
            count = min(step, rows - first)
            packed = np.frombuffer(source.read(count * row_bytes), dtype=np.uint8).reshape(count, row_bytes)
            numbers = np.array(dequantize(packed, GGMLQuantizationType(tensor.kind)), dtype=np.float32)
            if heads:  # pairs of rows that rotate together lie side by side there, half a head apart here
                shape = (-1, unit // 2, 2, width) if len(tensor.shape) > 1 else (heads, width // heads // 2, 2)
                numbers = numbers.reshape(shape).swapaxes(1, 2)
            plain = torch.from_numpy(np.ascontiguousarray(numbers)).to(getattr(torch, dtype))
            out.write(plain.view(torch.uint8).numpy().tobytes())


def _digest(*files: Path) -> str:
    import xxhash

    hasher = xxhash.xxh3_64()
    for file in files:
        with file.open("rb") as stream:
            while part := stream.read(1 << 24):
                hasher.update(part)
    return hasher.hexdigest()


@contextlib.contextmanager
def _only_one(lock: Path) -> Iterator[None]:
    """Holds a file lock: other processes wait here until this one is done (or dead)."""
    import fcntl

    with lock.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
