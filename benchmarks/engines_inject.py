"""What added fields, headers and marks cost a request: asking what it is to carry, and making the request that carries it.

`inject_us`: the dearest of the engines that people run themselves, in the median, for one turn of an agent (20 kB of tools and
messages). `inject_us_NAME`: one engine's; `inject_us_per_kb_NAME`: what each further kB costs, from a context ten times as
long. Nothing is sent: the first request finds out what its server is, and is not counted.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import time
from types import SimpleNamespace
from typing import Any

import openai
from common import say

from agentkv import AgentKV, ScriptedEngine
from agentkv.adapters.strict import StrictServer

BODY_BYTES, LONG_BYTES = 20_000, 200_000
_ROUNDS, _REQUESTS = 7, 100
"""Interleaved: what else the machine does for a moment is felt by one round, not by one engine."""
_OWN = ("llamacpp", "vllm", "dynamo")
_MODELS = {"openai": "gpt-5.6", "openai_older": "gpt-4.1", "anthropic": "claude-haiku-4-5"}
_TOOLS = [
    {
        "name": f"tool_{number}",
        "description": "Reads a file, or a part of it, from the working tree. " * 3,
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}, "lines": {"type": "integer"}}},
    }
    for number in range(8)
]


def injection(args: Any) -> dict[str, object]:
    """Microseconds for each engine's adapter, as its requests go through `kv.http_client()`."""
    llama = {
        "GET /props": lambda _: (200, {"total_slots": 2}),
        "GET /slots": lambda _: (200, [{"id": 0}, {"id": 1}]),
    }
    result: dict[str, object] = {}
    with (
        StrictServer(routes=llama) as llamacpp,
        StrictServer(dialect="vllm") as vllm,
        StrictServer(dialect="dynamo") as dynamo,
        AgentKV.with_engine(ScriptedEngine(["ok"]), ledger="memory") as kv,
    ):
        own = {"llamacpp": llamacpp.url, "vllm": vllm.url, "dynamo": dynamo.url}
        hosted = dict.fromkeys(_MODELS, "https://api.openai.com/v1") | {"anthropic": "https://api.anthropic.com/v1"}
        sides = [(name, url, size) for name, url in (own | hosted).items() for size in (BODY_BYTES, LONG_BYTES)]
        rounds = [[_median_us(kv, *side) for side in sides] for _ in range(_ROUNDS)]
        us = {side[::2]: statistics.median(one) for side, one in zip(sides, zip(*rounds, strict=True), strict=True)}
        for name in own | hosted:
            short, long = us[name, BODY_BYTES], us[name, LONG_BYTES]
            result[f"inject_us_{name}"] = short
            result[f"inject_us_per_kb_{name}"] = 1000 * (long - short) / (LONG_BYTES - BODY_BYTES)
            say(args, f"injection, {name}: median {short:.0f} us for 20 kB, {long:.0f} us for 200 kB")
    return result | {"inject_us": max(result[f"inject_us_{name}"] for name in _OWN), "inject_body_bytes": BODY_BYTES}


def _median_us(kv: AgentKV, name: str, url: str, size: int) -> float:
    injector = kv._doors.ways().injector
    anthropic = name == "anthropic"
    content = _turn(_MODELS.get(name, "m"), size, anthropic=anthropic)
    path = "/messages" if anthropic else "/chat/completions"
    client = openai.DefaultHttpxClient()
    answer = SimpleNamespace(status_code=200)

    def once() -> float:
        request = client.build_request(
            "POST",
            url + path,
            content=content,
            headers={"content-type": "application/json", "authorization": "Bearer k"},
        )
        began_s = time.perf_counter()
        extra = injector.asked(request)
        flow = injector.flow(request, extra)
        told = next(flow)
        with contextlib.suppress(StopIteration):
            flow.send(answer)
        spent_s = time.perf_counter() - began_s
        assert told is not request, f"{name}: nothing was added"
        injector.ended(request, extra)
        return spent_s

    with kv.task(f"{name}-{size}", final=False):
        once()
        spent = [once() for _ in range(_REQUESTS)]
    client.close()
    return 1e6 * statistics.median(spent)


def _turn(model: str, size: int, *, anthropic: bool) -> bytes:
    """An agent's request as its client writes it: a system prompt, tools, and messages as long as it takes."""
    system = "You are a careful programmer. " * 40
    messages: list[dict[str, str]] = [] if anthropic else [{"role": "system", "content": system}]
    head: dict[str, Any] = {"max_tokens": 1000, "messages": messages, "model": model}
    tools: list[dict[str, Any]] = [{"type": "function", "function": tool} for tool in _TOOLS]
    if anthropic:
        head["system"] = system
        tools = [
            {"name": tool["name"], "description": tool["description"], "input_schema": tool["parameters"]}
            for tool in _TOOLS
        ]
    body = head | {"tools": tools}
    while (short := size - len(json.dumps(body))) > 0:
        role = ("user", "assistant")[len(messages) % 2]
        messages.append({"role": role, "content": ("def f(x):\n    return x + 1\n" * 60)[: max(1, short)]})
    return json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()
