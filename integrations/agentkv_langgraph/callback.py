"""AgentKVCallback: hints and bill from LangChain's callbacks alone, for graphs that contain no line of ours.

Covers tool calls (hints, by tool call id) and the usage of model calls that did not go through agentkv; those that
did are on the books already and are left out. First form: no hints for model turns, no prompt layout.
"""
# ruff: noqa: ARG002  the signatures are LangChain's

from __future__ import annotations

import threading
import time
from contextlib import nullcontext
from typing import Any
from uuid import UUID
from weakref import WeakValueDictionary

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import ToolMessage
from langchain_core.outputs import LLMResult

from agentkv import log
from agentkv.core.task import UNATTRIBUTED, Caller
from agentkv.core.usage import Usage
from agentkv.errors import BudgetExceeded
from agentkv_langgraph.caller import caller_of_metadata

_callbacks: WeakValueDictionary[int, AgentKVCallback] = WeakValueDictionary()  # by id of the AgentKV, which they hold
_callbacks_lock = threading.Lock()


def callback_of(kv: Any) -> AgentKVCallback:
    """The one callback of this AgentKV: LangChain hands a run to each handler once, so nothing is counted twice."""
    with _callbacks_lock:
        known = _callbacks.get(id(kv))
        if known is None:
            known = _callbacks[id(kv)] = AgentKVCallback(kv)
        return known


class ToolAnsweredError(Exception):
    """A tool whose failure became an answer to the model (`status="error"`); only its type is looked at."""


class AgentKVCallback(BaseCallbackHandler):
    """Attach it to a graph with `kv.attach(graph)`, or put it into any runnable's `callbacks`.

    It runs inline, in the context of whoever calls, and lets nothing but BudgetExceeded out.
    """

    run_inline = True
    raise_error = True

    def __init__(self, kv: Any) -> None:
        self._kv = kv
        self._lock = threading.Lock()
        self._roots: dict[UUID, UUID] = {}
        self._tools: dict[UUID, tuple[Any, UUID | None]] = {}
        self._models: dict[UUID, tuple[Caller, float]] = {}

    def __copy__(self) -> AgentKVCallback:
        return self  # copies of a config must go on writing into the same books

    def __deepcopy__(self, _memo: dict[int, Any]) -> AgentKVCallback:
        return self

    def agentkv_root_of(self, run_id: UUID) -> str | None:
        """The key of the root run that `run_id` belongs to; None for a run that was not seen to start."""
        with self._lock:
            root = self._roots.get(run_id)
        return None if root is None else str(root)

    # -- runs

    def on_chain_start(
        self, serialized: Any, inputs: Any, *, run_id: UUID, parent_run_id: UUID | None = None, **kwargs: Any
    ) -> None:
        with self._lock:
            root = run_id if parent_run_id is None else self._roots.get(parent_run_id, parent_run_id)
            self._roots[run_id] = root

    def on_chain_end(self, outputs: Any, *, run_id: UUID, **kwargs: Any) -> None:
        self._run_over(run_id, None)

    def on_chain_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        self._run_over(run_id, error)

    def _run_over(self, run_id: UUID, error: BaseException | None) -> None:
        """Forget the run; a tool in it that never told its end ended with it."""
        with self._lock:
            self._roots.pop(run_id, None)
            left = [tool for tool, (_, parent) in self._tools.items() if parent == run_id]
        for tool in left:
            self._tool_over(tool, error or GeneratorExit())

    # -- tools

    def on_tool_start(
        self,
        serialized: dict[str, Any] | None,
        input_str: str,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        metadata: dict[str, Any] | None = None,
        inputs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        try:
            name = (serialized or {}).get("name") or kwargs.get("name") or "tool"
            scope = self._kv.tool(str(name), args=inputs or input_str, call_id=kwargs.get("tool_call_id"))
            with self._attributed(self._caller(metadata, parent_run_id)):
                scope.announce()
            with self._lock:
                self._tools[run_id] = (scope, parent_run_id)
        except BudgetExceeded:
            raise
        except Exception as error:
            log.failed("callback_failed", where="tool_start", error=repr(error))

    def on_tool_end(self, output: Any, *, run_id: UUID, **kwargs: Any) -> None:
        failed = isinstance(output, ToolMessage) and output.status == "error"
        self._tool_over(run_id, ToolAnsweredError() if failed else None)

    def on_tool_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        self._tool_over(run_id, error)

    def _tool_over(self, run_id: UUID, error: BaseException | None) -> None:
        with self._lock:
            scope, _ = self._tools.pop(run_id, (None, None))
        if scope is None:
            return
        try:
            scope.__exit__(None if error is None else type(error), error, None)
        except Exception as failure:
            log.failed("callback_failed", where="tool_end", error=repr(failure))

    # -- model calls

    def on_llm_start(self, serialized: Any, prompts: Any, *, run_id: UUID, **kwargs: Any) -> None:
        self._model_started(run_id, kwargs)

    def on_chat_model_start(self, serialized: Any, messages: Any, *, run_id: UUID, **kwargs: Any) -> None:
        self._model_started(run_id, kwargs)

    def _model_started(self, run_id: UUID, run: dict[str, Any]) -> None:
        caller = self._caller(run.get("metadata"), run.get("parent_run_id"))
        with self._lock:
            self._models[run_id] = (caller, time.monotonic())

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        with self._lock:
            self._models.pop(run_id, None)

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> None:
        with self._lock:
            caller, started_s = self._models.pop(run_id, (Caller(), time.monotonic()))
        try:
            for answers in response.generations:
                message = getattr(answers[0], "message", None) if answers else None
                if message is not None:
                    self._bill(message, response.llm_output or {}, caller, time.monotonic() - started_s)
        except Exception as error:
            log.failed("callback_failed", where="llm_end", error=repr(error))

    def _bill(self, message: Any, output: dict[str, Any], caller: Caller, total_s: float) -> None:
        about = message.response_metadata
        usage = getattr(message, "usage_metadata", None)
        if "agentkv" in about or about.get("system_fingerprint") == "agentkv":
            return
        if usage is None:
            log.warn_once("usage_missing", model=about.get("model_name"))
            return
        if usage.get("total_cost") == 0:  # LangChain's response cache answered: no model was called
            log.count("served_locally")
            return
        details = usage.get("input_token_details") or {}
        self._kv.record_call(
            caller=caller,
            model=str(about.get("model_name") or output.get("model_name") or "unknown"),
            usage=Usage(
                input_tokens=usage["input_tokens"],
                cached_tokens=min(details.get("cache_read") or 0, usage["input_tokens"]),
                output_tokens=usage["output_tokens"],
                calls=1,
            ),
            total_s=total_s,
        )

    # -- who

    def _caller(self, metadata: dict[str, Any] | None, parent: UUID | None) -> Caller:
        caller: Caller = self._kv.caller()
        if caller.task != UNATTRIBUTED:
            return caller
        root = None if parent is None else self.agentkv_root_of(parent)
        return caller_of_metadata(metadata) or (Caller(task=root) if root else caller)

    def _attributed(self, caller: Caller) -> Any:
        """A scope for calls whose task only the callback knows; it never ends the task."""
        if caller.task in (UNATTRIBUTED, self._kv.caller().task):
            return nullcontext()
        return self._kv.task(caller.task, final=False)
