"""LangGraph as a Host: who is calling, nodes with hooks around them, and which exceptions are no failures.

Wrapping itself is in `nodes.py`, the callback of `attach` in `callback.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from langchain_core.runnables import Runnable, RunnableBinding, RunnableConfig
from langchain_core.runnables.config import var_child_runnable_config
from langgraph.errors import GraphBubbleUp, GraphDrained, GraphInterrupt

from agentkv.core.task import Caller
from agentkv.errors import BudgetExceeded, ConfigError
from agentkv.log import failed
from agentkv.runtime.hosts import Enter, Leave
from agentkv_langgraph.asking import ask
from agentkv_langgraph.budget import BudgetStop, in_node
from agentkv_langgraph.caller import _RUNTIME_KEY, caller_of_running, metadata_of
from agentkv_langgraph.nodes import wrap


class LangGraphHost:
    """The `agentkv.hosts` entry point named "langgraph". Holds no state."""

    name = "langgraph"

    def caller(self) -> Caller | None:
        """Who is calling by the running node's config; None outside of a graph (never an error)."""
        config = var_child_runnable_config.get()
        if not config:
            return None
        try:
            return caller_of_running(config)
        except Exception as error:
            failed("caller_unreadable", error=repr(error))
            return None

    def wrap_node(self, fn: Callable[..., Any], enter: Enter, leave: Leave) -> Any:
        """`fn` with the hooks around each run; LangGraph sees the same signature, hints, edges and schemas."""
        return wrap(fn, enter, leave)

    def attach(self, graph: Any, runtime: Any) -> Any:
        """A copy of the compiled `graph` that tells `runtime` of its tool and model calls."""
        from agentkv_langgraph.callback import callback_of

        if not isinstance(graph, Runnable):
            hint = "; compile it first" if hasattr(graph, "compile") else ""
            raise ConfigError(f"attach needs a compiled graph or another runnable, not a {type(graph).__name__}{hint}")
        ours = callback_of(runtime)
        known = (getattr(graph, "config", None) or {}).get("callbacks")
        if isinstance(known, list) and ours in known:
            return graph
        attached = graph.with_config(callbacks=[ours])
        if isinstance(attached, RunnableBinding):  # no graph: nobody else puts the thread into the metadata

            def named(config: RunnableConfig) -> RunnableConfig:
                return {"metadata": metadata_of(config, runtime)}

            attached = attached.model_copy(update={"config_factories": [*attached.config_factories, named]})
        return attached

    def is_control_flow(self, error: BaseException) -> bool:
        """Interrupts, parent commands and drains: LangGraph's steering, an Exception by type but no failure."""
        return isinstance(error, GraphBubbleUp) and not isinstance(error, BudgetExceeded)

    def is_pause(self, error: BaseException) -> bool:
        """Interrupts and drains: the node runs again. A command for a parent graph ends what was under way."""
        return isinstance(error, GraphInterrupt | GraphDrained)

    def wrap_tool(self, tool: Any, owner: Any, options: Any) -> Any:
        """A LangChain tool object whose calls are told; None for anything else."""
        from agentkv_langgraph.tools import wrap_tool

        return wrap_tool(tool, owner, options)

    def alive(self) -> None:
        """A tool told its progress: LangGraph's heartbeat, for nodes with an idle time-out."""
        conf = (var_child_runnable_config.get() or {}).get("configurable") or {}
        heartbeat = getattr(conf.get(_RUNTIME_KEY), "heartbeat", None)
        if heartbeat is not None:
            heartbeat()

    def interrupt(self, question: dict[str, Any], refused: Exception) -> Any:
        """LangGraph's interrupt from wherever the node is; resume with `Command(resume={"tokens": 5000})` or False."""
        return ask(question, refused)

    def stopping(self, refused: BudgetExceeded) -> BudgetExceeded:
        """The refusal as a graph lets it through to its caller, whatever it does with errors of tools."""
        return BudgetStop.of(refused) if in_node() and not isinstance(refused, BudgetStop) else refused
