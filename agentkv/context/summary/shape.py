"""The shape of a folded prompt: where the summary stands, and which messages stay word for word.

It stands behind the first request, in a form that keeps the roles alternating where they did: as the end of the
request's own message if an assistant turn follows, as an assistant message if a user message follows, and as a user
message of its own where there is no request before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from agentkv.context.notebook import Fold
from agentkv.context.summary.turns import SUMMARY_MARK
from agentkv.core.message import Message


def applied(fold: Fold | None, messages: Sequence[Message]) -> tuple[Message, ...]:
    """`messages` with the first `fold.k` replaced: leading system messages, request, summary, pinned, the rest.

    More messages only lengthen the answer. O(what is left), whatever was folded. Without a fold: `messages`.
    """
    if fold is None:
        return tuple(messages)
    pinned = [messages[index] for index in fold.pinned]
    leading = 0
    while leading < len(pinned) and fold.pinned[leading] == leading and pinned[leading].role == "system":
        leading += 1
    request = next((place for place, message in enumerate(pinned) if message.role == "user"), None)
    rest = [message for place, message in enumerate(pinned) if place >= leading and place != request]
    rest += messages[fold.k :]
    text = SUMMARY_MARK + fold.text
    if request is None:
        return (*pinned[:leading], Message(role="user", content=text), *rest)
    first = pinned[request]
    follows = next((message.role for message in rest if message.role != "system"), "assistant")
    if follows == "user":
        return (*pinned[:leading], first, Message(role="assistant", content=text), *rest)
    return (*pinned[:leading], replace(first, content=f"{first.content}\n\n{text}"), *rest)
