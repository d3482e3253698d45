"""GGUF files: unpacked once into a Hugging Face folder in the user's cache, then loaded from there in seconds.

Covers: where the cache is, the conversion, two processes that convert at once. Does not cover: loading (`loader.py`).
The folder is complete or absent: it is written beside its place and renamed.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from agentkv.engine.local.quiet import quiet
from agentkv.errors import ModelError, ModelNotFound

_FORMAT = "1"  # part of the folder's name: a change of what we write makes a new folder


def cache_folder() -> Path:
    """Where converted models are kept: $AGENTKV_CACHE, else the user's cache directory."""
    given = os.environ.get("AGENTKV_CACHE")
    if given:
        return Path(given)
    import platformdirs

    return Path(platformdirs.user_cache_dir("agentkv"))


def converted(file: Path, *, progress: Callable[[str], None]) -> Path:
    """The folder with `file`'s weights (bf16) and tokenizer; made if it is not there yet.

    Raises ModelNotFound if the file is missing and ModelError if it cannot be read or the cache not be written.
    """
    if not file.is_file():
        raise ModelNotFound(f"there is no file {file}")
    models = cache_folder() / "models"
    folder = models / f"{file.stem}-{_digest(file)}-{_FORMAT}"
    if folder.is_dir():
        return folder
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _only_one(models / f"{folder.name}.lock"):
            if not folder.is_dir():
                for half in models.glob(f"{glob.escape(folder.name)}.*.part"):  # a process was killed in the middle
                    shutil.rmtree(half, ignore_errors=True)
                progress(f"unpacking {file.name} once into {folder} (about half a minute)")
                with quiet():
                    _convert(file, folder)
    except OSError as error:
        raise ModelError(f"{file} could not be unpacked into {models}: {error}; set AGENTKV_CACHE") from error
    return folder


def _convert(file: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    working = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".part", dir=folder.parent))
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
        model = AutoModelForCausalLM.from_pretrained(
            str(file.parent), gguf_file=file.name, dtype=torch.bfloat16, **_unpacked()
        )
        _settle(model)
        model.save_pretrained(working)
        tokenizer.save_pretrained(working)
        working.chmod(0o755)
        working.rename(folder)
    except (ValueError, RuntimeError, KeyError, NotImplementedError) as error:
        raise ModelError(f"{file} is not a GGUF file that transformers can unpack: {error}") from error
    finally:
        shutil.rmtree(working, ignore_errors=True)


def _unpacked() -> dict[str, Any]:
    """Newer transformers keep GGUF weights packed unless told otherwise; older ones know no such option."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


def _settle(model: Any) -> None:
    """The weights are plain numbers now; nothing in the saved folder may say otherwise."""
    for owner, name in ((model.config, "quantization_config"), (model, "hf_quantizer")):
        if getattr(owner, name, None) is not None:
            delattr(owner, name)
    model.is_quantized = False


def _digest(file: Path) -> str:
    import xxhash

    hasher = xxhash.xxh3_64()
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
