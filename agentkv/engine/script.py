"""What a script says: answers, and text as words. `scripted.py` plays it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from agentkv.core.message import ToolCall
from agentkv.engine.base import Request, TokenLogprob
from agentkv.errors import ConfigError

_TOKEN = re.compile(r"\s*\S+|\s+\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One answer in full: what is thought (`reasoning`), text, then tool calls.

    `logprobs`: one entry for each word of the text, for requests that ask; without them every word is made up to be
    half as likely as the one before.
    """

    text: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    reasoning: str = ""


One = str | ToolCall | Reply
Answer = One | tuple[One, ...] | BaseException | Callable[[Request], "One | tuple[One, ...]"]
"""What one call gets. A callable runs on the call's own thread; an exception fails the call (a RequestInvalid is
raised by `submit`, as engines do). A tuple holds the choices of a request with `n`, which gets the first of them again
where there are too few; any other answer is that of every choice."""


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


def replies_of(scripted: Answer, request: Request) -> list[Reply]:
    """The choices that a scripted answer stands for; raises the exception that it is, or that its callable raises."""
    answer: Any = scripted
    if not isinstance(answer, Reply | ToolCall | str | BaseException | tuple) and callable(answer):
        answer = answer(request)
    if isinstance(answer, BaseException):
        raise answer
    choices = answer if isinstance(answer, tuple) and answer else (answer,)
    return [_reply(choices[index % len(choices)]) for index in range(request.n)]


def _reply(answer: Any) -> Reply:
    if isinstance(answer, ToolCall):
        return Reply(tool_calls=(answer,))
    if isinstance(answer, str):
        return Reply(text=answer)
    if isinstance(answer, Reply):
        return answer
    raise ConfigError(f"the script answers {answer!r:.100}; give a str, ToolCall, Reply, exception or callable")


def logprobs_of(reply: Reply, words: list[str], top: int | None) -> tuple[TokenLogprob, ...]:
    """An entry for each of `words`, with `top` alternatives; nothing where none were asked for."""
    if top is None:
        return ()
    if reply.logprobs is not None:
        return reply.logprobs[: len(words)]
    return tuple(_made_up(word, place, top) for place, word in enumerate(words))


def _made_up(word: str, place: int, top: int) -> TokenLogprob:
    likely = [
        TokenLogprob(
            token_id=rank, raw=word.encode() if rank == 0 else b"~%d" % rank, logprob=-0.5 * (place + 1 + rank)
        )
        for rank in range(top)
    ]
    return TokenLogprob(token_id=0, raw=word.encode(), logprob=-0.5 * (place + 1), top=tuple(likely))


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
