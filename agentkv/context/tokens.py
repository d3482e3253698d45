"""Counting tokens without the model: tiktoken where its data is on this machine, else an estimate from bytes.

Covers texts and messages. Never opens a network connection: tiktoken's encoding file is looked for in its own cache
and checked before tiktoken is asked. A model that tiktoken does not know is counted with the newest encoding; the
local engine counts exactly instead. The estimate's error against real encodings is bounded in the tests.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentkv.context.canonical import tools_text
from agentkv.core.message import Message, ToolSpec
from agentkv.log import count, warn_once

MESSAGE_TOKENS = 4
"""What a chat template adds around a message (role, delimiters), roughly."""
DEFAULT_ENCODING = "o200k_base"

_URL = "https://openaipublic.blob.core.windows.net/encodings/{name}.tiktoken"
_SHA256 = {
    "o200k_base": "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
    "cl100k_base": "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
}
_FILES = {"o200k_harmony": "o200k_base"}  # encodings that share another one's file

MAX_EXACT_CHARS = 1_000_000
"""Longer texts are estimated: an encoder may need minutes for a megabyte of one character."""

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

_encodings: dict[str, Any] = {}
_names: dict[str, str] = {}
_lock = threading.Lock()


def count_text(text: str, model: str | None = None) -> int:
    """Tokens of `text`; 0 for "". Counts with tiktoken if that works offline, else estimates. Never raises."""
    if not text:
        return 0
    encoding = _encoding(model) if len(text) <= MAX_EXACT_CHARS else None
    if encoding is not None:
        try:
            return len(encoding.encode_ordinary(text))
        except Exception:
            count("tiktoken_failed")
    return estimate(text)


def count_messages(messages: Sequence[Message], tools: Sequence[ToolSpec] = (), model: str | None = None) -> int:
    """Tokens of a whole prompt: contents, tool calls, tools, and MESSAGE_TOKENS around each message."""
    total = count_text(tools_text(tools), model) if tools else 0
    for message in messages:
        total += MESSAGE_TOKENS + count_text(message.content, model)
        for call in message.tool_calls:
            total += count_text(call.name, model) + count_text(call.arguments, model)
    return total


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


def _encoding(model: str | None) -> Any:
    """The tiktoken encoding for `model`, None if it cannot be had without the network. Looked up once per name."""
    try:
        name = _encoding_name(model)
        if name not in _encodings:
            with _lock:
                if name not in _encodings:
                    _encodings[name] = _load(name)
        return _encodings[name]
    except Exception:
        count("tiktoken_failed")
        return None


def _encoding_name(model: str | None) -> str:
    if model is None:
        return DEFAULT_ENCODING
    if model not in _names:
        import tiktoken

        try:
            name = tiktoken.encoding_name_for_model(model)
        except KeyError:
            name = DEFAULT_ENCODING
        _names[model] = name if _FILES.get(name, name) in _SHA256 else DEFAULT_ENCODING
    return _names[model]


def _load(name: str) -> Any:
    file = _FILES.get(name, name)
    path = _cached_file(_URL.format(name=file))
    if path is None or not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != _SHA256[file]:
        warn_once(
            "tokens_estimated",
            encoding=name,
            advice="tiktoken's file is not in its cache; counts are estimates. Run tiktoken once online to have it",
        )
        return None
    import tiktoken

    return tiktoken.get_encoding(name)


def _cached_file(url: str) -> Path | None:
    """Where tiktoken looks for `url` before it downloads; None where its cache is switched off."""
    named = next((os.environ[key] for key in ("TIKTOKEN_CACHE_DIR", "DATA_GYM_CACHE_DIR") if key in os.environ), None)
    if named == "":
        return None
    folder = Path(named) if named else Path(tempfile.gettempdir()) / "data-gym-cache"
    return folder / hashlib.sha1(url.encode(), usedforsecurity=False).hexdigest()
