"""What an answer must be: the choice of a tool, a format. An engine that can holds the model to it while it writes; the
answer is checked all the same, and asked for once more where it fails.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from agentkv.core.message import Message, ToolSpec
from agentkv.engine.base import Generation, Request, ResponseFormat, ToolChoice, changed
from agentkv.engine.stream import Stream
from agentkv.errors import ConfigError, RequestInvalid
from agentkv_langgraph.structured import AnswerInvalid

_FREE = (None, False, "auto")
_ANY = ("any", "required", True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What an answer has to call: nothing (`none`: no tools are sent), anything, or `names`, of which one is called.

    With `checked_elsewhere` an answer that calls something else is returned as it is.
    """

    none: bool = False
    names: frozenset[str] = frozenset()
    checked_elsewhere: bool = False

    @classmethod
    def of(cls, given: Any, tools: Sequence[ToolSpec]) -> Self:
        """From LangChain's and OpenAI's spellings. Raises ConfigError for a tool that is not there."""
        if isinstance(given, cls):
            return given
        if given in _FREE:
            return cls()
        if given == "none":
            return cls(none=True)
        known = frozenset(tool.name for tool in tools)
        if given in _ANY:
            return cls(names=known)
        name = given
        if isinstance(given, Mapping):
            name = (given.get("function") or {}).get("name") or given.get("name")
        if name not in known:
            raise ConfigError(
                f"tool_choice={given!r} is no tool of this call; say 'auto', 'none', 'any' or one of {', '.join(sorted(known)) or 'none at all'}"
            )
        return cls(names=frozenset((name,)))

    def asked(self, *, parallel: bool) -> ToolChoice:
        """The same for an engine."""
        if not self.names:
            return ToolChoice(parallel=parallel)
        return ToolChoice(mode="required", names=tuple(sorted(self.names)), parallel=parallel)

    def is_met(self, generation: Generation) -> bool:
        """Whether the answer calls what it has to."""
        return (
            not self.names or self.checked_elsewhere or any(call.name in self.names for call in generation.tool_calls)
        )

    def checked(self, generation: Generation) -> Generation:
        """The answer; raises AnswerInvalid where it does not call what it has to."""
        if self.is_met(generation):
            return generation
        names = ", ".join(sorted(self.names))
        raise AnswerInvalid(f"the answer calls no tool of {names}", llm_output=generation.text)


def kept(choice: Choice, request: Request) -> Generator[Request, Generation, Generation]:
    """The calls that bring an answer in which the choice is kept: one, and one more where it was not."""
    first = yield request
    if choice.is_met(first) or request.messages is None:
        return choice.checked(first)
    told = f"Answer by calling {' or '.join(sorted(choice.names))}."
    answered = Message(role="assistant", content=first.text, tool_calls=first.tool_calls)
    results = tuple(Message(role="tool", content=told, tool_call_id=call.id) for call in first.tool_calls)
    more = results or (Message(role="user", content=told),)
    second = yield changed(request, messages=(*request.messages, answered, *more))
    return choice.checked(second)


def format_of(given: Any) -> ResponseFormat | None:
    """From OpenAI's `response_format`: None, text, json_object or json_schema. Raises ConfigError for anything else."""
    if isinstance(given, ResponseFormat):
        return given
    kind = given.get("type") if isinstance(given, Mapping) else None
    if given is None or kind == "text":
        return None
    if kind == "json_object":
        return ResponseFormat()
    inner = given.get("json_schema") if isinstance(given, Mapping) else None
    if kind != "json_schema" or not isinstance(inner, Mapping) or not isinstance(inner.get("schema"), Mapping):
        raise ConfigError(
            f"response_format={given!r:.200}: say {{'type': 'json_object'}} or {{'type': 'json_schema', 'json_schema': "
            "{'name': ..., 'schema': {...}}}"
        )
    return ResponseFormat(
        schema=inner["schema"], name=str(inner.get("name", "")), strict=bool(inner.get("strict", False))
    )


def submitted(submit: Callable[[Request], Stream], request: Request) -> Stream:
    """Submit; an engine that cannot hold an answer to anything is asked for a free one, which is checked."""
    try:
        return submit(request)
    except RequestInvalid as error:
        free = ToolChoice(mode="none" if request.tool_choice.mode == "none" else "auto")
        if error.code != "unsupported_value" or (request.response_format, request.tool_choice) == (None, free):
            raise
        loose = tuple(replace(tool, strict=False) for tool in request.tools)
        return submit(changed(request, tools=loose, tool_choice=free, response_format=None))
