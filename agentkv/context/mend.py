"""One message made sendable: its role, its texts, its names and arguments. What is fine passes as the very same object.

Does not cover how messages stand to each other (calls and results, ids): that is `repair.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from agentkv.core.message import ROLES, Message, Role, ToolCall

MAX_ID_CHARS = 64
MAX_NAME_CHARS = 64

_ID = re.compile(rf"[\x21-\x7e]{{1,{MAX_ID_CHARS}}}")
_NAME = re.compile(rf"[A-Za-z0-9_-]{{1,{MAX_NAME_CHARS}}}")
_NOT_IN_NAME = re.compile(r"[^A-Za-z0-9_-]")
_ROLE_OF: Mapping[str, Role] = {"developer": "system", "ai": "assistant", "human": "user", "function": "tool"}


def mended(message: Message, names: frozenset[str] = frozenset(), *, as_written: bool = False) -> Message:
    """`message` with a known role, texts that are UTF-8 without NUL, and only the fields that its role may have.

    `as_written`: arguments stay as the model wrote them, JSON or not.
    """
    role = _role(message.role)
    content = clean(message.content) if isinstance(message.content, str) else _text(message.content)
    calls = _calls(message.tool_calls, names, as_written) if role == "assistant" else ()
    answers = message.tool_call_id if role == "tool" else None
    if answers is not None and not isinstance(answers, str):
        answers = str(answers)
    name = None if message.name is None else mended_name(message.name, names) or None
    thought = clean(message.reasoning) if role == "assistant" and message.reasoning else ""
    made = (role, content, answers, name, thought)
    same = made == (message.role, message.content, message.tool_call_id, message.name, message.reasoning)
    if same and calls is message.tool_calls:
        return message
    return Message(role=role, content=content, tool_calls=calls, tool_call_id=answers, name=name, reasoning=thought)


def clean(text: str) -> str:
    """`text` without what UTF-8 or a server's database cannot hold: U+FFFD for NUL and for half a character.

    Two halves of one character that stand side by side become it.
    """
    if "\0" in text:
        text = text.replace("\0", "\ufffd")
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def is_valid_id(text: str) -> bool:
    """True for an id that every server takes: 1 to 64 visible ASCII characters."""
    return _ID.fullmatch(text) is not None


def mended_name(name: Any, names: frozenset[str] = frozenset()) -> str:
    """`name` with "_" for what a name may not hold, at most 64 characters; one in `names` stays as it is."""
    text: str = name if isinstance(name, str) else str(name)
    if _NAME.fullmatch(text) or text in names:
        return text
    return _NOT_IN_NAME.sub("_", text)[:MAX_NAME_CHARS]


def _role(role: Any) -> Role:
    return role if role in ROLES else _ROLE_OF.get(role if isinstance(role, str) else "", "user")


def _calls(calls: Any, names: frozenset[str], as_written: bool) -> tuple[ToolCall, ...]:
    if not calls:
        return ()
    given: tuple[Any, ...] = calls if isinstance(calls, tuple) else tuple(calls)
    fixed = tuple(_call(call, names, as_written) for call in given if isinstance(call, ToolCall))
    same = len(fixed) == len(given) and all(now is was for now, was in zip(fixed, given, strict=True))
    return given if same else fixed


def _call(call: ToolCall, names: frozenset[str], as_written: bool) -> ToolCall:
    name = mended_name(call.name, names) or "unknown_tool"
    written = as_written and isinstance(call.arguments, str)
    arguments = clean(call.arguments) if written else _arguments(call.arguments)
    given_id = call.id if isinstance(call.id, str) else "" if call.id is None else str(call.id)
    if (name, arguments, given_id) == (call.name, call.arguments, call.id):
        return call
    return replace(call, id=given_id, name=name, arguments=arguments)


def _arguments(arguments: Any) -> str:
    """The text as it is if it is a JSON object; `{}` for nothing, and anything else as the value of "text"."""
    if not isinstance(arguments, str):
        arguments = "" if arguments is None else _dumped(arguments)
    arguments = clean(arguments)
    if not arguments.strip():
        return "{}"
    try:
        fine = isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        fine = False
    return arguments if fine else json.dumps({"text": arguments}, ensure_ascii=False)


def _text(content: Any) -> str:
    """The text of a content that is none: nothing for None, the texts of parts, a mark for a part of another kind."""
    if content is None:
        return ""
    if isinstance(content, list | tuple):
        return "\n".join(_part(part) for part in content)
    return clean(_dumped(content))


def _part(part: Any) -> str:
    if isinstance(part, str):
        return clean(part)
    if isinstance(part, Mapping):
        text = part.get("text")
        return clean(text) if isinstance(text, str) else f"[{mended_name(part.get('type', 'part'))} left out]"
    return f"[{type(part).__name__} left out]"


def _dumped(value: Any) -> str:
    try:
        return json.dumps(value, sort_keys=True, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return f"[{type(value).__name__} left out]"
