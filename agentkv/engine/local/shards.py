"""A model folder's safetensors files: are they whole, do they belong together, how large are they.

Covers what the files' own headers say, before a weight is read: a file that was cut off, a shard that is missing, an
index of another download, a shard that no index knows. Does not cover what the weights are worth (`support.py`).
Format: 8 bytes little endian, the length of a JSON header, the header, then the data that its offsets name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentkv.errors import ModelError

INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_LENGTH_BYTES = 8
_LONGEST_HEADER = 100_000_000  # safetensors' own limit
_FREE = "__metadata__"
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64,
    "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
"""Of one number, by safetensors' names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """One tensor of a file, by its header."""

    dtype: str
    """As safetensors writes it: "F32", "BF16", "U8"."""
    shape: tuple[int, ...]
    size_bytes: int


def weights_of(folder: Path) -> dict[str, Weight]:
    """Every weight of the folder's safetensors files; {} where it has none (older formats are transformers' concern).

    Raises ModelError naming the file, and the bytes or weights that are missing.
    """
    index = folder / INDEX
    single = folder / _SINGLE
    if index.is_file():
        return _sharded(folder, index)
    shards = sorted(folder.glob("model-*-of-*.safetensors"))
    if single.is_file():
        if shards:
            raise ModelError(f"{folder} has {single.name} and also {shards[0].name} of another download; remove one")
        return header_of(single)
    if shards:
        raise ModelError(f"{folder} has {len(shards)} shards ({shards[0].name}, ...) but no {INDEX}")
    return {}


def _sharded(folder: Path, index: Path) -> dict[str, Weight]:
    try:
        places: Mapping[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        wanted = sorted({_own_file(place) for place in places.values()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as error:
        raise ModelError(f"{index} is damaged: {error!r}") from error
    missing = [name for name in wanted if not (folder / name).is_file()]
    if missing:
        raise ModelError(
            f"{folder} lacks {missing[0]}, which {INDEX} names"
            f"{f' (and {len(missing) - 1} more of {len(wanted)} files)' if len(missing) > 1 else ''}"
        )
    extra = [path.name for path in sorted(folder.glob("model*.safetensors")) if path.name not in wanted]
    if extra:
        raise ModelError(f"{folder} has {extra[0]}, which {INDEX} does not name: files of two downloads are mixed")
    found: dict[str, Weight] = {}
    for name in wanted:
        weights = header_of(folder / name)
        expected = {weight for weight, place in places.items() if place == name}
        strange = sorted(expected.symmetric_difference(weights))
        if strange:
            which = "lacks" if strange[0] in expected else "holds"
            raise ModelError(
                f"{folder / name} {which} {strange[0]}, other than {INDEX} says ({len(strange)} such weights): the "
                f"index is of another download"
            )
        found.update(weights)
    return found


def _own_file(place: str) -> str:
    if Path(place).name != place:
        raise ValueError(f"it names {place!r}, which is no file of the folder")
    return place


def header_of(file: Path) -> dict[str, Weight]:
    """The weights of one file, which lie one behind the other up to its end.

    Raises ModelError if it is not whole, with the bytes that are missing or the weight that lies elsewhere.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            if size < _LENGTH_BYTES or length > _LONGEST_HEADER:
                raise ModelError(f"{file} ({size} bytes) is no safetensors file")
            text = stream.read(length)
        if len(text) < length:
            raise ModelError(f"{file} was cut off in its header: {size} bytes of at least {_LENGTH_BYTES + length}")
        header: dict[str, Any] = json.loads(text.decode("utf-8"), object_pairs_hook=_once)
        entries = {name: _entry(name, entry) for name, entry in header.items() if name != _FREE}
        _check_free(header.get(_FREE, {}))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as error:
        raise ModelError(f"{file} is no safetensors file: {error!r}") from error
    at = start = _LENGTH_BYTES + length
    for name, (weight, begins) in sorted(entries.items(), key=lambda item: (item[1][1], item[1][0].size_bytes)):
        if start + begins != at:
            raise ModelError(
                f"{file} is damaged: its header puts {name} at byte {start + begins:,}, but what comes before it ends at "
                f"{at:,}"
            )
        at += weight.size_bytes
    if size < at:
        raise ModelError(f"{file} was cut off: it has {size:,} bytes of {at:,}, {at - size:,} are missing")
    if size > at:
        raise ModelError(f"{file} has {size - at:,} bytes more than its header names: it is damaged")
    return {name: weight for name, (weight, _) in entries.items()}


def _check_free(metadata: Mapping[str, Any]) -> None:
    if not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"{_FREE} is no texts by name")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; a name that is there twice is damage, for readers differ in which of the two they take."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it names {next(name for name in names if names.count(name) > 1)} twice")
    return found


def _entry(name: str, entry: Mapping[str, Any]) -> tuple[Weight, int]:
    """The weight and where it begins behind the header."""
    dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(shape, list) or not all(type(one) is int and one >= 0 for one in (*shape, start, end)):
        raise ValueError(f"{name} has the shape {shape!r} at {start!r} to {end!r}")
    count = 1
    for side in shape:
        count *= side
    if dtype not in _BITS:
        raise ValueError(f"{name} has the type {dtype!r}, which is not known here")
    if count * _BITS[dtype] != 8 * (end - start):
        raise ValueError(f"{name} ({dtype}, {shape!r}) has the bytes {start:,} to {end:,}")
    return Weight(dtype=dtype, shape=tuple(shape), size_bytes=end - start), start
