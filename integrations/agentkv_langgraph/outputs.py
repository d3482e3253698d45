"""Tool results under LangChain: slimmed in their text parts only, and a tool by which an agent reads the whole again.

Covers ToolMessages with text or with parts, Commands whose update holds some, lists of either. Images and other parts,
artifact, status, ids, names and whatever is no tool result stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from langchain_core.messages import ToolMessage
from langchain_core.tools import BaseTool, StructuredTool

from agentkv.context.outputs import Outputs, reader

if TYPE_CHECKING:
    from agentkv.runtime.agentkv import AgentKV

Result = TypeVar("Result")


class Slims(Protocol):
    """A Slimmer, or `kv.context`."""

    def slim(self, text: str, *, tool: str = "", command: str = "") -> Any:
        """What becomes of `text`: a Slimmed or a str."""
        ...


def read_output_tool(source: AgentKV | Outputs) -> BaseTool:
    """The tool `read_output(handle, lines, pattern)` for the outputs of an AgentKV or of a store of your own."""
    function = reader(source) if isinstance(source, Outputs) else source.context.reader()
    return StructuredTool.from_function(function, name=function.__name__, parse_docstring=True)


def slim_tool_message(result: Result, slimmer: Slims, *, command: str = "") -> Result:
    """`result` with the text of its tool messages slimmed; the same object where nothing changes.

    `result` is what a tool call came to: a ToolMessage, a Command, a list of them; anything else comes back as it is.
    `command` is the command line that the tool ran, where it ran one. Nothing is changed in place.
    """
    slimmed: Any = _slimmed(result, slimmer, command)
    return slimmed  # type: ignore[no-any-return]


def _slimmed(value: Any, slimmer: Slims, command: str) -> Any:
    if isinstance(value, ToolMessage):
        return _message(value, slimmer, command)
    if isinstance(value, list):
        return _all_or_same(value, [_slimmed(item, slimmer, command) for item in value])
    if type(value).__name__ == "Command" and hasattr(value, "update"):
        update = _update(value.update, slimmer, command)
        return value if update is value.update else replace(value, update=update)
    return value


def _update(update: Any, slimmer: Slims, command: str) -> Any:
    """A Command's update: a mapping of state keys, or pairs of key and value."""
    if isinstance(update, Mapping):
        changed = {key: _slimmed(value, slimmer, command) for key, value in update.items()}
        return update if all(changed[key] is update[key] for key in changed) else {**update, **changed}
    if isinstance(update, list | tuple) and all(isinstance(pair, tuple) and len(pair) == _PAIR for pair in update):
        values = [_slimmed(value, slimmer, command) for _, value in update]
        if all(new is pair[1] for new, pair in zip(values, update, strict=True)):
            return update
        return type(update)((pair[0], new) for new, pair in zip(values, update, strict=True))
    return _slimmed(update, slimmer, command) if isinstance(update, list) else update


_PAIR = 2


def _message(message: ToolMessage, slimmer: Slims, command: str) -> ToolMessage:
    tool = message.name or ""
    content: Any = message.content
    if isinstance(content, str):
        content = _text(content, slimmer, tool, command)
    else:
        content = _all_or_same(content, [_part(part, slimmer, tool, command) for part in content])
    return message if content is message.content else message.model_copy(update={"content": content})


def _part(part: Any, slimmer: Slims, tool: str, command: str) -> Any:
    if isinstance(part, str):
        return _text(part, slimmer, tool, command)
    if isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        text = _text(part["text"], slimmer, tool, command)
        return part if text is part["text"] else {**part, "text": text}
    return part


def _text(text: str, slimmer: Slims, tool: str, command: str) -> str:
    done = slimmer.slim(text, tool=tool, command=command)
    short: str = done if isinstance(done, str) else done.text
    return text if short == text else short


def _all_or_same(old: list[Any], new: list[Any]) -> list[Any]:
    return old if all(a is b for a, b in zip(old, new, strict=True)) else new
