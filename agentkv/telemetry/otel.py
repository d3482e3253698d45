"""OpenTelemetry: spans and metrics by the GenAI semantic conventions. Needs the extra `otel`.

A task is one `invoke_agent` span, each sub-agent of it (a graph inside a graph, a branch of a fan-out) another one
below it, each attempt of a model call a `chat` span, each tool call an `execute_tool` span. The usage of the chat spans
adds up to the bill; agent spans repeat the sums under names of their own and are flagged (`agentkv.aggregate`), so that
nothing is counted twice. Spans are made when a fact is known, with the times that it tells. Metrics: `meters.py`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Self

from agentkv.budget.facts import Fact, ModelCall, OutcomeFact, TaskFact, ToolCallFact
from agentkv.budget.finite import finite
from agentkv.errors import ExtraMissing
from agentkv.telemetry import names
from agentkv.telemetry.meters import Meters, error_of
from agentkv.telemetry.source import Source

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import Span, TracerProvider

MAX_OPEN = 1024
"""Tasks whose span is open; beyond them the one that was silent longest ends its span, marked as still open."""


_SEGMENT, _THREAD = "segment=", "thread="  # parts of a branch that name no agent
MAX_AGENTS = 256
"""Sub-agents of one task whose spans are open; beyond them the one that was silent longest ends."""


@dataclass(slots=True)
class _Agent:
    """A task, or a sub-agent of one; its sums hold those of its own sub-agents. `above` are the agents around it."""

    span: Span
    last_ms: int
    above: tuple[_Agent, ...] = ()
    calls: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cost_usd: Decimal = Decimal(0)
    agents: OrderedDict[str, _Agent] = field(default_factory=OrderedDict)
    """A task's sub-agents by branch, silent longest first."""


