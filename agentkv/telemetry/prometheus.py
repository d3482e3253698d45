"""Prometheus: the text of a metrics endpoint, counted from facts. Needs the extra `prometheus`.

Labels are models, tools, tiers and kinds, each with a bounded number of values; never a task, a session or a branch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Self

from agentkv.budget.facts import ContextFact, Fact, ModelCall, MoveFact, OutcomeFact, TaskFact, ToolCallFact
from agentkv.budget.finite import finite
from agentkv.errors import ExtraMissing
from agentkv.telemetry.names import SECONDS_BUCKETS, Known
from agentkv.telemetry.source import Source

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_TOKENS = ("input", "cached", "output", "reasoning")


class Prometheus:
    """Counts a source's facts until `close()`. `text()` is what an endpoint answers.

    `stats` is an AgentKV's `stats`, asked at every scrape for what went wrong and for the room in each tier. `registry`
    is one of prometheus_client, for an application that has an endpoint of its own; by default a new one.
    """

    def __init__(
        self,
        source: Source,
        *,
        stats: Callable[[], dict[str, Any]] | None = None,
        registry: CollectorRegistry | None = None,
    ) -> None:
        try:
            import prometheus_client as prometheus
        except ImportError as error:
            raise ExtraMissing("this needs prometheus-client: pip install 'agentkv-sdk[prometheus]'") from error
        self.registry = prometheus.CollectorRegistry() if registry is None else registry
        self._generate = prometheus.generate_latest
        self._models, self._tools, self._types, self._causes = Known(), Known(), Known(), Known()

        made: list[Any] = []

        def counter(name: str, told: str, *labels: str) -> Any:
            made.append(prometheus.Counter(f"agentkv_{name}", told, labels, registry=self.registry))
            return made[-1]

        def seconds(name: str, told: str, *labels: str) -> Any:
            made.append(
                prometheus.Histogram(f"agentkv_{name}", told, labels, registry=self.registry, buckets=SECONDS_BUCKETS)
            )
            return made[-1]

        self._calls = counter("model_calls", "Attempts of model calls", "model", "status")
        self._tokens = counter("tokens", "Tokens; cached ones are part of input, reasoning of output", "model", "kind")
        self._cost = counter("cost_usd", "Money spent on calls whose price is known", "model")
        self._unpriced = counter("unpriced_calls", "Calls whose price nobody knows", "model")
        self._served = counter("served_locally", "Calls that a local response cache answered", "model")
        self._call_s = seconds("model_call_seconds", "From request to last token", "model")
        self._first_s = seconds("first_token_seconds", "From request to first token", "model")
        self._stall_s = counter("stall_seconds", "What calls waited for their own old context", "model")
        self._tool_s = seconds("tool_seconds", "How long tool calls took", "tool", "status")
        self._moves = counter("moves", "Moves of KV", "action", "to", "outcome")
        self._moved = counter("moved_bytes", "Bytes of KV moved", "to", "outcome")
        self._context = counter("context_events", "Slimmings, folds, recalls, broken prefixes", "event", "cause")
        self._tasks = counter("tasks", "Tasks that started or finished", "event")
        self._outcomes = counter("outcomes", "Outcomes of tasks", "task_type", "completed")
        self._stats = None if stats is None else _Stats(stats)
        if self._stats is not None:
            self.registry.register(self._stats)
            made.append(self._stats)
        self._shared = made if registry is not None else []
        self._tell: dict[type[Any], Callable[[Any], None]] = {
            ModelCall: self._call, ToolCallFact: self._tool, MoveFact: self._move, ContextFact: self._shaped,
            TaskFact: lambda fact: self._tasks.labels(fact.event).inc(), OutcomeFact: self._outcome,
        }  # fmt: skip
        self._stop = source.on_fact(self._hear)

    def text(self) -> str:
        """All metrics in Prometheus' text form; answer it with `CONTENT_TYPE`."""
        return bytes(self._generate(self.registry)).decode()

    def close(self) -> None:
        """Stop counting, and leave a registry of the application's, so that another one may take this place. Idempotent."""
        self._stop()
        leaving, self._shared = self._shared, []
        for collector in leaving:
            self.registry.unregister(collector)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _hear(self, fact: Fact) -> None:
        tell = self._tell.get(type(fact))
        if tell is not None:
            tell(finite(fact))

    def _call(self, call: ModelCall) -> None:
        model, usage = self._models(call.model), call.usage
        if call.served_locally:
            self._served.labels(model).inc()
            return
        self._calls.labels(model, call.status).inc()
        parts = (usage.input_tokens, usage.cached_tokens, usage.output_tokens, usage.reasoning_tokens)
        for kind, tokens in zip(_TOKENS, parts, strict=True):
            self._tokens.labels(model, kind).inc(tokens)
        if call.cost_usd is None:
            self._unpriced.labels(model).inc()
        else:
            self._cost.labels(model).inc(float(call.cost_usd))
        self._call_s.labels(model).observe(call.timing.total_s)
        if call.timing.ttft_s:
            self._first_s.labels(model).observe(call.timing.ttft_s)
        self._stall_s.labels(model).inc(max(0.0, call.timing.stall_s))

    def _tool(self, tool: ToolCallFact) -> None:
        self._tool_s.labels(self._tools(tool.tool), tool.status).observe(tool.actual_s)

    def _move(self, move: MoveFact) -> None:
        self._moves.labels(move.action, move.to, move.outcome).inc()
        self._moved.labels(move.to, move.outcome).inc(move.size_bytes)

    def _shaped(self, fact: ContextFact) -> None:
        cause = self._causes(fact.cause) if fact.event == "break" else ""
        self._context.labels(fact.event, cause).inc()

    def _outcome(self, fact: OutcomeFact) -> None:
        self._outcomes.labels(self._types(fact.task_type), "yes" if fact.completed else "no").inc()


class _Stats:
    """What `stats()` tells, read at every scrape: what went wrong, what is not saved yet, the blocks of each tier."""

    def __init__(self, stats: Callable[[], dict[str, Any]]) -> None:
        self._stats = stats

    def describe(self) -> Iterable[Any]:
        """Nothing: the registry need not ask before it is scraped."""
        return ()

    def collect(self) -> Iterable[Any]:
        """The metrics of this moment."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        stats = self._stats()
        events = CounterMetricFamily("agentkv_events", "Events of the log, by name", labels=["event"])
        for name, number in sorted(stats.get("counters", {}).items()):
            events.add_metric([name], number)
        blocks = GaugeMetricFamily("agentkv_blocks", "Blocks that each tier has", labels=["tier"])
        tiers = stats.get("engine", {}).get("kv", {})
        for tier in ("device", "host", "disk"):
            room = tiers.get(tier)
            if isinstance(room, dict) and isinstance(room.get("blocks"), int):
                blocks.add_metric([tier], room["blocks"])
        unsaved = GaugeMetricFamily("agentkv_ledger_unsaved", "Facts that are not in the ledger's database yet")
        unsaved.add_metric([], stats.get("ledger", {}).get("unsaved", 0))
        return [events, blocks, unsaved]
