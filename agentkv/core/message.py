"""Chat messages as plain frozen values, framework-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]
ROLES: tuple[Role, ...] = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call that an assistant turn asks for; `arguments` is the model's own JSON text, byte for byte."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message. `content` is text; an assistant turn that only calls tools has content "". `reasoning`: what the
    assistant thought before it answered; the model's chat template decides whether it is shown again.
    """

    role: Role
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """A tool as the model sees it; `parameters` is a JSON schema. `strict`: the arguments of a call must be valid under it."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any]
    strict: bool = False
