"""agentkv for LangGraph: the host, a chat model over an agentkv engine, callbacks, and the demo command.

Importing this package loads neither LangGraph nor LangChain; its names load when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentkv_langgraph.budget import BudgetStop
    from agentkv_langgraph.callback import AgentKVCallback
    from agentkv_langgraph.chat import ChatAgentKV
    from agentkv_langgraph.host import LangGraphHost
    from agentkv_langgraph.memory import StoreMemory
    from agentkv_langgraph.middleware import AgentKVMiddleware
    from agentkv_langgraph.outputs import read_output_tool, slim_tool_message
    from agentkv_langgraph.tools import tool_wrappers

__all__ = [
    "AgentKVCallback",
    "AgentKVMiddleware",
    "BudgetStop",
    "ChatAgentKV",
    "LangGraphHost",
    "StoreMemory",
    "read_output_tool",
    "slim_tool_message",
    "tool_wrappers",
]

_HOMES = {
    "AgentKVCallback": "callback",
    "AgentKVMiddleware": "middleware",
    "BudgetStop": "budget",
    "ChatAgentKV": "chat",
    "LangGraphHost": "host",
    "StoreMemory": "memory",
    "read_output_tool": "outputs",
    "slim_tool_message": "outputs",
    "tool_wrappers": "tools",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
