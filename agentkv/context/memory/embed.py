"""Embed: texts as vectors. A hashing one that needs nothing, and adapters for small local models.

Covers the protocol and three ways to have one. Any function that maps texts to an array will do, for example a
sentence-transformers model's `encode`. Does not cover searching: that is `vectors.py`.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

from agentkv.context.memory.terms import terms
from agentkv.errors import ConfigError, ExtraMissing

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

DIMENSIONS = 512
GRAM_WEIGHT = 0.35
"""Of a character n-gram beside its word's 1: it finds other forms of the word, and a few chance likenesses."""


class Embed(Protocol):
    """Texts in, an array [texts, dimensions] out. An attribute `name` tells its vectors from other models'."""

    def __call__(self, texts: Sequence[str], /) -> Any: ...


class HashingEmbed:
    """Words and their character 3- and 4-grams, hashed into `dimensions` signed bins, length 1.

    Finds texts that share words or parts of words, in any script; knows nothing of synonyms. The same in every
    process. About 0.1 ms for a passage. Raises ConfigError for fewer than 16 dimensions.
    """

    def __init__(self, dimensions: int = DIMENSIONS) -> None:
        if dimensions < 16:  # noqa: PLR2004  fewer bins and everything is alike
            raise ConfigError(f"dimensions={dimensions} is not allowed; give 16 or more")
        self.dimensions = dimensions
        self.name = f"hashing-{dimensions}-1"

    def __call__(self, texts: Sequence[str], /) -> NDArray[np.float32]:
        """Vectors [texts, dimensions], float32; of length 1, or 0 for a text without a term."""
        import numpy as np

        out = np.zeros((len(texts), self.dimensions), dtype=np.float32)
        for number, text in enumerate(texts):
            counts: dict[str, int] = {}
            for term in terms(text):
                counts[term] = counts.get(term, 0) + 1
            if not counts:
                continue
            features = [_features(term, self.dimensions) for term in counts]
            bins = np.concatenate([bins for bins, _ in features])
            often = 1.0 + np.log(np.fromiter(counts.values(), np.float64))
            weights = np.concatenate([weights * more for (_, weights), more in zip(features, often, strict=True)])
            summed = np.bincount(bins, weights, self.dimensions)
            out[number] = summed / max(float(np.linalg.norm(summed)), 1e-9)
        return out


@lru_cache(maxsize=65_536)
def _features(term: str, dimensions: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Bins and signed weights of a term and of its n-grams; the n-grams together weigh GRAM_WEIGHT, by length."""
    import numpy as np

    framed = f"^{term}$"
    grams = [framed[at : at + size] for size in (3, 4) for at in range(len(framed) - size + 1)]
    whole = term.startswith("u") and any(digit in term for digit in "0123456789")  # a pair of CJK characters
    names = [framed] if whole or term.isdigit() else [framed, *grams]
    hashes = np.array([zlib.crc32(name.encode()) for name in names], dtype=np.int64)
    weights = np.full(len(names), GRAM_WEIGHT)
    weights[0] = 1.0
    return hashes % dimensions, np.where(hashes >> 31 & 1, weights, -weights)


class MeanPooled:
    """A transformers encoder as an Embed: the mean of its last hidden states over the text, length 1.

    Takes the loaded tokenizer and model, so nothing is imported here: `MeanPooled(AutoTokenizer.from_pretrained(p),
    AutoModel.from_pretrained(p), name="all-MiniLM-L6-v2")`.
    """

    def __init__(self, tokenizer: Any, model: Any, *, name: str, max_tokens: int = 256, batch: int = 32) -> None:
        self.name = name
        self._tokenizer = tokenizer
        self._model = model.eval()
        self._model.requires_grad_(False)
        self._max_tokens = max_tokens
        self._batch = batch

    def __call__(self, texts: Sequence[str], /) -> NDArray[np.float32]:
        """Vectors [texts, hidden size], float32."""
        import numpy as np

        rows = [self._some(list(texts[at : at + self._batch])) for at in range(0, len(texts), self._batch)]
        return np.concatenate(rows)

    def _some(self, texts: list[str]) -> NDArray[np.float32]:
        import numpy as np

        tokens = self._tokenizer(texts, padding=True, truncation=True, max_length=self._max_tokens, return_tensors="pt")
        states = np.asarray(self._model(**tokens).last_hidden_state)  # [texts, tokens, hidden]
        mask = np.asarray(tokens["attention_mask"])[:, :, None]
        means = (states * mask).sum(1) / np.maximum(mask.sum(1), 1)
        return np.asarray(means / np.maximum(np.linalg.norm(means, axis=1, keepdims=True), 1e-9), dtype=np.float32)


def sentence_transformer(model: str) -> Embed:
    """An Embed from the sentence-transformers model in folder `model`. Raises ExtraMissing without that package."""
    try:
        from sentence_transformers import SentenceTransformer  # type: ignore[import-not-found,unused-ignore]  # an extra
    except ImportError as error:
        raise ExtraMissing(
            "sentence_transformer() needs a package that is not installed: pip install sentence-transformers"
        ) from error
    loaded = SentenceTransformer(model)

    class Encoded:
        name = model

        def __call__(self, texts: Sequence[str], /) -> Any:
            return loaded.encode(list(texts), show_progress_bar=False, normalize_embeddings=True)

    return Encoded()


def vectors_of(embed: Embed, texts: Sequence[str]) -> NDArray[np.float32]:
    """Vectors [texts, dimensions] of length 1 (or 0). Raises ValueError for anything else than finite numbers so."""
    import numpy as np

    rows = np.asarray(embed(texts), dtype=np.float32)
    if rows.ndim != 2 or len(rows) != len(texts) or not rows.shape[1] or not np.isfinite(rows).all():  # noqa: PLR2004
        raise ValueError(
            f"an embedding of {len(texts)} texts has shape {rows.shape} or holds numbers that are not finite"
        )
    unit: NDArray[np.float32] = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), np.float32(1e-9))
    return unit


def name_of(embed: Embed) -> str:
    """What tells the vectors of `embed` from another's."""
    return str(getattr(embed, "name", None) or f"{type(embed).__module__}.{type(embed).__qualname__}")
