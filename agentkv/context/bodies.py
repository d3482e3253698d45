"""Recorded request bodies of OpenAI's chat completions, as the calls that they were.

Covers one JSON object per call: the body itself, or {"request": body, "response": answer, ...}; what stands where is
in docs/prefix.md. Nothing is trusted: a row that is no request raises ValueError with what is wrong.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from agentkv.context.explain import Seen
from agentkv.context.mend import mended
from agentkv.core.message import Message, ToolCall, ToolSpec
from agentkv.core.usage import Usage

_SESSION = ("session", "session_id", "conversation_id", "thread_id", "trace_id")
_TIME = ("at_s", "time", "timestamp", "ts", "created")
_MS_FROM = 1e11
"""Times from here on are milliseconds: in seconds it is the year 5138."""


def call_of(row: Any) -> Seen:
    """The model call that a row records. `session` is "" where the row names none. Raises ValueError."""
    if not isinstance(row, Mapping):
        raise ValueError(f"a {type(row).__name__} instead of an object")  # noqa: TRY004  any bad row is a ValueError
    body = next((row[key] for key in ("request", "body") if isinstance(row.get(key), Mapping)), row)
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise ValueError("no messages")
    response = row["response"] if isinstance(row.get("response"), Mapping) else {}
    return Seen(
        session=_named(row, body, _SESSION),
        task=_named(row, body, ("task", "task_id", "user")),
        model=str(body.get("model") or ""),
        messages=tuple(_message(one) for one in given),
        tools=tuple(_tools(body)),
        usage=_usage(row.get("usage") or response.get("usage")),
        at_s=_time(next((row[key] for key in _TIME if row.get(key) is not None), response.get("created"))),
        answer=_answer(row.get("answer"), response),
        template=_template(body),
    )


def _named(row: Mapping[str, Any], body: Mapping[str, Any], names: Iterable[str]) -> str:
    """The first value under one of these names, in the row, the body or the body's metadata."""
    metadata = body.get("metadata")
    for place in (row, body, metadata if isinstance(metadata, Mapping) else {}):
        for name in names:
            if isinstance(place.get(name), str | int) and place[name] != "":
                return str(place[name])
    return ""


def _message(given: Any) -> Message:
    if not isinstance(given, Mapping):
        raise ValueError(f"a message that is a {type(given).__name__}")  # noqa: TRY004
    thought = given.get("reasoning_content") or given.get("reasoning")
    calls = given.get("tool_calls") or ([{"function": given["function_call"]}] if given.get("function_call") else [])
    if not isinstance(calls, list):
        raise ValueError("tool_calls that are no list")  # noqa: TRY004
    message = mended(
        Message(
            role=given.get("role", "user"), content=_content(given.get("content")),
            tool_call_id=given.get("tool_call_id"), name=given.get("name"),
        )
    )  # fmt: skip
    return Message(
        role=message.role,
        content=(f"<think>{thought}</think>\n" if isinstance(thought, str) and thought else "") + message.content,
        tool_calls=tuple(_call(call) for call in calls),
        tool_call_id=message.tool_call_id,
        name=message.name,
    )


def _content(given: Any) -> Any:
    """Texts as they are; a part of another kind as its digest, so that another image is another prompt."""
    if not isinstance(given, list):
        return given
    parts: list[str] = []
    for part in given:
        text = part.get("text") if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            digest = hashlib.blake2b(json.dumps(part, sort_keys=True).encode(), digest_size=8).hexdigest()
            text = f"[part {digest}]"
        parts.append(text)
    return "\n".join(parts)


def _call(given: Any) -> ToolCall:
    function = given.get("function") if isinstance(given, Mapping) else None
    if not isinstance(function, Mapping):
        raise ValueError("a tool call without its function")  # noqa: TRY004
    arguments = function.get("arguments")
    return ToolCall(
        id=str(given.get("id") or ""),
        name=str(function.get("name") or ""),
        arguments=arguments if isinstance(arguments, str) else json.dumps(arguments),
    )


def _tools(body: Mapping[str, Any]) -> Iterable[ToolSpec]:
    """Each tool with its whole entry: what else stands in it (`strict`) is sent too, so it counts."""
    for given in [*(body.get("tools") or ()), *(body.get("functions") or ())]:
        function = given.get("function", given) if isinstance(given, Mapping) else None
        if not isinstance(function, Mapping):
            raise ValueError("a tool that is no object")  # noqa: TRY004
        more = {key: value for key, value in function.items() if key not in ("name", "description", "parameters")}
        parameters = function.get("parameters")
        known: dict[str, Any] = dict(parameters) if isinstance(parameters, Mapping) else {}
        yield ToolSpec(
            name=str(function.get("name") or ""),
            description=str(function.get("description") or ""),
            parameters={**known, "": more} if more else known,
        )


def _template(body: Mapping[str, Any]) -> str:
    parts = [body.get(name) for name in ("chat_template", "chat_template_kwargs")]
    return json.dumps(parts, sort_keys=True) if any(parts) else ""


def _answer(given: Any, response: Mapping[str, Any]) -> Message | None:
    if given is None:
        choices = response.get("choices")
        first = choices[0] if isinstance(choices, list) and choices else None
        given = first.get("message") if isinstance(first, Mapping) else None
    return _message({"role": "assistant", **given}) if isinstance(given, Mapping) else None


def _usage(given: Any) -> Usage | None:
    """Only where cached tokens are reported: without them nothing can be said about the cache."""
    if not isinstance(given, Mapping):
        return None
    tokens = _number(given.get("prompt_tokens", given.get("input_tokens")))
    details = given.get("prompt_tokens_details", given.get("input_tokens_details"))
    cached = _number(details.get("cached_tokens")) if isinstance(details, Mapping) else None
    if tokens is not None and cached is not None:
        return Usage(input_tokens=max(tokens, cached), cached_tokens=cached, calls=1)
    beside = _number(given.get("cache_read_input_tokens"))
    if tokens is None or beside is None:
        return None
    written = _number(given.get("cache_creation_input_tokens")) or 0
    return Usage(input_tokens=tokens + beside + written, cached_tokens=beside, calls=1)


def _number(given: Any) -> int | None:
    return given if isinstance(given, int) and not isinstance(given, bool) and given >= 0 else None


def _time(given: Any) -> float | None:
    """Seconds from a number (of seconds or milliseconds) or an ISO date and time; None for anything else."""
    if isinstance(given, bool) or not isinstance(given, int | float | str):
        return None
    try:
        at_s = dt.datetime.fromisoformat(given).timestamp() if isinstance(given, str) else float(given)
    except (ValueError, OverflowError):
        return None
    return at_s / 1000 if at_s > _MS_FROM else at_s
