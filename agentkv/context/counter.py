"""Counter: tokens of messages, tools and whole prompts, each message counted once.

Covers messages of ours and of the OpenAI form (dicts; content as text or as blocks: text, images, sounds, files, tool
calls and results). Counts are remembered by a digest of the text, never with the text. Does not cover counting a text:
`tokens.TextCounter`, or the tokenizer of a loaded model.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentkv.context import images as pictures
from agentkv.context.canonical import tools_text
from agentkv.context.estimate import estimate
from agentkv.core.message import Message, ToolSpec
from agentkv.errors import ConfigError
from agentkv.log import failed

MESSAGE_TOKENS = 4
"""What a chat template adds around a message (role, delimiters), roughly."""
FILE_TOKENS = 1_000
"""What a file block counts as: its pages are not read."""
SHORT_CHARS = 48
"""Shorter texts are counted again each time: that is cheaper than remembering them."""

_SOUNDS = frozenset({"audio", "input_audio"})
_PICTURES = frozenset({"image", "image_url", "input_image"})
_FILES = frozenset({"file", "input_file", "document", "video", "media"})
_CALLS = frozenset({"tool_use", "tool_call", "server_tool_use"})
_RESULTS = frozenset({"tool_result"})
_RECENT = 8

ImageTokens = Callable[[int, int, str], int]
"""Tokens of an image from width and height in pixels and its detail ("low", "high", "auto")."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """`tokens`, and whether its texts were counted with the model's own tokenizer and nothing had to be estimated.

    What a chat template adds is MESSAGE_TOKENS for each message in either case.
    """

    tokens: int
    exact: bool


class Counter:
    """Counts with `count_text` (text -> tokens), each text of up to `max_entries` once. Thread-safe; never raises.

    `exact` says whether `count_text` is the model's own tokenizer; None asks its attribute `exact`. `images` counts a
    picture, OpenAI's formula for gpt-4o unless given. Raises ConfigError for a `max_entries` below 1.
    """

    def __init__(
        self,
        count_text: Callable[[str], int],
        *,
        exact: bool | None = None,
        images: ImageTokens = pictures.image_tokens,
        max_entries: int = 50_000,
    ) -> None:
        if max_entries < 1:
            raise ConfigError(f"max_entries={max_entries} is not allowed; give the number of counts to remember, >= 1")
        from xxhash import xxh3_128_digest  # 5 ms that `import agentkv` must not pay

        self._digest = xxh3_128_digest
        self._count_text = count_text
        self._exact = exact
        self._images = images
        self._max_entries = max_entries
        self._known: OrderedDict[bytes, int] = OrderedDict()
        self._tools: deque[tuple[tuple[ToolSpec, ...], int]] = deque(maxlen=_RECENT)
        self._prompts: deque[tuple[tuple[Any, ...], int]] = deque(maxlen=_RECENT)
        self._lock = threading.Lock()
        self._kinds: tuple[tuple[frozenset[str], Callable[[Mapping[str, Any]], int]], ...] = (
            (_PICTURES, self._image),
            (_SOUNDS, lambda block: pictures.audio_tokens(_data(block))),
            (_FILES, lambda _block: FILE_TOKENS),
            (_CALLS, self._call),
            (_RESULTS, lambda block: self.content(block.get("content"))),
        )

    @property
    def exact(self) -> bool:
        """Whether texts are counted with the model's own tokenizer."""
        return bool(getattr(self._count_text, "exact", False)) if self._exact is None else self._exact

    def __len__(self) -> int:
        return len(self._known)

    def text(self, text: str) -> int:
        """Tokens of `text`, 0 for ""."""
        if len(text) < SHORT_CHARS:
            return self._counted(text)
        key = self._digest(text.encode("utf-8", "surrogatepass"))
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
                return known
        tokens = self._counted(text)
        with self._lock:
            self._known[key] = tokens
            while len(self._known) > self._max_entries:
                self._known.popitem(last=False)
        return tokens

    def message(self, message: Message | Mapping[str, Any]) -> int:
        """Tokens of one message and MESSAGE_TOKENS around it."""
        if isinstance(message, Message):
            calls = sum(self.text(call.name) + self.text(call.arguments) for call in message.tool_calls)
            return MESSAGE_TOKENS + self.content(message.content) + calls
        calls = sum(self._call(call) for call in _list(message.get("tool_calls")))
        return MESSAGE_TOKENS + self.content(message.get("content")) + calls

    def content(self, content: Any) -> int:
        """Tokens of a message's content: text, None, or blocks. Base64 data is never counted as text."""
        if isinstance(content, str):
            return self.text(content)
        return sum(self._block(block) for block in _list(content))

    def tools(self, specs: Iterable[ToolSpec]) -> int:
        """Tokens of the tools' schemas; the last few sets are remembered. A schema must not be changed in place."""
        key = tuple(specs)
        if not key:
            return 0
        for known, tokens in tuple(self._tools):
            if known == key:
                return tokens
        try:
            tokens = self.text(tools_text(key))
        except (RecursionError, TypeError, ValueError) as error:  # a schema that is no JSON
            failed("tools_not_counted", error=repr(error)[:200])
            tokens = sum(self.text(spec.name) + self.text(spec.description) + MESSAGE_TOKENS for spec in key)
        self._tools.appendleft((key, tokens))
        return tokens

    def prompt(self, messages: Sequence[Message | Mapping[str, Any]], tools: Sequence[ToolSpec] = ()) -> int:
        """Tokens of a whole prompt. One that extends a recent one costs what is new in it."""
        new = tuple(messages)
        done, tokens = 0, 0
        for known, total in tuple(self._prompts):
            if len(known) > done and new[: len(known)] == known:
                done, tokens = len(known), total
        tokens += sum(self.message(message) for message in new[done:])
        if new and all(isinstance(message, Message) for message in new[done:]):  # a dict may change under us
            self._prompts.appendleft((new, tokens))
        return tokens + (self.tools(tools) if tools else 0)

    def counted(self, messages: Sequence[Message | Mapping[str, Any]], tools: Sequence[ToolSpec] = ()) -> Counted:
        """`prompt`, with a flag that says whether it is an estimate."""
        plain = all(
            isinstance(message, Message) or isinstance(message.get("content"), str | None) for message in messages
        )
        return Counted(tokens=self.prompt(messages, tools), exact=self.exact and plain)

    def _counted(self, text: str) -> int:
        if not text:
            return 0
        try:
            return self._count_text(text)
        except Exception as error:
            failed("text_not_counted", error=repr(error)[:200], chars=len(text))
            return estimate(text)

    def _block(self, block: Any) -> int:
        if isinstance(block, str):
            return self.text(block)
        if not isinstance(block, Mapping):
            return 0
        kind = block.get("type")
        known = isinstance(kind, str)
        counts = next((counts for kinds, counts in self._kinds if known and kind in kinds), None)
        if counts is not None:
            return counts(block)
        text = block.get("text", block.get("thinking", block.get("reasoning", "")))
        return self.text(text) if isinstance(text, str) else 0

    def _image(self, block: Mapping[str, Any]) -> int:
        part = block.get("image_url")
        detail = str((part.get("detail") if isinstance(part, Mapping) else None) or block.get("detail") or "auto")
        try:
            width, height = pictures.image_size(_data(block)) or pictures.UNKNOWN_PX
            return self._images(width, height, detail)
        except Exception as error:
            failed("image_not_counted", error=repr(error)[:200])
            return pictures.image_tokens(*pictures.UNKNOWN_PX)

    def _call(self, call: Any) -> int:
        if not isinstance(call, Mapping):
            return 0
        inner = call.get("function")
        call = inner if isinstance(inner, Mapping) else call
        arguments = next((call[key] for key in ("arguments", "args", "input") if call.get(key) is not None), "")
        if not isinstance(arguments, str):
            try:
                arguments = json.dumps(arguments, ensure_ascii=False, default=str)
            except (ValueError, RecursionError):
                arguments = ""
        return self.text(str(call.get("name") or "")) + self.text(arguments)


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()


def _data(block: Mapping[str, Any]) -> str:
    """The base64 text, or the address, of an image or sound in any of its usual forms; "" where there is none."""
    for key in ("image_url", "input_audio", "source", "audio"):
        inner = block.get(key)
        block = inner if isinstance(inner, Mapping) else block
        if isinstance(inner, str):
            return inner
    return next((block[key] for key in ("data", "base64", "url") if isinstance(block.get(key), str)), "")