class OpenTelemetry:
    """Tells a source's facts to OpenTelemetry until `close()`, which ends the spans of tasks that still run.

    `provider` is what the conventions call the provider of the model ("openai", "anthropic", ...). Without providers
    given the global ones are used; exporters and sampling are the application's to set up.
    """

    def __init__(
        self,
        source: Source,
        *,
        provider: str = "agentkv",
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
    ) -> None:
        try:
            from opentelemetry import metrics, trace
        except ImportError as error:
            raise ExtraMissing("telemetry needs OpenTelemetry: pip install 'agentkv-sdk[otel]'") from error
        self._trace = trace
        self._tracer = trace.get_tracer("agentkv", tracer_provider=tracer_provider)
        self._meters = Meters(metrics.get_meter("agentkv", meter_provider=meter_provider), provider)
        self._provider = provider
        self._open: OrderedDict[str, _Agent] = OrderedDict()  # silent longest first
        self._lock = threading.RLock()
        self._tell: dict[type[Any], Callable[[Any], None]] = {
            ModelCall: self._chat, ToolCallFact: self._tool, TaskFact: self._event, OutcomeFact: self._outcome,
        }  # fmt: skip
        self._stop = source.on_fact(self._hear)

    def close(self) -> None:
        """Stop listening and end all spans. Idempotent."""
        self._stop()
        with self._lock:
            for key in list(self._open):
                self._end(key, still_open=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _hear(self, fact: Fact) -> None:
        fact = finite(fact)
        self._meters.count(fact)
        tell = self._tell.get(type(fact))
        if tell is not None:
            with self._lock:
                tell(fact)

    # -- agents

    def _task(self, key: str, at_ms: int) -> _Agent:
        known = self._open.get(key)
        if known is None:
            known = self._open[key] = self._started(key, at_ms)
            while len(self._open) > MAX_OPEN:
                self._end(next(iter(self._open)), still_open=True)
        self._open.move_to_end(key)
        return known

    def _agent(self, key: str, branch: str, at_ms: int) -> _Agent:
        """Who did something in this branch of the task: the task itself, or a sub-agent."""
        task = agent = self._task(key, at_ms)
        parts = branch.split("|") if branch else []
        for depth, part in enumerate(parts, 1):
            if part.startswith(_SEGMENT):
                continue
            place = "|".join(parts[:depth])
            known = task.agents.get(place)
            if known is None:
                known = task.agents[place] = self._started(key, at_ms, agent, name=part.partition(":")[0], branch=place)
            task.agents.move_to_end(place)
            agent = known
        while len(task.agents) > max(MAX_AGENTS, len(parts)):
            self._ended(task.agents.popitem(last=False)[1])
        return agent

    def _started(
        self, key: str, at_ms: int, around: _Agent | None = None, *, name: str = "", branch: str = ""
    ) -> _Agent:
        name = "thread" if name.startswith(_THREAD) else name  # a thread's key would be ever new
        about = {
            names.GEN_AI_OPERATION: names.INVOKE_AGENT, names.GEN_AI_PROVIDER: self._provider,
            names.GEN_AI_CONVERSATION: key, names.GEN_AI_AGENT: name, names.BRANCH: branch, names.AGGREGATE: True,
        }  # fmt: skip
        span = self._tracer.start_span(
            names.sendable(f"{names.INVOKE_AGENT} {name}".rstrip()),
            context=None if around is None else self._trace.set_span_in_context(around.span),
            start_time=_ns(at_ms),
            attributes=_attributes(about),
        )
        return _Agent(span, at_ms, () if around is None else (around, *around.above))

    def _end(self, key: str, *, still_open: bool) -> None:
        task = self._open.pop(key)
        for agent in reversed(task.agents.values()):
            self._ended(agent)
        task.span.set_attribute(names.STILL_OPEN, still_open)
        self._ended(task)

    def _ended(self, agent: _Agent) -> None:
        agent.span.set_attributes({
            names.AGGREGATE_CALLS: agent.calls, names.AGGREGATE_INPUT: agent.input_tokens,
            names.AGGREGATE_OUTPUT: agent.output_tokens, names.AGGREGATE_COST_USD: float(agent.cost_usd),
        })  # fmt: skip
        agent.span.end(_ns(agent.last_ms))

    # -- facts

    def _event(self, fact: TaskFact) -> None:
        if fact.event != "finished":
            self._typed(self._task(fact.task, fact.at_ms), fact.task_type)
        elif fact.task in self._open:
            task = self._open[fact.task]
            self._typed(task, fact.task_type)
            task.last_ms = max(fact.at_ms, task.last_ms)
            self._end(fact.task, still_open=False)

    def _outcome(self, fact: OutcomeFact) -> None:
        if fact.task in self._open:  # a span that has ended cannot be told any more
            task = self._open[fact.task]
            self._typed(task, fact.task_type)
            task.span.set_attribute(names.COMPLETED, fact.completed)

    def _typed(self, task: _Agent, task_type: str) -> None:
        if task_type:
            task.span.set_attribute(names.TASK_TYPE, names.sendable(task_type))

    def _child(
        self, agent: _Agent, name: str, times_ms: tuple[float, float], about: dict[str, Any], error: str
    ) -> None:
        begin_ms, end_ms = times_ms
        span = self._tracer.start_span(
            names.sendable(name),
            context=self._trace.set_span_in_context(agent.span),
            kind=self._trace.SpanKind.CLIENT
            if about[names.GEN_AI_OPERATION] == names.CHAT
            else self._trace.SpanKind.INTERNAL,
            start_time=_ns(begin_ms),
            attributes=_attributes(about),
        )
        if error:
            span.set_attribute(names.ERROR_TYPE, names.sendable(error))
            span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, names.sendable(error)))
        span.end(_ns(end_ms))
        for one in (agent, *agent.above):
            one.last_ms = max(one.last_ms, round(end_ms))

    def _chat(self, call: ModelCall) -> None:
        agent = self._agent(call.task, call.branch, call.at_ms)
        usage = call.usage
        about: dict[str, Any] = {
            names.GEN_AI_OPERATION: names.CHAT, names.GEN_AI_PROVIDER: self._provider,
            names.GEN_AI_CONVERSATION: call.task, names.GEN_AI_REQUEST_MODEL: call.model,
            names.GEN_AI_RESPONSE_MODEL: call.model, names.GEN_AI_AGENT: call.node, names.NODE: call.node,
            names.BRANCH: call.branch, names.SESSION: call.session, names.ATTEMPT: call.attempt,
            names.PURPOSE: call.purpose, names.ESTIMATED: call.estimated, names.SERVED_LOCALLY: call.served_locally,
            names.GEN_AI_TTFC: call.timing.ttft_s or None, names.STALL_S: call.timing.stall_s,
        }  # fmt: skip
        if not call.served_locally:
            about |= {
                names.GEN_AI_INPUT_TOKENS: usage.input_tokens, names.GEN_AI_OUTPUT_TOKENS: usage.output_tokens,
                names.GEN_AI_CACHE_READ_TOKENS: usage.cached_tokens,
                names.GEN_AI_CACHE_WRITE_TOKENS: usage.cache_write_tokens,
                names.GEN_AI_REASONING_TOKENS: usage.reasoning_tokens,
            }  # fmt: skip
            if call.cost_usd is not None:
                about |= {names.COST_USD: float(call.cost_usd), names.COST_USD_EXACT: f"{call.cost_usd:f}"}
            for one in (agent, *agent.above):
                one.calls += 1
                one.input_tokens += usage.input_tokens
                one.output_tokens += usage.output_tokens
                one.cost_usd += call.cost_usd or 0
        end_ms = call.at_ms + call.timing.total_s * 1000
        self._child(agent, f"{names.CHAT} {call.model}".rstrip(), (call.at_ms, end_ms), about, error_of(call))

    def _tool(self, tool: ToolCallFact) -> None:
        begin_ms = tool.at_ms - tool.actual_s * 1000
        about = {
            names.GEN_AI_OPERATION: names.EXECUTE_TOOL, names.GEN_AI_TOOL: tool.tool, names.GEN_AI_CONVERSATION: tool.task,
            names.COMMAND: tool.command, names.NODE: tool.node, names.BRANCH: tool.branch, names.SESSION: tool.session,
            names.ATTEMPT: tool.attempt, names.PREDICTED_P50_S: tool.predicted_p50_s,
        }  # fmt: skip
        error = "" if tool.status in ("succeeded", "paused") else tool.status
        agent = self._agent(tool.task, tool.branch, round(begin_ms))
        self._child(agent, f"{names.EXECUTE_TOOL} {tool.tool}".rstrip(), (begin_ms, tool.at_ms), about, error)


def _attributes(about: dict[str, Any]) -> dict[str, Any]:
    return {name: names.sendable(value) for name, value in about.items() if value not in ("", None)}


def _ns(at_ms: float) -> int:
    return max(0, round(at_ms * 1_000_000))
