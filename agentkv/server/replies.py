"""From a Generation to OpenAI's JSON: whole chats and completions, and the chunks of their streams.

A Reply is made for one call. What comes over the wire is `whole`, or `begin`, a `piece` for each chunk, and `end` (or
`failed`). Responses have a Reply of their own, in `events.py`.
"""

from __future__ import annotations

import codecs
import json
import math
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from agentkv.core.message import ToolCall
from agentkv.core.usage import Usage
from agentkv.engine.base import CallDelta, Choice, Chunk, Generation, TokenLogprob
from agentkv.server.refusals import refusal

FINGERPRINT = "agentkv"
"""Tells callbacks that this answer is on the bill already."""

DONE = b"data: [DONE]\n\n"
LEAST_LOGPROB = -9999.0
"""What an impossible token has: JSON knows no infinity."""


class Reply(Protocol):
    """How one call's answer is told."""

    def whole(self, generation: Generation) -> dict[str, Any]:
        """The reply to a call that does not stream."""
        ...

    def begin(self) -> bytes:
        """What a stream starts with."""
        ...

    def piece(self, chunk: Chunk) -> bytes:
        """A part of the answer; b"" where there is nothing to tell."""
        ...

    def end(self, generation: Generation) -> bytes:
        """The rest of a stream that ended well."""
        ...

    def failed(self, error: BaseException) -> bytes:
        """The rest of a stream that did not."""
        ...


@dataclass(slots=True, kw_only=True)
class _Frame:
    """What all objects of one reply share. `usage`: the stream ends with a chunk for it."""

    model: str
    created_s: int
    id: str
    n: int = 1
    usage: bool = False
    kind: str = ""
    chunk_kind: str = ""

    def object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created_s,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
            "choices": choices,
        }

    def chunk(self, choice: dict[str, Any]) -> bytes:
        return event(self.object(self.chunk_kind, [choice]) | ({"usage": None} if self.usage else {}))

    def closing(self, generation: Generation) -> bytes:
        """After the last choice: usage if it was asked for, and the mark of the end."""
        if not self.usage:
            return DONE
        return event(self.object(self.chunk_kind, []) | {"usage": usage_body(generation.usage)}) + DONE

    def failed(self, error: BaseException) -> bytes:
        """The error as an event, and no mark of the end."""
        return event(refusal(error)[1])


