"""Checked by mypy, never run: tools keep their types, and a typo in an option is found before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, assert_type

from agentkv_langgraph import AgentKVMiddleware, ChatAgentKV, tool_wrappers
from langchain.agents import create_agent
from langchain_core.tools import BaseTool, tool
from langgraph.prebuilt import ToolNode

from agentkv import AgentKV, ScriptedEngine
from agentkv.runtime.tools import ToolScope

kv = AgentKV.with_engine(ScriptedEngine([]))


@kv.tool_function
def shell(cmd: str, times: int = 1) -> str:
    return cmd * times


@kv.tool_function(expect_s=1.0, slim=True)
async def slow(cmd: str) -> int:
    return len(cmd)


@kv.tool_function
@tool
def above(cmd: str) -> str:
    """Run it."""
    return cmd


@kv.tool_function(expect_s=1.0)
@tool("named", return_direct=True)
def above_with_options(cmd: str) -> str:
    """Run it."""
    return cmd


@tool
@kv.tool_function(slim=True)
def below(cmd: str) -> str:
    """Run it."""
    return cmd


class Own(BaseTool):
    name: str = "own"
    description: str = "Mine."
    calls: int = 0

    def _run(self, cmd: str) -> str:
        return cmd


assert_type(above, BaseTool)
assert_type(above_with_options, BaseTool)
assert_type(below, BaseTool)
assert_type(kv.tool_function(Own()), Own)
assert_type(kv.tool_function(expect_s=2.0)(Own()).calls, int)
create_agent(ChatAgentKV(kv), [above, below, kv.tool_function(Own())])
kv.tool_function(3)  # type: ignore[call-overload]
assert_type(shell("ls"), str)
shell(3)  # type: ignore[arg-type]
as_coroutine: Callable[[str], Coroutine[Any, Any, int]] = slow
assert_type(kv.current_tool(), ToolScope)
ToolNode([shell], **tool_wrappers(kv))
ChatAgentKV(kv, temperature=0.5, stop=["END"])
ChatAgentKV(kv, temprature=0.5)  # type: ignore[call-arg]
ChatAgentKV(kv, max_tokens="many")  # type: ignore[arg-type]
AgentKVMiddleware(kv, hints={"http://gpu:8000/v1": "agentkv", "http://b/v1": lambda caller: {}})
AgentKVMiddleware(kv, slm=True)  # type: ignore[call-arg]
