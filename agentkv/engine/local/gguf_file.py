"""GGUF models as files: one, or the parts of one that was split, found and read as a whole.

Covers which files belong together and whether they are of one model. Does not cover the header of a file
(`gguf_header.py`), what tensors mean (`gguf_model.py`), nor unpacking them into a folder (`convert.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentkv.engine.local.gguf_header import Tensor, read_header
from agentkv.errors import ModelError, ModelNotFound

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFile:
    """A model's metadata and tensors; `files` in order, one unless it was split. Settings are those of the first.

    `places`: where in it each setting's value begins.
    """

    files: tuple[Path, ...]
    metadata: Mapping[str, Any]
    places: Mapping[str, int]
    tensors: Mapping[str, Tensor]

    @property
    def architecture(self) -> str:
        """What llama.cpp calls the family: "llama", "qwen2"."""
        return str(self.metadata.get("general.architecture", ""))

    @property
    def size_bytes(self) -> int:
        """All files together."""
        return sum(file.stat().st_size for file in self.files)


def find_gguf(path: Path) -> tuple[Path, ...] | None:
    """The files of the model at `path`: a .gguf file, any part of a split one, or a folder that holds just one model.

    None if `path` is a folder without GGUF files. Raises ModelNotFound naming a missing part, or several models.
    """
    if path.is_dir():
        found = sorted(path.glob("*.gguf"))
        stems = {match["stem"] if (match := _PART.fullmatch(file.name)) else file.name for file in found}
        if len(stems) > 1:
            names = ", ".join(sorted(stems)[:4])
            raise ModelNotFound(f"{path} holds {len(stems)} GGUF models ({names}): give the path of one of them")
        return find_gguf(found[0]) if found else None
    match = _PART.fullmatch(path.name)
    if match is None:
        if not path.is_file():
            raise ModelNotFound(f"there is no file {path}")
        return (path,)
    count = int(match["count"])
    parts = tuple(path.with_name(f"{match['stem']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1))
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise ModelNotFound(
            f"{path.parent} lacks {missing[0]}, part of a GGUF that was split into {count} files"
            f"{f' ({len(missing)} parts are missing)' if len(missing) > 1 else ''}"
        )
    return parts


def read_gguf(files: tuple[Path, ...]) -> GgufFile:
    """Headers of all parts. Raises ModelError naming the file, and the bytes that are damaged or missing."""
    metadata: Mapping[str, Any] = {}
    places: Mapping[str, int] = {}
    tensors: dict[str, Tensor] = {}
    for number, file in enumerate(files):
        part = read_header(file)
        if number == 0:
            metadata, places = part.metadata, part.places
        elif (own := part.metadata.get("split.no", number)) != number:
            says = own + 1 if isinstance(own, int) else own
            raise ModelError(f"{file} says that it is part {says}, not {number + 1}: it was renamed")
        twice = sorted(set(tensors) & set(part.tensors))
        if twice:
            raise ModelError(
                f"{file} has {twice[0]}, which a part before it has, too: the parts are of different models"
            )
        tensors |= part.tensors
    wanted = metadata.get("split.tensors.count", len(tensors))
    if len(tensors) != wanted or metadata.get("split.count", len(files)) not in (0, len(files)):
        raise ModelError(
            f"{files[0]} and its parts hold {len(tensors)} tensors in {len(files)} files, but its header names {wanted} "
            f"in {metadata.get('split.count', 1)}: the parts are of different models"
        )
    return GgufFile(files=files, metadata=metadata, places=places, tensors=tensors)
