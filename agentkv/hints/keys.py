"""Keys: under which names a tool call is learnt, from broad to narrow.

Covers the chain everything -> class of tool -> tool -> first command word -> sub-command -> size of the arguments,
and the key within a session. Names are cut at 64 characters; a size is told as its power of two.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from agentkv.hints.classes import OTHER, class_of

Key = tuple[str | int, ...]
LONGEST_NAME = 64
_LENGTHS = {"all": 1, "class": 2, "tool": 2, "command": 3, "size": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """The keys of one kind of call, the first `broad` of them shared with other tools."""

    label: str
    keys: tuple[Key, ...]
    broad: int


@dataclass(frozen=True, slots=True)
class Told:
    """A call, or a part of one, that was learnt: it survived the bins [first, last) and may have ended in `last`."""

    tool: str
    command: str
    size: int
    first: int
    last: int
    ended: bool


@lru_cache(maxsize=4096)
def chain_of(tool: str, command: str, size: int) -> Chain:
    """The keys of a call, from broad to narrow."""
    label = class_of(tool, command)
    keys: list[Key] = [("all",)] if label == OTHER else []
    keys.append(("class", label))
    broad = len(keys)
    keys.append(("tool", tool))
    if command:
        word, has_more, _ = command.partition(" ")
        keys.append(("command", tool, word))
        if has_more:
            keys.append(("command", tool, command))
    if size:
        keys.append(("size", tool, command, size))
    return Chain(label=label, keys=tuple(keys), broad=broad)


def name_of(text: object) -> str:
    """A tool's name or a command as it is kept."""
    return text[:LONGEST_NAME] if isinstance(text, str) else ""


def size_of(arg_bytes: object) -> int:
    """The binary order of magnitude of a size, 0 where it is not known."""
    return min(arg_bytes.bit_length(), 40) if isinstance(arg_bytes, int) and arg_bytes > 0 else 0


def key_from_json(parts: Any) -> Key:
    """A key of the state file; ValueError or TypeError for what is none."""
    key = tuple(parts)
    if not key or _LENGTHS.get(key[0]) != len(key):
        raise ValueError("not a key")
    names = key[:-1] if key[0] == "size" else key
    if not all(isinstance(name, str) and len(name) <= LONGEST_NAME for name in names):
        raise ValueError("not a key")
    if key[0] == "size" and type(key[-1]) is not int:
        raise ValueError("not a size")
    return key
