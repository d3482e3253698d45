"""From the JSON body of POST /v1/responses to our Request: the part of that API that agents use.

Covers input items (messages, function_call, function_call_output, reasoning), instructions, functions as tools, formats, and what
is told back of them. Does not cover: the reply (`events.py`), earlier responses (`stored.py`), hosted tools, files,
images, background and conversations, which are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from agentkv.core.message import Message, ToolCall, ToolSpec
from agentkv.engine.request import EFFORTS, Request, ResponseFormat, ToolChoice
from agentkv.errors import PromptTooLong, RequestInvalid, TemplateRejected
from agentkv.server.fields import Fields, kind_of, refuse
from agentkv.server.messages import read_content, read_tools
from agentkv.server.requests import Asked, check_model, passing_on, read_kv_hints
from agentkv.server.sampled import HARMLESS, read_format, read_sampling, read_tool_choice, wanted_logprobs

_TEXT_PARTS = frozenset({"input_text", "output_text", "text"})
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_LOGPROBS = "message.output_text.logprobs"
_MOST_METADATA = 16
_NAMES = {
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "max_tokens": "max_output_tokens",
    "messages": "input",
}
"""Fields of ours that have another name here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedResponse:
    """What a call asks for. `told`: what the response object repeats of it; `kept`: the messages without instructions."""

    asked: Asked
    told: dict[str, Any]
    kept: tuple[Message, ...]
    store: bool


def response_request(
    body: Any,
    *,
    model: str,
    earlier: Callable[[str], tuple[Message, ...]] | None = None,
    passes_on: bool = False,
) -> AskedResponse:
    """Read the body; `earlier(id)` are the messages of a stored response; `passes_on` as in `requests.py`.

    Raises RequestInvalid naming the field.
    """
    fields = Fields(body)
    check_model(fields, model)
    metadata = _metadata(fields.any("metadata", {}))
    _refuse_what_is_hosted(fields)
    instructions = fields.text("instructions", "")
    before = fields.text("previous_response_id", "")
    kept = _before(before, earlier) + _input(fields.any("input"))
    tools = read_tools(fields.items("tools"), flat=True)
    choice = read_tool_choice(fields, tools, flat=True)
    text_format = _text_format(fields)
    sampling = read_sampling(fields, limits=("max_output_tokens",), penalties=False)
    logprobs = wanted_logprobs(_includes_logprobs(fields), fields.any("top_logprobs"), only_with=f"include={_LOGPROBS}")
    stream, store = fields.flag("stream", default=False), fields.flag("store", default=True)
    effort = _effort(fields)
    _stream_options(fields, stream=stream)
    messages = (Message(role="system", content=instructions), *kept) if instructions else kept
    request = Request(
        messages=messages,
        tools=() if choice.mode == "none" else tools,
        tool_choice=choice,
        sampling=sampling,
        logprobs=logprobs,
        response_format=text_format,
        reasoning_effort=effort,
    )
    told = {
        "instructions": instructions or None,
        "max_output_tokens": sampling.max_tokens,
        "metadata": metadata,
        "parallel_tool_calls": choice.parallel,
        "previous_response_id": before or None,
        "reasoning": {"effort": effort, "summary": None},
        "temperature": sampling.temperature,
        "text": {"format": _told_format(text_format)},
        "tool_choice": _told_choice(choice),
        "tools": [_told_tool(tool) for tool in tools],
        "top_p": sampling.top_p,
        "truncation": "disabled",
    }
    hints = read_kv_hints(fields)
    request = passing_on(fields, request) if passes_on else request
    ignored = fields.end(harmless=HARMLESS - {"metadata", "store"})
    asked = Asked(request=request, stream=stream, include_usage=True, ignored=ignored, hints=hints)
    return AskedResponse(asked=asked, told=told, kept=kept, store=store)


def in_words_of_responses(error: RequestInvalid) -> RequestInvalid:
    """An engine's refusal with the field's name as it is here."""
    name = _NAMES.get(error.param or "")
    if name is None:
        return error
    told = str(error).replace(error.param or "", name, 1)
    if isinstance(error, PromptTooLong):
        told = told.replace("max_tokens", "max_output_tokens", 1)
    kind = TemplateRejected if isinstance(error, TemplateRejected) else RequestInvalid
    return kind(told, param=name, code=error.code)


def _refuse_what_is_hosted(fields: Fields) -> None:
    fields.only("background", False, why="an answer is computed while its caller waits")
    fields.only("conversation", why="only previous_response_id continues one")
    fields.only("prompt", why="no prompts are kept here")
    fields.only("truncation", "disabled", why="a prompt that does not fit is refused, never cut silently")
    fields.only("max_tool_calls", why="only functions can be called, and their caller counts them")


def _effort(fields: Fields) -> str | None:
    """`reasoning.effort`; refused by the path that the client wrote."""
    value = fields.any("reasoning")
    if value is None:
        return None
    inner = Fields(value, "reasoning")
    effort = inner.any("effort")
    for name in ("summary", "generate_summary"):
        inner.only(name, why="what the model thought is told as it is")
    inner.end()
    if effort is not None and effort not in EFFORTS:
        refuse("reasoning.effort", f"is {effort!r:.40}; give one of {', '.join(EFFORTS)}")
    return None if effort is None else str(effort)


def _stream_options(fields: Fields, *, stream: bool) -> None:
    options = fields.any("stream_options")
    if options is None:
        return
    if not stream:
        refuse("stream_options", "is only allowed with stream=true")
    inner = Fields(options, "stream_options")
    inner.only("include_obfuscation", False, why="events are sent as they are")
    inner.end()


