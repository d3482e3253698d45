"""One GGUF file's header: metadata, tensors and where each lies, read as bytes that may be damaged.

Covers the format and its bounds: whatever is written there, it is read in a moment or refused by name and byte. Does
not cover split files (`gguf_file.py`) nor what a setting means (`gguf_model.py`).
Format: "GGUF", version, counts, metadata, tensor infos, padding, then data; strings are a length and UTF-8. Tensors lie
one behind the other in the order of their infos, each padded to `general.alignment`: llama.cpp reads nothing else.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from agentkv.errors import ModelError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LONG = 64
"""Arrays longer than this are kept as their length only: vocabularies, which a tokenizer library reads."""
_ALIGNMENT = "general.alignment"
_MOST_DIMENSIONS = 8
_MOST_DEPTH = 4  # of arrays in arrays
_MOST_BYTES = 1 << 28  # of one string: more is a damaged length
_MOST_ITEMS = 1 << 22  # of all arrays of strings or arrays: the largest vocabularies have a tenth
_MOST_ENTRIES = 1 << 20  # of settings and of tensors
_MOST_NUMBERS = 1 << 48  # in one tensor


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


@dataclass(frozen=True, slots=True)
class LongArray:
    """An array of more than 64 items, by its length."""

    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What one file says; `places`: where in it each setting's value begins."""

    metadata: Mapping[str, Any]
    places: Mapping[str, int]
    tensors: Mapping[str, Tensor]


def read_header(file: Path) -> Header:
    """Raises ModelError naming the file, and the byte that makes no sense or how many are missing."""
    try:
        with file.open("rb") as stream:
            size = file.stat().st_size
            if stream.read(4) != b"GGUF":
                raise ModelError(f"{file} is not a GGUF file: it does not begin with GGUF")
            try:
                return _header(file, _Reader(stream), size)
            except (EOFError, ValueError, OverflowError, MemoryError, struct.error) as error:
                raise ModelError(
                    f"{file} ({size:,} bytes) was cut off or damaged in its header, before byte {stream.tell():,}: {error}"
                ) from error
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error}") from error


def _header(file: Path, reader: _Reader, size: int) -> Header:
    version = reader.scalar("I")
    if version not in (2, 3):
        raise ModelError(f"{file} is GGUF version {version}; versions 2 and 3 are known")
    tensor_count, metadata_count = reader.scalar("Q"), reader.scalar("Q")
    if max(tensor_count, metadata_count) > _MOST_ENTRIES:
        raise ValueError(f"{tensor_count:,} tensors and {metadata_count:,} settings make no sense")
    metadata: dict[str, Any] = {}
    places: dict[str, int] = {}
    for _ in range(metadata_count):
        name = reader.text()
        if name in metadata:
            raise ValueError(f"{name} is set twice")
        kind = reader.scalar("I")
        places[name] = reader.at
        metadata[name] = reader.value(kind)
    align = metadata.get(_ALIGNMENT, 32)
    if type(align) is not int or align < 1 or align & (align - 1):
        raise ValueError(f"{_ALIGNMENT} at byte {places[_ALIGNMENT]:,} is {align!r}, no power of two")
    infos = [reader.info() for _ in range(tensor_count)]
    return Header(metadata=metadata, places=places, tensors=_laid_out(file, infos, reader.at, align, size))


def _laid_out(file: Path, infos: list[_Info], header_bytes: int, align: int, size: int) -> dict[str, Tensor]:
    """The tensors, one behind the other up to the end of the file."""
    start = at = -(-header_bytes // align) * align
    end = header_bytes
    tensors: dict[str, Tensor] = {}
    for info in infos:
        if info.name in tensors:
            raise ModelError(f"{file} is damaged at byte {info.place:,} of its header: it names {info.name} twice")
        if start + info.offset != at:
            raise ModelError(
                f"{file} is damaged at byte {info.place:,} of its header: it puts {info.name} at byte "
                f"{start + info.offset:,}, but what comes before it ends at {at:,}"
            )
        size_bytes = _size(file, info)
        tensors[info.name] = Tensor(
            file=file, name=info.name, kind=info.kind, shape=info.shape, at=at, size_bytes=size_bytes
        )
        end = at + size_bytes
        at = -(-end // align) * align
    if size < end:
        raise ModelError(f"{file} was cut off: it has {size:,} bytes of {end:,}, {end - size:,} are missing")
    if size > at:
        raise ModelError(f"{file} has {size - at:,} bytes more than its header names: it is damaged")
    return tensors


def _size(file: Path, info: _Info) -> int:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        numbers, size = GGML_QUANT_SIZES[GGMLQuantizationType(info.kind)]
    except (ValueError, KeyError) as error:
        raise ModelError(f"{file} stores {info.name} in a GGML type that is not known here ({info.kind})") from error
    count = 1
    for side in info.shape:
        count *= side
    if not info.shape or not 0 < count <= _MOST_NUMBERS or info.shape[-1] % numbers:
        raise ModelError(
            f"{file} is damaged at byte {info.place:,} of its header: {info.name} has the shape {info.shape}, which its "
            f"type (blocks of {numbers}) cannot have"
        )
    return count // int(numbers) * int(size)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Info:
    """A tensor as the header has it: `offset` from where data begins, `place` of the info itself."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int
    place: int


class _Reader:
    """Little-endian values of a stream. Raises EOFError where it ends, ValueError for what makes no sense."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._items = 0

    @property
    def at(self) -> int:
        """The next byte."""
        return self._stream.tell()

    def _take(self, count: int) -> bytes:
        if count > _MOST_BYTES:
            raise ValueError(f"a length of {count:,} bytes makes no sense")
        data = self._stream.read(count)
        if len(data) < count:
            raise EOFError(f"{count - len(data):,} bytes are missing")
        return data

    def scalar(self, kind: str) -> Any:
        return struct.unpack(f"<{kind}", self._take(struct.calcsize(kind)))[0]

    def text(self) -> str:
        return self._take(self.scalar("Q")).decode("utf-8")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            raise ValueError(f"metadata of an unknown type {kind}")
        if depth == _MOST_DEPTH:
            raise ValueError(f"an array {depth + 1} deep in others makes no sense")
        item, count = self.scalar("I"), self.scalar("Q")
        if item in _SCALARS and count > _LONG:
            self._take(count * struct.calcsize(_SCALARS[item]))
            return LongArray(count)
        self._items += count
        if self._items > _MOST_ITEMS:
            raise ValueError(f"an array of {count:,} items makes no sense")
        values = []
        for _ in range(count):
            values.append(self.value(item, depth + 1))
            if count > _LONG:
                values.clear()
        return values if count <= _LONG else LongArray(count)

    def info(self) -> _Info:
        place = self.at
        name, dimensions = self.text(), self.scalar("I")
        if dimensions > _MOST_DIMENSIONS:
            raise ValueError(f"a tensor of {dimensions} dimensions")
        shape = tuple(reversed([self.scalar("Q") for _ in range(dimensions)]))
        return _Info(name=name, shape=shape, kind=self.scalar("I"), offset=self.scalar("Q"), place=place)
