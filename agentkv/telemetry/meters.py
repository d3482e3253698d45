"""OpenTelemetry's metrics, counted from facts: tokens, durations, money, stalls, bytes moved. No task, session or branch."""

from __future__ import annotations

from typing import Any

from agentkv.budget.facts import Fact, ModelCall, MoveFact, ToolCallFact
from agentkv.telemetry import names


class Meters:
    """Counts what it is told, on the instruments of `meter`."""

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
        """Add the fact, whose durations are numbers, to what it counts for."""
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
        error = error_of(call)
        self._seconds.record(call.timing.total_s, about | ({names.ERROR_TYPE: error} if error else {}))
        self._tokens.record(call.usage.input_tokens, about | {names.GEN_AI_TOKEN_TYPE: "input"})
        self._tokens.record(call.usage.output_tokens, about | {names.GEN_AI_TOKEN_TYPE: "output"})
        if call.timing.ttft_s:
            self._first.record(call.timing.ttft_s, about)
        if call.cost_usd:
            self._cost.add(float(call.cost_usd), about)
        self._stall.add(max(0.0, call.timing.stall_s), about)


def error_of(call: ModelCall) -> str:
    """What the conventions call the error's type; "" for a call that ended well."""
    return "" if call.status == "ok" else call.error or call.status
