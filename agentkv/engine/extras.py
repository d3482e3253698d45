"""Extras: what a request carries to a server elsewhere beyond what it says in its own fields.

Covers which body fields and headers may be passed on, how many bytes of them, and which of them also go with a request
that shares the prompt. Does not cover what the server makes of them, nor what we add ourselves (`adapters/`): where both
say something, the request's own counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from agentkv.errors import RequestInvalid

MOST_BODY_BYTES = 256 << 10
MOST_HEADER_BYTES = 16 << 10
SAID_OTHERWISE = frozenset({
    "model", "messages", "prompt", "stream", "stream_options", "n", "best_of", "use_beam_search", "temperature", "top_p",
    "seed", "stop", "logit_bias", "presence_penalty", "frequency_penalty", "logprobs", "top_logprobs", "tools",
    "tool_choice", "parallel_tool_calls", "functions", "function_call", "response_format", "reasoning_effort",
    "chat_template_kwargs", "modalities", "echo", "suffix", "continue_final_message", "add_generation_prompt", "kv_hints",
    "max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens", "n_predict", "num_predict",
})  # fmt: skip
"""Fields that a request has, or that would let it write more, or otherwise, than it says (and its budget holds)."""
_OF_THE_PROMPT = ("cache_salt", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user")
_NOT_PASSED = frozenset({
    "api-key", "authorization", "connection", "cookie", "date", "expect", "forwarded", "host", "keep-alive", "origin",
    "referer", "set-cookie", "te", "trailer", "transfer-encoding", "upgrade", "user-agent", "via", "x-api-key",
    "x-auth-token", "x-goog-api-key", "x-real-ip",
})  # fmt: skip
"""Of one connection, or of who may use it: the engine has its own."""
_NOT_PASSED_BEGINNINGS = ("accept", "content-", "proxy-", "sec-", "x-agentkv-", "x-forwarded-", "x-stainless-")
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(r"[\x20-\x7e\t]*")


def check_extras(body: Mapping[str, Any], headers: Mapping[str, str]) -> None:
    """Raise RequestInvalid for what is not passed on."""
    if body:
        _check_body(body)
    if headers:
        _check_headers(headers)


def _check_body(body: Mapping[str, Any]) -> None:
    if not isinstance(body, Mapping) or not all(isinstance(name, str) for name in body):
        _refuse("extra_body", "must be an object of JSON values")
    taken = sorted(SAID_OTHERWISE & body.keys())
    if taken:
        _refuse("extra_body", f"holds {taken[0]!r}, which a request says itself", param=taken[0])
    try:
        size = len(json.dumps(dict(body)))
    except (TypeError, ValueError, RecursionError):
        _refuse("extra_body", "must be an object of JSON values, not nested too deeply")
    if size > MOST_BODY_BYTES:
        _refuse(
            "extra_body", f"has {size} bytes ({', '.join(sorted(body))[:100]}); at most {MOST_BODY_BYTES} are passed on"
        )


def _check_headers(headers: Mapping[str, str]) -> None:
    if not isinstance(headers, Mapping):
        _refuse("extra_headers", "must be an object of texts")
    for name, value in headers.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name) or not isinstance(value, str):
            _refuse("extra_headers", f"has {name!r:.60}, which is no header")
        if not _VALUE.fullmatch(value):
            _refuse("extra_headers", f"has {name!r:.60} with what is not plain ASCII", param=name)
        if not passes(name):
            _refuse("extra_headers", f"has {name!r:.60}, which is the connection's own", param=name)
    size = sum(len(name) + len(value) + 4 for name, value in headers.items())
    if size > MOST_HEADER_BYTES:
        _refuse("extra_headers", f"have {size} bytes; at most {MOST_HEADER_BYTES} are passed on")


def _refuse(what: str, why: str, *, param: str | None = None) -> None:
    raise RequestInvalid(f"{what} {why}", param=param or what, code="invalid_value")


def passes(name: str) -> bool:
    """Whether a header of this name may be passed on."""
    low = name.lower()
    return low not in _NOT_PASSED and not low.startswith(_NOT_PASSED_BEGINNINGS)


def passed_headers(pairs: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Of a request's headers (as ASGI tells them) those that are passed on; of repeated ones all values."""
    said = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in pairs]
    hops = {one.strip().lower() for name, value in said if name == "connection" for one in value.split(",")}
    passed: dict[str, str] = {}
    for name, value in said:
        if passes(name) and name not in hops:
            passed[name] = f"{passed[name]}, {value}" if name in passed else value
    return passed


def of_the_prompt(body: Mapping[str, Any]) -> dict[str, Any]:
    """Those that belong to the prompt and to whoever pays, for a request that shares both: its cache is the same, no other's."""
    shared = {name: body[name] for name in _OF_THE_PROMPT if name in body}
    nvext = body.get("nvext")
    if isinstance(nvext, Mapping) and "cache_salt" in nvext:
        shared["nvext"] = {"cache_salt": nvext["cache_salt"]}
    return shared
