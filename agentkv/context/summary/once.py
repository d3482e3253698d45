"""One fold of a prompt by hand: early turns become one summary message, the last ones stay word for word.

For prompts that you build yourself, with any text as summary. The system messages, the first and the newest user
message are never folded; a tool call and its results stay together. Does not remember anything from call to call:
`folder.py` does, and it knows what a fold costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentkv.context.summary.turns import SUMMARY_MARK, groups, is_summary
from agentkv.core.message import Message
from agentkv.errors import ConfigError
from agentkv.log import failed

MIN_SHARE = 0.25
"""A fold breaks the prefix, so it waits until what it can fold is at least this share of the soft mark."""

Count = Callable[[Sequence[Message]], int]
Summarise = Callable[[Sequence[Message]], str]


def fold(
    messages: Sequence[Message], *, soft_tokens: int, keep_last: int, count: Count, summarise: Summarise
) -> Sequence[Message]:
    """`messages` with the middle replaced by a summary if `count(messages)` exceeds `soft_tokens`.

    The answer is the very same object if nothing was folded: below the mark, nothing left to fold, or a summary that
    is missing, empty or not shorter than what it replaces (then a counter and a log line say so). At least
    `keep_last` messages (not turns) stay at the end, more where a tool call and its results would be parted. `count` should count
    the whole prompt, tools included. An older summary among the folded messages is handed to `summarise` first.
    """
    if soft_tokens < 0 or keep_last < 0:
        raise ConfigError(f"fold(soft_tokens={soft_tokens}, keep_last={keep_last}): numbers >= 0 are needed")
    if count(messages) <= soft_tokens:
        return messages
    parts = _parts(messages, keep_last)
    fresh = [message for message in parts.folded if not is_summary(message)]
    if not fresh or count(fresh) < soft_tokens * MIN_SHARE:
        return messages
    text = _summary_of(parts.folded, summarise)
    if text is None:
        return messages
    summary = Message(role="user", content=SUMMARY_MARK + text)
    if count([summary]) >= count(parts.folded):
        failed("summary_failed", error="the summary is not shorter than what it replaces")
        return messages
    return [*parts.head, summary, *parts.pinned, *parts.window]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """Every message is in exactly one part; `pinned` are messages of the middle that stay word for word."""

    head: list[Message]
    folded: list[Message]
    pinned: list[Message]
    window: list[Message]


def _parts(messages: Sequence[Message], keep_last: int) -> _Parts:
    """Head = leading system messages and the first request; window = whole groups at the end; the rest is between."""
    start = 0
    while start < len(messages) and messages[start].role == "system":
        start += 1
    whole = groups(messages[start:])
    window: list[Message] = []
    while whole and len(window) < keep_last:
        window = whole.pop() + window
    requests = [message for message in messages if message.role == "user" and not is_summary(message)]
    head, folded, pinned = list(messages[:start]), [], []
    for message in (message for group in whole for message in group):
        if requests and message is requests[0]:
            head.append(message)
        elif message.role == "system" or (requests and message is requests[-1]):
            pinned.append(message)
        else:
            folded.append(message)
    return _Parts(head=head, folded=folded, pinned=pinned, window=window)


def _summary_of(messages: Sequence[Message], summarise: Summarise) -> str | None:
    try:
        text = summarise(messages)
    except Exception as error:
        failed("summary_failed", error=repr(error))
        return None
    if not isinstance(text, str) or not text.strip():
        failed("summary_failed", error="the summary is empty")
        return None
    return text.strip()
