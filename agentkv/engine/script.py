"""What a script says: answers, and text as words. `scripted.py` plays it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from agentkv.core.message import ToolCall
from agentkv.engine.base import Request
from agentkv.errors import ConfigError

_TOKEN = re.compile(r"\s*\S+|\s+\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One answer in full: text, then tool calls."""

    text: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


Answer = str | ToolCall | Reply | BaseException | Callable[[Request], "str | ToolCall | Reply"]
"""What one call gets. A callable runs on the call's own thread; an exception fails the call (a RequestInvalid is
raised by `submit`, as engines do)."""


def tokens_of(text: str) -> list[str]:
    """The words of a text, each with the blanks before it; joined they are the text."""
    return _TOKEN.findall(text)


def prompt_tokens(request: Request) -> list[str]:
    """A request as words; an answer appended to it is the beginning of the next turn's."""
    if request.messages is None:
        return tokens_of(request.prompt or "")
    tokens: list[str] = []
    for tool in request.tools:
        tokens += ["<tool>", *tokens_of(f"{tool.name} {tool.description} {json.dumps(dict(tool.parameters))}")]
    for message in request.messages:
        tokens += [f"<{message.role}>", *tokens_of(message.content), *call_tokens(message.tool_calls)]
    return [*tokens, "<assistant>"]


def call_tokens(calls: tuple[ToolCall, ...]) -> list[str]:
    """Tool calls as words."""
    return [token for call in calls for token in tokens_of(f"<call> {call.name} {call.arguments}")]


def reply_of(scripted: Answer, request: Request) -> Reply:
    """The reply that a scripted answer stands for; raises the exception that it is, or that its callable raises."""
    answer: Any = scripted
    if not isinstance(answer, Reply | ToolCall | str | BaseException) and callable(answer):
        answer = answer(request)
    if isinstance(answer, BaseException):
        raise answer
    if isinstance(answer, ToolCall):
        return Reply(tool_calls=(answer,))
    if isinstance(answer, str):
        return Reply(text=answer)
    if isinstance(answer, Reply):
        return answer
    raise ConfigError(f"the script answers {answer!r:.100}; give a str, ToolCall, Reply, exception or callable")


def until_stop(text: str, stop: tuple[str, ...]) -> tuple[str, bool]:
    """`text` before the first stop string in it, and whether there was one."""
    ends = [text.find(mark) for mark in stop if mark in text]
    return (text[: min(ends)], True) if ends else (text, False)


def common_prefix(one: list[str], other: list[str]) -> int:
    """Length of the longest common prefix."""
    shorter = min(len(one), len(other))
    if one[:shorter] == other[:shorter]:
        return shorter
    return next(index for index in range(shorter) if one[index] != other[index])
