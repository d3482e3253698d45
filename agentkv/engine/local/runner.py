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

from agentkv.engine.local.attention import NULL_BLOCK, Group, PagedBatch
from agentkv.kv.geometry import BLOCK_TOKENS

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
    """Runs `model` over `pool` ([blocks, layers, 2, 16, kv_heads, head_dim], contiguous). Used by one thread."""

    def __init__(self, model: Any, pool: Tensor) -> None:
        blocks, layers, _, _, kv_heads, head_dim = pool.shape
        self._model = model
        self._pool = pool
        self._rows = pool.view(blocks * layers * 2 * BLOCK_TOKENS, kv_heads * head_dim)
        self._blocks = pool.view(blocks * layers * 2, BLOCK_TOKENS * kv_heads * head_dim)
        self._heads = model.config.get_text_config().num_attention_heads
        self._layers = layers
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
        logits: Tensor = output.logits[0]
        return logits

    def _batch(self, packed: list[Span], positions: np.ndarray[Any, np.dtype[np.int64]]) -> PagedBatch:
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
        groups = self._groups(packed, widths, table_t, lens)
        rows = self._token_rows(slots_t)
        return PagedBatch(
            rows=self._rows,
            blocks=self._blocks,
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

    def _groups(self, packed: list[Span], widths: list[int], table: Tensor, lens: Tensor) -> list[Group]:
        """Decode rows of similar length share one padded group; each longer span is a group of its own."""
        groups: list[Group] = []
        first = token = 0
        while first < len(packed):
            last = first + 1
            if len(packed[first].token_ids) == 1:
                while last < len(packed) and len(packed[last].token_ids) == 1 and 2 * widths[last] >= widths[first]:
                    last += 1
            span, width, sequences = packed[first], widths[first], last - first
            count = sequences if sequences > 1 else len(span.token_ids)
            tokens = span.end if sequences == 1 else width * BLOCK_TOKENS
            folded = sequences == 1 and 1 < count <= _FOLDED_TOKENS and span.start > 0
            gather = table[first:last, :width].reshape(-1) * (2 * self._layers) + self._offsets
            groups.append(
                Group(
                    start=token,
                    end=token + count,
                    sequences=sequences,
                    tokens=tokens,
                    gather=gather.view(self._layers, -1).unbind(0),
                    mask=self._mask(span, sequences, tokens, lens[first:last]),
                    causal=sequences == 1 and count > 1 and span.start == 0,
                    folded=folded,
                )
            )
            first, token = last, token + count
        need = max(group.gather[0].shape[0] for group in groups) * self._blocks.shape[1]
        if need > self._scratch.shape[0]:
            self._scratch = torch.empty(_round_up(need), dtype=self._pool.dtype, device=self._pool.device)
        return groups

    def _mask(self, span: Span, sequences: int, tokens: int, lens: Tensor) -> Tensor | None:
        device, dtype = self._pool.device, self._pool.dtype
        count = len(span.token_ids)
        if sequences > 1:  # ends at each sequence's length
            hidden = torch.arange(tokens, device=device) >= lens.unsqueeze(1)
            return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)[:, None, None]
        if count == 1 or span.start == 0:
            return None
        mask = torch.full((count, tokens), -torch.inf, dtype=dtype, device=device).triu_(span.start + 1)
        if count <= _FOLDED_TOKENS:
            mask = mask.repeat(self._heads // self._pool.shape[4], 1)
        return mask[None, None]

    def _outputs(self, tokens: int) -> Tensor:
        head_dim = self._pool.shape[-1]
        need = tokens * self._heads * head_dim
        if need > self._output.numel():
            self._output = torch.empty(_round_up(need), dtype=self._pool.dtype, device=self._pool.device)
        return self._output.view(-1)[:need].view(1, tokens, self._heads, head_dim)


def _packing_key(span: Span) -> tuple[bool, int]:
    """Single tokens first, longest context first, so that similar lengths are neighbours."""
    count = len(span.token_ids)
    return (count > 1, -span.end if count == 1 else 0)


def _round_up(count: int) -> int:
    return 1 << (count - 1).bit_length()
