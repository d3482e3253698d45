"""Tools in one fixed form: the same tools give the same bytes in every call and every process.

Covers the order of tools, of keys and of set-valued entries, and an outcome for each value that JSON has not (`plain`);
all of it once per tool: a list that did not change costs microseconds. The order of JSON lists is meaning and stays.
A ToolSpec is a value: who changes its `parameters` in place is not noticed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

from agentkv.core.message import ToolSpec

MAX_REMEMBERED = 4096
"""Tools whose form is remembered; beyond this all is forgotten and begins anew."""

NO_PARAMETERS: Mapping[str, Any] = {"properties": {}, "type": "object"}
"""The parameters of a tool that has none, or something else than a schema in their place."""


def canonical_tools(tools: Iterable[ToolSpec], *, known: tuple[ToolSpec, ...] = ()) -> tuple[ToolSpec, ...]:
    """`tools` sorted by name, with sorted keys; those in `known` come first in the order known, new ones after them.

    So a tool that is found later is appended, and shuffling costs nothing. Of two tools with one name the last counts.
    The very object `known` where nothing changed.
    """
    by_name = {tool.name: _form(tool).spec for tool in tools}
    first = [by_name.pop(tool.name) for tool in known if tool.name in by_name]
    result = (*first, *(by_name[name] for name in sorted(by_name)))
    return known if len(result) == len(known) and all(map(is_, result, known)) else result


def tools_text(tools: Iterable[ToolSpec]) -> str:
    """`tools` as one line of JSON per tool, in the order given, independent of dict order and hash seed."""
    return "\n".join([_form(tool).text for tool in tools])


def raw_tools_text(tools: Sequence[ToolSpec]) -> str:
    """`tools` as one line of JSON per tool, with keys in the order in which they would be sent."""
    return "\n".join([_form(tool).raw for tool in tools])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """What is remembered of a tool. `given` is held so that no other tool gets its id."""

    given: ToolSpec
    spec: ToolSpec
    text: str
    raw: str


_by_identity: dict[int, _Form] = {}
_by_content: dict[tuple[str, bool], _Form] = {}


def _form(tool: ToolSpec) -> _Form:
    found = _by_identity.get(id(tool))
    if found is not None:
        return found
    raw = _raw(tool)
    form = _by_content.get((raw, tool.strict))
    if form is None:
        spec = _spec(tool)
        form = _Form(given=spec, spec=spec, text=_line(spec, spec.parameters), raw=raw)
        _remember(_by_content, (raw, tool.strict), form)
        if form.text == raw:
            _remember(_by_identity, id(spec), form)
    form = _Form(given=tool, spec=form.spec, text=form.text, raw=raw)
    _remember(_by_identity, id(tool), form)
    return form


def _spec(tool: ToolSpec) -> ToolSpec:
    from agentkv.context.mend import clean  # these two cost milliseconds that `import agentkv` must not pay
    from agentkv.context.plain import canonical_json

    parameters = canonical_json(tool.parameters)
    return ToolSpec(
        name=clean(str(tool.name)),
        description=clean(str(tool.description or "")),
        parameters=parameters if isinstance(parameters, dict) else dict(NO_PARAMETERS),
        strict=tool.strict,
    )


def _raw(tool: ToolSpec) -> str:
    """The line as it would be sent if it can be, so that a tool object seen for the first time costs one C call."""
    if type(tool.parameters) is dict:
        try:
            return _line(tool, tool.parameters)
        except (TypeError, ValueError, RecursionError):
            pass  # it holds what JSON has not
    from agentkv.context.plain import canonical_json

    return _line(_spec(tool), canonical_json(tool.parameters, sort=False))


def _line(tool: ToolSpec, parameters: object) -> str:
    row = {"description": tool.description, "name": tool.name, "parameters": parameters}
    return json.dumps(row, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _remember(forms: dict[Any, _Form], key: object, form: _Form) -> None:
    if len(forms) >= MAX_REMEMBERED:
        forms.clear()
    forms[key] = form
