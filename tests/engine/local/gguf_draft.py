"""A GGUF file taken apart into its header's fields, to be changed and put together again; for tests of damage, and their fixtures."""

from __future__ import annotations

import importlib.util
import struct
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from safetensors.torch import load_file

from agentkv.engine.local import convert
from agentkv.engine.local.gguf_file import read_gguf
from agentkv.engine.local.gguf_model import config_of

_spec = importlib.util.spec_from_file_location("gguf_maker", Path(__file__).with_name("gguf_maker.py"))
maker = sys.modules[_spec.name] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(maker)

UINT8, UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64 = 0, 4, 5, 6, 7, 8, 9, 10
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


def word(value: int) -> bytes:
    """Four bytes."""
    return struct.pack("<I", value)


def long(value: int) -> bytes:
    """Eight bytes."""
    return struct.pack("<Q", value)


def text(value: str | bytes) -> bytes:
    """A length and UTF-8."""
    raw = value.encode() if isinstance(value, str) else value
    return long(len(raw)) + raw


def array(kind: int, *items: bytes) -> bytes:
    """A type, a count and the items."""
    return word(kind) + long(len(items)) + b"".join(items)


@dataclass
class Info:
    """A tensor's entry: `dims` in the file's order."""

    name: str
    dims: list[int]
    kind: int
    offset: int


@dataclass
class Draft:
    """`settings`: name -> (type, raw value). Counts are told right unless `tensor_count` or `setting_count` say another."""

    settings: list[tuple[str, int, bytes]]
    infos: list[Info]
    data: bytes
    version: int = 3
    align: int = 32
    more: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, raw: bytes) -> Draft:
        """Take a whole file apart."""
        version, tensors, settings = struct.unpack_from("<IQQ", raw, 4)
        at = 24
        found = []
        for _ in range(settings):
            name, at = _text(raw, at)
            (kind,) = struct.unpack_from("<I", raw, at)
            end = _end(raw, at + 4, kind)
            found.append((name, kind, raw[at + 4 : end]))
            at = end
        infos = []
        for _ in range(tensors):
            name, at = _text(raw, at)
            (count,) = struct.unpack_from("<I", raw, at)
            dims = list(struct.unpack_from(f"<{count}Q", raw, at + 4))
            kind, offset = struct.unpack_from("<IQ", raw, at + 4 + 8 * count)
            infos.append(Info(name, dims, kind, offset))
            at += 16 + 8 * count
        return cls(found, infos, raw[-(-at // 32) * 32 :], version)

    def set(self, name: str, kind: int, raw: bytes) -> Draft:
        """Change a setting, or add it behind the others; itself."""
        names = [one for one, _, _ in self.settings]
        at = names.index(name) if name in names else len(names)
        self.settings[at : at + 1] = [(name, kind, raw)]
        return self

    def drop(self, name: str) -> Draft:
        """Leave a setting out; itself."""
        self.settings = [one for one in self.settings if one[0] != name]
        return self

    def info(self, name: str) -> Info:
        """A tensor's entry."""
        return next(one for one in self.infos if one.name == name)

    def add(self, name: str, dims: list[int], raw: bytes, kind: int = 0) -> Draft:
        """A tensor more, behind the others; itself."""
        self.infos.append(Info(name, dims, kind, len(self.data)))
        self.data += raw + bytes(-len(raw) % self.align)
        return self

    def bytes(self) -> bytes:
        """The file."""
        counts = (self.more.get("tensors", len(self.infos)), self.more.get("settings", len(self.settings)))
        out = b"GGUF" + struct.pack("<IQQ", self.version, *counts)
        for name, kind, raw in self.settings:
            out += text(name) + word(kind) + raw
        for info in self.infos:
            out += text(info.name) + word(len(info.dims)) + b"".join(map(long, info.dims))
            out += word(info.kind) + long(info.offset)
        return out + bytes(-len(out) % self.align) + self.data


def _text(raw: bytes, at: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("<Q", raw, at)
    return raw[at + 8 : at + 8 + length].decode(), at + 8 + length


def _end(raw: bytes, at: int, kind: int) -> int:
    if kind == STRING:
        return _text(raw, at)[1]
    if kind != ARRAY:
        return at + _SIZES[kind]
    item, count = struct.unpack_from("<IQ", raw, at)
    at += 12
    for _ in range(count):
        at = _end(raw, at, item)
    return at


@pytest.fixture(scope="module")
def folder(models, tmp_path_factory):
    """The model that the files are of."""
    return models.save(tmp_path_factory.mktemp("llama") / "model", merges=True)


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory):
    """The bytes of a file that is not damaged."""
    return maker.write(folder, tmp_path_factory.mktemp("whole") / "tiny.gguf").read_bytes()


@pytest.fixture
def made(whole):
    """It taken apart."""
    return Draft.of(whole)


@pytest.fixture
def weights(tmp_path):
    """`weights(raw)`: what a file of these bytes unpacks to, without its tokenizer."""

    def unpack(raw):
        path, out = tmp_path / "x.gguf", tmp_path / "out.safetensors"
        path.write_bytes(raw)
        read = read_gguf((path,))
        config_of(read)
        with convert._own_errors(read):
            convert._write_weights(read, out, convert.stored_dtype(read))
        return load_file(out)

    return unpack
