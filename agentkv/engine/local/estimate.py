"""What a model would need, from headers alone: before a weight is read, before a GGUF is unpacked.

Covers weights in memory, KV of one token, working memory, the context that fits beside them, and why a model would be
refused. Does not cover loading (`loader.py`), nor what the trial on real weights finds (`support.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from agentkv.engine.local.convert import doubtful_tokenizer, stored_dtype, unpacked_bytes
from agentkv.engine.local.dtypes import device_of, dtype_of, name_of
from agentkv.engine.local.features import context_tokens, refusal, window_tokens, windows
from agentkv.engine.local.gguf_file import GgufFile, read_gguf
from agentkv.engine.local.gguf_model import config_of
from agentkv.engine.local.loader import config_in, local_place, suggestions_in
from agentkv.engine.local.quantised import method_of, require
from agentkv.engine.local.quiet import quiet
from agentkv.engine.local.shards import weights_of
from agentkv.errors import AgentKVError, ModelError, UnsupportedModel
from agentkv.kv.geometry import BLOCK_TOKENS, ITEM_BYTES, Geometry
from agentkv.kv.limits import available_bytes
from agentkv.kv.window import Window

CHUNK_TOKENS = 1024
"""The most that is prefilled at a time, by default: what working memory is reckoned for."""
_FLOATS = {"F64", "F32", "F16", "BF16"}
_LIBRARIES_BYTES = 250 << 20
"""Tokenizer, transformers' own objects and allocator slack; measured on the CPU with SmolLM2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Sizes in bytes. `refused`: why it could not be loaded, "" if nothing in its headers forbids it."""

    name: str
    family: str
    refused: str
    device: str
    dtype: str
    why_dtype: str
    quantised: str
    files_bytes: int
    unpacked_bytes: int
    """On disk in the model cache, for a GGUF file; else 0."""
    weights_bytes: int
    working_bytes: int
    token_bytes: int
    context_tokens: int
    why_context: str
    window_tokens: tuple[int, ...]
    """The sliding windows of its layers; () where every layer sees the whole context."""
    kept_tokens: int
    """KV that a context keeps at most, in tokens: all of it, or what the widest window shows if all layers have one."""
    available_bytes: int
    template: bool
    suggested: Mapping[str, Any] = field(default_factory=dict)
    doubt: str = ""
    """Why the tokenizer may differ from the original one (GGUF)."""

    @property
    def fits_tokens(self) -> int:
        """Tokens of KV for which there is room on the device beside the model; whole blocks."""
        room = self.available_bytes - self.weights_bytes - self.working_bytes
        return max(0, room // (BLOCK_TOKENS * self.token_bytes)) * BLOCK_TOKENS

    def longest_tokens(self, size_bytes: int) -> int:
        """The longest context that `size_bytes` of device memory can compute."""
        window = self.window_tokens[-1] if self.kept_tokens < self.context_tokens else 0
        return min(self.context_tokens, Window(tokens=window).longest(size_bytes // (BLOCK_TOKENS * self.token_bytes)))


def estimate(name: str, *, device: str = "auto", dtype: str = "auto") -> Estimate:
    """Look at a local model: "smollm2-135m", a Hugging Face folder, a GGUF file or a part of one.

    Raises ModelNotFound, ModelError for damaged files, ConfigError for an unknown device or type.
    """
    where = device_of(device)
    place, files = local_place(name)
    read = None if files is None else read_gguf(files)
    try:
        config = config_in(place, name) if read is None else _gguf_config(read)
    except UnsupportedModel as error:
        raise ModelError(f"{name} cannot be loaded: {error}") from error
    chosen = dtype_of(dtype, where, config)
    try:
        return _estimate(name, config, place, read, where=where, typed=chosen)
    except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
        if isinstance(error, AgentKVError):
            raise
        raise ModelError(f"{name} cannot be loaded: its config makes no sense: {error!r}") from error


def _estimate(
    name: str, config: Any, place: Path, read: GgufFile | None, *, where: torch.device, typed: tuple[torch.dtype, str]
) -> Estimate:
    chosen, why = typed
    method = method_of(config)
    geometry = Geometry.from_hf_config(config, name_of(chosen))
    weights = _folder_weights(place, chosen) if read is None else ITEM_BYTES[name_of(chosen)] * _numbers(read)
    tokens, why_context = context_tokens(config)
    window = Window(tokens=window_tokens(config))
    text = config.get_text_config()
    if where.type == "cpu" and chosen == torch.bfloat16 and text.tie_word_embeddings:
        weights += text.vocab_size * text.hidden_size * 2  # the output layer is packed, the embedding is not
    return Estimate(
        name=name,
        family=str(config.model_type),
        refused=_refused(config, method, name),
        device=str(where),
        dtype=name_of(chosen),
        why_dtype=why,
        quantised=method or "",
        files_bytes=sum(file.stat().st_size for file in (place.glob("*.safetensors") if read is None else read.files)),
        unpacked_bytes=0 if read is None else unpacked_bytes(read),
        weights_bytes=weights,
        working_bytes=_working_bytes(text, geometry, min(tokens, window.tokens + CHUNK_TOKENS) if window else tokens),
        token_bytes=geometry.token_bytes,
        context_tokens=tokens,
        why_context=why_context,
        window_tokens=tuple(sorted(set(windows(config)) - {0})),
        kept_tokens=min(tokens, BLOCK_TOKENS * (window.reach_blocks + 1)) if window else tokens,
        available_bytes=torch.cuda.mem_get_info(where)[0] if where.type == "cuda" else available_bytes(),
        template=_has_template(place) if read is None else "tokenizer.chat_template" in read.metadata,
        suggested={} if read is not None else suggestions_in(place),
        doubt="" if read is None else doubtful_tokenizer(read),
    )


def _gguf_config(read: GgufFile) -> Any:
    from transformers import AutoConfig

    fields = {**config_of(read), "dtype": stored_dtype(read)}
    with quiet():
        return AutoConfig.for_model(fields.pop("model_type"), **fields)


def _numbers(read: GgufFile) -> int:
    return sum(tensor.count for tensor in read.tensors.values())


def _folder_weights(folder: Path, dtype: torch.dtype) -> int:
    """Floats take the compute type, packed integers what they take in the file."""
    stored = weights_of(folder)
    if not stored:
        return sum(path.stat().st_size for path in folder.glob("*.bin"))
    size = ITEM_BYTES[name_of(dtype)]
    total = 0
    for weight in stored.values():
        count = 1
        for side in weight.shape:
            count *= side
        total += size * count if weight.dtype in _FLOATS else weight.size_bytes
    return total


def _working_bytes(text: Any, geometry: Geometry, seen_tokens: int) -> int:
    """A chunk's activations in the widest place, one layer's K and V of so many tokens, and the libraries' own."""
    wide: int = max(getattr(text, "intermediate_size", 0) or 0, text.hidden_size)
    activations: int = CHUNK_TOKENS * (4 * text.hidden_size + 3 * wide) * 4
    gathered = seen_tokens * geometry.token_bytes // geometry.layers
    logits: int = 4 * text.vocab_size * 16
    return activations + gathered + logits + _LIBRARIES_BYTES


def _refused(config: Any, method: str | None, name: str) -> str:
    try:
        if method is not None:
            require(method, name)
    except AgentKVError as error:
        return str(error)
    return refusal(config) or ""


def _has_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    options = folder / "tokenizer_config.json"
    return options.is_file() and '"chat_template"' in options.read_text(encoding="utf-8", errors="replace")