@dataclass(slots=True, kw_only=True)
class ChatReply(_Frame):
    """A chat completion."""

    kind: str = "chat.completion"
    chunk_kind: str = "chat.completion.chunk"
    _told: set[int] = field(default_factory=set)
    """Choices whose calls came with the stream."""

    def whole(self, generation: Generation) -> dict[str, Any]:
        choices = [self._choice(index, choice) for index, choice in enumerate(generation.choices)]
        return self.object(self.kind, choices) | {"usage": usage_body(generation.usage)}

    def _choice(self, index: int, choice: Generation | Choice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        calls = choice.tool_calls or choice.unfinished
        if calls:
            message["content"] = choice.text or None
            message["tool_calls"] = [_call(call) for call in calls]
        if choice.reasoning:
            message["reasoning_content"] = choice.reasoning
        logprobs = chat_logprobs(choice.logprobs)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": choice.finish_reason}

    def begin(self) -> bytes:
        """The role, once for each choice."""
        return b"".join(self._delta(index, {"role": "assistant", "content": ""}) for index in range(self.n))

    def piece(self, chunk: Chunk) -> bytes:
        told = b""
        if chunk.reasoning:
            told = self._delta(chunk.choice, {"reasoning_content": chunk.reasoning})
        if chunk.text or chunk.logprobs:
            told += self._delta(chunk.choice, {"content": chunk.text}, logprobs=chat_logprobs(chunk.logprobs))
        if chunk.calls:
            self._told.add(chunk.choice)
        return told + b"".join(self._delta(chunk.choice, {"tool_calls": [_call_delta(one)]}) for one in chunk.calls)

    def end(self, generation: Generation) -> bytes:
        """Calls that have not come yet, whole; then why each choice ended."""
        told = []
        for index, choice in enumerate(generation.choices):
            for number, call in enumerate(choice.tool_calls if index not in self._told else ()):
                told.append(self._delta(index, {"tool_calls": [{"index": number, **_call(call)}]}))
            told.append(self._delta(index, {}, finish_reason=choice.finish_reason))
        return b"".join(told) + self.closing(generation)

    def _delta(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
    ) -> bytes:
        return self.chunk({"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason})


@dataclass(slots=True, kw_only=True)
class CompletionReply(_Frame):
    """A text completion. `echo` is the prompt, where it stands before each choice's text."""

    kind: str = "text_completion"
    chunk_kind: str = "text_completion"
    echo: str = ""
    _at: dict[int, int] = field(default_factory=dict)
    """Where in its text each choice is."""

    def whole(self, generation: Generation) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "text": self.echo + choice.text,
                "logprobs": completion_logprobs(choice.logprobs, 0),
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(generation.choices)
        ]
        return self.object(self.kind, choices) | {"usage": usage_body(generation.usage)}

    def begin(self) -> bytes:
        return b"".join(self._text(index, self.echo) for index in range(self.n)) if self.echo else b""

    def piece(self, chunk: Chunk) -> bytes:
        if not (chunk.text or chunk.logprobs):
            return b""
        at = self._at.get(chunk.choice, 0)
        self._at[chunk.choice] = at + sum(len(_text(entry.raw)) for entry in chunk.logprobs)
        return self._text(chunk.choice, chunk.text, logprobs=completion_logprobs(chunk.logprobs, at))

    def end(self, generation: Generation) -> bytes:
        ends = (
            self._text(index, "", finish_reason=choice.finish_reason) for index, choice in enumerate(generation.choices)
        )
        return b"".join(ends) + self.closing(generation)

    def _text(
        self, index: int, text: str, *, logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
    ) -> bytes:
        return self.chunk({"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason})


def new_id(kind: str) -> str:
    """A name for a reply or a part of one: "chatcmpl-..."."""
    return f"{kind}{uuid.uuid4().hex}"


def usage_body(usage: Usage) -> dict[str, Any]:
    """OpenAI's usage; cached tokens are part of the prompt's."""
    return {
        "prompt_tokens": usage.input_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def event(value: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def chat_logprobs(entries: Iterable[TokenLogprob]) -> dict[str, Any] | None:
    """The log probabilities of a chat's choice; null where there are none."""
    content = token_logprobs(entries)
    return {"content": content, "refusal": None} if content else None


def token_logprobs(entries: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
    """Entries with text, bytes and alternatives, as chats and responses have them."""
    return [_entry(entry) | {"top_logprobs": [_entry(other) for other in entry.top]} for entry in entries]


def _entry(entry: TokenLogprob) -> dict[str, Any]:
    return {"token": _text(entry.raw), "bytes": list(entry.raw), "logprob": _finite(entry.logprob)}


def completion_logprobs(entries: Iterable[TokenLogprob], at: int) -> dict[str, Any] | None:
    """The log probabilities of a completion's choice, whose text begins at character `at`."""
    entries = list(entries)
    if not entries:
        return None
    offsets, read = [], codecs.getincrementaldecoder("utf-8")("replace")
    for entry in entries:  # tokens that share a character begin at the same place
        half = bool(read.getstate()[0])
        first = read.decode(entry.raw[:1])
        behind = half and first != "" and len(first) + len(read.getstate()[0]) > 1  # half a character not gone on with
        offsets.append(at + behind)
        at += len(first) + len(read.decode(entry.raw[1:]))
    return {
        "tokens": [_text(entry.raw) for entry in entries],
        "token_logprobs": [_finite(entry.logprob) for entry in entries],
        "top_logprobs": [{_text(other.raw): _finite(other.logprob) for other in entry.top} for entry in entries],
        "text_offset": offsets,
    }


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def _finite(logprob: float) -> float:
    return LEAST_LOGPROB if math.isnan(logprob) else max(LEAST_LOGPROB, min(0.0, logprob))


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _call_delta(delta: CallDelta) -> dict[str, Any]:
    """The first piece of a call has its id and name, the others only more of its arguments."""
    function = {"name": delta.name, "arguments": delta.arguments} if delta.id else {"arguments": delta.arguments}
    return {"index": delta.index, **({"id": delta.id, "type": "function"} if delta.id else {}), "function": function}
