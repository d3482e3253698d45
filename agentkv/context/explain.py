"""Explanation: for one model call, where its prompt first differs from the one before, why, and what that cost.

Covers the words and numbers of one call, and a way to hear every call of the process (`listen`). Does not cover
finding the place (`breaks.py`) nor remembering the call before (`prefix.py`). Bytes and tokens are counted in the
prompt's text as `message_text` gives it: the tools' lines, then contents and calls, nothing of a chat template.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from agentkv import log
from agentkv.context.breaks import PROVIDER, Cause
from agentkv.core.message import Message, ToolSpec
from agentkv.core.usage import Usage

Count = Callable[[str], int]

ADVICE: dict[Cause, str] = {
    "template": "keep the chat template and the fixed instructions as they are for the whole session",
    "clock": 'tell the time at the end of the prompt: volatile=("clock",)',
    "a changing value": "tell what changes from call to call at the end of the prompt: volatile=(...)",
    "tool order": "offer the tools in one order, with canonical_tools",
    "tools added": "offer every tool from the start; where tools stand before the messages, a new one breaks all of them",
    "tools removed": "leave the tools as they are and restrict the choice at the end of the prompt",
    "tools changed": "keep names, descriptions and schemas as they are for the whole session",
    "tool args re-dumped": "send the model's own argument text again, not what json.dumps makes of it",
    "tool call changed": "send the assistant's turn again as it came",
    "reasoning dropped": "send the reasoning again if the model's template keeps it; else only new text is computed",
    "text changed": "append instead of editing what was sent",
    "role changed": "append instead of editing what was sent",
    "message inserted": "put new messages at the end",
    "messages removed": "shorten rarely and much, at declared points",
    "model switch": "stay with one model for a session; each has a cache of its own",
    "fold": "declared; a fold that takes much at a time pays for what it breaks",
    "cache expired": "nothing is wrong with the prompt; a longer lifetime or an earlier call would have kept the cache",
    "cache missed": "nothing is wrong with the prompt; the cache was full, or another machine answered",
    "below minimum size": "nothing is wrong with the prompt; the provider does not cache ones as short as this",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """One model call against the call before. `cause` is None where the prompt extends the last, or is the first.

    `message`, `character`, `byte` and `token` say where the prompt stops being the old one (its old end, where it
    extends it); `token` and the token numbers are None without a counter, and where `estimated` follow from bytes and
    the tokens that the provider reported. `lost_*` is what is computed again for the cause. `also` is a second
    cause at this call: a break behind the first, or one that cost nothing because the cache had expired. `before` and `after` are prompt text: do not log them.
    """

    call: int
    cause: Cause | None
    message: int
    character: int
    byte: int
    token: int | None
    role: str = ""
    value: str = ""
    prompt_bytes: int
    prompt_tokens: int | None
    lost_bytes: int = 0
    lost_tokens: int | None = 0
    estimated: bool = False
    cached_tokens: int | None = None
    idle_s: float | None = None
    also: Cause | None = None
    before: str = ""
    after: str = ""

    @property
    def extends(self) -> bool:
        """True if nothing was changed that had been sent before, whatever became of the provider's cache."""
        return self.cause is None or (self.cause in PROVIDER and self.also is None)

    @property
    def advice(self) -> str:
        """What to do about it; "" where there is nothing to do."""
        return ADVICE.get(self.cause, "") if self.cause is not None else ""

    def to_json(self, *, text: bool = False) -> dict[str, Any]:
        """Plain values; with `text` also the characters around the place."""
        fields = {name: value for name, value in asdict(self).items() if text or name not in ("before", "after")}
        return fields | {"extends": self.extends, "advice": self.advice}

    def __str__(self) -> str:
        if self.cause is None:
            return f"call {self.call}: {'first prompt' if self.call == 1 else f'extends the prompt before at byte {self.byte}'}"
        token = "" if self.token is None else f" (token {self.token})"
        lost = f"{self.lost_bytes} bytes" if self.lost_tokens is None else f"{self.lost_tokens} tokens"
        where = "the tools" if self.message < 0 else f"message {self.message} ({self.role}), character {self.character}"
        also = "" if self.also is None else f" (and {self.also})"
        about = "" if self.cause in PROVIDER else f", byte {self.byte}{token} in {where}"
        return f"call {self.call}: {self.cause}{also}{about}; {lost} computed again"


