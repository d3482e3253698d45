"""A GGUF's settings by kind: a whole number, a number, or a refusal that names the setting and its byte.

Does not cover which settings there are and what they mean (`gguf_model.py`).
"""

from __future__ import annotations

import math
from typing import Any

from agentkv.engine.local.gguf_file import GgufFile
from agentkv.errors import ModelError, UnsupportedModel

_MOST = 1 << 31
_SHOWN = 40


def damaged(file: GgufFile, key: str, why: str) -> ModelError:
    """The error for a setting whose value makes no sense."""
    shown = repr(file.metadata[key])[:_SHOWN]
    return ModelError(f"{file.files[0]} is damaged at byte {file.places[key]:,} of its header: {key} = {shown}, {why}")


class Settings:
    """Those of a file's architecture, without its name in front. What is lacking and has no default is refused."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file

    def _key(self, name: str) -> str:
        return f"{self._file.architecture}.{name}"

    def has(self, name: str) -> bool:
        """Whether the file names it."""
        return self._key(name) in self._file.metadata

    def value(self, name: str, default: Any = None) -> Any:
        """As the file has it."""
        found = self._file.metadata.get(self._key(name), default)
        if found is None:
            raise UnsupportedModel(f"{self._file.files[0].name} lacks {self._key(name)}")
        return found

    def whole(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """From `least` up to 2**31."""
        found = self.value(name, default)
        if type(found) is int and (least <= found <= _MOST or not self.has(name)):
            return found
        raise damaged(self._file, self._key(name), f"no whole number from {least} to {_MOST:,}")

    def number(self, name: str, default: float | None = None) -> float:
        """Above 0."""
        found = self.value(name, default)
        if type(found) in (int, float) and 0 < found < math.inf:
            return float(found)
        raise damaged(self._file, self._key(name), "no number above 0")
