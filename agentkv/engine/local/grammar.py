"""What an answer may be, as a grammar: a JSON value, calls of certain tools, or text with calls in it.

Covers: from a Request to a grammar in llguidance's Lark dialect, and which field is to blame if it does not compile.
Does not cover: holding an answer to it (`guide.py`), reading calls out of it (`held.py`).

JSON is written on one line, `, ` and `: ` between its parts: what models were trained on, and no room for the endless
white space that small ones like to write.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentkv.core.message import ToolSpec
from agentkv.engine.local.held import Among, head_of
from agentkv.engine.local.schemas import closed, finite
from agentkv.engine.local.tokeniser import check_unicode
from agentkv.engine.local.toolcalls import CLOSE, OPEN
from agentkv.engine.request import Request
from agentkv.errors import RequestInvalid

MOST_CALLS = 8
"""In one turn that may consist of calls only; a small model that repeats itself must end."""
_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """`lark` describes the answer; `param` is the request's field from which it comes. `among`: what calls in our tags,
    of `tools`, stand among; None where there are none.
    """

    lark: str
    param: str
    among: Among | None = None
    tools: tuple[ToolSpec, ...] = ()


def grammar_of(request: Request, *, tags: bool = True) -> Grammar | None:
    """The grammar that `request` asks for; None where the model may write what it likes.

    `tags`: left alone, the model writes its calls between our tags. One that has marks of its own is held to ours where it
    must call, and is left alone where it may: it would not find the way.
    """
    choice, wanted = request.tool_choice, request.response_format
    tools = tuple(tool for tool in request.tools if not choice.names or tool.name in choice.names)
    if choice.mode == "none":
        tools = ()
    value = None
    if wanted is not None:
        schema = {"type": "object"} if wanted.schema is None else wanted.schema
        value = _json(schema, lenient=not wanted.strict, param="response_format")
    if not tools:
        return None if value is None else Grammar(lark=f"start: {value}\n", param="response_format")
    named = choice.mode == "required" and len(tools) == 1  # a call of that tool, as OpenAI's named choice
    calls = _calls(tools, most=MOST_CALLS if choice.parallel and not named else 1)
    if choice.mode == "required":
        return Grammar(lark=f"start: calls\n{calls}", param="tools", among="calls", tools=tools)
    if value is not None:
        lark = f"start: calls | value\nvalue: {value}\n{calls}"
        return Grammar(lark=lark, param="response_format", among="value", tools=tools)
    if tags and (choice.names or not choice.parallel or any(tool.strict for tool in tools)):
        return Grammar(lark=_free(tools, parallel=choice.parallel), param="tools", among="text", tools=tools)
    return None


def _calls(tools: Sequence[ToolSpec], *, most: int) -> str:
    """Rule `calls`: one call or more, a line each."""
    more = f' ("\\n" call){{0,{most - 1}}}' if most > 1 else ""
    return f"calls: call{more}\ncall: {_text(OPEN)} body {_text(CLOSE)}\n{_bodies(tools)}"


def _free(tools: Sequence[ToolSpec], *, parallel: bool) -> str:
    """Text in which calls may stand; without `parallel` the first call is the end."""
    start = "start: opened* FREE" if parallel else "start: FREE | opened"
    return (
        f"{start}\nopened: text body {_text(CLOSE)}\ntext[lazy]: FREE {_text(OPEN)}\nFREE: /(.|\\n)*/\n{_bodies(tools)}"
    )


def _bodies(tools: Sequence[ToolSpec]) -> str:
    """Rule `body`: what stands between the tags, each tool with a schema root of its own."""
    lines = ["body: " + " | ".join(f"tool_{number}" for number in range(len(tools)))]
    for number, tool in enumerate(tools):
        arguments = _json(_object(tool), lenient=not tool.strict, param="tools")
        lines.append(f"tool_{number}: {_text(head_of(tool.name))} {arguments} {_text('}')}")
    return "\n".join(lines) + "\n"


def _object(tool: ToolSpec) -> dict[str, Any]:
    """The schema of a tool's arguments, which are an object whatever else it says."""
    kind = tool.parameters.get("type", "object")
    if "object" not in (kind if isinstance(kind, list) else [kind]):
        told = f"the parameters of tool {tool.name!r:.60} have type {kind!r:.60}; arguments are an object"
        raise RequestInvalid(told, param="tools", code="unsupported_schema")
    return {**tool.parameters, "type": "object"}


def _json(schema: Mapping[str, Any], *, lenient: bool, param: str) -> str:
    """A JSON value valid under `schema`; `lenient`: keywords that cannot be held are left to the model."""
    options = _COMPACT | ({"lenient": True} if lenient else {})
    try:
        narrow = finite(closed(schema) if param == "tools" else schema)
        text = "%json " + json.dumps({**narrow, "x-guidance": options}, ensure_ascii=False)
    except RecursionError:
        raise RequestInvalid(
            f"{param} cannot be held: a schema is nested too deeply", param=param, code="unsupported_schema"
        ) from None
    check_unicode(text, param)
    return text


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
