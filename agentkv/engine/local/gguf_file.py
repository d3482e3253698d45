"""GGUF files by their headers: metadata, tensors, and the parts of a file that was split.

Covers reading headers (whole files or parts, checked for completeness) and raw tensor data. Does not cover what tensors
mean (`gguf_model.py`) nor unpacking them into a folder (`convert.py`).
Format: "GGUF", version, counts, metadata, tensor infos, padding, then data; strings are a length and UTF-8.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from agentkv.errors import ModelError, ModelNotFound

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LONG = 64
"""Arrays longer than this are kept as their length only: vocabularies, which a tokenizer library reads."""
_MOST_DIMENSIONS = 8
_MOST_BYTES = 1 << 28  # of one string: more is a damaged length


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One tensor of a file; `kind` is GGML's type number, `shape` in torch's order."""

    file: Path
    name: str
    kind: int
    shape: tuple[int, ...]
    at: int
    size_bytes: int

    @property
    def count(self) -> int:
        """Numbers in it."""
        product = 1
        for size in self.shape:
            product *= size
        return product


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFile:
    """A model's metadata and tensors; `files` in order, one unless it was split."""

    files: tuple[Path, ...]
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]

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
    """Headers of all parts. Raises ModelError naming the file, and the bytes that are missing."""
    metadata: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    for number, file in enumerate(files):
        own, found = _read(file)
        if number == 0:
            metadata = own
        elif own.get("split.no", number) != number:
            raise ModelError(f"{file} says that it is part {own['split.no'] + 1}, not {number + 1}: it was renamed")
        tensors |= found
    wanted = metadata.get("split.tensors.count", len(tensors))
    if len(tensors) != wanted or metadata.get("split.count", len(files)) not in (0, len(files)):
        raise ModelError(
            f"{files[0]} and its parts hold {len(tensors)} tensors in {len(files)} files, but its header names {wanted} "
            f"in {metadata.get('split.count', 1)}: the parts are of different models"
        )
    return GgufFile(files=files, metadata=metadata, tensors=tensors)


def _read(file: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            reader = _Reader(stream)
            if stream.read(4) != b"GGUF":
                raise ModelError(f"{file} is not a GGUF file: it does not begin with GGUF")
            version = reader.scalar("I")
            if version not in (2, 3):
                raise ModelError(f"{file} is GGUF version {version}; versions 2 and 3 are known")
            tensor_count, metadata_count = reader.scalar("Q"), reader.scalar("Q")
            metadata = {}
            for _ in range(metadata_count):
                name = reader.text()
                metadata[name] = reader.value(reader.scalar("I"))
            infos = [reader.info() for _ in range(tensor_count)]
            align = int(metadata.get("general.alignment", 32))
            start = -(-stream.tell() // align) * align
    except (EOFError, UnicodeDecodeError, struct.error, OverflowError) as error:
        raise ModelError(f"{file} ({size:,} bytes) was cut off or damaged in its header: {error}") from error
    tensors = {name: _placed(file, name, shape, kind, start + at) for name, shape, kind, at in infos}
    end = max((tensor.at + tensor.size_bytes for tensor in tensors.values()), default=start)
    if size < end:
        raise ModelError(f"{file} was cut off: it has {size:,} bytes of {end:,}, {end - size:,} are missing")
    return metadata, tensors


def _placed(file: Path, name: str, shape: tuple[int, ...], kind: int, at: int) -> Tensor:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        numbers, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except (ValueError, KeyError) as error:
        raise ModelError(f"{file} stores {name} in a GGML type that is not known here ({kind})") from error
    tensor = Tensor(file=file, name=name, kind=kind, shape=shape, at=at, size_bytes=0)
    return Tensor(file=file, name=name, kind=kind, shape=shape, at=at, size_bytes=tensor.count // numbers * size)


class _Reader:
    """Little-endian values of a stream. Raises EOFError where it ends."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def _take(self, count: int) -> bytes:
        if count > _MOST_BYTES:
            raise EOFError(f"a length of {count:,} bytes makes no sense")
        data = self._stream.read(count)
        if len(data) < count:
            raise EOFError(f"{count - len(data):,} bytes are missing")
        return data

    def scalar(self, kind: str) -> Any:
        return struct.unpack(f"<{kind}", self._take(struct.calcsize(kind)))[0]

    def text(self) -> str:
        return self._take(self.scalar("Q")).decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            raise EOFError(f"metadata of an unknown type {kind}")
        item, count = self.scalar("I"), self.scalar("Q")
        if item in _SCALARS and count > _LONG:
            self._take(count * struct.calcsize(_SCALARS[item]))
            return count
        values = []
        for _ in range(count):
            values.append(self.value(item))
            if count > _LONG:
                values.clear()
        return values if count <= _LONG else count

    def info(self) -> tuple[str, tuple[int, ...], int, int]:
        """(name, shape in torch's order, kind, offset of the data)."""
        name, dimensions = self.text(), self.scalar("I")
        if dimensions > _MOST_DIMENSIONS:
            raise EOFError(f"a tensor of {dimensions} dimensions")
        shape = tuple(reversed([self.scalar("Q") for _ in range(dimensions)]))
        return name, shape, self.scalar("I"), self.scalar("Q")
