"""Attention over the paged pool, registered with transformers under one name.

Covers: `PagedBatch` (what one forward needs, tensors only), the plain torch implementation (CPU path and the
specification of any kernel) with windows, soft caps and sinks, registration. Does not cover: building a PagedBatch
(`runner.py`) nor blocks (`kv/`). The metadata travel in the forward call's keyword arguments (`paged=`), never in
module globals: several engines and threads share the registered function.

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

_UNSUPPORTED = ("position_bias", "head_mask", "block_sequence_ids")
_TILE_SCORES = 1 << 24
"""Scores computed at a time where they cannot be left to SDPA: 64 MiB of float32."""


@dataclass(slots=True, kw_only=True)
class View:
    """What the layers of one window read of a group's contexts."""

    gather: tuple[Tensor, ...]
    """Per layer int64 [2 * sequences * blocks]: the K rows, then the V rows, of all blocks in sight."""
    skip: int = 0
    """So many first tokens of what was gathered are out of the window."""
    tokens: int
    """The (padded) tokens behind `skip`."""
    mask: Tensor | None
    """Additive, [1 or sequences, 1, rows, tokens]; None where everything is attended to."""
    causal: bool = False
    """Without a mask: each row sees the tokens before the chunk (`before`) and those of the chunk up to itself."""
    before: int = 0
    folded: bool = False
    """The query heads of one KV head are rows of it (and of the mask): K and V are read once for all of them."""


@dataclass(slots=True, kw_only=True)
class Group:
    """Tokens `start:end` of the packed batch that attend together.

    Decode: `sequences` rows of one token each over equally many (padded) blocks. Prefill: one sequence, `end - start`
    tokens. `views` has one for each window that some layer has; 0 stands for the whole context.
    """

    start: int
    end: int
    sequences: int
    views: dict[int, View]


@dataclass(slots=True, kw_only=True)
class PagedBatch:
    """What paged attention needs to know about one forward over `T` packed tokens."""

    rows: Tensor
    """The pool as rows of one token: [blocks * layers * 2 * 16, kv_heads * head_dim]."""
    blocks: Tensor
    """The pool as rows of one block: [blocks * layers * 2, 16 * kv_heads * head_dim]."""
    windows: tuple[int, ...]
    """Per layer: tokens that it looks back, itself included; 0 for all."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """How a layer makes weights of queries and keys: scale, then soft cap, then mask, then the sinks' share."""

    scaling: float | None
    softcap: float | None = None
    sinks: Tensor | None = None
    """[heads]: a score of each head that takes its share of the weights and gives nothing."""

    @property
    def plain(self) -> bool:
        """True where SDPA computes the same."""
        return self.softcap is None and self.sinks is None


def paged_attention_forward(  # noqa: PLR0917  as transformers calls it
    module: torch.nn.Module,
    query: Tensor,  # [1, heads, T, head_dim]
    key: Tensor,  # [1, kv_heads, T, head_dim]
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001  transformers passes it; the batch carries its own
    scaling: float | None = None,
    dropout: float = 0.0,  # noqa: ARG001  inference only
    paged: PagedBatch | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Write the new keys and values into the pool, then attend. Returns ([1, T, heads, head_dim], None)."""
    if paged is None:
        raise RuntimeError("this model was given to an agentkv engine; run it through the engine")
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"paged attention has no {name}")
    layer: int = module.layer_idx  # type: ignore[assignment]
    _checked(layer, sliding_window, paged.windows[layer])
    tokens = key.shape[2]
    paged.rows.index_copy_(0, paged.k_rows[layer], key.transpose(1, 2).reshape(tokens, -1))
    paged.rows.index_copy_(0, paged.v_rows[layer], value.transpose(1, 2).reshape(tokens, -1))
    scores = Scores(scaling=scaling, softcap=softcap, sinks=s_aux)
    for group in paged.groups:
        out = _attend(paged, group, query, layer=layer, kv_heads=key.shape[1], scores=scores)
        if group.end - group.start == tokens:
            return out.unsqueeze(0), None
        paged.output[0, group.start : group.end] = out
    return paged.output, None


def _checked(layer: int, asked: int | None, window: int) -> None:
    """Models name the window that their layers want; the config, by which blocks are read, must agree."""
    if asked is not None and asked != window:
        raise NotImplementedError(f"layer {layer} has a window of {asked}, but the config says {window or None}")


def _attend(paged: PagedBatch, group: Group, query: Tensor, *, layer: int, kv_heads: int, scores: Scores) -> Tensor:
    """One group's attention, [tokens, heads, head_dim]."""
    heads, head_dim = query.shape[1], query.shape[3]
    per_kv = heads // kv_heads
    view = group.views[paged.windows[layer]]
    index = view.gather[layer]
    gathered = paged.scratch[: index.shape[0] * paged.blocks.shape[1]].view(index.shape[0], -1)
    torch.index_select(paged.blocks, 0, index, out=gathered)
    # k, v: [sequences, kv_heads, tokens, head_dim]
    seen = slice(view.skip, view.skip + view.tokens)
    k, v = gathered.view(2, group.sequences, -1, kv_heads, head_dim).transpose(2, 3)[:, :, :, seen]
    q = query[0, :, group.start : group.end]  # [heads, tokens, head_dim]
    decode = group.sequences == group.end - group.start
    if not scores.plain:
        return _by_hand(q, k, v, view, scores, decode=decode)
    if decode:  # the query heads of one KV head are rows
        q = q.transpose(0, 1).view(group.sequences, kv_heads, per_kv, head_dim)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=view.mask, scale=scores.scaling)
        return out.reshape(group.sequences, heads, head_dim)
    if view.folded:  # a short chunk
        rows = q.reshape(1, kv_heads, -1, head_dim)
        out = F.scaled_dot_product_attention(rows, k, v, attn_mask=view.mask, scale=scores.scaling)
        return out.reshape(heads, -1, head_dim).transpose(0, 1)  # not every kernel's output is contiguous
    # a long chunk: KV heads as batch, K and V shared by their query heads through a stride of 0
    rows = q.view(kv_heads, per_kv, -1, head_dim)
    if view.before and view.mask is None:
        out = _in_two_parts(rows, k, v, view.before, scores.scaling)
    else:
        shape = (kv_heads, per_kv, view.tokens, head_dim)
        shared = (k[0].unsqueeze(1).expand(shape), v[0].unsqueeze(1).expand(shape))
        out = F.scaled_dot_product_attention(
            rows, *shared, attn_mask=view.mask, is_causal=view.causal, scale=scores.scaling
        )
    return out.permute(2, 0, 1, 3).reshape(-1, heads, head_dim)


