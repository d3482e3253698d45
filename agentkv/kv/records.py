"""The records of a store's journal as bytes: which block is in which slot of which file, and the notes.

Covers the format and its replay, both pure functions. Files, growth and failures are `journal.py`.

    magic | header | record ...      record = body length u32 | kind u8 | body | xxh3-64 of all before it

The checksums of one file are seeded with its epoch, a random number in its header, so that a record of another file
is as bad as a torn one. Replay stops at the first record that is not whole. A place is `file number << 32 | slot in
that file`; a generation grows with each put, and a free that names an older one than the place has is ignored.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import xxhash

from agentkv.kv.index import BlockKey

MAGIC = b"agentkv\x01"
_FRAME = struct.Struct("<IB")
_SUM = struct.Struct("<Q")
_HEADER = struct.Struct("<QQ")
_PUT = struct.Struct("<16sQQQ")
_FREE = struct.Struct("<QQ")
_NAME = struct.Struct("<I")
FRAME_BYTES = _FRAME.size + _SUM.size
PUT_BYTES = _PUT.size
_GROUP = 1024
"""Entries that share a record when a journal is written anew."""


class Kind(IntEnum):
    """What a record says."""

    HEADER = 1
    PUT = 2
    FREE = 3
    NOTE = 4
    FORGET = 5


class Entry(NamedTuple):
    """What a place holds."""

    key: BlockKey
    generation: int
    checksum: int
    """xxh3-64 of the block, seeded with its key."""


class Header(NamedTuple):
    """Whose journal it is."""

    block_bytes: int
    epoch: int
    store: str


@dataclass(slots=True, kw_only=True)
class Replay:
    """What a journal says. `header` is None if not even that can be read; then there is nothing else either."""

    header: Header | None = None
    entries: dict[int, Entry] = field(default_factory=dict)
    """By place."""
    notes: dict[str, bytes] = field(default_factory=dict)
    good_bytes: int = 0
    left_out_bytes: int = 0
    """What follows the last good record."""


def start(header: Header) -> bytes:
    """The first bytes of a journal."""
    body = _HEADER.pack(header.block_bytes, header.epoch) + _text(header.store)
    return MAGIC + _record(Kind.HEADER, body, epoch=0)


def puts(entries: Iterable[tuple[int, Entry]], *, epoch: int) -> bytes:
    """One record: these places hold these blocks from now on. Empty if there are none."""
    body = b"".join(_PUT.pack(entry.key, place, entry.generation, entry.checksum) for place, entry in entries)
    return _record(Kind.PUT, body, epoch=epoch) if body else b""


def frees(places: Iterable[tuple[int, int]], *, epoch: int) -> bytes:
    """One record: these (place, generation) hold nothing any more. Empty if there are none."""
    body = b"".join(_FREE.pack(*one) for one in places)
    return _record(Kind.FREE, body, epoch=epoch) if body else b""


def note(name: str, payload: bytes, *, epoch: int) -> bytes:
    """One record: the note `name` is `payload`."""
    text = _text(name)
    return _record(Kind.NOTE, _NAME.pack(len(text)) + text + payload, epoch=epoch)


def forget(name: str, *, epoch: int) -> bytes:
    """One record: there is no note `name`."""
    return _record(Kind.FORGET, _text(name), epoch=epoch)


def whole(header: Header, entries: Mapping[int, Entry], notes: Mapping[str, bytes]) -> Iterator[bytes]:
    """The pieces of the shortest journal that says this."""
    yield start(header)
    items = list(entries.items())
    for at in range(0, len(items), _GROUP):
        yield puts(items[at : at + _GROUP], epoch=header.epoch)
    for name, payload in notes.items():
        yield note(name, payload, epoch=header.epoch)


def replay(data: bytes) -> Replay:
    """What the journal `data` says, up to the first record that is not whole."""
    result = Replay(left_out_bytes=len(data))
    if not data.startswith(MAGIC):
        return result
    at, epoch = len(MAGIC), 0
    while (found := _next(data, at, epoch)) is not None:
        kind, body, end = found
        try:
            if (kind == Kind.HEADER) is not (result.header is None):
                break
            if kind == Kind.HEADER:
                block_bytes, epoch = _HEADER.unpack_from(body)
                result.header = Header(block_bytes, epoch, str(body[_HEADER.size :], "utf-8", "surrogatepass"))
            else:
                _apply(result, kind, body)
        except (struct.error, UnicodeDecodeError, ValueError):
            break
        at = end
    if result.header is not None:
        result.good_bytes = at
        result.left_out_bytes = len(data) - at
    return result


def _apply(result: Replay, kind: int, body: memoryview) -> None:
    if kind == Kind.PUT:
        for key, place, generation, checksum in list(_PUT.iter_unpack(body)):
            result.entries[place] = Entry(key, generation, checksum)
    elif kind == Kind.FREE:
        for place, generation in list(_FREE.iter_unpack(body)):
            entry = result.entries.get(place)
            if entry is not None and entry.generation <= generation:
                del result.entries[place]
    elif kind == Kind.NOTE:
        (size,) = _NAME.unpack_from(body)
        end = _NAME.size + size
        if end > len(body):
            raise ValueError(kind)
        result.notes[str(body[_NAME.size : end], "utf-8", "surrogatepass")] = bytes(body[end:])
    elif kind == Kind.FORGET:
        result.notes.pop(str(body, "utf-8", "surrogatepass"), None)
    else:
        raise ValueError(kind)


def _next(data: bytes, at: int, epoch: int) -> tuple[int, memoryview, int] | None:
    """(kind, body, where the next record starts); None if there is no whole record at `at`."""
    if at + FRAME_BYTES > len(data):
        return None
    size, kind = _FRAME.unpack_from(data, at)
    body_at = at + _FRAME.size
    end = body_at + size + _SUM.size
    if end > len(data):
        return None
    view = memoryview(data)
    (expected,) = _SUM.unpack_from(data, end - _SUM.size)
    if xxhash.xxh3_64_intdigest(view[at : end - _SUM.size], epoch) != expected:
        return None
    return kind, view[body_at : end - _SUM.size], end


def _record(kind: Kind, body: bytes, *, epoch: int) -> bytes:
    data = _FRAME.pack(len(body), kind) + body
    return data + _SUM.pack(xxhash.xxh3_64_intdigest(data, epoch))


def _text(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
