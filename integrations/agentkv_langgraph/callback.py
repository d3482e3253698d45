"""AgentKVCallback: hints and bill from LangChain's callbacks alone, for graphs that contain no line of ours.

Covers tool calls (hints, by tool call id) and the usage of model calls that did not go through agentkv, failed ones
too (`spent.py` reads it), with hints of their start and end, told or not (`origin.py`); those that did are on the
books already and are left out. No prompt layout.
"""
# ruff: noqa: ARG002  the signatures are LangChain's

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Self
from uuid import UUID
from weakref import WeakSet, WeakValueDictionary

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import ToolMessage
from langchain_core.outputs import LLMResult
from langgraph.errors import GraphBubbleUp

from agentkv import log
from agentkv.context.tokens import load_beside
from agentkv.core.hint import HintKind
from agentkv.core.task import UNATTRIBUTED, Caller
from agentkv.core.usage import Usage
from agentkv.engine.attempts import FailedTry
from agentkv.errors import AgentKVError, BudgetExceeded
from agentkv.runtime import identity
from agentkv.runtime.doors import passing
from agentkv_langgraph.caller import caller_of_metadata
from agentkv_langgraph.origin import Origin, task_here
from agentkv_langgraph.runs import Runs
from agentkv_langgraph.spent import ModelRun
from agentkv_langgraph.tries import Tries, running

_callbacks: WeakValueDictionary[tuple[int, type], AgentKVCallback] = WeakValueDictionary()
"""By the id of the AgentKV, which they hold, and their class."""
_callbacks_lock = threading.Lock()


def callback_of(kv: Any) -> AgentKVCallback:
    """The one callback of this AgentKV."""
    return AgentKVCallback(kv)


def _books(kv: Any) -> dict[str, Any]:
    """What the callbacks of one AgentKV have in common: all of it. The first calls will want to count tokens."""
    load_beside()
    return {
        "_kv": kv, "_lock": threading.Lock(), "_runs": Runs(), "_tools": {}, "_models": {}, "_watched": WeakSet(),
        "_tries": Tries(kv),
    }  # fmt: skip


class ToolAnsweredError(Exception):
    """A tool whose failure became an answer to the model (`status="error"`); only its type is looked at."""


