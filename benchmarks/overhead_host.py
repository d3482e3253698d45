"""What the SDK costs inside LangGraph and LangChain: nodes, an agent's middleware, and hints that nobody takes.

Tracing is measured beside it, in the same rounds: an OpenTelemetry span that holds the messages, as tracing wrappers of
model calls have, and LangChain's own tracer without its network. Nothing here needs a model or a network.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from typing import Any

from agentkv_langgraph import AgentKVMiddleware, LangGraphHost
from common import interleaved, median
from langchain.agents.middleware import AgentMiddleware, ModelRequest, ModelResponse
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables.config import var_child_runnable_config
from langchain_core.tracers.run_collector import RunCollectorCallbackHandler
from langgraph.graph import START, MessagesState, StateGraph

from agentkv import AgentKV, ScriptedEngine
from agentkv.clock import SystemClock
from agentkv.runtime.reach import MOST_QUEUED, Reach

STEP_S = 0.05


class Model(BaseChatModel):
    """A foreign model that answers at once, with usage."""

    @property
    def _llm_type(self) -> str:
        return "instant"

    def _generate(self, *_: Any, **__: Any) -> ChatResult:
        usage: Any = {"input_tokens": 1000, "output_tokens": 10, "total_tokens": 1010}
        message = AIMessage("done", usage_metadata=usage, response_metadata={"model_name": "instant"})
        return ChatResult(generations=[ChatGeneration(message=message)])


def conversation(messages: int) -> list[BaseMessage]:
    """A tool loop of that many messages, 400 characters each."""
    made: list[BaseMessage] = [HumanMessage("fix the tests " * 30)]
    while len(made) < messages:
        call = {"name": "shell", "args": {"cmd": "pytest -q"}, "id": f"call-{len(made)}"}
        made += [AIMessage("Let me see.", tool_calls=[call]), ToolMessage("ok\n" * 130, tool_call_id=call["id"])]
    return made[:messages]


def nodes(repeats: int) -> dict[str, float]:
    """A decorated node against the plain function, called as LangGraph calls it."""
    with AgentKV.with_engine(ScriptedEngine([]), host=LangGraphHost()) as kv:

        def node(state: dict[str, int]) -> dict[str, int]:
            return state

        async def anode(state: dict[str, int]) -> dict[str, int]:
            return state

        told, atold = kv.node(node), kv.node(anode)
        state = {"n": 1}

        async def awaited(fn: Callable[..., Any], calls: int) -> float:
            started = time.perf_counter()
            for _ in range(calls):
                await fn(state)
            return (time.perf_counter() - started) / calls * 1e6

        sides = interleaved(
            {
                "sync": lambda: _per_call_us(lambda: node(state), 2000),
                "sync told": lambda: _per_call_us(lambda: told(state), 2000),
                "async": lambda: asyncio.run(awaited(anode, 2000)),
                "async told": lambda: asyncio.run(awaited(atold, 2000)),
            },
            repeats,
        )
    return {
        "node_sync_us": round(min(sides["sync told"]) - min(sides["sync"]), 2),
        "node_async_us": round(min(sides["async told"]) - min(sides["async"]), 2),
    }


class Noop(AgentMiddleware):
    """LangChain's own middleware, which does nothing."""

    def wrap_model_call(self, request: Any, handler: Any) -> Any:
        return handler(request)


class Traced(AgentMiddleware):
    """A span for each call, with what went in and what came out, as tracing wrappers write it."""

    def __init__(self) -> None:
        super().__init__()
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(BatchSpanProcessor(self.exporter))
        self._tracer = self.provider.get_tracer("bench")

    def wrap_model_call(self, request: Any, handler: Any) -> Any:
        with self._tracer.start_as_current_span("chat instant") as span:
            span.set_attribute("gen_ai.operation.name", "chat")
            span.set_attribute("gen_ai.input.messages", json.dumps([_spoken(one) for one in request.messages]))
            response = handler(request)
            answer = response.result[0]
            span.set_attribute("gen_ai.output.messages", json.dumps([_spoken(answer)]))
            span.set_attribute("gen_ai.usage.input_tokens", answer.usage_metadata["input_tokens"])
            span.set_attribute("gen_ai.usage.output_tokens", answer.usage_metadata["output_tokens"])
            return response


def _spoken(message: BaseMessage) -> dict[str, Any]:
    said: dict[str, Any] = {"role": message.type, "parts": [{"type": "text", "content": message.text}]}
    for call in getattr(message, "tool_calls", ()):
        said["parts"].append({"type": "tool_call", "id": call["id"], "name": call["name"], "arguments": call["args"]})
    return said


