"""OpenTelemetry: spans and metrics by the GenAI semantic conventions. Needs the extra `otel`.

A task is one `invoke_agent` span, each attempt of a model call a `chat` span below it, each tool call an
`execute_tool` span. The usage of the chat spans adds up to the bill; the agent span repeats the sums under names of
its own and is flagged (`agentkv.aggregate`), so that nothing is counted twice. Spans are made when a fact is known, with
the times that it tells. Metrics carry no task, session or branch.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Self

from agentkv.budget.facts import Fact, ModelCall, MoveFact, OutcomeFact, TaskFact, ToolCallFact
from agentkv.errors import ExtraMissing
from agentkv.telemetry import names
from agentkv.telemetry.source import Source

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import Span, TracerProvider

MAX_OPEN = 1024
"""Tasks whose span is open; beyond them the one that was silent longest ends its span, marked as still open."""


@dataclass(slots=True)
class _Task:
    span: Span
    last_ms: int
    calls: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cost_usd: Decimal = Decimal(0)


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
        self._meters = _Meters(metrics.get_meter("agentkv", meter_provider=meter_provider), provider)
        self._provider = provider
        self._open: OrderedDict[str, _Task] = OrderedDict()  # silent longest first
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
        self._meters.count(fact)
        tell = self._tell.get(type(fact))
        if tell is not None:
            with self._lock:
                tell(fact)

    def _task(self, key: str, at_ms: int) -> _Task:
        known = self._open.get(key)
        if known is None:
            span = self._tracer.start_span(
                names.INVOKE_AGENT,
                start_time=_ns(at_ms),
                attributes={
                    names.GEN_AI_OPERATION: names.INVOKE_AGENT, names.GEN_AI_PROVIDER: self._provider,
                    names.GEN_AI_CONVERSATION: key, names.AGGREGATE: True,
                },
            )  # fmt: skip
            known = self._open[key] = _Task(span, at_ms)
            while len(self._open) > MAX_OPEN:
                self._end(next(iter(self._open)), still_open=True)
        self._open.move_to_end(key)
        return known

    def _event(self, fact: TaskFact) -> None:
        if fact.event != "finished":
            self._task(fact.task, fact.at_ms)
        elif fact.task in self._open:
            self._open[fact.task].last_ms = max(fact.at_ms, self._open[fact.task].last_ms)
            self._end(fact.task, still_open=False)

    def _outcome(self, fact: OutcomeFact) -> None:
        if fact.task in self._open:  # a span that has ended cannot be told any more
            self._open[fact.task].span.set_attributes(
                {names.TASK_TYPE: fact.task_type, names.COMPLETED: fact.completed}
            )

    def _end(self, key: str, *, still_open: bool) -> None:
        task = self._open.pop(key)
        task.span.set_attributes({
            names.AGGREGATE_CALLS: task.calls, names.AGGREGATE_INPUT: task.input_tokens,
            names.AGGREGATE_OUTPUT: task.output_tokens, names.AGGREGATE_COST_USD: float(task.cost_usd),
            names.STILL_OPEN: still_open,
        })  # fmt: skip
        task.span.end(_ns(task.last_ms))

    def _child(self, task: _Task, name: str, times_ms: tuple[float, float], about: dict[str, Any], error: str) -> None:
        begin_ms, end_ms = times_ms
        span = self._tracer.start_span(
            name,
            context=self._trace.set_span_in_context(task.span),
            kind=self._trace.SpanKind.CLIENT
            if about[names.GEN_AI_OPERATION] == names.CHAT
            else self._trace.SpanKind.INTERNAL,
            start_time=_ns(begin_ms),
            attributes={name: value for name, value in about.items() if value not in ("", None)},
        )
        if error:
            span.set_attribute(names.ERROR_TYPE, error)
            span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, error))
        span.end(_ns(end_ms))
        task.last_ms = max(task.last_ms, round(end_ms))

    def _chat(self, call: ModelCall) -> None:
        task = self._task(call.task, call.at_ms)
        usage = call.usage
        about: dict[str, Any] = {
            names.GEN_AI_OPERATION: names.CHAT, names.GEN_AI_PROVIDER: self._provider,
            names.GEN_AI_CONVERSATION: call.task, names.GEN_AI_REQUEST_MODEL: call.model,
            names.GEN_AI_RESPONSE_MODEL: call.model, names.GEN_AI_AGENT: call.node, names.NODE: call.node,
            names.BRANCH: call.branch, names.SESSION: call.session, names.ATTEMPT: call.attempt,
            names.PURPOSE: call.purpose, names.ESTIMATED: call.estimated, names.SERVED_LOCALLY: call.served_locally,
            names.GEN_AI_TTFC: call.timing.ttft_s, names.STALL_S: call.timing.stall_s,
        }  # fmt: skip
        if not call.served_locally:
            about |= {
                names.GEN_AI_INPUT_TOKENS: usage.input_tokens, names.GEN_AI_OUTPUT_TOKENS: usage.output_tokens,
                names.GEN_AI_CACHE_READ_TOKENS: usage.cached_tokens,
                names.GEN_AI_CACHE_WRITE_TOKENS: usage.cache_write_tokens,
                names.GEN_AI_REASONING_TOKENS: usage.reasoning_tokens,
            }  # fmt: skip
            task.calls += 1
            task.input_tokens += usage.input_tokens
            task.output_tokens += usage.output_tokens
            if call.cost_usd is not None:
                about |= {names.COST_USD: float(call.cost_usd), names.COST_USD_EXACT: f"{call.cost_usd:f}"}
                task.cost_usd += call.cost_usd
        end_ms = call.at_ms + call.timing.total_s * 1000
        self._child(task, f"{names.CHAT} {call.model}".rstrip(), (call.at_ms, end_ms), about, _error_of(call))

    def _tool(self, tool: ToolCallFact) -> None:
        begin_ms = tool.at_ms - tool.actual_s * 1000
        about = {
            names.GEN_AI_OPERATION: names.EXECUTE_TOOL, names.GEN_AI_TOOL: tool.tool, names.GEN_AI_CONVERSATION: tool.task,
            names.COMMAND: tool.command, names.NODE: tool.node, names.SESSION: tool.session,
            names.PREDICTED_P50_S: tool.predicted_p50_s,
        }  # fmt: skip
        error = "" if tool.status in ("succeeded", "paused") else tool.status
        task = self._task(tool.task, round(begin_ms))
        self._child(task, f"{names.EXECUTE_TOOL} {tool.tool}".rstrip(), (begin_ms, tool.at_ms), about, error)


class _Meters:
    """The metrics: tokens, durations, money, stalls, bytes moved."""

    def __init__(self, meter: Any, provider: str) -> None:
        self._provider = provider
        self._models, self._tools = names.Known(), names.Known()
        self._tokens = meter.create_histogram(
            names.TOKEN_USAGE, unit="{token}", explicit_bucket_boundaries_advisory=names.TOKEN_BUCKETS
        )
        self._seconds = meter.create_histogram(
            names.OPERATION_DURATION, unit="s", explicit_bucket_boundaries_advisory=names.SECONDS_BUCKETS
        )
        self._first = meter.create_histogram(
            names.TIME_TO_FIRST_CHUNK, unit="s", explicit_bucket_boundaries_advisory=names.SECONDS_BUCKETS
        )
        self._cost = meter.create_counter(names.METRIC_COST, unit="USD")
        self._stall = meter.create_counter(names.METRIC_STALL, unit="s")
        self._moved = meter.create_counter(names.METRIC_MOVED, unit="By")

    def count(self, fact: Fact) -> None:
        if isinstance(fact, ModelCall):
            self._call(fact)
        elif isinstance(fact, ToolCallFact):
            about = {names.GEN_AI_OPERATION: names.EXECUTE_TOOL, names.GEN_AI_TOOL: self._tools(fact.tool)}
            failed = {} if fact.status in ("succeeded", "paused") else {names.ERROR_TYPE: fact.status}
            self._seconds.record(fact.actual_s, about | failed)
        elif isinstance(fact, MoveFact):
            self._moved.add(fact.size_bytes, {names.TO: fact.to, names.OUTCOME: fact.outcome})

    def _call(self, call: ModelCall) -> None:
        model = self._models(call.model)
        about = {
            names.GEN_AI_OPERATION: names.CHAT, names.GEN_AI_PROVIDER: self._provider, names.GEN_AI_REQUEST_MODEL: model,
        }  # fmt: skip
        if call.served_locally:
            return
        error = _error_of(call)
        self._seconds.record(call.timing.total_s, about | ({names.ERROR_TYPE: error} if error else {}))
        self._tokens.record(call.usage.input_tokens, about | {names.GEN_AI_TOKEN_TYPE: "input"})
        self._tokens.record(call.usage.output_tokens, about | {names.GEN_AI_TOKEN_TYPE: "output"})
        if call.timing.ttft_s:
            self._first.record(call.timing.ttft_s, about)
        if call.cost_usd:
            self._cost.add(float(call.cost_usd), about)
        self._stall.add(max(0.0, call.timing.stall_s), about)


def _error_of(call: ModelCall) -> str:
    return "" if call.status == "ok" else call.error or call.status


def _ns(at_ms: float) -> int:
    return max(0, round(at_ms * 1_000_000))
