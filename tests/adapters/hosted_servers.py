"""Scripted hosted providers: every request is checked against the schema that the provider's own package publishes.

A field that the schema does not know, a value of another type, too many marks or a long one behind a short one is a 400 in
the provider's words, and `refusals` says why.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping

from anthropic.types.message_create_params import MessageCreateParamsNonStreaming
from openai.types import completion_create_params as older
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming
from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming
from pydantic import TypeAdapter, ValidationError

from agentkv.adapters.strict import StrictServer

CHAT, COMPLETIONS, RESPONSES, MESSAGES = (
    (TypeAdapter(made), frozenset(typing.get_type_hints(made)))
    for made in (
        CompletionCreateParamsNonStreaming, older.CompletionCreateParamsNonStreaming, ResponseCreateParamsNonStreaming,
        MessageCreateParamsNonStreaming,
    )
)  # fmt: skip


class Hosted(StrictServer):
    """Both providers' routes. `asked` has the bodies, `refusals` why one was refused."""

    def __init__(self) -> None:
        super().__init__()
        self.refusals: list[str] = []
        self.routes = {
            "POST /v1/chat/completions": self._checked(CHAT, self._chat_answer),
            "POST /v1/completions": self._checked(COMPLETIONS, self._completions_answer),
            "POST /v1/responses": self._checked(RESPONSES, self._responses_answer),
            "POST /v1/messages": self._checked(MESSAGES, self._messages_answer),
        }
        self.cached = 0

    def bodies(self, path: str) -> list[Mapping]:
        """What was asked at this route."""
        return [asked.body for asked in self.asked if asked.path == path]

    def _checked(self, schema, answer):
        def route(body):
            why = problem(body, *schema)
            if why:
                self.refusals.append(why)
                return 400, {"type": "error", "error": {"type": "invalid_request_error", "message": why}}
            return 200, answer(body)

        return route

    def _chat_answer(self, body):
        message = {"role": "assistant", "content": "ok"}
        usage = {"prompt_tokens": 3000, "completion_tokens": 1, "total_tokens": 3001}
        usage |= {"prompt_tokens_details": {"cached_tokens": self.cached, "cache_write_tokens": 5}}
        return {
            "id": "c", "object": "chat.completion", "created": 0, "model": body["model"], "usage": usage,
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "service_tier": body.get("service_tier", "default"),
        }  # fmt: skip

    def _completions_answer(self, body):
        usage = {"prompt_tokens": 3000, "completion_tokens": 1, "total_tokens": 3001}
        usage |= {"prompt_tokens_details": {"cached_tokens": self.cached}}
        return {
            "id": "c", "object": "text_completion", "created": 0, "model": body["model"], "usage": usage,
            "choices": [{"index": 0, "text": "ok", "finish_reason": "stop", "logprobs": None}],
        }  # fmt: skip

    def _responses_answer(self, body):
        usage = {"input_tokens": 3000, "output_tokens": 1, "total_tokens": 3001}
        usage |= {
            "input_tokens_details": {"cached_tokens": self.cached},
            "output_tokens_details": {"reasoning_tokens": 0},
        }
        return {
            "id": "r", "object": "response", "created_at": 0, "model": body["model"], "status": "completed", "usage": usage,
            "output": [], "parallel_tool_calls": True, "tool_choice": "auto", "tools": [],
        }  # fmt: skip

    def _messages_answer(self, body):
        usage = {"input_tokens": 10, "output_tokens": int(body["max_tokens"] > 0)}
        usage |= {"cache_read_input_tokens": self.cached, "cache_creation_input_tokens": 20}
        return {
            "id": "m", "type": "message", "role": "assistant", "model": body["model"], "usage": usage,
            "content": [{"type": "text", "text": "ok"}], "stop_reason": "end_turn", "stop_sequence": None,
        }  # fmt: skip


def problem(body, adapter, names) -> str:
    """Why the provider would refuse this body; "" if it would not."""
    unknown = sorted(set(body) - names)
    if unknown:
        return f"{unknown[0]}: Extra inputs are not permitted"
    try:
        _read_through(adapter.validate_python(dict(body)))
    except ValidationError as error:
        return f"{error.errors()[0]['loc']}: {error.errors()[0]['msg']}"
    marks = _marks(body)
    if len(marks) > 4:
        return f"A maximum of 4 blocks with cache_control may be provided. Found {len(marks)}."
    if "1h" in marks and "5m" in marks[: len(marks) - marks[::-1].index("1h")]:
        return "a ttl='1h' cache_control block must not come after a ttl='5m' cache_control block"
    breakpoints = [part for part in _parts(body) if "prompt_cache_breakpoint" in part]
    if len(breakpoints) > 4:
        return "prompt_cache_breakpoint: at most 4 in a request"
    return ""


def _parts(value) -> Iterator[Mapping]:
    """Every object in the order of the prompt: tools, system, messages."""
    if isinstance(value, Mapping):
        yield value
        names = [*(name for name in ("tools", "system", "messages") if name in value)]
        for name in [*names, *(name for name in value if name not in names)]:
            yield from _parts(value[name])
    elif isinstance(value, list):
        for one in value:
            yield from _parts(one)


def _marks(body) -> list[str]:
    return [part["cache_control"].get("ttl", "5m") for part in _parts(body) if part.get("cache_control")]


def _read_through(value) -> None:
    """Iterables are checked only as they are read."""
    if isinstance(value, Mapping):
        for one in value.values():
            _read_through(one)
    elif isinstance(value, Iterator | list | tuple):
        for one in value:
            _read_through(one)