def middleware(repeats: int, messages: int = 50) -> dict[str, float]:
    """One model call of an agent through each middleware, inside a running node; microseconds over the bare call."""
    model, history = Model(), conversation(messages)

    def handler(request: Any) -> Any:
        return ModelResponse(result=[request.model.invoke(request.messages)])

    with AgentKV.with_engine(ScriptedEngine([]), host=LangGraphHost()) as kv:
        ours, noop, traced = AgentKVMiddleware(kv), Noop(), Traced()
        collector = RunCollectorCallbackHandler()
        results: dict[str, list[float]] = {}

        def through(one: Any) -> Callable[[], float]:
            return lambda: _per_call_us(
                lambda: one.wrap_model_call(ModelRequest(model=model, messages=history), handler), 50
            )

        def by_langsmith() -> float:
            config: Any = {**(var_child_runnable_config.get() or {}), "callbacks": [collector]}
            token = var_child_runnable_config.set(config)
            try:
                return _per_call_us(lambda: handler(ModelRequest(model=model, messages=history)), 50)
            finally:
                var_child_runnable_config.reset(token)
                collector.traced_runs.clear()

        def node(_state: MessagesState) -> dict[str, Any]:
            bare = lambda: _per_call_us(lambda: handler(ModelRequest(model=model, messages=history)), 50)  # noqa: E731
            sides = {"bare": bare, "noop": through(noop), "ours": through(ours), "otel": through(traced)}
            results.update(interleaved({**sides, "langsmith": by_langsmith}, repeats))
            return {"messages": []}

        graph = StateGraph(MessagesState)
        graph.add_node(node)
        graph.add_edge(START, "node")
        graph.compile().invoke({"messages": []}, {"configurable": {"thread_id": "bench"}})
        billed = kv.report("bench").usage.calls
        traced.provider.shutdown()
    assert 50 * repeats == billed, f"{billed} calls on the bill"
    best = {name: min(values) - min(results["bare"]) for name, values in results.items()}
    return {
        "middleware_us": round(best["ours"], 1),
        "middleware_median_us": round(median(results["ours"]) - median(results["bare"]), 1),
        "noop_us": round(best["noop"], 1),
        "otel_us": round(best["otel"], 1),
        "langsmith_us": round(best["langsmith"], 1),
        "vs_tracer": round(best["ours"] / min(best["otel"], best["langsmith"]), 3),
    }


class Dead:
    """An adapter to an engine that took the first hint and never answers."""

    name = "dead"
    patience_s = 0.05

    def __init__(self) -> None:
        self.over = threading.Event()

    def deliver(self, hint: Any, within_s: float) -> Any:
        self.over.wait()
        raise OSError(f"gone: {hint.kind}, {within_s}")

    def tick(self) -> tuple[tuple[()], None]:
        return (), None

    def reset(self) -> None:
        """There is nothing to forget."""

    def close(self) -> None:
        self.over.set()


def dead_sink(repeats: int, steps: int = 3) -> dict[str, float]:
    """Steps of 50 ms (a tool call each, progress told twice), with nobody listening and with a sink that is stuck.

    The sink's queue is full before the first step, and a second subscriber fails at each hint.
    """

    def step_s(kv: AgentKV) -> float:
        with kv.task("bench", final=False):
            started = time.perf_counter()
            for _ in range(steps):
                with kv.tool("pytest", args={"cmd": "pytest -q"}) as call:
                    time.sleep(STEP_S / 2)
                    call.progress(0.5)
                    time.sleep(STEP_S / 2)
                    call.progress(0.9)
            return (time.perf_counter() - started) / steps

    def broken(_hint: Any) -> None:
        raise OSError("no")

    adapter = Dead()
    with AgentKV.with_engine(ScriptedEngine([])) as alone, AgentKV.with_engine(ScriptedEngine([])) as stuck:
        reach = Reach(adapter, clock=SystemClock())
        stuck.subscribe(reach.tell)
        for _ in range(MOST_QUEUED):
            with stuck.tool("fill"):
                pass
        full = reach.stats()["queued"]
        stuck.subscribe(broken)
        sides = interleaved({"alone": lambda: step_s(alone), "stuck": lambda: step_s(stuck)}, 3 * repeats)
        adapter.over.set()
        reach.close()
    return {
        "dead_sink_slowdown": round(min(sides["stuck"]) / min(sides["alone"]) - 1, 4),
        "dead_sink_queued": full,
    }


def _per_call_us(fn: Callable[[], object], calls: int) -> float:
    started = time.perf_counter()
    for _ in range(calls):
        fn()
    return (time.perf_counter() - started) / calls * 1e6
