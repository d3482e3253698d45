"""LangChain messages and tools as agentkv's, and a Generation as an AI message.

Everything put into a message is a plain JSON value, so that checkpoints hold it under any serialiser setting. What
the model really wrote travels in `additional_kwargs` and is sent again byte for byte, as long as nobody edited the
turn in between.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, ChatMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.messages.tool import ToolCallChunk, invalid_tool_call, tool_call, tool_call_chunk
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_core.utils.json import parse_partial_json

from agentkv.core.message import ROLES, Message, Role, ToolCall, ToolSpec
from agentkv.engine.base import CallDelta, Generation
from agentkv.errors import ConfigError, RequestInvalid

RAW = "agentkv_raw"
RAW_CALLS = "agentkv_raw_calls"
REASONING = "reasoning_content"
"""Where LangChain's other integrations have what a model thought."""
_SPOKEN_ELSEWHERE = {"tool_call", "tool_use", "invalid_tool_call", "reasoning", "thinking", "redacted_thinking"}
"""Blocks of an assistant turn that are not its text: calls are in `tool_calls`, reasoning is not sent again."""


def to_messages(messages: Iterable[BaseMessage]) -> tuple[Message, ...]:
    """Core messages. Raises RequestInvalid naming the position of a message that cannot be sent as text."""
    return tuple(_to_message(message, index) for index, message in enumerate(messages))


def _to_message(message: BaseMessage, index: int) -> Message:
    text = _text(message, index)
    if isinstance(message, AIMessage):
        return _to_turn(message, text)
    if isinstance(message, ToolMessage):
        return Message(role="tool", content=text, tool_call_id=message.tool_call_id, name=message.name)
    return Message(role=_role(message, index), content=text, name=message.name)


def _role(message: BaseMessage, index: int) -> Role:
    if isinstance(message, SystemMessage):
        return "system"
    if isinstance(message, HumanMessage):
        return "user"
    named = getattr(message, "role", None) if isinstance(message, ChatMessage) else None
    for role in ROLES:
        if named == role:
            return role
    raise RequestInvalid(
        f"message {index} is a {type(message).__name__}{f' with role {named!r}' if named else ''}; "
        f"this engine knows the roles {', '.join(ROLES)}",
        param=f"messages[{index}]",
    )


def _text(message: BaseMessage, index: int) -> str:
    if isinstance(message.content, str):
        return message.content
    pieces = []
    for block in message.content:
        if isinstance(block, str):
            pieces.append(block)
        elif block.get("type") == "text" or (block.get("type") is None and "text" in block):
            pieces.append(str(block.get("text") or ""))
        elif not (isinstance(message, AIMessage) and block.get("type") in _SPOKEN_ELSEWHERE):
            raise RequestInvalid(
                f"message {index} holds a block of type {block.get('type')!r}; this engine reads text only",
                param=f"messages[{index}]",
            )
    return "".join(pieces)


def _to_turn(message: AIMessage, text: str) -> Message:
    raw_calls = message.additional_kwargs.get(RAW_CALLS)
    written = {str(call["id"]): str(call["arguments"]) for call in raw_calls or ()}
    calls = [
        ToolCall(
            id=call["id"] or "", name=call["name"], arguments=_arguments(call["args"], written.get(call["id"] or ""))
        )
        for call in message.tool_calls
    ]
    calls += [
        ToolCall(
            id=call["id"] or "", name=call["name"] or "", arguments=written.get(call["id"] or "", call["args"] or "")
        )
        for call in message.invalid_tool_calls
    ]
    raw, thought = message.additional_kwargs.get(RAW), message.additional_kwargs.get(REASONING)
    thought = thought if isinstance(thought, str) else ""
    if not calls and not thought and isinstance(raw, str) and not raw_calls and text.strip() and text.strip() in raw:
        text = raw
    return Message(role="assistant", content=text, tool_calls=tuple(calls), reasoning=thought)


def _arguments(args: Any, written: str | None) -> str:
    """The model's own JSON text where it still says the same; a text of ours where somebody changed the call."""
    if written is not None and _parsed(written) == args:
        return written
    return json.dumps(args, ensure_ascii=False)


def _parsed(arguments: str) -> dict[str, Any] | None:
    try:
        value = json.loads(arguments) if arguments.strip() else {}
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def to_tools(tools: Sequence[Any], *, strict: bool = False) -> tuple[ToolSpec, ...]:
    """Tool specs from everything that LangChain calls a tool: functions, BaseTools, models, schemas. `strict`: all are.

    Raises ConfigError for a tool that is no function: a provider's own, which runs on its servers.
    """
    specs = []
    for tool in tools:
        if isinstance(tool, ToolSpec):
            specs.append(replace(tool, strict=True) if strict else tool)
            continue
        function = _function_of(tool)
        schema = function.get("parameters") or {"type": "object", "properties": {}}
        description = function.get("description", "")
        held = strict or bool(function.get("strict"))
        specs.append(ToolSpec(name=function["name"], description=description, parameters=schema, strict=held))
    return tuple(specs)


