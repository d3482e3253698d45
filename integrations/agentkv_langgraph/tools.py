"""Tool calls of LangGraph and LangChain, each told once: wrappers for a ToolNode, and tool objects of one's own.

Covers `tool_wrappers` (the pair that ToolNode and agents' middleware take) and BaseTools under `@kv.tool_function`.
Functions are the runtime's (`runtime/functions.py`), callbacks are in `callback.py`; where several of them see one
call, it is one call.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import Any, Self, TypedDict

from langchain_core.messages import ToolMessage
from langchain_core.tools import BaseTool

from agentkv.core.hint import ToolStatus
from agentkv.errors import BudgetExceeded
from agentkv.runtime.functions import Options, Tells
from agentkv.runtime.tools import ToolScope
from agentkv_langgraph.budget import BudgetStop, answered
from agentkv_langgraph.outputs import slim_tool_message
from agentkv_langgraph.twins import twin

Execute = Callable[[Any], Any]
AExecute = Callable[[Any], Awaitable[Any]]


class ToolWrappers(TypedDict):
    """What `ToolNode(tools, **tool_wrappers(kv))` takes."""

    wrap_tool_call: Callable[[Any, Execute], Any]
    awrap_tool_call: Callable[[Any, AExecute], Awaitable[Any]]


def tool_wrappers(kv: Any, *, slim: bool = True) -> ToolWrappers:
    """`ToolNode(tools, **tool_wrappers(kv))`: each call is told by its tool_call_id and attempt, sync and async.

    With `slim` the text of tool messages is shortened before it enters the state (what was left out can be read again,
    see `read_output_tool`); with slim=False results are exactly what the tools gave. Arguments are looked at for
    command words, size and a declared time-out, and not kept.
    """

    def wrap_tool_call(request: Any, execute: Execute) -> Any:
        try:
            with Watched(kv, request, slim=slim) as call:
                return call.ended(execute(request))
        except BudgetExceeded as refused:
            return answered(kv, request, refused)

    async def awrap_tool_call(request: Any, execute: AExecute) -> Any:
        try:
            async with Watched(kv, request, slim=slim) as call:
                return call.ended(await execute(request))
        except BudgetExceeded as refused:
            return answered(kv, request, refused)

    return ToolWrappers(wrap_tool_call=wrap_tool_call, awrap_tool_call=awrap_tool_call)


class Watched:
    """One run of a tool that a request (`tool_call`, `tool`, `runtime`) asks for, told as a tool call."""

    __slots__ = ("_failed", "_kv", "_scope", "_slim")

    def __init__(self, kv: Any, request: Any, *, slim: bool) -> None:
        call: Mapping[str, Any] = request.tool_call
        name = call.get("name") or getattr(request.tool, "name", None) or "tool"
        self._kv = kv
        self._slim = slim
        self._failed = False
        self._scope: ToolScope = kv.tool(str(name), args=call.get("args"), call_id=call.get("id") or None)

    def ended(self, result: Any) -> Any:
        """What the tool gave, slimmed if it is to be. An answer that tells of a failure counts as one."""
        self._failed = answers_with_failure(result)
        return slim_tool_message(result, self._kv.context, command=self._scope.command) if self._slim else result

    def __enter__(self) -> Self:
        try:
            self._scope.announce()
        except BudgetStop:
            raise
        except BudgetExceeded as error:
            raise BudgetStop.of(error) from error
        return self

    async def __aenter__(self) -> Self:
        try:
            await self._scope.announce_async()
        except BudgetStop:
            raise
        except BudgetExceeded as error:
            raise BudgetStop.of(error) from error
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, traceback)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None and self._failed:
            self._scope.end(ToolStatus.FAILED)
        else:
            self._scope.__exit__(kind, error, traceback)


def answers_with_failure(result: Any) -> bool:
    """Whether a tool's result tells the model that it failed (bad arguments, an error that was handled)."""
    return isinstance(result, ToolMessage) and result.status == "error"


def wrap_tool(tool: Any, owner: Tells, options: Options) -> Any:
    """A BaseTool whose runs are told; None for anything else.

    It is of a subclass of the tool's own class and shares everything with the tool: schemas, names, what it keeps.
    """
    if not isinstance(tool, BaseTool):
        return None
    original = type(tool)

    def scope(self: Any, tool_input: Any, call_id: str | None) -> ToolScope:
        visible = getattr(self, "_filter_injected_args", None)
        args = visible(tool_input) if visible is not None and isinstance(tool_input, dict) else tool_input
        return options.scope(owner, self.name, args, call_id)

    def ended(told: ToolScope, result: Any) -> Any:
        if answers_with_failure(result):
            told.end(ToolStatus.FAILED)
        else:
            told.end(ToolStatus.SUCCEEDED)
        if not options.slim:
            return result
        return told.slim(result) if isinstance(result, str) else slim_tool_message(result, owner.context)  # type: ignore[attr-defined]

    @functools.wraps(original.run)
    def run(self: Any, tool_input: Any, *args: Any, **kwargs: Any) -> Any:
        told = scope(self, tool_input, kwargs.get("tool_call_id")).announce()
        try:
            result = original.run(self, tool_input, *args, **kwargs)
        except BaseException as error:
            told.__exit__(type(error), error, None)
            raise
        return ended(told, result)

    @functools.wraps(original.arun)
    async def arun(self: Any, tool_input: Any, *args: Any, **kwargs: Any) -> Any:
        told = await scope(self, tool_input, kwargs.get("tool_call_id")).announce_async()
        try:
            result = await original.arun(self, tool_input, *args, **kwargs)
        except BaseException as error:
            told.__exit__(type(error), error, None)
            raise
        return ended(told, result)

    namespace = {"run": run, "arun": arun, "__module__": original.__module__, "__doc__": original.__doc__}
    make_class: Any = type(original)  # pydantic's metaclass
    return twin(tool, make_class(original.__name__, (original,), namespace))
