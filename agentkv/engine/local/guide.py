"""Guides: an answer is held to a grammar token by token, by llguidance.

Covers: compiling (once for equal grammars), masks, what must come next, bytes of tokens. Does not cover: grammars
(`grammar.py`), thoughts before an answer (`behind.py`), choosing (`sampler.py`). A mask takes some 10 us for a vocabulary of 50,000.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentkv.engine.local.behind import BehindThought, MarkTokens
from agentkv.engine.local.grammar import Grammar
from agentkv.engine.local.thoughts import Marks
from agentkv.engine.local.tokeniser import Tokeniser
from agentkv.errors import ExtraMissing, ModelError, RequestInvalid

_MOST_KEPT = 64
_TRIED = 64
_NOTHING_FITS = "NoExtensionBias"
"""The library's word for a place where no text can go on."""


class Guides:
    """Makes guides for one model. Thread-safe. The first use reads the vocabulary, which takes some 0.3 s."""

    def __init__(self, tokeniser: Tokeniser, *, vocabulary: int, eos_ids: Collection[int]) -> None:
        self._tokeniser = tokeniser
        self._vocabulary = vocabulary
        self._ends = frozenset(eos_ids)
        self._eos_ids = (
            sorted(eos_ids) or tokeniser.control_ids()[:1]
        )  # it asks for one; of a model without, any will do
        self._lock = threading.Lock()
        self._words: Any = None
        self._compiled: OrderedDict[str, Any] = OrderedDict()
        self._marks: dict[Marks, MarkTokens] = {}

    def behind(self, marks: Marks, grammar: Grammar, *, begun: bool) -> BehindThought:
        """A new guide of an answer that may be thought about first; `begun`: the prompt has opened the thought."""
        made = self._maker(grammar)
        words = self._vocabulary_of(_llguidance())
        with self._lock:
            tokens = self._marks.get(marks)
            if tokens is None:
                raw = [self._raw(words, token) for token in range(self._vocabulary)]
                tokens = self._marks[marks] = MarkTokens(marks, raw, ends=self._ends)
        return BehindThought(made, tokens, begun=begun)

    def guide(self, grammar: Grammar) -> LLGuide:
        """A new guide. Raises RequestInvalid, naming the field, for what does not compile or cannot be held."""
        return self._maker(grammar)()

    def _maker(self, grammar: Grammar) -> Callable[[], LLGuide]:
        library = _llguidance()
        words = self._vocabulary_of(library)
        with self._lock:
            matcher = self._compiled.get(grammar.lark)
            if matcher is not None:
                self._compiled.move_to_end(grammar.lark)
        if matcher is None:
            matcher = _compiled(library, words, grammar)
            with self._lock:
                self._compiled[grammar.lark] = matcher
                if len(self._compiled) > _MOST_KEPT:
                    self._compiled.popitem(last=False)
        return lambda: LLGuide(matcher.deep_copy(), param=grammar.param)

    def raw(self, token_id: int) -> bytes:
        """A token's own bytes."""
        return self._raw(self._vocabulary_of(_llguidance()), token_id)

    def _raw(self, words: Any, token_id: int) -> bytes:
        control = self._tokeniser.control(token_id)
        return bytes(words.decode_bytes([token_id])) if control is None else control.encode()

    def _vocabulary_of(self, library: Any) -> Any:
        with self._lock:
            if self._words is None:
                self._words = library.LLTokenizer(
                    self._tokeniser.without_spellings(), n_vocab=self._vocabulary, eos_token=self._eos_ids or None
                )
            return self._words


class LLGuide:
    """One answer on its way through a grammar that comes from the request's field `param`. Used by the engine's thread."""

    def __init__(self, matcher: Any, *, param: str) -> None:
        self._matcher = matcher
        self._param = param

    def mask(self, scores: Tensor) -> Tensor:
        """`scores` [vocabulary] with -inf for what must not come next, in place.

        RequestInvalid if the grammar grows beyond what the library follows, ModelError if nothing can come for another reason.
        """
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        if self._matcher.is_error() or not bits.any():
            hopeless = _hopeless(self._matcher)
            if hopeless:
                raise _refused(hopeless, self._param)
            raise ModelError(f"the answer cannot be held to its grammar any more: {self._matcher.get_error():.300}")
        barred = torch.from_numpy(bits[: len(scores)] == 0)
        return scores.masked_fill_(barred, -torch.inf)

    @property
    def ended(self) -> bool:
        """True if nothing may follow any more (but an end token, where the model has one)."""
        return bool(self._matcher.is_stopped())

    def permits(self, token: int) -> bool:
        """True if `token` may be written now."""
        return bool(self._matcher.validate_tokens([token]))

    def accept(self, token: int) -> None:
        """This token was written; one that the grammar has no place for is found at the next mask."""
        self._matcher.consume_token(token)

    def ahead(self, most: int) -> Sequence[int]:
        """Tokens that must come next, at most `most`: the grammar leaves no choice."""
        tokens: list[int] = self._matcher.compute_ff_tokens()
        return tokens[:most]


def _compiled(library: Any, words: Any, grammar: Grammar) -> Any:
    matcher = library.LLMatcher(words, library.LLMatcher.grammar_from_lark(grammar.lark), log_level=0)
    what = matcher.get_error() or _endless(matcher.deep_copy())
    if what:
        raise _refused(what, grammar.param)
    return matcher


def _refused(what: str, param: str) -> RequestInvalid:
    told = what.partition("\n<")[0]
    return RequestInvalid(f"{param} cannot be held: {told:.500}", param=param, code="unsupported_schema")


def _endless(matcher: Any) -> str:
    """What is wrong with a grammar that can never end, or is too large to follow: it shows at the first free token."""
    for _ in range(_TRIED):
        ahead = matcher.compute_ff_tokens()
        if not ahead or matcher.is_error() or not matcher.consume_tokens(ahead):
            break
    if not matcher.is_error():
        matcher.compute_bitmask()
    return _hopeless(matcher)


def _hopeless(matcher: Any) -> str:
    """The grammar's own fault; "" for others: text that spells a control token is not taken as one, which is none."""
    error = str(matcher.get_error())
    if error.startswith(_NOTHING_FITS):
        return "no value fits it"
    return error if "limit" in error or "too many" in error else ""


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise ExtraMissing(
            "log probabilities, JSON formats and forced calls need llguidance: pip install 'agentkv-sdk[local]'"
        ) from error
    return llguidance
