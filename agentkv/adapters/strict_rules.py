"""What StrictServer refuses in the manner of real engines, in their words: `refusal(dialect, ...)`.

Covers OpenAI's oldest field list, Dynamo 1.6.1 (strict `nvext`, ids of at most 256 bytes) and vLLM (unknown fields are
ignored; a priority is refused as 0.33 does unless it schedules by them, where 0.32 takes it and does nothing with it).
Measured on the servers themselves; values that no adapter of ours sends are not checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

Dialect = Literal["openai", "dynamo", "vllm"]
CHAT_FIELDS = frozenset(
    [
        "messages",
        "model",
        "stream",
        "stream_options",
        "temperature",
        "top_p",
        "max_tokens",
        "max_completion_tokens",
        "stop",
        "seed",
        "tools",
        "tool_choice",
        "n",
        "user",
        "presence_penalty",
        "frequency_penalty",
        "response_format",
        "parallel_tool_calls",
    ]
)
"""What the oldest OpenAI-compatible servers understand."""
NVEXT_FIELDS = frozenset(
    [
        "greed_sampling",
        "use_raw_prompt",
        "annotations",
        "backend_instance_id",
        "token_data",
        "max_thinking_tokens",
        "cache_salt",
        "extra_fields",
        "metadata_upload",
        "prefill_worker_id",
        "decode_worker_id",
        "dp_rank",
        "prefill_dp_rank",
        "agent_hints",
        "request_timestamp_ms",
        "routing_constraints",
        "router",
    ]
)
_I32, _U32 = (-(2**31), 2**31 - 1), (0, 2**32 - 1)
HINT_FIELDS = {"priority": _I32, "strict_priority": _U32, "osl": _U32, "speculative_prefill": None, "latency_sensitivity": None}  # fmt: skip
LONGEST_ID_BYTES = 256


def refusal(
    dialect: Dialect,
    body: Mapping[str, Any],
    headers: Mapping[str, str],
    *,
    accepts: frozenset[str],
    priorities: bool,
    names_fields: bool,
) -> Any:
    """The JSON answer to a chat request that this server does not take, None for one that it takes.

    `headers` in lower case. `priorities`: whether vLLM was started with priority scheduling.
    """
    if dialect == "dynamo":
        words = _dynamo(body, headers, accepts)
        return None if words is None else {"message": words, "type": "Bad Request", "code": 400}
    if dialect == "vllm":
        words = _vllm(body, priorities=priorities)
        return None if words is None else {"error": {"message": words, "type": "BadRequestError", "code": 400}}
    unknown = sorted(set(body) - accepts)
    if not unknown:
        return None
    names = ", ".join(unknown) if names_fields else "something"
    message = f"Unrecognized request argument supplied: {names}"
    return {"error": {"message": message, "type": "invalid_request_error"}}


def _dynamo(body: Mapping[str, Any], headers: Mapping[str, str], accepts: frozenset[str]) -> str | None:
    if len(headers.get("x-dynamo-session-id", "").encode()) > LONGEST_ID_BYTES:
        return "Invalid request"
    unknown = sorted(set(body) - accepts - {"nvext", "cache_salt"})
    if unknown:
        return f"Validation: Unsupported parameter(s): {', '.join(f'`{name}`' for name in unknown)}"
    if not body.get("messages"):
        return "Validation: The 'messages' field cannot be empty. At least one message is required."
    nvext = body.get("nvext")
    return None if nvext is None else _nvext(nvext)


def _nvext(nvext: Any) -> str | None:
    before = "Failed to deserialize the JSON body into the target type: "
    if not isinstance(nvext, Mapping):
        return f"{before}invalid type: expected struct NvExt"
    hints = nvext.get("agent_hints", {})
    for part, known in ((nvext, NVEXT_FIELDS), (hints, frozenset(HINT_FIELDS))):
        for name in part:
            if name not in known:
                return (
                    f"{before}unknown field `{name}`, expected one of {', '.join(f'`{one}`' for one in sorted(known))}"
                )
    for name, value in hints.items():
        bounds = HINT_FIELDS[name]
        good = isinstance(value, int) and not isinstance(value, bool) and bounds and bounds[0] <= value <= bounds[1]
        if bounds and not good:
            return f"{before}invalid value: `{value}`, expected {'i32' if bounds == _I32 else 'u32'}"
    if not isinstance(hints.get("speculative_prefill", False), bool):
        return f"{before}invalid type: expected a boolean"
    fields = nvext.get("extra_fields", [])
    if not isinstance(fields, list) or not all(isinstance(one, str) for one in fields):
        return f"{before}invalid type: expected a sequence of strings"
    return None if isinstance(nvext.get("cache_salt", ""), str) else f"{before}invalid type: expected a string"


def _vllm(body: Mapping[str, Any], *, priorities: bool) -> str | None:
    priority = body.get("priority", 0)
    if not isinstance(priority, int):
        return "1 validation error: priority: Input should be a valid integer"
    if priority and not priorities:
        return f"Got priority {priority} but Priority scheduling is not enabled."
    if not isinstance(body.get("kv_transfer_params") or {}, Mapping):
        return "1 validation error: kv_transfer_params: Input should be a valid dictionary"
    salt = body.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        return "Parameter 'cache_salt' must be a non-empty string if provided."
    return None