def _in_two_parts(q: Tensor, k: Tensor, v: Tensor, before: int, scaling: float | None) -> Tensor:
    """A long chunk behind a context: all of what is before it, then itself causally, joined by their weights' sums.

    So no row is masked and half of the chunk's own scores are not computed: with 4,096 tokens in sight 0.74 of the time of SDPA
    with a mask. q: [kv_heads, per_kv, tokens, head_dim], k and v: [1, kv_heads, before + tokens, head_dim]; q's shape comes back.
    """
    kv_heads, per_kv, tokens, head_dim = q.shape
    part = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    shape = (kv_heads, per_kv, tokens, head_dim)
    own = (k[0, :, None, before:].expand(shape), v[0, :, None, before:].expand(shape))
    out, total = part(q, *own, 0.0, True, scale=scaling)
    # for what everybody sees the query heads of a KV head are rows
    rows = q.reshape(1, kv_heads, per_kv * tokens, head_dim)
    past, past_total = part(rows, k[:, :, :before], v[:, :, :before], 0.0, False, scale=scaling)
    share = torch.sigmoid(total - past_total.reshape(total.shape)).unsqueeze(-1)
    return torch.lerp(past.reshape(shape).float(), out.float(), share).to(q.dtype)


def _by_hand(q: Tensor, k: Tensor, v: Tensor, view: View, scores: Scores, *, decode: bool) -> Tensor:
    """What SDPA does not know, written out, a tile of rows at a time.

    q: [heads, tokens, head_dim], k and v: [sequences, kv_heads, context, head_dim]; returns [tokens, heads, head_dim].
    """
    heads, tokens, head_dim = q.shape
    sequences, kv_heads, context, _ = k.shape
    per_kv = heads // kv_heads
    if decode:
        rows = q.transpose(0, 1).reshape(sequences, kv_heads, per_kv, 1, head_dim)
        mask = None if view.mask is None else view.mask.unsqueeze(1)
        return _weighed(rows, k, v, mask, scores).reshape(tokens, heads, head_dim)
    out = torch.empty(tokens, heads, head_dim, dtype=v.dtype, device=v.device)
    step = max(1, _TILE_SCORES // (heads * context))
    for start in range(0, tokens, step):
        tile = slice(start, min(start + step, tokens))
        rows = q[:, tile].reshape(1, kv_heads, per_kv, -1, head_dim)
        if view.causal:
            mask = torch.full((rows.shape[3], context), -torch.inf, device=q.device).triu_(view.before + start + 1)
        else:
            mask = None if view.mask is None else view.mask[0, 0, tile]
        weighed = _weighed(rows, k, v, mask, scores)
        out[tile] = weighed.permute(3, 0, 1, 2, 4).reshape(-1, heads, head_dim)
    return out


def _weighed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scores: Scores) -> Tensor:
    """q: [sequences, kv_heads, per_kv, tokens, head_dim]; the result has its shape. Weights in float32."""
    sequences, kv_heads, per_kv, tokens, head_dim = q.shape
    scaling = head_dim**-0.5 if scores.scaling is None else scores.scaling
    weights = (q.reshape(sequences, kv_heads, -1, head_dim) @ k.transpose(2, 3)).float() * scaling
    weights = weights.view(sequences, kv_heads, per_kv, tokens, -1)
    if scores.softcap is not None:
        weights = torch.tanh(weights / scores.softcap) * scores.softcap
    if mask is not None:
        weights = weights + mask
    if scores.sinks is not None:
        sinks = scores.sinks.float().view(1, kv_heads, per_kv, 1, 1).expand(*weights.shape[:4], 1)
        weights = torch.cat([weights, sinks], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = weights.softmax(-1)
    return (weights.to(v.dtype).reshape(sequences, kv_heads, per_kv * tokens, -1) @ v).view(q.shape)


def no_mask(*_args: object, **_kwargs: object) -> None:
    """Transformers asks for a mask; ours are in the PagedBatch, and a T x T one would be quadratic."""


def register() -> None:
    """Make IMPLEMENTATION known to transformers. Idempotent."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(IMPLEMENTATION, paged_attention_forward)
    AttentionMaskInterface.register(IMPLEMENTATION, no_mask)
