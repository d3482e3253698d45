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
        wanted = sorted(set(places.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
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


def header_of(file: Path) -> dict[str, Weight]:
    """The weights of one file. Raises ModelError if it is not whole, with the bytes that are missing."""
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            if size < _LENGTH_BYTES or length > _LONGEST_HEADER:
                raise ModelError(f"{file} ({size} bytes) is no safetensors file")
            text = stream.read(length)
        if len(text) < length:
            raise ModelError(f"{file} was cut off in its header: {size} bytes of at least {_LENGTH_BYTES + length}")
        header: Mapping[str, Any] = json.loads(text)
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        weights = {name: _weight(entry) for name, entry in entries.items()}
        end = _LENGTH_BYTES + length + max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, OSError) as error:
        raise ModelError(f"{file} is no safetensors file: {error!r}") from error
    if size < end:
        raise ModelError(f"{file} was cut off: it has {size:,} bytes of {end:,}, {end - size:,} are missing")
    if size > end:
        raise ModelError(f"{file} has {size - end:,} bytes more than its header names: it is damaged")
    return weights


def _weight(entry: Mapping[str, Any]) -> Weight:
    start, end = (int(place) for place in entry["data_offsets"])
    return Weight(dtype=str(entry["dtype"]), shape=tuple(map(int, entry["shape"])), size_bytes=end - start)
