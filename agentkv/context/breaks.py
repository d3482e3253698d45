"""Break: the first place where a prompt is no extension of the one before it, and the name of what was done there.

Covers comparing two prompts. Does not cover remembering them (`prefix.py`), nor what it cost (`explain.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from agentkv.context.canonical import canonical_tools, raw_tools_text
from agentkv.core.message import Message, ToolCall, ToolSpec

Cause = Literal[
    "template",
    "clock",
    "a changing value",
    "tool order",
    "tools added",
    "tools removed",
    "tools changed",
    "tool args re-dumped",
    "tool call changed",
    "reasoning dropped",
    "text changed",
    "role changed",
    "message inserted",
    "messages removed",
    "model switch",
    "fold",
    "cache expired",
    "cache missed",
    "below minimum size",
]
VALUES: tuple[Cause, ...] = ("clock", "a changing value")
"""Causes where only a value changed in a text that is otherwise the same."""
PROVIDER: tuple[Cause, ...] = ("cache expired", "cache missed", "below minimum size")
"""Causes that lie with whoever keeps the cache: the prompt did extend the one before."""

_AROUND = 24
_LOOK_AHEAD = 64
_REASONING = re.compile(r"<(think|thinking|reasoning)>.*?</\1>", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Break:
    """The first difference that the old prompt cannot be extended over.

    `message` is the index of the message (-1: the tools, which stand before all messages), `character` the position
    in its content. `before` and `after` show a few characters from there on (prompt text: do not log). `value` names
    the kind of value that changed, where that is all. `also` is the cause of a second break further back, which shows once
    the first is mended. Everything behind this point has to be computed again.
    """

    message: int
    character: int
    role: str
    cause: Cause
    before: str = ""
    after: str = ""
    value: str = ""
    also: Cause | None = None


def find_break(
    old: Sequence[Message],
    new: Sequence[Message],
    *,
    old_tools: Sequence[ToolSpec] = (),
    new_tools: Sequence[ToolSpec] = (),
) -> Break | None:
    """Where `new` stops being an extension of `old`; None if it is one. Equal objects are compared at C speed.

    Tools count as they are sent, key order and all: they stand before the messages, so an added one is a break too.
    """
    return first_of(tools_break(old_tools, new_tools), messages_break(tuple(old), tuple(new)))


def first_of(first: Break | None, second: Break | None) -> Break | None:
    """The break that stands first, with the name of the other."""
    if first is None or second is None:
        return first or second
    return replace(first, also=second.cause)


def tools_break(old: Sequence[ToolSpec], new: Sequence[ToolSpec]) -> Break | None:
    """Where the tools differ, seen in their text of one line each."""
    if old is new or (len(old) == len(new) and all(was is now for was, now in zip(old, new, strict=True))):
        return None
    was, now = raw_tools_text(old), raw_tools_text(new)
    return None if was == now else _text_break(was, now, _tools_cause(old, new))


def messages_break(old: tuple[Message, ...], new: tuple[Message, ...]) -> Break | None:
    """Where the messages differ."""
    index = shared_messages(old, new)
    if index == len(old):
        return None
    if index == len(new):
        return Break(message=len(new), character=0, role=old[len(new)].role, cause="messages removed")
    was, now = old[index], new[index]
    moved = _moved(old, new, index)
    if moved is not None:
        return Break(message=index, character=0, role=was.role, cause=moved)
    if was.role != now.role:
        return Break(message=index, character=0, role=was.role, cause="role changed")
    if was.content != now.content:
        cause, value = _content_cause(was.content, now.content)
        found = _text_break(was.content, now.content, cause)
        return replace(found, message=index, role=was.role, value=value)
    return Break(message=index, character=len(was.content), role=was.role, cause=_rest_cause(was, now))


def shared_messages(old: tuple[Message, ...], new: tuple[Message, ...]) -> int:
    """How many messages the two begin with alike. Where `new` extends `old`, and for equal objects, at C speed."""
    if new[: len(old)] == old:
        return len(old)
    pairs = enumerate(zip(old, new, strict=False))
    return next((at for at, (was, now) in pairs if was is not now and was != now), min(len(old), len(new)))


def first_difference(was: str, now: str) -> int:
    """The index of the first character that differs; the shorter's length if it begins the longer."""
    low, high = 0, min(len(was), len(now))  # was[:low] == now[:low]; compared in halves because prompts are long
    while low < high:
        middle = (low + high + 1) // 2
        if was[low:middle] == now[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def shared_chars(was: str, now: str) -> int:
    """How many characters the two have in common at both ends."""
    head = first_difference(was, now)
    return head + first_difference(was[head:][::-1], now[head:][::-1])


def _moved(old: tuple[Message, ...], new: tuple[Message, ...], index: int) -> Cause | None:
    """Whether messages were taken out or put in here: what follows is found a little further on in the other prompt."""
    ahead = slice(index + 1, index + 1 + _LOOK_AHEAD)
    if new[index] in old[ahead]:
        return "messages removed"
    return "message inserted" if old[index] in new[ahead] else None


def _tools_cause(old: Sequence[ToolSpec], new: Sequence[ToolSpec]) -> Cause:
    was, now = ({tool.name: tool for tool in canonical_tools(tools)} for tools in (old, new))
    if was == now:
        return "tool order"
    same = all(was[name] == now[name] for name in was.keys() & now.keys())
    if same and was.keys() < now.keys():
        return "tools added"
    return "tools removed" if same and now.keys() < was.keys() else "tools changed"


def _content_cause(was: str, now: str) -> tuple[Cause, str]:
    from agentkv.context.volatile import changed_value

    if _REASONING.sub("", was).strip() == now.strip() and _REASONING.search(was):
        return "reasoning dropped", ""
    value = changed_value(was, now)
    if not value:
        return "text changed", ""
    return ("clock" if value == "clock" else "a changing value"), value


def _rest_cause(was: Message, now: Message) -> Cause:
    if was.tool_calls == now.tool_calls and was.reasoning != now.reasoning:
        return "reasoning dropped" if was.reasoning else "text changed"
    same = len(was.tool_calls) == len(now.tool_calls) and all(
        one.name == other.name and one.id == other.id and _same_json(one, other)
        for one, other in zip(was.tool_calls, now.tool_calls, strict=True)
    )
    return "tool args re-dumped" if same and was.tool_calls != now.tool_calls else "tool call changed"


def _same_json(one: ToolCall, other: ToolCall) -> bool:
    try:
        same: bool = json.loads(one.arguments) == json.loads(other.arguments)
    except (ValueError, TypeError, RecursionError):
        return one.arguments == other.arguments
    return same


def _text_break(was: str, now: str, cause: Cause) -> Break:
    at = first_difference(was, now)
    before, after = was[at : at + _AROUND], now[at : at + _AROUND]
    return Break(message=-1, character=at, role="tools", cause=cause, before=before, after=after)
