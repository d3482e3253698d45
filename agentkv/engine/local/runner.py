"""Runner: one forward of a Hugging Face model over several sequences packed into one row.

Covers: turning spans (tokens of one sequence at known positions, with its blocks) into the tensors of attention and
the model call. Does not cover: which spans run (`batch.py`), attention (`attention.py`), choosing tokens
(`sampler.py`). Faster runners for one model family can stand behind the same `forward`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentkv.engine.local.attention import NULL_BLOCK, Group, PagedBatch, View
from agentkv.engine.local.features import windows
from agentkv.kv.geometry import BLOCK_TOKENS

_Ints = np.ndarray[Any, np.dtype[np.int64]]
_FOLDED_TOKENS = 128
"""Chunks up to this length read K and V once for all query heads of a KV head; longer ones would tile a big mask."""


@dataclass(slots=True, kw_only=True)
class Span:
    """Tokens `token_ids` of one sequence at positions `start...`; `blocks` covers at least start + len(token_ids)
    tokens. `sample`: the last token's logits are wanted, and those of the `drafted` before it: so many of the last
    tokens are guesses.
    """

    token_ids: Sequence[int]
    start: int
    blocks: Sequence[int]
    sample: bool
    drafted: int = 0

    @property
    def end(self) -> int:
        """Context length after this span."""
        return self.start + len(self.token_ids)


class Runner:
    """Runs `model` over `pool` ([blocks, layers, 2, 16, kv_heads, head_dim], contiguous). Used by one thread.

    `vocabulary`: logits behind so many ids are cut off (padding of the matrix, which the tokenizer has no tokens for).
    """

    def __init__(self, model: Any, pool: Tensor, *, vocabulary: int | None = None) -> None:
        blocks, layers, _, _, kv_heads, head_dim = pool.shape
        self._model = model
        self._pool = pool
        self._rows = pool.view(blocks * layers * 2 * BLOCK_TOKENS, kv_heads * head_dim)
        self._blocks = pool.view(blocks * layers * 2, BLOCK_TOKENS * kv_heads * head_dim)
        self._heads = model.config.get_text_config().num_attention_heads
        self._vocabulary = vocabulary
        self._layers = layers
        self._windows = windows(model.config)
        self._kinds = sorted(set(self._windows))
        # Row of (block, layer, k or v): (block * layers + layer) * 2 + kv.
        self._offsets = torch.arange(2 * layers, device=pool.device).view(layers, 2, 1)
        self._scratch = torch.empty(0, dtype=pool.dtype, device=pool.device)
        self._output = torch.empty(0, dtype=pool.dtype, device=pool.device)

    def close(self) -> None:
        """Let go of the weights and of the pool; nothing can be computed any more. Idempotent."""
        self._model = None
        self._pool = self._rows = self._blocks = self._scratch = self._output = torch.empty(0)

    @torch.inference_mode()
    def zero(self, blocks: Sequence[int]) -> None:
        """Clear blocks: a padded batch reads (and masks) what lies behind a sequence's end, which must be finite."""
        if blocks:
            self._pool.index_fill_(0, torch.tensor(blocks, device=self._pool.device), 0)

    @torch.inference_mode()
    def forward(self, spans: Sequence[Span]) -> Tensor:
        """Logits [rows, vocabulary]: 1 + drafted rows for each span with sample, in the order of `spans`."""
        order = sorted(range(len(spans)), key=lambda i: _packing_key(spans[i]))
        packed = [spans[i] for i in order]
        counts = [len(span.token_ids) for span in packed]
        last = np.cumsum(counts) - 1
        ends = [(int(last[place]), packed[place]) for place in np.argsort(order)]
        keep = [row for end, span in ends if span.sample for row in range(end - span.drafted, end + 1)]
        ids = torch.tensor([[token for span in packed for token in span.token_ids]], device=self._pool.device)
        positions = np.concatenate([np.arange(span.start, span.end) for span in packed])
        output = self._model(
            input_ids=ids,
            position_ids=torch.from_numpy(positions).unsqueeze(0).to(self._pool.device),
            use_cache=False,
            logits_to_keep=torch.tensor(keep, dtype=torch.int64, device=self._pool.device),
            paged=self._batch(packed, positions),
        )
        logits: Tensor = output.logits[0, :, : self._vocabulary]
        return logits

    def _batch(self, packed: list[Span], positions: _Ints) -> PagedBatch:
        device = self._pool.device
        widths = [-(-span.end // BLOCK_TOKENS) for span in packed]
        table = np.full((len(packed), max(widths)), NULL_BLOCK, dtype=np.int64)
        for row, (span, width) in enumerate(zip(packed, widths, strict=True)):
            table[row, :width] = span.blocks[:width]
        owner = np.repeat(np.arange(len(packed)), [len(span.token_ids) for span in packed])
        slots = table[owner, positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS
        table_t = torch.from_numpy(table).to(device)
        slots_t = torch.from_numpy(slots).to(device)
        lens = torch.tensor([span.end for span in packed], device=device)
        groups = self._groups(packed, widths, table)
        rows = self._token_rows(slots_t)
        return PagedBatch(
            rows=self._rows,
            blocks=self._blocks,
            windows=self._windows,
            k_rows=rows[:, 0].unbind(0),
            v_rows=rows[:, 1].unbind(0),
            block_table=table_t,
            lens=lens,
            slots=slots_t,
            groups=groups,
            scratch=self._scratch,
            output=self._outputs(len(positions)) if len(groups) > 1 else self._output,
        )

    def _token_rows(self, slots: Tensor) -> Tensor:
        """Rows of each new token in the pool, [layers, 2, T]."""
        block, offset = slots // BLOCK_TOKENS, slots % BLOCK_TOKENS
        return (block * (2 * self._layers) + self._offsets) * BLOCK_TOKENS + offset

    def _groups(self, packed: list[Span], widths: list[int], table: _Ints) -> list[Group]:
        """Decode rows of similar length share one padded group; each longer span is a group of its own."""
        groups: list[Group] = []
        first = token = 0
        while first < len(packed):
            last = first + 1
            if _padded(packed[first]):
                while last < len(packed) and _padded(packed[last]) and 2 * widths[last] >= widths[first]:
                    last += 1
            sequences = last - first
            count = sequences if sequences > 1 else len(packed[first].token_ids)
            views = self._views(packed[first:last], table[first:last])
            groups.append(Group(start=token, end=token + count, sequences=sequences, views=views))
            first, token = last, token + count
        rows = max(view.gather[0].shape[0] for group in groups for view in group.views.values())
        need = rows * self._blocks.shape[1]
        if need > self._scratch.shape[0]:
            self._scratch = torch.empty(_round_up(need), dtype=self._pool.dtype, device=self._pool.device)
        return groups

    def _views(self, spans: list[Span], table: _Ints) -> dict[int, View]:
        """One view for each window of the model; windows that nobody has outgrown see the whole context."""
        make = self._decode_view if len(spans) > 1 else self._single_view
        longest = max(span.end for span in spans)
        made: dict[int, View] = {}
        for window in self._kinds:
            sliding = window if window < longest else 0
            if sliding not in made:
                made[sliding] = make(spans, table, sliding)
        return {window: made[window if window < longest else 0] for window in self._kinds}

    def _gather(self, table: _Ints) -> tuple[Tensor, ...]:
        """Per layer the rows of K, then of V, of all blocks in the table."""
        blocks = torch.from_numpy(table.reshape(-1)).to(self._pool.device)
        return (blocks * (2 * self._layers) + self._offsets).view(self._layers, -1).unbind(0)

    def _decode_view(self, spans: list[Span], table: _Ints, window: int) -> View:
        """One token each of several sequences, all of a context or the last `window` tokens of it."""
        device, dtype = self._pool.device, self._pool.dtype
        ends = np.array([span.end for span in spans])
        widths = -(-ends // BLOCK_TOKENS)
        if window:
            lows = np.maximum(0, ends - window)
            firsts = lows // BLOCK_TOKENS
            seen = np.full((len(spans), int((widths - firsts).max())), NULL_BLOCK, dtype=np.int64)
            for row, (first, width) in enumerate(zip(firsts, widths, strict=True)):
                seen[row, : width - first] = table[row, first:width]
            places = np.arange(seen.shape[1] * BLOCK_TOKENS) + firsts[:, None] * BLOCK_TOKENS
            out_of_sight = (places >= ends[:, None]) | (places < lows[:, None])
        else:
            seen = table[:, : int(widths.max())]
            out_of_sight = np.arange(seen.shape[1] * BLOCK_TOKENS) >= ends[:, None]
        tokens = seen.shape[1] * BLOCK_TOKENS
        hidden = torch.from_numpy(out_of_sight).to(device)
        mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)
        return View(gather=self._gather(seen), tokens=tokens, mask=mask[:, None, None])

    def _single_view(self, spans: list[Span], table: _Ints, window: int) -> View:
        """A token or a chunk of one sequence, over all of its context or what its windows show of it."""
        (span,) = spans
        low = max(0, span.start - window + 1) if window else 0
        count, first, tokens = len(span.token_ids), low // BLOCK_TOKENS, span.end - low
        first_chunk, long = span.start == 0, count > _FOLDED_TOKENS
        causal = count > 1 and not window and (first_chunk or (long and self._pool.device.type == "cpu"))
        folded = count > 1 and not long and not causal
        mask = None if causal or count == 1 else self._chunk_mask(count, tokens, window)
        if mask is not None and folded:
            mask = mask.repeat(self._heads // self._pool.shape[4], 1)
        return View(
            gather=self._gather(table[:1, first : -(-span.end // BLOCK_TOKENS)]),
            skip=low - first * BLOCK_TOKENS,
            tokens=tokens,
            mask=None if mask is None else mask[None, None],
            causal=causal,
            before=span.start if causal else 0,
            folded=folded,
        )

    def _chunk_mask(self, count: int, tokens: int, window: int) -> Tensor:
        """[count, tokens]: the last `count` of the tokens, each of which sees itself and what is before it."""
        device, dtype = self._pool.device, self._pool.dtype
        before = tokens - count
        mask = torch.full((count, tokens), -torch.inf, dtype=dtype, device=device).triu_(before + 1)
        if window:
            gone = torch.ones(count, tokens, dtype=torch.bool, device=device).tril_(before - window)
            mask.masked_fill_(gone, -torch.inf)
        return mask

    def _outputs(self, tokens: int) -> Tensor:
        head_dim = self._pool.shape[-1]
        need = tokens * self._heads * head_dim
        if need > self._output.numel():
            self._output = torch.empty(_round_up(need), dtype=self._pool.dtype, device=self._pool.device)
        return self._output.view(-1)[:need].view(1, tokens, self._heads, head_dim)


def _padded(span: Span) -> bool:
    """True for a span that may share a padded group: what lies behind its end is read, and was cleared.

    A single token inside of a prompt ends in a block that nobody cleared; it is read exactly.
    """
    return len(span.token_ids) == 1 and span.sample


def _packing_key(span: Span) -> tuple[bool, int]:
    """Padded ones first, longest context first, so that similar lengths are neighbours."""
    return (not _padded(span), -span.end if _padded(span) else 0)


def _round_up(count: int) -> int:
    return 1 << (count - 1).bit_length()