class AgentKVCallback(BaseCallbackHandler):
    """Attach it to a graph with `kv.attach(graph)`, or put it into any runnable's `callbacks`.

    It runs inline, in the context of whoever calls, and lets nothing but BudgetExceeded out. There is one for an AgentKV,
    however often it is made and listed: a call is told, held and billed once. Those of a subclass share its books.
    """

    run_inline = True
    raise_error = True

    def __new__(cls, kv: Any) -> Self:
        with _callbacks_lock:
            known: Any = _callbacks.get((id(kv), cls))
            if known is None:
                known = super().__new__(cls)
                books = next((vars(one) for (key, _), one in _callbacks.items() if key == id(kv)), None)
                vars(known).update(books or _books(kv))
                _callbacks[id(kv), cls] = known
            return known  # type: ignore[no-any-return]

    def __init__(self, kv: Any) -> None:
        """All is set already, for whoever came first."""

    _kv: Any
    _lock: threading.Lock
    _runs: Runs
    _tools: dict[UUID, tuple[Any, UUID | None, asyncio.Task[Any] | None]]
    _models: dict[UUID, ModelRun]
    _watched: WeakSet[asyncio.Task[Any]]
    _tries: Tries

    def __copy__(self) -> AgentKVCallback:
        return self  # copies of a config must go on writing into the same books

    def __deepcopy__(self, _memo: dict[int, Any]) -> AgentKVCallback:
        return self

    def agentkv_root_of(self, run_id: UUID) -> str | None:
        """The key of the root run that `run_id` belongs to; None for a run that was not seen to start."""
        root = self._runs.root_of(run_id)
        return None if root is None else str(root)

    def agentkv_task_of(self, run_id: UUID, kv: Any) -> str | None:
        """The task of a run, if `kv` is the AgentKV of this callback and its task is known."""
        return self._runs.task_of(run_id) if kv is self._kv else None

    # -- runs

    def on_chain_start(
        self, serialized: Any, inputs: Any, *, run_id: UUID, parent_run_id: UUID | None = None, **kwargs: Any
    ) -> None:
        place = (kwargs.get("metadata") or {}).get("langgraph_checkpoint_ns") or ""
        self._runs.start(run_id, parent_run_id, place=place, task=identity.scope_of(self._kv))

    def on_chain_end(self, outputs: Any, *, run_id: UUID, **kwargs: Any) -> None:
        self._run_over(run_id, None)

    def on_chain_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        self._run_over(run_id, error)

    def _run_over(self, run_id: UUID, error: BaseException | None) -> None:
        """Forget the run; a call in it that never told its end ended with it."""
        self._runs.end(run_id)
        with self._lock:
            tools = [tool for tool, (_, parent, _) in self._tools.items() if parent == run_id]
            models = [run for run in self._models.values() if run.parent == run_id]
        for tool in tools:
            self._tool_over(tool, error or GeneratorExit())
        for run in models:
            self._end_if_left(run)

    def _watch(self, task: asyncio.Task[Any] | None) -> None:
        """Be told when the task is over, once for all of its calls. The task keeps nothing of ours alive."""
        if task is None or task in self._watched:
            return
        self._watched.add(task)
        ours = weakref.ref(self)

        def over(task: asyncio.Task[Any]) -> None:
            callback = ours()
            if callback is not None:
                callback._task_over(task)

        task.add_done_callback(over)

    def _task_over(self, task: asyncio.Task[Any]) -> None:
        with self._lock:
            tools = [tool for tool, (_, _, begun_in) in self._tools.items() if begun_in is task]
            left = [run for run in self._models.values() if run.origin is not None and run.origin.task is task]
        for tool in tools:
            self._tool_over(tool, asyncio.CancelledError())
        for run in left:
            self._end_if_left(run)

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
        if run_id in self._tools:  # listed twice
            return
        try:
            name = (serialized or {}).get("name") or kwargs.get("name") or "tool"
            scope = self._kv.tool(str(name), args=inputs or input_str, call_id=kwargs.get("tool_call_id"))
            with self._attributed(self._caller(metadata, parent_run_id)):
                scope.announce()
            task = task_here()
            with self._lock:
                self._tools[run_id] = (scope, parent_run_id, task)
            self._watch(task)
        except (BudgetExceeded, GraphBubbleUp):  # refused, or a person is asked
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
            scope, *_ = self._tools.pop(run_id, (None,))
        if scope is None:
            return
        try:
            scope.__exit__(None if error is None else type(error), error, None)
        except Exception as failure:
            log.failed("callback_failed", where="tool_end", error=repr(failure))

    # -- model calls

    def on_llm_start(self, serialized: Any, prompts: Any, *, run_id: UUID, **kwargs: Any) -> None:
        self._model_started(run_id, prompts, kwargs)

    def on_chat_model_start(self, serialized: Any, messages: Any, *, run_id: UUID, **kwargs: Any) -> None:
        self._model_started(run_id, messages, kwargs)

    def _model_started(self, run_id: UUID, prompts: Any, run: dict[str, Any]) -> None:
        for before in (running.get(), self._models.get(run_id)):
            if before is not None:
                self._end_if_left(before)
        listed = self._models.get(run_id)
        if listed is not None:  # LangChain tells each handler as often as it is listed
            listed.listed += 1
            return
        caller = self._caller(run.get("metadata"), run.get("parent_run_id"))
        started = ModelRun.started(caller, time.monotonic(), prompts[0] if prompts else None, {**run, "run_id": run_id})
        try:
            if not started.ours:
                gate = self._kv.budgets.gate
                started.held = gate.foreign_call(caller, started.worst, model=started.asked, again=started.is_retry)
        except (BudgetExceeded, GraphBubbleUp):
            raise
        except Exception as error:
            log.failed("callback_failed", where="model_start", error=repr(error))
        running.set(started)
        passing.set(partial(self._through_door, started))
        started.origin = Origin.here()
        with self._lock:
            self._models[run_id] = started
        self._watch(started.origin.task)
        self._tell_turn(HintKind.TURN_START, started)

    def _end_if_left(self, run: ModelRun) -> None:
        """End a call that was cancelled without a word about it."""
        try:
            if self._models.get(run.run_id) is run and run.origin is not None and run.origin.is_left(began=run.began):
                self._model_failed(run.run_id, asyncio.CancelledError(), None)
        except Exception as error:
            log.failed("callback_failed", where="model_left", error=repr(error))

    def _through_door(self, run: ModelRun, door: object) -> None:
        """The client is one of ours (`kv.openai()`): the engine reserves, books and settles the call itself."""
        if door is self._kv._doors and not run.ours:
            run.through_door = True
            run.over()

    def on_llm_new_token(self, token: Any, *, chunk: Any = None, run_id: UUID, **kwargs: Any) -> None:
        run = self._models.get(run_id)
        if run is None or not run.hears():
            return
        run.began = True
        if not run.ours:
            try:
                run.chunk(token, chunk)
            except Exception as error:
                log.failed("callback_failed", where="llm_new_token", error=repr(error))

    def on_llm_error(
        self, error: BaseException, *, run_id: UUID, response: LLMResult | None = None, **kwargs: Any
    ) -> None:
        run = self._model_failed(run_id, error, response)
        if run is not None and run.refused is not None:
            raise run.refused from error

    def _model_failed(self, run_id: UUID, error: BaseException, response: LLMResult | None) -> ModelRun | None:
        """Bill what a call used that failed or was given up. The run, unless somebody else says what became of it."""
        run = self._model_over(run_id)
        if run is None or run.ours or run.through_door or isinstance(error, AgentKVError):
            return None
        try:
            if not run.began and self._tries.knows(error):
                return None
            spent = run.failed(error, response)
            self._kv.record_call(
                caller=run.caller,
                model=run.asked or "unknown",
                usage=spent.usage,
                total_s=time.monotonic() - run.started_s,
                status="failed" if isinstance(error, Exception) else "aborted",
                error=type(error).__name__,
                estimated=spent.estimated,
                service_tier=spent.service_tier,
            )
        except Exception as failure:
            log.failed("callback_failed", where="llm_error", error=repr(failure))
        finally:
            run.over()
        return run

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> None:
        run = self._model_over(run_id)
        if run is None:  # it was given up, and is on the books
            return
        try:
            if not (run.ours or run.through_door or _is_ours(response)):
                self._bill(response, run)
        except Exception as error:
            log.failed("callback_failed", where="llm_end", error=repr(error))
        finally:
            run.over()

    def _model_over(self, run_id: UUID) -> ModelRun | None:
        with self._lock:
            run = self._models.pop(run_id, None)
        if run is not None:
            run.origin = None
            if running.get() is run:
                running.set(None)
                passing.set(None)
            self._tell_turn(HintKind.TURN_END, run)
        return run

    def _tell_turn(self, kind: HintKind, run: ModelRun) -> None:
        """A model call of another client starts or ends; its session is not known, so it is told of the task."""
        if run.ours:
            return
        try:
            self._kv._emitter.turn(kind, task=run.caller.task, session="", node=run.caller.node)
        except Exception as error:
            log.failed("callback_failed", where=str(kind), error=repr(error))

    def _bill(self, response: LLMResult, run: ModelRun) -> None:
        spent, model = run.ended(response)
        total_s = time.monotonic() - run.started_s
        if spent is None:  # no model was called
            log.count("served_locally")
            self._kv.record_call(caller=run.caller, model=model, usage=Usage(), total_s=total_s, served_locally=True)
            return
        self._kv.record_call(
            caller=run.caller,
            model=model,
            usage=spent.usage,
            total_s=total_s,
            estimated=spent.estimated,
            service_tier=spent.service_tier,
            cached_by=spent.cached_by,
        )

    # -- tries that a client repeats in silence: its hooks, which keep the callback alive as long as the client is

    def http_failed(self, failed: FailedTry) -> None:
        self._tries.failed(failed)

    def http_refuses(self) -> str:
        return self._tries.refuses()

    # -- who

    def _caller(self, metadata: dict[str, Any] | None, parent: UUID | None) -> Caller:
        caller: Caller = self._kv.caller()
        task = self._runs.task_of(parent)
        if caller.task != UNATTRIBUTED:
            if task is None and parent is not None and self._runs.root_of(parent) is not None:
                self._remember(parent)
            return caller
        told = caller_of_metadata(metadata)
        if task is not None:
            return replace(told or caller, task=task)
        root = None if parent is None else self.agentkv_root_of(parent)
        return told or (Caller(task=root) if root else caller)

    def _remember(self, run_id: UUID) -> None:
        """Whose the run is, read in its own context; a scope inside of it says nothing of that."""
        try:
            own = self._kv.host.caller()
            if own is not None:
                self._runs.seen(run_id, own.task)
        except Exception as error:
            log.failed("callback_failed", where="caller", error=repr(error))

    def _attributed(self, caller: Caller) -> Any:
        """A scope for calls whose task only the callback knows; it never ends the task."""
        if caller.task in (UNATTRIBUTED, self._kv.caller().task):
            return nullcontext()
        return self._kv.task(caller.task, final=False)


def _is_ours(response: LLMResult) -> bool:
    """Whether the answer came through this package's own model or endpoint, which have booked it."""
    for answers in response.generations:
        about = getattr(getattr(answers[0], "message", None), "response_metadata", {}) if answers else {}
        if "agentkv" in about or about.get("system_fingerprint") == "agentkv":
            return True
    return False
