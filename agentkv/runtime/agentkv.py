"""`AgentKV`: wires engine, policy, forecasts, budgets and ledger, and owns their lifetime. Composition only."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar, overload

from agentkv import log
from agentkv.budget.limits import Budget
from agentkv.clock import Clock, SystemClock
from agentkv.context.options import Context
from agentkv.core.hint import Hint
from agentkv.core.host import Host
from agentkv.core.residency import Policy, Receipt
from agentkv.core.task import Caller, PriorityClass
from agentkv.core.usage import Usage
from agentkv.engine.base import Engine, Request
from agentkv.engine.stream import Stream
from agentkv.errors import Closed
from agentkv.hints.features import command_words, declared_timeout_s, size_bytes
from agentkv.policy.rules import Rules
from agentkv.runtime import identity
from agentkv.runtime.books import Books
from agentkv.runtime.build import books_for, rules_of, stages_for
from agentkv.runtime.functions import current_tool, tool_function
from agentkv.runtime.hosts import find_host
from agentkv.runtime.learned import Learned, default_path
from agentkv.runtime.nodes import decorated
from agentkv.runtime.sampled import Sampled
from agentkv.runtime.tasks import TaskScope
from agentkv.runtime.tools import ToolScope
from agentkv.runtime.wiring import wired

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

    from agentkv.budget.bill import Bill
    from agentkv.budget.prices import PriceTable
    from agentkv.context.cuts import Cut
    from agentkv.context.view import Stages

_Fn = TypeVar("_Fn")
DEFAULT_CONTEXT: Context | None = Context()


class AgentKV:
    """The object that users hold; make one with `local`, `remote` or `with_engine`, and close it (or use `with`).

    Thread-safe; works from sync and async code alike. Only budgets and misuse raise.
    """

    def __init__(
        self, *, engine: Engine, policy: str | Policy | Rules, books: Books, learned: Learned, host: Host, clock: Clock,
        context: Context | None, stages: Stages | None,
    ) -> None:  # fmt: skip
        self.engine = engine
        self.host = host
        self._clock = clock
        self._books = books
        self._learned = learned
        self._sampled = Sampled(engine)
        parts = wired(
            self, caller=self.caller, submit=self.submit, engine=engine, policy=policy, books=books, learned=learned, host=host,
            clock=clock, context=context, stages=stages,
        )  # fmt: skip
        self.context, self.budgets = parts.context, parts.budgets
        told = self._told = parts.told
        self.deliver, self.outcome, self.agent_message = told.deliver, told.outcome, told.agent_message
        self.on_fact = books.on_fact
        self._emitter, self._receipts = parts.emitter, parts.receipts
        self._planner, self._desk = parts.planner, parts.desk
        self._model_calls, self._endings, self._doors = parts.model_calls, parts.endings, parts.doors
        self.http_client, self.async_http_client = parts.doors.http_client, parts.doors.async_http_client
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._closed = False

    # -- construction

    @classmethod
    def local(
        cls,
        model: str = "smollm2-135m",
        *,
        device: str = "auto",
        device_memory: int | str = "256MiB",
        host_memory: int | str | None = "auto",
        disk: str | Path | None = None,
        disk_memory: int | str = "4GiB",
        policy: str | Policy | Rules = "lazy",
        dtype: str = "auto",
        chat_template: str | Path | None = None,
        ledger: str | None = None,
        salt: str = "",
        persist: bool = False,
        context: Context | None = DEFAULT_CONTEXT,
        prices: str | Path | PriceTable | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> Self:
        """The embedded engine with its three tiers.

        Args:
            model: "smollm2-135m", a local Hugging Face folder, a GGUF file, or a hub name.
            device: "auto", "cpu", "cuda" or "cuda:1"; several as "cuda:0,cuda:1", over one host arena and one disk.
            device_memory: bytes of the block pool on each device; what contexts there may take at most.
            host_memory: bytes of the host arena; "auto" is 1 GiB, or half of what is available where that is less;
                None switches the host tier (and so the disk tier) off.
            disk: a folder for the disk tier; None switches it off. A folder that cannot be used switches it off
                with one warning.
            disk_memory: bytes that the disk tier may take.
            policy: a name ("lazy", "hazard", "ladder", "keep"), or one that `from agentkv.policy import ladder` made.
            dtype: "auto", "bfloat16", "float16" or "float32".
            chat_template: Jinja text, or a file with it, in place of the model's own (a base model has none).
            ledger: None (SQLite in the user's data folder), "memory", or a database URL.
            salt: a tenant's secret; sessions under different salts never share blocks.
            persist: sessions whose task did not end are on disk when this closes, and resume in the next process with
                the same model, salt and disk (without `disk`: in the user's cache folder). See `agentkv sessions`.
            context: how prompts are kept short and steady, see `Context`; None leaves them as they are.
            prices: a file of prices that come before the package's own, see docs/prices.md.
            progress: called with a sentence at each slow step of loading.

        Raises:
            ConfigError: an option that cannot work. ModelNotFound, UnsupportedModel, ExtraMissing: no such model.
        """
        from agentkv.runtime.build import local_engine

        chosen = rules_of(policy)
        engine = local_engine(
            model,
            device=device,
            device_memory=device_memory,
            host_memory=host_memory,
            disk=disk,
            disk_memory=disk_memory,
            dtype=dtype,
            chat_template=chat_template,
            salt=salt,
            persist=persist,
            progress=progress,
        )
        return cls._assemble(engine, policy=chosen, ledger=ledger, context=context, prices=prices, salt=salt)

    @classmethod
    def remote(
        cls,
        *,
        base_url: str,
        model: str,
        api_key: str | None = None,
        ledger: str | None = None,
        timeout_s: float = 600.0,
        context: Context | None = DEFAULT_CONTEXT,
        prices: str | Path | PriceTable | None = None,
        salt: str = "",
        speaks: str = "auto",
        probe: bool = False,
        prewarm: bool = False,
    ) -> Self:
        """Any OpenAI-compatible endpoint, through the openai package: hints, budgets and bills without our engine.

        `speaks` names the engine there ("vllm", "llama.cpp", "dynamo", "openai", ...), is "off", or "ask": an address that
        is not plainly your own is not asked, nor prewarmed, by "auto". `salt` is a tenant's, for engines that part their caches by one. With `probe` an own server is asked once,
        by a request of one token, whether it takes priorities; with `prewarm` it computes a waiting context shortly before
        its tool ends, paid by the task. See docs/engines.md.
        """
        from agentkv.adapters.found import checked
        from agentkv.engine.remote import RemoteEngine

        reach: dict[str, Any] = {"salt": salt, "engine": checked(speaks), "probe": probe, "prewarm": prewarm}
        engine = RemoteEngine(base_url=base_url, model=model, api_key=api_key, timeout_s=timeout_s, reach=reach)
        return cls._assemble(engine, policy="keep", ledger=ledger, context=context, prices=prices)

    @classmethod
    def with_engine(
        cls,
        engine: Engine,
        *,
        policy: str | Policy | Rules = "lazy",
        ledger: str | None = "memory",
        host: Host | None = None,
        clock: Clock | None = None,
        context: Context | None = DEFAULT_CONTEXT,
        prices: str | Path | PriceTable | None = None,
    ) -> Self:
        """Any object that answers model calls; `ScriptedEngine` for tests."""
        given: dict[str, Any] = {"ledger": ledger, "host": host, "clock": clock, "context": context, "prices": prices}
        return cls._assemble(engine, policy=policy, **given)

    @classmethod
    def _assemble(
        cls, engine: Engine, *, policy: str | Policy | Rules, ledger: str | None, context: Context | None,
        prices: str | Path | PriceTable | None, host: Host | None = None, clock: Clock | None = None, salt: str = "",
    ) -> Self:  # fmt: skip
        clock = clock or SystemClock()
        try:
            rules = rules_of(policy)
            stages = stages_for(engine, context, in_memory=ledger == "memory", salt=salt)
            books = books_for(engine, ledger=ledger, clock=clock, prices=prices)
        except BaseException:
            engine.close()
            raise
        learned = Learned(None if ledger == "memory" else default_path(), now_s=clock.now_s())
        host = host or find_host()
        return cls(
            engine=engine, policy=rules, books=books, learned=learned, host=host, clock=clock, context=context, stages=stages
        )  # fmt: skip

    # -- model calls

    def submit(self, request: Request) -> Stream:
        """Start a model call for whoever is calling.

        Raises:
            BudgetExceeded: before anything is spent. RequestInvalid: before anything is started. Closed.
        """
        self._check_open()
        stream = self._model_calls.submit(request)
        self._learned.save_if_due(self._clock.now_s())
        for key in self._books.idle_too_long():
            self.finish(key)
        return stream

    def record_call(self, *, caller: Caller, model: str, usage: Usage, total_s: float = 0.0, **about: Any) -> None:
        """Bill a model call that another client made for `caller` (a framework's callback tells of it).

        `about` are more fields of its `ModelCall`: status, error, estimated, service_tier, served_locally, ...
        """
        self._check_open()
        self._books.foreign_call(caller=caller, model=model, usage=usage, total_s=total_s, **about)

    # -- who is calling

    def caller(self) -> Caller:
        """Who is calling here and now."""
        return identity.resolve(self, self.host)

    def task(
        self, key: str, *, budget: Budget | None = None, priority: PriorityClass | None = None, final: bool = True,
        type: str = "", tenant: str = "",  # noqa: A002  what users call it
    ) -> TaskScope:  # fmt: skip
        """`with kv.task("task-1", budget=...)`: what runs inside is billed to this task (sync and async).

        With `final` the task is destroyed at the end of the block: its KV is freed without writing a byte. With
        final=False it stays, as a wait on a person, and a later block with the same key goes on. A task of a `type` that
        `kv.budgets.limit` knows waits for its place, beside those of other types and tenants.
        """
        self._check_open()
        return TaskScope(self, key, budget=budget, priority=priority, final=final, task_type=type, tenant=tenant)

    def enter_task(
        self, key: str, *, budget: Budget | None, priority: PriorityClass | None, task_type: str = ""
    ) -> None:
        """Part of TaskScope's contract; use `task`."""
        self._check_open()
        self._told.entered(key, task_type)
        pool = self.budgets.pool(task_type)
        self._books.enter(key, budget=budget, priority=priority, pool=pool, task_type=task_type)

    def leave_task(self, key: str, *, final: bool) -> None:
        """Part of TaskScope's contract; use `task`."""
        if self._books.leave(key) and final:
            self.finish(key)

    def leave_segment(self, key: str, name: str, *, carry: bool) -> str:
        """Part of SegmentScope's contract; use `kv.task(...).segment(...)`."""
        return self._endings.segment(key, name, carry=carry)

    @overload
    def node(self, fn: _Fn, /) -> _Fn: ...
    @overload
    def node(self, /, *, name: str | None = None, context: bool = True) -> Callable[[_Fn], _Fn]: ...
    def node(self, fn: Any = None, /, *, name: str | None = None, context: bool = True) -> Any:
        """Decorate a graph node (or any callable): what it calls is attributed to it. Behaviour is unchanged.

        With context=False the node's model calls are sent exactly as they are.
        """
        if fn is None:
            return lambda one: decorated(self, self.host, one, name=name, as_is=not context)
        return decorated(self, self.host, fn, name=name, as_is=not context)

    def attach(self, graph: _Fn) -> _Fn:
        """`graph` with hints and bill from the framework's callbacks alone: no code change."""
        return self.host.attach(graph, self)  # type: ignore[no-any-return]

    carry = staticmethod(identity.carried)

    # -- tool calls
    tool_function = tool_function
    current_tool = current_tool

    def tool(
        self,
        name: str,
        *,
        args: Any = None,
        expect_s: float | None = None,
        timeout_s: float | None = None,
        duration_key: str = "",
        call_id: str | None = None,
        session: str | None = None,
    ) -> ToolScope:
        """`with kv.tool("pytest", args={"cmd": cmd})`: tell that a tool runs, so that its wait can be used.

        `args` is looked at for its command words and its size and never stored. `expect_s` is your own estimate,
        `timeout_s` when the call is ended at the latest, `duration_key` a name for calls that take equally long, if you
        have them. `session` names whose context waits; by default the one that the caller used last.
        """
        self._check_open()
        return ToolScope(
            self._desk,
            tool=name,
            command=command_words(args),
            arg_bytes=size_bytes(args),
            expect_s=expect_s,
            timeout_s=declared_timeout_s(args) if timeout_s is None else timeout_s,
            duration_key=duration_key,
            call_id=call_id or f"call-{next(self._ids)}",
            session=session,
        )

    # -- listening

    def subscribe(self, subscriber: Callable[[Hint], None]) -> Callable[[], None]:
        """Hear every hint, in order, on the thread that causes it; returns the way to stop."""
        return self._emitter.subscribe(subscriber)

    def on_receipt(self, listener: Callable[[Receipt], None]) -> None:
        """Hear what became of every move, from the thread that carried it out; must be quick."""
        self._receipts.add(listener)

    # -- the end of a task, and what it cost

    def finish(self, task: str) -> None:
        """The task is over: destroy its sessions without writing a byte. Unknown and repeated keys are no-ops."""
        self._endings.task(task)

    def propose_cut(self, task: str) -> Cut | None:
        """Whether the task should go on in a new segment: its window or its budget will be full within a few calls."""
        return self._endings.propose_cut(task)

    def report(self, task: str) -> Bill:
        """The task's bill so far: print it, or take `to_json()`."""
        return self._books.bill(task)

    def sampling(self, request: Request) -> dict[str, Any]:
        """How the request's tokens are chosen, and under "suggested" what the model's makers would do: never applied."""
        return self._sampled(request.sampling)

    def stats(self) -> dict[str, Any]:
        """Blocks and bytes per tier, moves and hits, facts not saved yet, counters of what went wrong; plain JSON values."""
        return {
            "engine": dict(self.engine.stats()),
            "counters": dict(log.counters),
            "reach": self._doors.stats(),
            "ledger": {"unsaved": self._books.unsaved},
        }

    # -- OpenAI clients in this process

    def openai(self) -> OpenAI:
        """An `openai.OpenAI` client that talks to this engine without a socket."""
        self._check_open()
        client: OpenAI = self._doors.open(self).openai()
        return client

    def async_openai(self) -> AsyncOpenAI:
        """An `openai.AsyncOpenAI` client that talks to this engine without a socket."""
        self._check_open()
        client: AsyncOpenAI = self._doors.open(self).async_openai()
        return client

    # -- lifetime

    def close(self) -> None:
        """End every call with Closed, free all memory, flush the ledger. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self.budgets.gate.closed = True
        self._doors.close()
        if self._planner is not None:
            self._planner.close()
        self.engine.close()
        self.context.close()
        self._learned.close()
        self._books.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("this AgentKV is closed; make a new one")