def message_text(message: Message) -> str:
    """What counts as a message's text: its content, then name and arguments of each call."""
    if not message.tool_calls:
        return message.content
    return message.content + "".join([call.name + call.arguments for call in message.tool_calls])


def size_bytes(text: str) -> int:
    """UTF-8 bytes of `text`."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


class Ruler:
    """Bytes and tokens of a prompt up to each message. Each text is measured once, when it is new."""

    def __init__(self, count: Count | None) -> None:
        self._count = count
        self._tools_text = ""
        self._tools = (0, 0)
        self._bytes = [0]
        self._tokens = [0]

    @property
    def bytes(self) -> int:
        """Of the whole prompt."""
        return self._tools[0] + self._bytes[-1]

    @property
    def tokens(self) -> int | None:
        """Of the whole prompt; None without a counter."""
        return None if self._count is None else self._tools[1] + self._tokens[-1]

    def fit(self, tools_text: str, kept: int, new: Sequence[Message]) -> None:
        """The prompt is now `tools_text`, the first `kept` messages of the prompt so far, and `new`."""
        if tools_text != self._tools_text:
            self._tools_text = tools_text
            self._tools = (size_bytes(tools_text), self.tokens_of(tools_text))
        del self._bytes[kept + 1 :], self._tokens[kept + 1 :]
        for message in new:
            text = message_text(message)
            self._bytes.append(self._bytes[-1] + size_bytes(text))
            self._tokens.append(self._tokens[-1] + self.tokens_of(text))

    def tokens_of(self, text: str) -> int:
        """Tokens of a text; 0 without a counter."""
        return self._count(text) if self._count is not None and text else 0

    def at(self, index: int, shared_text: str) -> tuple[int, int | None]:
        """Byte and token where `shared_text`, the beginning of message `index` (-1: of the tools), ends."""
        before = (0, 0)
        if index >= 0:
            before = (self._tools[0] + self._bytes[index], self._tools[1] + self._tokens[index])
        token = None if self._count is None else before[1] + self.tokens_of(shared_text)
        return before[0] + size_bytes(shared_text), token


# -- every call of the process


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A model call that ended, as a listener gets it. `at_s`: seconds on any clock that all calls share.

    `declared`: the prefix was changed on purpose for this call ("fold").
    """

    session: str
    task: str
    model: str
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    usage: Usage | None = None
    at_s: float | None = None
    answer: Message | None = None
    template: str = ""
    declared: Cause | None = None


_listeners: tuple[Callable[[Seen], None], ...] = ()
_lock = threading.Lock()


@contextlib.contextmanager
def listen(listener: Callable[[Seen], None]) -> Iterator[None]:
    """Hear every model call of this process while the block runs, from whatever thread tells of it."""
    global _listeners  # noqa: PLW0603  one tuple for the process: replaced whole, read without a lock
    with _lock:
        _listeners = (*_listeners, listener)
    try:
        yield
    finally:
        with _lock:
            _listeners = tuple(one for one in _listeners if one is not listener)


def seen(
    *,
    session: str,
    messages: Sequence[Message],
    task: str = "",
    model: str = "",
    tools: Sequence[ToolSpec] = (),
    usage: Usage | None = None,
    at_s: float | None = None,
    answer: Message | None = None,
    template: str = "",
    declared: Cause | None = None,
) -> None:
    """Tell the listeners of a model call. Costs nothing where there are none; never raises."""
    if not _listeners:
        return
    call = Seen(
        session=session, task=task, model=model, messages=tuple(messages), tools=tuple(tools),
        usage=usage, at_s=at_s, answer=answer, template=template, declared=declared,
    )  # fmt: skip
    for listener in _listeners:
        try:
            listener(call)
        except Exception as error:
            log.failed("prefix_listener_failed", error=type(error).__name__)
