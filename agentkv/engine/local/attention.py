"""Attention over the paged pool, registered with transformers under one name.

Covers: `PagedBatch` (what one forward needs, tensors only), the plain torch implementation (CPU path and the
specification of any kernel), registration. Does not cover: building a PagedBatch (`runner.py`) nor blocks (`kv/`).
The metadata travel in the forward call's keyword arguments (`paged=`), never in module globals: several engines and
threads share the registered function.

How it reads: the pool is `[blocks, layers, 2, 16, kv_heads, head_dim]`, so for one layer K and V of a block are two
rows of one 2-d view. `index_select` of those rows into a reused scratch buffer, then dense SDPA: advanced indexing
was 5-8 times slower, a fresh buffer for each layer 2.5 times.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  everybody's name for it
from torch import Tensor

IMPLEMENTATION = "agentkv_paged"
NULL_BLOCK = 0
"""Padding in block tables; all zeros, never handed out."""

_UNSUPPORTED = ("softcap", "s_aux", "position_bias", "sliding_window")


@dataclass(slots=True, kw_only=True)
class Group:
    """Tokens `start:end` of the packed batch that attend together.

    Decode: `sequences` rows of one token each over equally many (padded) blocks. Prefill: one sequence, `end - start`
    tokens. `gather[layer]` lists the K rows, then the V rows, of all its blocks. `tokens` is the (padded) context.
    """

    start: int
    end: int
    sequences: int
    tokens: int
    gather: tuple[Tensor, ...]
    """Per layer int64 [2 * sequences * blocks]."""
    mask: Tensor | None
    """Additive, [1 or sequences, 1, rows, tokens]; None where everything gathered is attended to."""
    causal: bool = False
    folded: bool = False
    """The query heads of one KV head are rows of it (and of the mask): K and V are read once for all of them."""


@dataclass(slots=True, kw_only=True)
class PagedBatch:
    """What paged attention needs to know about one forward over `T` packed tokens."""

    rows: Tensor
    """The pool as rows of one token: [blocks * layers * 2 * 16, kv_heads * head_dim]."""
    blocks: Tensor
    """The pool as rows of one block: [blocks * layers * 2, 16 * kv_heads * head_dim]."""
    k_rows: tuple[Tensor, ...]
    """Per layer int64 [T]: where the new keys go."""
    v_rows: tuple[Tensor, ...]
    block_table: Tensor
    """int64 [sequences, width], padded with NULL_BLOCK (for kernels that walk the pool themselves)."""
    lens: Tensor
    """int64 [sequences]: context length after this forward."""
    slots: Tensor
    """int64 [T]: block * 16 + offset of each new token."""
    groups: list[Group]
    scratch: Tensor
    """Flat buffer for gathered K and V, at least as large as the largest group needs."""
    output: Tensor
    """[1, T, heads, head_dim], reused by all layers."""


def paged_attention_forward(  # noqa: PLR0917  as transformers calls it
    module: torch.nn.Module,
    query: Tensor,  # [1, heads, T, head_dim]
    key: Tensor,  # [1, kv_heads, T, head_dim]
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001  transformers passes it; the batch carries its own
    scaling: float | None = None,
    dropout: float = 0.0,  # noqa: ARG001  inference only
    paged: PagedBatch | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Write the new keys and values into the pool, then attend. Returns ([1, T, heads, head_dim], None)."""
    if paged is None:
        raise RuntimeError("this model was given to an agentkv engine; run it through the engine")
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"paged attention has no {name}")
    layer: int = module.layer_idx  # type: ignore[assignment]
    tokens = key.shape[2]
    paged.rows.index_copy_(0, paged.k_rows[layer], key.transpose(1, 2).reshape(tokens, -1))
    paged.rows.index_copy_(0, paged.v_rows[layer], value.transpose(1, 2).reshape(tokens, -1))
    for group in paged.groups:
        out = _attend(paged, group, query, layer=layer, kv_heads=key.shape[1], scaling=scaling)
        if group.end - group.start == tokens:
            return out.unsqueeze(0), None
        paged.output[0, group.start : group.end] = out
    return paged.output, None


def _attend(
    paged: PagedBatch, group: Group, query: Tensor, *, layer: int, kv_heads: int, scaling: float | None
) -> Tensor:
    """One group's attention, [tokens, heads, head_dim]."""
    heads, head_dim = query.shape[1], query.shape[3]
    per_kv = heads // kv_heads
    index = group.gather[layer]
    gathered = paged.scratch[: index.shape[0] * paged.blocks.shape[1]].view(index.shape[0], -1)
    torch.index_select(paged.blocks, 0, index, out=gathered)
    # k, v: [sequences, kv_heads, tokens, head_dim]
    k, v = gathered.view(2, group.sequences, -1, kv_heads, head_dim).transpose(2, 3)[:, :, :, : group.tokens]
    q = query[0, :, group.start : group.end]  # [heads, tokens, head_dim]
    if group.sequences == group.end - group.start:  # decode: the query heads of one KV head are rows
        q = q.transpose(0, 1).view(group.sequences, kv_heads, per_kv, head_dim)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=group.mask, scale=scaling)
        return out.reshape(group.sequences, heads, head_dim)
    if group.folded:  # a short chunk
        rows = q.reshape(1, kv_heads, -1, head_dim)
        out = F.scaled_dot_product_attention(rows, k, v, attn_mask=group.mask, scale=scaling)
        return out.reshape(heads, -1, head_dim).transpose(0, 1)  # not every kernel's output is contiguous
    # a long chunk: KV heads as batch, K and V shared by their query heads through a stride of 0
    shape = (kv_heads, per_kv, group.tokens, head_dim)
    out = F.scaled_dot_product_attention(
        q.view(kv_heads, per_kv, -1, head_dim),
        k[0].unsqueeze(1).expand(shape),
        v[0].unsqueeze(1).expand(shape),
        attn_mask=group.mask,
        is_causal=group.causal,
        scale=scaling,
    )
    return out.permute(2, 0, 1, 3).reshape(-1, heads, head_dim)


def no_mask(*_args: object, **_kwargs: object) -> None:
    """Transformers asks for a mask; ours are in the PagedBatch, and a T x T one would be quadratic."""


def register() -> None:
    """Make IMPLEMENTATION known to transformers. Idempotent."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(IMPLEMENTATION, paged_attention_forward)
    AttentionMaskInterface.register(IMPLEMENTATION, no_mask)
