"""Keys of blocks: a block is known by the hash of all tokens up to its end, not by who computed it.

Covers the chain hash. Which block is where is `book.py`. Needs neither torch nor a device.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from agentkv.kv.geometry import BLOCK_TOKENS

BlockKey = bytes
KEY_BYTES = 16
_LAYOUT_VERSION = b"agentkv.kv/1"
_TOKEN_BYTES = 4


def root_key(*, fingerprint: bytes, salt: str) -> BlockKey:
    """What every chain of one model and one tenant starts from.

    `fingerprint` names weights, dtype and layout; `salt` the tenant. Both are framed by their length, so that
    ("ab", "c") and ("a", "bc") never meet.
    """
    import xxhash

    hasher = xxhash.xxh3_128(_LAYOUT_VERSION)
    for part in (fingerprint, salt.encode("utf-8", "surrogatepass")):
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.digest()


def chain_keys(root: BlockKey, token_ids: Sequence[int], start_key: BlockKey | None = None) -> list[BlockKey]:
    """One key per full block of `token_ids`; the tokens of a partial last block have none.

    `start_key` continues a chain: the key of the block that comes before `token_ids`. Each key covers its own
    tokens and, through the key before it, all earlier ones.
    """
    import xxhash

    data = array("I", token_ids).tobytes()
    step = BLOCK_TOKENS * _TOKEN_BYTES
    digest = xxhash.xxh3_128_digest
    key = root if start_key is None else start_key
    keys: list[BlockKey] = []
    for at in range(0, len(data) - step + 1, step):
        key = digest(key + data[at : at + step])
        keys.append(key)
    return keys


def tail_key(before: BlockKey, token_ids: Sequence[int]) -> BlockKey:
    """The key of a partial block: fewer than 16 tokens at the end of a context, after the block (or root) `before`.

    Never equal to a full block's key: that one covers more bytes.
    """
    import xxhash

    if not 0 < len(token_ids) < BLOCK_TOKENS:
        raise ValueError(f"a partial block has 1 to {BLOCK_TOKENS - 1} tokens, not {len(token_ids)}")
    return xxhash.xxh3_128_digest(before + array("I", token_ids).tobytes())
