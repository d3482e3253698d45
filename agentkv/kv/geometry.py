"""Geometry: how many bytes the KV of one token and of one block takes, from a model's configuration.

Covers MHA, GQA and MQA. Does not decide whether a model can be paged at all: that is the engine's loader.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentkv.errors import ConfigError

BLOCK_TOKENS = 16
SLOT_ALIGN_BYTES = 4096
"""Host and disk slots start at multiples of a page, as O_DIRECT demands."""

MIN_SLOTS = 2
"""A tier that holds fewer blocks than this cannot work: one block stays while another moves."""

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """The shape of one token's KV: 2 (K and V) x layers x kv_heads x head_dim numbers of type `dtype`."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ConfigError(f"dtype={self.dtype!r} is unknown; choose one of {sorted(ITEM_BYTES)}")
        if min(self.layers, self.kv_heads, self.head_dim) < 1:
            raise ConfigError(f"a KV geometry needs positive sizes: {self}")

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's K and V in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * ITEM_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of 16 tokens."""
        return BLOCK_TOKENS * self.token_bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes that a block takes in the host arena and on disk: rounded up to a page."""
        return -(-self.block_bytes // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """[layers, 2, 16, kv_heads, head_dim]."""
        return (self.layers, 2, BLOCK_TOKENS, self.kv_heads, self.head_dim)

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any] | object, dtype: str) -> Geometry:
        """From a Hugging Face config (object or mapping; a `text_config` inside it is used if there is one).

        Raises ConfigError where the number of layers or attention heads is not to be found.
        """
        text = _get(config, "text_config")
        source = config if text is None else text
        layers = _get(source, "num_hidden_layers", "n_layer", "num_layers")
        heads = _get(source, "num_attention_heads", "n_head", "num_heads")
        hidden = _get(source, "hidden_size", "n_embd", "d_model")
        if layers is None or heads is None:
            raise ConfigError("the model's config names neither its layers nor its attention heads")
        kv_heads = _get(source, "num_key_value_heads", "num_kv_heads")
        if kv_heads is None:
            kv_heads = 1 if _get(source, "multi_query") else heads
        head_dim = _get(source, "head_dim")
        if head_dim is None:
            if hidden is None:
                raise ConfigError("the model's config names neither head_dim nor hidden_size")
            head_dim = hidden // heads
        return cls(layers=layers, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)


def _get(config: Mapping[str, Any] | object, *names: str) -> Any:
    """The first of `names` that the config has and that is not None."""
    for name in names:
        value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
        if value is not None:
            return value
    return None
