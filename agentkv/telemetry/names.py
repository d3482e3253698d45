"""Names that other systems know us by. Those of the GenAI semantic conventions (1.39, in development) are GEN_AI_*.

When the conventions change, this file changes and nothing else.
"""

from __future__ import annotations

from typing import Any

GEN_AI_OPERATION = "gen_ai.operation.name"
GEN_AI_PROVIDER = "gen_ai.provider.name"
GEN_AI_CONVERSATION = "gen_ai.conversation.id"
GEN_AI_AGENT = "gen_ai.agent.name"
GEN_AI_REQUEST_MODEL = "gen_ai.request.model"
GEN_AI_RESPONSE_MODEL = "gen_ai.response.model"
GEN_AI_TTFC = "gen_ai.response.time_to_first_chunk"
GEN_AI_INPUT_TOKENS = "gen_ai.usage.input_tokens"
GEN_AI_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
GEN_AI_CACHE_READ_TOKENS = "gen_ai.usage.cache_read.input_tokens"
GEN_AI_CACHE_WRITE_TOKENS = "gen_ai.usage.cache_creation.input_tokens"
GEN_AI_REASONING_TOKENS = "gen_ai.usage.reasoning.output_tokens"
GEN_AI_TOOL = "gen_ai.tool.name"
GEN_AI_TOKEN_TYPE = "gen_ai.token.type"  # noqa: S105  a name, no password
ERROR_TYPE = "error.type"

CHAT, EXECUTE_TOOL, INVOKE_AGENT = "chat", "execute_tool", "invoke_agent"

TOKEN_USAGE = "gen_ai.client.token.usage"  # noqa: S105  likewise
OPERATION_DURATION = "gen_ai.client.operation.duration"
TIME_TO_FIRST_CHUNK = "gen_ai.client.operation.time_to_first_chunk"

# Buckets that the conventions ask for.
TOKEN_BUCKETS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576, 4194304, 16777216, 67108864)
SECONDS_BUCKETS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)

# Our own.
COST_USD = "agentkv.cost_usd"
"""A number, for sums on a dashboard."""
COST_USD_EXACT = "agentkv.cost_usd_exact"
"""The same as decimal text."""
NODE, BRANCH, SESSION, ATTEMPT = "agentkv.node", "agentkv.branch", "agentkv.session", "agentkv.attempt"
PURPOSE, ESTIMATED, SERVED_LOCALLY = "agentkv.purpose", "agentkv.estimated", "agentkv.served_locally"
STALL_S = "agentkv.stall_s"
COMMAND, PREDICTED_P50_S = "agentkv.tool.command", "agentkv.tool.predicted_p50_s"
AGGREGATE = "agentkv.aggregate"
"""True on a span that repeats what its chat spans hold: leave it out of sums."""
AGGREGATE_CALLS, AGGREGATE_INPUT = "agentkv.aggregate.calls", "agentkv.aggregate.input_tokens"
AGGREGATE_OUTPUT, AGGREGATE_COST_USD = "agentkv.aggregate.output_tokens", "agentkv.aggregate.cost_usd"
TASK_TYPE, COMPLETED, STILL_OPEN = "agentkv.task.type", "agentkv.task.completed", "agentkv.task.still_open"

METRIC_COST, METRIC_STALL, METRIC_MOVED = "agentkv.cost", "agentkv.stall", "agentkv.kv.moved"
TO, OUTCOME = "agentkv.to", "agentkv.outcome"

EVENTS = {
    "model_call": "agentkv_model_call",
    "tool_call": "agentkv_tool_call",
    "move": "agentkv_move",
    "context": "agentkv_context",
    "task": "agentkv_task",
    "agent_message": "agentkv_agent_message",
    "delivery": "agentkv_delivery",
    "outcome": "agentkv_outcome",
}
"""The log line of each kind of fact."""


def sendable(value: Any) -> Any:
    """A value for an exporter: a text that is no Unicode would take the whole batch of spans with it."""
    if not isinstance(value, str):
        return value
    try:
        value.encode()
    except UnicodeEncodeError:
        return value.encode("utf-8", "backslashreplace").decode()
    return value


OTHER = "other"
_MOST_CHARS = 80


class Known:
    """The first `most` names that were seen, so that a label cannot take ever new values; others are "other"."""

    def __init__(self, most: int = 100) -> None:
        self._most = most
        self._seen: dict[str, str] = {}

    def __call__(self, name: str) -> str:
        known = self._seen.get(name)
        if known is None:
            if len(self._seen) >= self._most:
                return OTHER
            known = self._seen[name] = "".join(c if c.isprintable() else "?" for c in name[:_MOST_CHARS]) or "unknown"
        return known
