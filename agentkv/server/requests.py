"""From the JSON body of an OpenAI call to our Request: what each field does, or why it is refused.

The policy: a field either has its effect, or is refused with 400 naming it. Fields that may be accepted without any
effect are few, never change an answer, and are listed in HARMLESS; the reply's header `x-agentkv-ignored` names those
that were sent. Messages and tools are read in `messages.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentkv.engine.base import Request, Sampling
from agentkv.errors import RequestInvalid
from agentkv.server.fields import Fields, refuse
from agentkv.server.messages import read_messages, read_tools

HARMLESS = frozenset({
    "metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier", "store", "user",
})  # fmt: skip
"""Book-keeping of the sender's account with a hosted service; our cache needs no key."""

STOP_LIMIT = 16
DEFAULT_TEMPERATURE = 1.0
"""OpenAI's own default: the same code gives the same kind of answer here and there."""
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's own default for /v1/completions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a call asks for: the request, and how the reply is to come."""

    request: Request
    stream: bool
    include_usage: bool
    ignored: tuple[str, ...]


def chat_request(body: Any, *, model: str) -> Asked:
    """Read the body of POST /v1/chat/completions. Raises RequestInvalid naming the field at fault."""
    fields = Fields(body)
    _check_model(fields, model)
    messages = read_messages(fields.items("messages"))
    tools = read_tools(fields.items("tools"))
    if _tool_choice(fields) == "none":
        tools = ()
    fields.only("parallel_tool_calls", True, why="the model decides how many calls it makes")
    fields.only("logprobs", False, why="log probabilities are not computed")
    fields.only("top_logprobs", 0, why="log probabilities are not computed")
    fields.only("response_format", {"type": "text"}, why="output is not constrained")
    fields.only("modalities", ["text"], why="this is a text model")
    sampling = _sampling(fields, default_max_tokens=None)
    return _asked(fields, Request(messages=messages, tools=tools, sampling=sampling))


def completion_request(body: Any, *, model: str) -> Asked:
    """Read the body of POST /v1/completions. Raises RequestInvalid naming the field at fault."""
    fields = Fields(body)
    _check_model(fields, model)
    prompt = fields.any("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str):
        refuse("prompt", "must be one text", code="invalid_type")
    fields.only("best_of", 1, why="one answer is computed for each call")
    fields.only("echo", False, why="the prompt is not repeated")
    fields.only("logprobs", 0, why="log probabilities are not computed")
    fields.only("suffix", "", why="the model cannot insert")
    sampling = _sampling(fields, default_max_tokens=DEFAULT_COMPLETION_TOKENS)
    return _asked(fields, Request(prompt=prompt, sampling=sampling))


def _check_model(fields: Fields, model: str) -> None:
    asked = fields.text("model")
    if asked != model:
        refuse("model", f"{asked!r:.100} is not served here; this is {model!r}", code="model_not_found")


def _tool_choice(fields: Fields) -> str:
    choice = fields.any("tool_choice", "auto")
    if choice in ("auto", "none"):
        return str(choice)
    return refuse("tool_choice", f"{choice!r:.100} is not supported: calls cannot be forced", code="unsupported_value")


def _sampling(fields: Fields, *, default_max_tokens: int | None) -> Sampling:
    fields.only("n", 1, why="one answer is computed for each call")
    fields.only("presence_penalty", 0, 0.0, why="tokens are not penalised")
    fields.only("frequency_penalty", 0, 0.0, why="tokens are not penalised")
    fields.only("logit_bias", {}, why="tokens are not biased")
    new_name, old_name = fields.any("max_completion_tokens"), fields.any("max_tokens")
    if new_name is not None and old_name is not None and new_name != old_name:
        refuse("max_tokens", f"is {old_name!r:.20} while max_completion_tokens is {new_name!r:.20}; give one of them")
    given: Mapping[str, Any] = {
        "max_tokens": next((limit for limit in (new_name, old_name) if limit is not None), default_max_tokens),
        "temperature": fields.any("temperature", DEFAULT_TEMPERATURE),
        "top_p": fields.any("top_p", 1.0),
        "seed": fields.any("seed"),
        "stop": _stop(fields.any("stop", [])),
    }
    try:
        return Sampling(**given)
    except RequestInvalid as error:
        if error.param != "max_tokens" or new_name is None:
            raise
        raise RequestInvalid(
            str(error).replace("max_tokens", "max_completion_tokens", 1), param="max_completion_tokens", code=error.code
        ) from error


def _stop(stop: Any) -> tuple[Any, ...]:
    marks = [stop] if isinstance(stop, str) else stop
    if not isinstance(marks, list):
        refuse("stop", "must be a text or a list of texts", code="invalid_type")
    if len(marks) > STOP_LIMIT:
        refuse("stop", f"holds {len(marks)} texts; at most {STOP_LIMIT} are allowed")
    return tuple(marks)


def _asked(fields: Fields, request: Request) -> Asked:
    stream = fields.flag("stream", default=False)
    options = fields.any("stream_options")
    include_usage = False
    if options is not None:
        if not stream:
            refuse("stream_options", "is only allowed with stream=true")
        inner = Fields(options, "stream_options")
        include_usage = inner.flag("include_usage", default=False)
        inner.only("include_obfuscation", False, why="chunks are sent as they are")
        inner.end()
    return Asked(request=request, stream=stream, include_usage=include_usage, ignored=fields.end(harmless=HARMLESS))
