"""The choice of a tool: nothing forces it while decoding is free, so the answer is checked and asked for once more."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from agentkv.core.message import Message, ToolSpec
from agentkv.engine.base import Generation, Request, changed
from agentkv.errors import ConfigError
from agentkv_langgraph.structured import AnswerInvalid

_FREE = (None, False, "auto")
_ANY = ("any", "required", True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What an answer has to call: nothing (`none`: no tools are sent), anything, or `names`, of which one is called."""

    none: bool = False
    names: frozenset[str] = frozenset()

    @classmethod
    def of(cls, given: Any, tools: Sequence[ToolSpec]) -> Self:
        """From LangChain's and OpenAI's spellings. Raises ConfigError for a tool that is not there."""
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

    def is_met(self, generation: Generation) -> bool:
        """Whether the answer calls what it has to."""
        return not self.names or any(call.name in self.names for call in generation.tool_calls)

    def checked(self, generation: Generation) -> Generation:
        """The answer; raises AnswerInvalid where it does not call what it has to."""
        if self.is_met(generation):
            return generation
        names = ", ".join(sorted(self.names))
        raise AnswerInvalid(
            f"the answer calls no tool of {names}; this engine cannot force it", llm_output=generation.text
        )


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