def _function_of(tool: Any) -> dict[str, Any]:
    try:
        made = convert_to_openai_tool(tool)
    except ValueError:
        if not isinstance(tool, Mapping):
            raise
        made = dict(tool)
    if made.get("type") == "function" and "name" in made:  # as the Responses API has it
        return made
    function = made.get("function")
    if isinstance(function, dict):
        return function
    raise ConfigError(
        f"the tool {made.get('type') or ', '.join(made)!s} is no function: a provider runs it on its own servers, and "
        "here is none; give the model a function that does its work"
    )


def turn_fields(generation: Generation, sampling: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Everything of an AI message but its content and tool calls, in JSON values. `sampling`: how it was chosen."""
    usage = generation.usage
    kwargs: dict[str, Any] = {RAW: str(generation.raw)}
    calls = generation.tool_calls or generation.unfinished
    if calls:
        kwargs[RAW_CALLS] = [{"id": call.id, "arguments": call.arguments} for call in calls]
    told = {"session": generation.session, "timing": asdict(generation.timing), "estimated": generation.estimated}
    if generation.stopped_by:
        told["stopped_by"] = generation.stopped_by
    elif sampling:
        told["sampling"] = dict(sampling)
    return {
        "additional_kwargs": kwargs,
        "usage_metadata": {
            "input_tokens": usage.input_tokens,
            "output_tokens": usage.output_tokens,
            "total_tokens": usage.total_tokens,
            "input_token_details": {"cache_read": usage.cached_tokens, "cache_creation": usage.cache_write_tokens},
            "output_token_details": {"reasoning": usage.reasoning_tokens},
        },
        "response_metadata": {
            "model_name": generation.model,
            "model_provider": "agentkv",
            "finish_reason": generation.finish_reason,
            "agentkv": told,
        },
    }


def to_call_chunk(delta: CallDelta) -> ToolCallChunk:
    """A piece of a call that streams. Each needs a message of its own: those of one message are not added up."""
    return tool_call_chunk(name=delta.name or None, args=delta.arguments, id=delta.id or None, index=delta.index)


def to_call_chunks(generation: Generation, *, streamed: bool = False) -> list[ToolCallChunk]:
    """The calls of a streamed answer's last chunk; `streamed`: they came before it, piece by piece.

    LangChain completes half a JSON object there, so that a call cut short would come out as a valid one with fewer
    arguments. Such a text is handed over as a JSON string, which is no object: it stays an invalid call. What has
    streamed gets an end with which it is no JSON (`_spoilt`).
    """
    if generation.unfinished:
        ends = [_spoilt(call.arguments)[len(call.arguments) :] for call in generation.unfinished]
        return [tool_call_chunk(name=None, args=end, id=None, index=index) for index, end in enumerate(ends)]
    if streamed:
        return []
    chunks = []
    for index, call in enumerate(generation.tool_calls):
        args = call.arguments if _parsed(call.arguments) is not None else json.dumps(call.arguments, ensure_ascii=False)
        chunks.append(tool_call_chunk(name=call.name, args=args, id=call.id, index=index))
    return chunks


def _spoilt(arguments: str) -> str:
    """`arguments` with an end that nobody can read as JSON, nor LangChain complete to some."""
    ends = ("]", '"]', '""]')  # outside of a string, inside of one, behind a backslash in one
    return next(arguments + end for end in ends if parse_partial_json(arguments + end) is None)


def to_ai_message(generation: Generation, sampling: Mapping[str, Any] | None = None) -> AIMessage:
    """The whole answer as one message; calls whose arguments are no JSON object become `invalid_tool_calls`, and so do
    all of an answer that was cut inside of one.
    """
    valid, invalid = [], []
    for call in generation.tool_calls:
        args = _parsed(call.arguments)
        if args is None:
            invalid.append(
                invalid_tool_call(name=call.name, args=call.arguments, id=call.id, error="arguments are no JSON object")
            )
        else:
            valid.append(tool_call(name=call.name, args=args, id=call.id))
    for call in generation.unfinished:
        told = _spoilt(call.arguments)
        invalid.append(
            invalid_tool_call(name=call.name, args=told, id=call.id, error="the answer was cut inside of a call")
        )
    fields = turn_fields(generation, sampling)
    if generation.reasoning:
        fields["additional_kwargs"][REASONING] = generation.reasoning
    return AIMessage(content=generation.text, tool_calls=valid, invalid_tool_calls=invalid, **fields)