def _includes_logprobs(fields: Fields) -> bool:
    wanted = fields.items("include") or []
    for index, name in enumerate(wanted):
        if name != _LOGPROBS:
            refuse(f"include[{index}]", f"{name!r:.60} is not supported: only {_LOGPROBS} is", code="unsupported_value")
    return bool(wanted)


def _metadata(value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        refuse("metadata", "must be an object of texts", code="invalid_type")
    if len(value) > _MOST_METADATA:
        refuse("metadata", f"has {len(value)} entries; at most {_MOST_METADATA} are allowed")
    return value


def _text_format(fields: Fields) -> ResponseFormat | None:
    text = fields.any("text")
    if text is None:
        return None
    inner = Fields(text, "text")
    wanted = read_format(inner.any("format"), "text.format")
    inner.only("verbosity", "medium", why="the model says as much as it says")
    inner.end()
    return wanted


def _before(response_id: str, earlier: Callable[[str], tuple[Message, ...]] | None) -> tuple[Message, ...]:
    if not response_id:
        return ()
    if earlier is None:
        refuse("previous_response_id", "is not supported here", code="unsupported_value")
    return earlier(response_id)


def _input(value: Any) -> tuple[Message, ...]:
    if isinstance(value, str):
        return (Message(role="user", content=value),)
    if not isinstance(value, list) or not value:
        what = "is missing" if value is None else f"must be a text or a list of items, not {kind_of(value)}"
        refuse("input", what if value != [] else "is empty", code="missing_required_parameter")
    items = [_item(Fields(item, f"input[{index}]")) for index, item in enumerate(value)]
    turns = joined(item for item in items if item is not None)
    if not turns:
        refuse("input", "holds nothing but reasoning")
    return turns


def joined(messages: Iterable[Message]) -> tuple[Message, ...]:
    """Items as messages: what an assistant thought, what it said and its calls are one turn, in either order.

    A thought that nothing follows is left out.
    """
    turns: list[Message] = []
    thought = ""
    for message in messages:
        last = turns[-1] if turns else None
        if _is_thought(message):
            thought += message.reasoning
        elif last is not None and not thought and _same_turn(last, message):
            calls = (*last.tool_calls, *message.tool_calls)
            turns[-1] = replace(last, content=last.content + message.content, tool_calls=calls)
        else:
            turns.append(replace(message, reasoning=thought) if thought and message.role == "assistant" else message)
            thought = ""
    return tuple(turns)


def _same_turn(last: Message, message: Message) -> bool:
    """Calls go with the text before them, and text behind calls with them: their outputs come only later."""
    return last.role == message.role == "assistant" and bool(last.tool_calls or message.tool_calls)


def _is_thought(message: Message) -> bool:
    return bool(message.reasoning) and not (message.content or message.tool_calls)


def _item(fields: Fields) -> Message | None:
    kind = fields.text("type", "message")
    kinds: dict[str, Callable[[Fields], Message | None]] = {
        "message": _message, "function_call": _call, "function_call_output": _output, "reasoning": _reasoning,
    }  # fmt: skip
    read = kinds.get(kind)
    if read is None:
        refuse(
            fields.at("type"),
            f"{kind!r:.40} is not supported: only messages, function calls and reasoning are",
            code="unsupported_value",
        )
    message = read(fields)
    fields.end(harmless={"id", "status"})
    return message


def _message(fields: Fields) -> Message:
    name = fields.text("role")
    role = _ROLES.get(name)
    if role is None:
        refuse(fields.at("role"), f"{name!r:.40} is not one of {', '.join(_ROLES)}")
    fields.any("phase")  # told by newer models, and sent back by their clients
    said, refusals = fields.any("content"), role == "assistant"
    content = read_content(said, fields.at("content"), kinds=_TEXT_PARTS, refusals=refusals)
    return Message(role=role, content=content)  # type: ignore[arg-type]


def _call(fields: Fields) -> Message:
    call = ToolCall(id=fields.text("call_id"), name=fields.text("name"), arguments=fields.text("arguments"))
    return Message(role="assistant", tool_calls=(call,))


def _reasoning(fields: Fields) -> Message | None:
    """What an earlier answer thought; None where there is no text: what is encrypted is no thought of this model's."""
    fields.any("summary")
    fields.any("encrypted_content")
    parts = fields.items("content") or []
    texts = []
    for index, part in enumerate(parts):
        inner = Fields(part, f"{fields.at('content')}[{index}]")
        inner.only("type", "reasoning_text", why="only text is read")
        texts.append(inner.text("text"))
        inner.end()
    return Message(role="assistant", reasoning="".join(texts)) if any(texts) else None


def _output(fields: Fields) -> Message:
    call_id = fields.text("call_id")
    content = read_content(fields.any("output"), fields.at("output"), kinds=_TEXT_PARTS)
    return Message(role="tool", content=content, tool_call_id=call_id)


def _told_tool(tool: ToolSpec) -> dict[str, Any]:
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description or None,
        "parameters": dict(tool.parameters),
        "strict": tool.strict,
    }


def _told_choice(choice: ToolChoice) -> Any:
    if not choice.names:
        return choice.mode
    if choice.mode == "required" and len(choice.names) == 1:
        return {"type": "function", "name": choice.names[0]}
    named = [{"type": "function", "name": name} for name in choice.names]
    return {"type": "allowed_tools", "mode": choice.mode, "tools": named}


def _told_format(wanted: ResponseFormat | None) -> dict[str, Any]:
    if wanted is None:
        return {"type": "text"}
    if wanted.schema is None:
        return {"type": "json_object"}
    return {"type": "json_schema", "name": wanted.name, "schema": dict(wanted.schema), "strict": wanted.strict}
