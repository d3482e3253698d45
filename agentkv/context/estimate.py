"""Tokens of a text from its bytes alone: where no tokenizer can be had, and for texts too long for one.

Covers every text: any script, lone surrogates, NUL; linear time. The error against real tokenizers is stated in
docs/tokens.md and held in the tests. Does not cover counting with a tokenizer: that is `tokens.py`.
"""

from __future__ import annotations

import re

_LETTERS = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ "
_DIGITS = b"0123456789"
_WEIGHTS: tuple[tuple[bytes, float], ...] = (  # bytes that start a character of a kind -> tokens per character
    (_LETTERS, 1 / 4.8),
    (_DIGITS, 1 / 2),
    (bytes(byte for byte in range(0x80) if byte not in _LETTERS + _DIGITS), 1 / 1.9),
    (bytes(range(0xC0, 0xE0)), 1 / 2.4),
    (bytes(range(0xE0, 0xF0)), 0.9),
    (bytes(range(0xF0, 0x100)), 2.0),
)
_DENSE = re.compile(rb"[A-Za-z0-9+/=_-]{24,}")
_DENSE_TOKENS = 0.62
_DIGIT = re.compile(rb"\d")
_BLANKS = re.compile(rb"[ \t]{3,}")


def estimate(text: str) -> int:
    """Tokens of `text` from its bytes; at least 1, 0 for "".

    Weights fitted to two public encodings: ASCII letters and blanks 4.8 per token, digits 2, other ASCII 1.9; Latin,
    Greek, Cyrillic and Arabic letters (two bytes) 2.4 characters, CJK and Indic (three) 1.1, emoji (four) 0.5 per
    token; long runs of letters with digits (base64, hashes) 1.6 characters; a run of blanks counts as one.
    """
    if not text:
        return 0
    data = text.encode("utf-8", "surrogatepass")
    dense = 0

    def weigh(match: re.Match[bytes]) -> bytes:
        nonlocal dense
        if not _DIGIT.search(match[0]):
            return match[0]
        dense += len(match[0])
        return b""

    data = _BLANKS.sub(b" ", _DENSE.sub(weigh, data))
    tokens = dense * _DENSE_TOKENS
    for kind, tokens_per_byte in _WEIGHTS:
        tokens += (len(data) - len(data.translate(None, kind))) * tokens_per_byte
    return max(1, round(tokens))
