"""Checked by mypy, never run: tools keep their types, and a typo in an option is found before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, assert_type

from agentkv_langgraph import AgentKVMiddleware, ChatAgentKV, tool_wrappers
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
