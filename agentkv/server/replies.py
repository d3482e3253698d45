"""From a Generation to OpenAI's JSON: whole objects and the chunks of a stream."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass
from typing import Any

from agentkv.core.message import ToolCall
from agentkv.core.usage import Usage
from agentkv.engine.base import Generation

FINGERPRINT = "agentkv"
"""Tells callbacks that this answer is on the bill already."""

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """What all objects of one reply share. `chat` picks the endpoint's shape; `usage` adds the field to chunks."""

    model: str
    created_s: int
    chat: bool
    usage: bool = False
    id: str = ""

    def whole(self, generation: Generation) -> dict[str, Any]:
        """The reply to a call that does not stream."""
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": generation.finish_reason}
        if self.chat:
            message: dict[str, Any] = {"role": "assistant", "content": generation.text, "refusal": None}
            if generation.tool_calls:
                message["content"] = generation.text or None
                message["tool_calls"] = [_call(call) for call in generation.tool_calls]
            choice["message"] = message
        else:
            choice["text"] = generation.text
        kind = "chat.completion" if self.chat else "text_completion"
        return self._object(kind, [choice]) | {"usage": usage_body(generation.usage)}

    def opening(self) -> bytes:
        """The first chunk of a chat: the role."""
        return self._chunk({"role": "assistant", "content": ""}, None)

    def text(self, text: str) -> bytes:
        """A piece of text."""
        return self._chunk({"content": text} if self.chat else text, None)

    def call(self, index: int, call: ToolCall) -> bytes:
        """A whole tool call; parallel ones are told apart by their index."""
        return self._chunk({"tool_calls": [{"index": index, **_call(call)}]}, None)

    def closing(self, generation: Generation) -> bytes:
        """The last chunk with a choice: why the answer ended."""
        return self._chunk({} if self.chat else "", generation.finish_reason)

    def bill(self, generation: Generation) -> bytes:
        """The chunk after the last: usage, and no choice."""
        return event(self._object(self._chunk_kind, []) | {"usage": usage_body(generation.usage)})

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _chunk(self, piece: dict[str, Any] | str, finish_reason: str | None) -> bytes:
        choice = {"index": 0, "logprobs": None, "finish_reason": finish_reason, "delta" if self.chat else "text": piece}
        return event(self._object(self._chunk_kind, [choice]) | ({"usage": None} if self.usage else {}))

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created_s,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
            "choices": choices,
        }


def new_id(*, chat: bool) -> str:
    """A name for a reply."""
    return f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"


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


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
