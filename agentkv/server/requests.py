"""From the JSON body of a chat or a completion to our Request: what each field does, or why it is refused.

The policy: a field either has its effect, or is refused with 400 naming it; what an engine cannot do, it refuses itself.
Fields that may be accepted without any effect are few, never change an answer, and are listed in HARMLESS; the reply's
header `x-agentkv-ignored` names those that were sent. `passes_on`: the engine is a server elsewhere, and what is not read
here goes there as it is (`engine/extras.py`), those fields too. Messages and tools are read in `messages.py`, what all endpoints
share in `sampled.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from agentkv.engine.extras import SAID_OTHERWISE
from agentkv.engine.request import Request
from agentkv.hints.wire import WireHint, read_envelope
from agentkv.server.fields import Fields, refuse
from agentkv.server.messages import read_messages, read_tools
from agentkv.server.sampled import (
    HARMLESS,
    read_chat_logprobs,
    read_format,
    read_n,
    read_sampling,
    read_tool_choice,
)

_TOKENCAKE = frozenset({
    "agent_type", "importance", "offload_eligible", "reusable_prefix", "agent_id", "graph_id", "node_id",
})  # fmt: skip
LONGEST_LIFECYCLE = 256
MOST_HINTS = 64
LIMITS = ("max_completion_tokens", "max_tokens")
"""Both names of the most tokens, the newer one first."""
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's own default for /v1/completions."""
MOST_COMPLETION_LOGPROBS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a call asks for: the request, and how the reply is to come."""

    request: Request
    stream: bool
    include_usage: bool
    ignored: tuple[str, ...]
    echo: str = ""
    """The prompt, where it is to stand before each choice's text."""
    lifecycle: str | None = None
    """TokenCake's name for this call, by which its events will speak of it."""
    hints: tuple[WireHint, ...] = ()
    """What its `kv_hints` say; taken before the call begins."""


def chat_request(body: Any, *, model: str, passes_on: bool = False) -> Asked:
    """Read the body of POST /v1/chat/completions. Raises RequestInvalid naming the field at fault."""
    fields = Fields(body)
    check_model(fields, model)
    messages = read_messages(fields.items("messages"))
    tools = read_tools(fields.items("tools"))
    choice = read_tool_choice(fields, tools, flat=False)
    fields.only("modalities", ["text"], why="this is a text model")
    goes_on = _goes_on(fields)
    lifecycle = _named_lifecycle(fields) if passes_on else _lifecycle(fields)
    request = Request(
        messages=messages,
        tools=() if choice.mode == "none" else tools,
        tool_choice=choice,
        sampling=read_sampling(fields, limits=LIMITS),
        n=read_n(fields),
        logprobs=read_chat_logprobs(fields),
        response_format=read_format(fields.any("response_format"), "response_format"),
        reasoning_effort=fields.any("reasoning_effort"),
        chat_template_kwargs=fields.any("chat_template_kwargs", {}),
        continue_final_message=goes_on,
        as_is=goes_on,  # a note behind the last message would stand in the middle of the answer
    )
    return _asked(fields, request, lifecycle=lifecycle, passes_on=passes_on)


def _goes_on(fields: Fields) -> bool:
    goes_on = fields.flag("continue_final_message", default=False)
    if fields.flag("add_generation_prompt", default=not goes_on) == goes_on:
        refuse("add_generation_prompt", "must be false with continue_final_message, and true without it")
    return goes_on


def _lifecycle(fields: Fields) -> str | None:
    """What TokenCake's clients send with a call: its lifecycle; what else they tell of it is not used here."""
    extra = fields.any("vllm_xargs")
    if extra is None:
        return None
    outer = Fields(extra, "vllm_xargs")
    inner = Fields(outer.any("tokencake"), "vllm_xargs.tokencake")
    lifecycle = inner.text("lifecycle_id")
    outer.end()
    inner.end(harmless=_TOKENCAKE)
    return lifecycle[:LONGEST_LIFECYCLE]


def _named_lifecycle(fields: Fields) -> str | None:
    """The same, where all that is told in these arguments is for the server elsewhere."""
    extra = fields.seen("vllm_xargs")
    inner = extra.get("tokencake") if isinstance(extra, dict) else None
    lifecycle = inner.get("lifecycle_id") if isinstance(inner, dict) else None
    return lifecycle[:LONGEST_LIFECYCLE] if isinstance(lifecycle, str) and lifecycle else None


def completion_request(body: Any, *, model: str, passes_on: bool = False) -> Asked:
    """Read the body of POST /v1/completions. Raises RequestInvalid naming the field at fault."""
    fields = Fields(body)
    check_model(fields, model)
    prompt = fields.any("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str):
        refuse("prompt", "must be one text", code="invalid_type")
    fields.only("best_of", 1, why="every answer that is computed is told")
    fields.only("suffix", "", why="the model cannot insert")
    logprobs = _completion_logprobs(fields)
    echo = fields.flag("echo", default=False)
    if echo and logprobs is not None:
        refuse("echo", "is not supported with logprobs: those of the prompt are not computed", code="unsupported_value")
    sampling = read_sampling(fields, limits=LIMITS, default_max_tokens=DEFAULT_COMPLETION_TOKENS)
    request = Request(prompt=prompt, sampling=sampling, n=read_n(fields), logprobs=logprobs)
    return _asked(fields, request, echo=prompt if echo else "", passes_on=passes_on)


def _completion_logprobs(fields: Fields) -> int | None:
    top = fields.any("logprobs")
    if top is not None and (
        isinstance(top, bool) or not isinstance(top, int) or not 0 <= top <= MOST_COMPLETION_LOGPROBS
    ):
        refuse("logprobs", f"is {top!r:.40}; give an integer from 0 to {MOST_COMPLETION_LOGPROBS}")
    return None if top is None else int(top)


def check_model(fields: Fields, model: str) -> None:
    """Refuse a call for another model than `model`."""
    asked = fields.text("model")
    if asked != model:
        refuse("model", f"{asked!r:.100} is not served here; this is {model!r}", code="model_not_found")


def _asked(fields: Fields, request: Request, *, echo: str = "", lifecycle: str | None = None, passes_on: bool) -> Asked:
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
    hints = read_kv_hints(fields)
    request = passing_on(fields, request) if passes_on else request
    ignored = fields.end(harmless=HARMLESS)
    return Asked(
        request=request,
        stream=stream,
        include_usage=include_usage,
        ignored=ignored,
        echo=echo,
        lifecycle=lifecycle,
        hints=hints,
    )


def passing_on(fields: Fields, request: Request) -> Request:
    """The request with what nobody here has read, for the server elsewhere."""
    rest = fields.passed_on(known=SAID_OTHERWISE)
    return replace(request, extra_body=rest) if rest else request


def read_kv_hints(fields: Fields) -> tuple[WireHint, ...]:
    """Our hints in the envelope that vLLM's classes of this name read; actions of others are left to others."""
    envelope = fields.any("kv_hints")
    if envelope is None:
        return ()
    actions = envelope.get("actions") if isinstance(envelope, dict) else None
    if not isinstance(actions, list) or len(actions) > MOST_HINTS:
        refuse("kv_hints", f"is an object with a list of at most {MOST_HINTS} actions", code="invalid_type")
    return tuple(read_envelope(envelope))
