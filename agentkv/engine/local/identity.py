"""A model's fingerprint: what its KV depends on, by content.

Covers weights, config (with its rotary embedding), tokenizer, compute type and block layout. Never names or times: a
folder that was saved anew in place is another model, a copy of it elsewhere is the same one.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from agentkv.kv.geometry import BLOCK_TOKENS, Geometry

_HASHED = (
    "*.safetensors", "*.bin", "config.json", "quantize_config.json", "tokenizer.json", "tokenizer.model", "vocab.json",
    "merges.txt", "added_tokens.json", "special_tokens_map.json", "tokenizer_config.json",
)  # fmt: skip
_HASH_BYTES = 1 << 22


def fingerprint(folder: Path, geometry: Geometry) -> bytes:
    """xxh3-128 over the folder's files and the geometry that they are run with."""
    import xxhash

    files = sorted({file for pattern in _HASHED for file in folder.glob(pattern)})
    with ThreadPoolExecutor(4, thread_name_prefix="agentkv-hash") as pool:
        digests = list(pool.map(_digest, files))
    hasher = xxhash.xxh3_128(f"{geometry!r} in blocks of {BLOCK_TOKENS}".encode())
    for file, digest in zip(files, digests, strict=True):
        hasher.update(file.name.encode() + b"\0" + digest)
    return hasher.digest()


def _digest(file: Path) -> bytes:
    import xxhash

    hasher = xxhash.xxh3_128()
    buffer = bytearray(_HASH_BYTES)
    with file.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            hasher.update(memoryview(buffer)[:count])
    return hasher.digest()
