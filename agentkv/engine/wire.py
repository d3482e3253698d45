"""OpenAI's wire, seen from the client: a Request in its words, and an answer gathered from a stream's chunks.

Servers differ: chunks may lack what the standard promises, so nothing here trusts a field to be there.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass
from typing import Any

from agentkv.core.message import Message, ToolCall, ToolSpec
from agentkv.core.usage import Usage
from agentkv.engine.base import FinishReason, Request
from agentkv.errors import RemoteError

_FINISH: dict[str, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "content_filter": "stop",
}


def call_arguments(request: Request, *, model: str, max_tokens_field: str) -> dict[str, Any]:
    """Arguments of a streamed `create` call; options that have their default value are left out."""
    sampling = request.sampling
    arguments: dict[str, Any] = {"model": model, "stream": True, "temperature": sampling.temperature}
    if sampling.top_p != 1.0:
        arguments["top_p"] = sampling.top_p
    if sampling.seed is not None:
        arguments["seed"] = sampling.seed
    if sampling.stop:
        arguments["stop"] = list(sampling.stop)
    if request.messages is None:
        limit = {} if sampling.max_tokens is None else {"max_tokens": sampling.max_tokens}
        return arguments | limit | {"prompt": request.prompt}
    if sampling.max_tokens is not None:
        arguments[max_tokens_field] = sampling.max_tokens
    if request.tools:
        arguments["tools"] = [_tool(tool) for tool in request.tools]
    return arguments | {"messages": [_message(message) for message in request.messages]}


def _message(message: Message) -> dict[str, Any]:
    body: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        body["content"] = message.content or None
        body["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        body["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        body["name"] = message.name
    return body


def _tool(tool: ToolSpec) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}


def texts_of(request: Request) -> list[str]:
    """What the model will read, piece by piece: for counting where nobody else does."""
    if request.messages is None:
        return [request.prompt or ""]
    tools = [json.dumps(_tool(tool)) for tool in request.tools]
    calls = [call.name + call.arguments for message in request.messages for call in message.tool_calls]
    return [message.content for message in request.messages] + calls + tools


@dataclass(slots=True)
class _Call:
    id: str = ""
    name: str = ""
    arguments: str = ""


class Gathered:
    """An answer put together chunk by chunk."""

    def __init__(self) -> None:
        self.text = ""
        self.model = ""
        self.usage: Usage | None = None
        self._reason: str | None = None
        self._calls: list[_Call] = []
        self._place: dict[int, int] = {}

    def take(self, chunk: Any) -> str:
        """Note what a chunk says and return its text."""
        self.model = getattr(chunk, "model", None) or self.model
        self.usage = usage_of(getattr(chunk, "usage", None)) or self.usage
        text = ""
        for choice in getattr(chunk, "choices", None) or []:
            self._reason = getattr(choice, "finish_reason", None) or self._reason
            delta = getattr(choice, "delta", None)
            text += (getattr(choice, "text", None) if delta is None else getattr(delta, "content", None)) or ""
            for part in getattr(delta, "tool_calls", None) or []:
                self._take_call(part)
        self.text += text
        return text

    def _take_call(self, part: Any) -> None:
        """A part belongs to the call of its index; a new id under an old index is a new call (some servers send 0)."""
        index = getattr(part, "index", None)
        part_id = getattr(part, "id", None) or ""
        place = self._place.get(index) if index is not None else None
        if index is None and not part_id and self._calls:
            place = len(self._calls) - 1
        if place is None or (part_id and self._calls[place].id not in ("", part_id)):
            place = len(self._calls)
            self._calls.append(_Call())
            if index is not None:
                self._place[index] = place
        call, function = self._calls[place], getattr(part, "function", None)
        call.id = call.id or part_id
        call.name += getattr(function, "name", None) or ""
        call.arguments += getattr(function, "arguments", None) or ""

    @property
    def written(self) -> str:
        """All that the model wrote, calls too."""
        return self.text + "".join(call.name + call.arguments for call in self._calls)

    def end(self) -> tuple[FinishReason, tuple[ToolCall, ...]]:
        """Why the answer ended, and its calls; RemoteError if it was cut off on the way.

        A call that the token limit cut in two is left out: half an argument must never be acted on.
        """
        if self._reason is None:
            raise RemoteError("the answer broke off: the stream ended without a finish reason")
        reason = _FINISH.get(self._reason, "stop")
        calls = [call for call in self._calls if reason != "length" or _is_json(call.arguments)]
        if calls and reason == "stop":
            reason = "tool_calls"
        return reason, tuple(
            ToolCall(id=call.id or f"call_{uuid.uuid4().hex}", name=call.name, arguments=call.arguments)
            for call in calls
        )


def usage_of(reported: Any) -> Usage | None:
    """A server's usage; None where it says nothing or only zeros. Cached tokens never exceed the input."""
    prompt = _count(reported, "prompt_tokens")
    if prompt == 0:
        return None
    cached = _count(getattr(reported, "prompt_tokens_details", None), "cached_tokens")
    output = _count(reported, "completion_tokens")
    return Usage(input_tokens=prompt, cached_tokens=min(cached, prompt), output_tokens=output, calls=1)


def _count(reported: Any, name: str) -> int:
    value = getattr(reported, name, None)
    return value if isinstance(value, int) and value > 0 else 0


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
