"""agentkv: KV tiering, hints, budgets and bills for long-running agents.

The public names load their parts on first use: importing this package costs milliseconds, not seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentkv.budget.bill import Bill
    from agentkv.budget.limits import Budget
    from agentkv.context.options import Context
    from agentkv.core.forecast import Forecast
    from agentkv.core.hint import Hint, HintKind
    from agentkv.core.message import Message, ToolCall, ToolSpec
    from agentkv.core.task import Caller, PriorityClass
    from agentkv.core.usage import Timing, Usage
    from agentkv.engine.base import Chunk, Generation, Request, ResponseFormat, Sampling, ToolChoice
    from agentkv.engine.scripted import ScriptedEngine
    from agentkv.engine.stream import Stream
    from agentkv.errors import (
        AgentKVError,
        BudgetExceeded,
        Closed,
        ConfigError,
        ModelNotFound,
        PromptTooLong,
        QueueFull,
        RequestInvalid,
    )
    from agentkv.runtime.agentkv import AgentKV

__version__ = "0.1.0"

__all__ = [
    "AgentKV",
    "AgentKVError",
    "Bill",
    "Budget",
    "BudgetExceeded",
    "Caller",
    "Chunk",
    "Closed",
    "ConfigError",
    "Context",
    "Forecast",
    "Generation",
    "Hint",
    "HintKind",
    "Message",
    "ModelNotFound",
    "PriorityClass",
    "PromptTooLong",
    "QueueFull",
    "Request",
    "RequestInvalid",
    "ResponseFormat",
    "Sampling",
    "ScriptedEngine",
    "Stream",
    "Timing",
    "ToolCall",
    "ToolChoice",
    "ToolSpec",
    "Usage",
]

_HOMES = {
    "AgentKV": "agentkv.runtime.agentkv",
    "AgentKVError": "agentkv.errors",
    "Bill": "agentkv.budget.bill",
    "Budget": "agentkv.budget.limits",
    "BudgetExceeded": "agentkv.errors",
    "Caller": "agentkv.core.task",
    "Chunk": "agentkv.engine.base",
    "Closed": "agentkv.errors",
    "ConfigError": "agentkv.errors",
    "Context": "agentkv.context.options",
    "Forecast": "agentkv.core.forecast",
    "Generation": "agentkv.engine.base",
    "Hint": "agentkv.core.hint",
    "HintKind": "agentkv.core.hint",
    "Message": "agentkv.core.message",
    "ModelNotFound": "agentkv.errors",
    "PriorityClass": "agentkv.core.task",
    "PromptTooLong": "agentkv.errors",
    "QueueFull": "agentkv.errors",
    "Request": "agentkv.engine.base",
    "RequestInvalid": "agentkv.errors",
    "ResponseFormat": "agentkv.engine.base",
    "Sampling": "agentkv.engine.base",
    "ScriptedEngine": "agentkv.engine.scripted",
    "Stream": "agentkv.engine.stream",
    "Timing": "agentkv.core.usage",
    "ToolCall": "agentkv.core.message",
    "ToolChoice": "agentkv.engine.base",
    "ToolSpec": "agentkv.core.message",
    "Usage": "agentkv.core.usage",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'agentkv' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
