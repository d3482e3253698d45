"""Budgets inside LangGraph: a refusal that nothing swallows, what a refused call answers, and the notice before that.

A tool node may turn what a tool raises into a message for the model (`handle_tool_errors=True`), and retry policies
look at types: neither touches LangGraph's own control flow, so in a graph a refusal is one of these.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Self

from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.runnables.config import var_child_runnable_config
from langgraph.errors import GraphBubbleUp

from agentkv.errors import BudgetExceeded
from agentkv.runtime.gate import closing_words

_MAX_TOLD = 4096
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


class Notices:
    """The notice of a budget's soft mark in prompts of another client: behind the message that was last then, for good.

    A prompt is only added to, because every later one shows it at the same place. Thread-safe.
    """

    def __init__(self, kv: Any) -> None:
        self._kv = kv
        self._lock = threading.Lock()
        self._told: OrderedDict[tuple[str, str], tuple[str, str]] = (
            OrderedDict()
        )  # message and text, by task and branch

    def shown(self, messages: Sequence[BaseMessage]) -> Sequence[BaseMessage]:
        """The messages as the model is to see them; the caller's own stay as they are."""
        last = messages[-1] if messages else None
        may_begin = last is not None and last.id and not isinstance(last, AIMessage)
        if not (may_begin or self._told):
            return messages
        caller = self._kv.caller()
        place = (caller.task, caller.branch)
        with self._lock:
            told = self._told.get(place)
            if told is None and last is not None and last.id and may_begin:
                text = self._kv.budgets.notice(caller)
                if text:
                    told = self._told[place] = (last.id, text)
                    while len(self._told) > _MAX_TOLD:
                        self._told.popitem(last=False)
        if told is None:
            return messages
        return [_with_text(message, told[1]) if message.id == told[0] else message for message in messages]


def _with_text(message: BaseMessage, text: str) -> BaseMessage:
    content: Any = message.content
    more = f"{content}\n\n{text}" if isinstance(content, str) else [*content, {"type": "text", "text": text}]
    return message.model_copy(update={"content": more})
