"""Tools in one fixed form: the same tools give the same bytes in every call and every process.

Covers the order of tools, of keys and of set-valued entries. The order of JSON lists is meaning and stays.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from agentkv.core.message import ToolSpec


def canonical_tools(tools: Iterable[ToolSpec], *, known: tuple[ToolSpec, ...] = ()) -> tuple[ToolSpec, ...]:
    """`tools` sorted by name, with sorted keys; those in `known` come first in the order known, new ones after them.

    So a tool that is found later is appended and breaks no prefix. Of two tools with one name the last counts.
    """
    by_name = {tool.name: _canonical_tool(tool) for tool in tools}
    first = [by_name.pop(tool.name) for tool in known if tool.name in by_name]
    return (*first, *(by_name[name] for name in sorted(by_name)))


def tools_text(tools: Iterable[ToolSpec]) -> str:
    """`tools` as one line of JSON per tool, in the order given, independent of dict order and hash seed."""
    rows = ({"name": t.name, "description": t.description, "parameters": canonical_json(t.parameters)} for t in tools)
    return "\n".join(json.dumps(row, sort_keys=True, ensure_ascii=False, separators=(",", ":")) for row in rows)


def canonical_json(value: Any) -> Any:
    """`value` with mapping keys sorted and sets as sorted lists, all the way down."""
    if isinstance(value, Mapping):
        return {str(key): canonical_json(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, set | frozenset):
        return sorted(
            (canonical_json(item) for item in value),
            key=lambda item: json.dumps(item, sort_keys=True, ensure_ascii=False),
        )
    if isinstance(value, list | tuple):
        return [canonical_json(item) for item in value]
    return value


def _canonical_tool(tool: ToolSpec) -> ToolSpec:
    return ToolSpec(name=tool.name, description=tool.description, parameters=canonical_json(tool.parameters))
