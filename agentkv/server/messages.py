"""Reading chat messages and tools from an OpenAI body. Other fields are `requests.py`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from agentkv.core.message import Message, Role, ToolCall, ToolSpec
from agentkv.server.fields import Fields, kind_of, refuse

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_HARMLESS_OF_PARTS = frozenset({"cache_control", "logprobs"})
"""What the first asks for, reuse of the prefix, happens anyway; the others come back from an earlier answer."""


def read_messages(items: list[Any] | None) -> tuple[Message, ...]:
    """The messages of a chat. Text parts are joined as they are; "developer" is the newer name of "system".

    What an assistant refused with, in a part or in a field, is what it said: our models have no other place for it.
    """
    if not items:
        refuse("messages", "must be a list with at least one message", code="missing_required_parameter")
    return tuple(_message(Fields(item, f"messages[{index}]")) for index, item in enumerate(items))


def _message(fields: Fields) -> Message:
    name = fields.text("role")
    role = _ROLES.get(name)
    if role is None:
        refuse(fields.at("role"), f"{name!r:.40} is not one of {', '.join(_ROLES)}")
    calls: tuple[ToolCall, ...] = ()
    reasoning = refused = ""
    if role == "assistant":
        reasoning = _reasoning(fields)
        items = fields.items("tool_calls") or []
        calls = tuple(_call(Fields(item, f"{fields.at('tool_calls')}[{i}]")) for i, item in enumerate(items))
        fields.only("annotations", [], why="they are not read")
        refused = fields.text("refusal", "")
    said = fields.any("content", "" if role == "assistant" else None)
    message = Message(
        role=role,
        content=read_content(said, fields.at("content"), refusals=role == "assistant") or refused,
        tool_calls=calls,
        tool_call_id=fields.text("tool_call_id") if role == "tool" else None,
        name=fields.text("name", "") or None,
        reasoning=reasoning,
    )
    fields.end()
    return message


def _reasoning(fields: Fields) -> str:
    """What the assistant thought, under either of the names that servers tell it by."""
    told = [fields.any(name) for name in ("reasoning_content", "reasoning")]
    for name, value in zip(("reasoning_content", "reasoning"), told, strict=True):
        if value is not None and not isinstance(value, str):
            refuse(fields.at(name), f"must be a text, not {kind_of(value)}", code="invalid_type")
    return told[0] or told[1] or ""


def read_content(content: Any, path: str, *, kinds: Collection[str] = ("text",), refusals: bool = False) -> str:
    """A message's text: as it is, or its parts joined. `kinds`: what parts of text are called at this endpoint;
    `refusals`: there may be parts with which a model refused.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        what = "is missing" if content is None else f"must be a text or a list of parts, not {kind_of(content)}"
        refuse(path, what, code="invalid_type")
    parts = (Fields(part, f"{path}[{index}]") for index, part in enumerate(content))
    return "".join(_part(part, kinds, refusals=refusals) for part in parts)


def _part(fields: Fields, kinds: Collection[str], *, refusals: bool) -> str:
    kind = fields.text("type")
    if refusals and kind == "refusal":
        text = fields.text("refusal")
        fields.end(harmless=_HARMLESS_OF_PARTS)
        return text
    if kind not in kinds:
        refuse(fields.at("type"), f"{kind!r:.40} is not supported: only text parts are", code="unsupported_value")
    text = fields.text("text")
    fields.only("annotations", [], why="they are not read")
    fields.end(harmless=_HARMLESS_OF_PARTS)
    return text


def _call(fields: Fields) -> ToolCall:
    fields.only("type", "function", why="only functions can be called")
    function = Fields(fields.any("function"), fields.at("function"))
    call = ToolCall(id=fields.text("id"), name=function.text("name"), arguments=function.text("arguments"))
    function.end()
    fields.end(harmless={"index"})
    return call


def read_tools(items: list[Any] | None, *, flat: bool = False) -> tuple[ToolSpec, ...]:
    """The tools of a call; each name once. `flat`: a function's fields stand beside its type, as in responses."""
    tools = tuple(_tool(Fields(item, f"tools[{index}]"), flat=flat) for index, item in enumerate(items or []))
    names = [tool.name for tool in tools]
    for name in names:
        if names.count(name) > 1:
            refuse("tools", f"hold {name!r:.60} more than once")
    return tools


def _tool(fields: Fields, *, flat: bool) -> ToolSpec:
    fields.only("type", "function", why="only functions can be called")
    function = fields if flat else Fields(fields.any("function"), fields.at("function"))
    parameters = function.any("parameters", {"type": "object", "properties": {}})
    if not isinstance(parameters, dict):
        refuse(function.at("parameters"), f"must be an object, not {kind_of(parameters)}", code="invalid_type")
    tool = ToolSpec(
        name=function.text("name"),
        description=function.text("description", ""),
        parameters=parameters,
        strict=function.flag("strict", default=False),
    )
    function.end()
    fields.end()
    return tool
