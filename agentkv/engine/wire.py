"""OpenAI's wire, seen from the client: a Request in its words, and an answer gathered from a stream's chunks.

Servers differ: chunks may lack what the standard promises, so nothing here trusts a field to be there.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from agentkv.core.message import Message, ToolCall, ToolSpec
from agentkv.core.reported import Reported, merged, report_in, reported
from agentkv.core.usage import Usage
from agentkv.engine.base import FinishReason, Request, ResponseFormat, Sampling, ToolChoice
from agentkv.errors import RemoteError

PASSED_ON = frozenset({
    "logit_bias", "presence_penalty", "frequency_penalty", "tool_choice", "parallel_tool_calls", "tools.strict",
    "response_format", "reasoning_effort", "chat_template_kwargs", "extra_body", "extra_headers",
})  # fmt: skip
"""What is told to the server as it is (of `request.FEATURES`); whether it does it is its own affair."""

THOUGHT_FIELDS = ("reasoning_content", "reasoning")
"""Where servers tell thoughts: the name that most have, and that of newer vLLM and of OpenRouter."""

_FINISH: dict[str, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "content_filter": "stop",
}


def call_arguments(request: Request, *, model: str, max_tokens_field: str, thought_field: str = "") -> dict[str, Any]:
    """Arguments of a streamed `create` call; options that have their default value are left out.

    `thought_field`: under what name this server tells thoughts, and hears those of turns with calls again; "" if it tells none.
    """
    sampling = request.sampling
    arguments: dict[str, Any] = {"model": model, "stream": True, **_sampling(sampling)}
    if request.extra_headers:
        arguments["extra_headers"] = dict(request.extra_headers)
    if request.extra_body:
        arguments["extra_body"] = dict(request.extra_body)
    if request.messages is None:
        limit = {} if sampling.max_tokens is None else {"max_tokens": sampling.max_tokens}
        return arguments | limit | {"prompt": request.prompt}
    if sampling.max_tokens is not None:
        arguments[max_tokens_field] = sampling.max_tokens
    if request.tools:
        arguments["tools"] = [_tool(tool) for tool in request.tools]
        arguments |= _choice(request.tool_choice)
    if request.response_format is not None:
        arguments["response_format"] = _format(request.response_format)
    if request.reasoning_effort is not None:
        arguments["reasoning_effort"] = request.reasoning_effort
    if request.chat_template_kwargs:  # no field of OpenAI's, but of every open server's
        told = {"chat_template_kwargs": dict(request.chat_template_kwargs)}
        arguments["extra_body"] = {**arguments.get("extra_body", {}), **told}
    return arguments | {"messages": [_message(message, thought_field) for message in request.messages]}


def _sampling(sampling: Sampling) -> dict[str, Any]:
    fields: dict[str, Any] = {"temperature": sampling.temperature}
    if sampling.top_p != 1.0:
        fields["top_p"] = sampling.top_p
    if sampling.seed is not None:
        fields["seed"] = sampling.seed
    if sampling.stop:
        fields["stop"] = list(sampling.stop)
    if sampling.logit_bias:
        fields["logit_bias"] = {str(token_id): amount for token_id, amount in sampling.logit_bias}
    for penalty in ("presence_penalty", "frequency_penalty"):
        if getattr(sampling, penalty):
            fields[penalty] = getattr(sampling, penalty)
    return fields


def _message(message: Message, thought_field: str) -> dict[str, Any]:
    body: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        body["content"] = message.content or None
        body["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
        if thought_field and message.reasoning:
            body[thought_field] = message.reasoning
    if message.tool_call_id is not None:
        body["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        body["name"] = message.name
    return body


def _tool(tool: ToolSpec) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function | ({"strict": True} if tool.strict else {})}


def _choice(choice: ToolChoice) -> dict[str, Any]:
    """The fields that narrow the calls; none where the model decides freely."""
    fields: dict[str, Any] = {} if choice.parallel else {"parallel_tool_calls": False}
    if choice.mode == "required" and len(choice.names) == 1:
        return fields | {"tool_choice": {"type": "function", "function": {"name": choice.names[0]}}}
    if choice.names:
        tools = [{"type": "function", "function": {"name": name}} for name in choice.names]
        allowed = {"mode": choice.mode, "tools": tools}
        return fields | {"tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}}
    return fields if choice.mode == "auto" else fields | {"tool_choice": choice.mode}


def _format(wanted: ResponseFormat) -> dict[str, Any]:
    if wanted.schema is None or wanted.plain:
        return {"type": "json_object"}
    inner = {"name": wanted.name or "answer", "schema": dict(wanted.schema), "strict": wanted.strict}
    return {"type": "json_schema", "json_schema": inner}


def texts_of(request: Request, *, thoughts: bool = False) -> list[str]:
    """What the model will read, piece by piece: for counting where nobody else does. `thoughts`: they are sent again."""
    if request.messages is None:
        return [request.prompt or ""]
    tools = [json.dumps(_tool(tool)) for tool in request.tools]
    calls = [call.name + call.arguments for message in request.messages for call in message.tool_calls]
    thought = [message.reasoning for message in request.messages if thoughts and message.tool_calls]
    return [message.content for message in request.messages] + calls + tools + list(filter(None, thought))


@dataclass(slots=True)
class _Call:
    id: str = ""
    name: str = ""
    arguments: str = ""


class Gathered:
    """An answer put together chunk by chunk.

    Usage may come once or many times, growing, repeated, in parts, or before the answer: what is said last counts,
    and an answer that went on after it was counted is counted here.
    """

    def __init__(self) -> None:
        self.text = ""
        self.thought = ""
        self.thought_field = ""
        """Under what name the server tells thoughts, once it has."""
        self.model = ""
        self.said = 0
        """Grows with every chunk that says something new."""
        self._report: dict[str, Any] = {}
        self._counted_to = 0
        self._reason: str | None = None
        self._calls: list[_Call] = []
        self._place: dict[int, int] = {}

    def take(self, chunk: Any) -> tuple[str, str]:
        """Note what a chunk says and return its text and its piece of a thought."""
        self.model = getattr(chunk, "model", None) or self.model
        text, reason, thought = "", self._reason, len(self.thought)
        for choice in getattr(chunk, "choices", None) or []:
            self._reason = getattr(choice, "finish_reason", None) or self._reason
            delta = getattr(choice, "delta", None)
            self._think(delta)
            text += (getattr(choice, "text", None) if delta is None else getattr(delta, "content", None)) or ""
            for part in getattr(delta, "tool_calls", None) or []:
                self.said += self._take_call(part)
        self.text += text
        self.said += len(text) + len(self.thought) - thought + (self._reason != reason)
        report = report_in(chunk)
        if report:
            earlier, self._report = self._report, merged(self._report, report)
            self.said += earlier != self._report
            if report.keys() & {"usage", "timings"} and reported(report) is not None:
                self._counted_to = len(self.written) + len(self.thought)
        return text, self.thought[thought:]

    def _think(self, delta: Any) -> None:
        """Reasoning that a server shows beside the answer; it is no part of the answer, but it was written."""
        for name in THOUGHT_FIELDS:
            value = getattr(delta, name, None)
            if isinstance(value, str) and value:
                self.thought += value
                self.thought_field = name
                return

    def spent(self, input_tokens: Callable[[], int], count: Callable[[str], int]) -> Reported:
        """What the call used so far: as reported, and counted (`estimated`) where nothing was."""
        told = reported(self._report)
        if told is None:
            thought = count(self.thought) if self.thought else 0
            said = thought + (count(self.written) if self.written else 0)
            counted = Usage(input_tokens=input_tokens(), output_tokens=said, reasoning_tokens=thought, calls=1)
            return Reported(usage=counted, estimated=True)
        usage = told.usage
        if not usage.input_tokens:
            usage = replace(usage, input_tokens=input_tokens())
        complete = len(self.written) + len(self.thought) == self._counted_to
        if complete and (usage.output_tokens or not self._counted_to):
            return replace(told, usage=usage)
        said = count(self.written) + (count(self.thought) if self.thought else 0)
        usage = replace(usage, output_tokens=max(usage.output_tokens, said))
        return replace(told, usage=usage, estimated=True)

    def _take_call(self, part: Any) -> int:
        """A part belongs to the call of its index; a new id under an old index is a new call (some servers send 0).

        How much it said.
        """
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
        name, arguments = getattr(function, "name", None) or "", getattr(function, "arguments", None) or ""
        call.name += name
        call.arguments += arguments
        return len(name) + len(arguments)

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


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
