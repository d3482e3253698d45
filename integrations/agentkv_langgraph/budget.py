"""Budgets inside LangGraph: a refusal that nothing swallows, and what a refused tool or model call answers.

A tool node may turn what a tool raises into a message for the model (`handle_tool_errors=True`), and retry policies
look at types: neither touches LangGraph's own control flow, so in a graph a refusal is one of these.
"""

from __future__ import annotations

from typing import Any, Self

from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.runnables.config import var_child_runnable_config
from langgraph.errors import GraphBubbleUp

from agentkv.errors import BudgetExceeded
from agentkv.runtime.gate import closing_words

_SCRATCHPAD = "__pregel_scratchpad"  # LangGraph's own constant; only a running node's config has it


class BudgetStop(BudgetExceeded, GraphBubbleUp):
    """BudgetExceeded as no tool node turns it into an answer to the model (`handle_tool_errors`)."""

    @classmethod
    def of(cls, error: BudgetExceeded) -> Self:
        """The same, in this form."""
        return cls(
            str(error), task=error.task, limit=error.limit, allowed=error.allowed, used=error.used, asked=error.asked
        )


def in_node() -> bool:
    """Whether a node of a graph runs here."""
    config = var_child_runnable_config.get() or {}
    return _SCRATCHPAD in (config.get("configurable") or {})


def answered(kv: Any, request: Any, refused: BudgetExceeded) -> ToolMessage:
    """The result of a tool call that the budget of a task that is to finish refused: so the history stays valid.

    Raises `refused` for every other task.
    """
    if not kv.budgets.finishes(refused.task):
        raise refused
    call = request.tool_call
    return ToolMessage(
        content=f"Not run: this task may make no more tool calls ({refused.used:,} of {refused.allowed:,} "
        f"{refused.limit.replace('_', ' ')} are used). Answer with what you have.",
        tool_call_id=call["id"],
        name=call.get("name"),
        status="error",
    )


def closed(kv: Any, messages: list[Any], refused: BudgetExceeded) -> AIMessage:
    """The closing turn of a task that is to finish, for a model call of another client that its budget refused.

    Raises `refused` for every other task.
    """
    if not kv.budgets.finishes(refused.task):
        raise refused
    said = next((m.text for m in reversed(messages) if isinstance(m, AIMessage) and m.text.strip()), "")
    about = {"finish_reason": "stop", "agentkv": {"stopped_by": "budget"}}
    return AIMessage(content=closing_words(said, refused), response_metadata=about)
