"""Two scenarios for any OpenAI-compatible server, and the two servers that benchmarks/serve.py runs them against.

A main context that must survive its sub-agents: a long conversation hands out work to sub-agents whose contexts together
do not fit beside it; then it goes on. How much of it is computed again, and how long is the first token waited for?
Reuse after an abort in mid-thought: a long answer is hung up on; then it is sent back as far as it came, with a new word
of the user behind. How much is computed again, and how long did the server go on for nobody?
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
from serve_client import prompt

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

MODEL = "smollm2-135m"
MEMORY_TOKENS = 4096
BYTES_PER_TOKEN = 23_040
MAIN_WORDS, SUB_WORDS, SUBS = 900, 700, 4


@contextlib.contextmanager
def agentkv_server(*options: str) -> Iterator[str]:
    """`agentkv serve` in a process of its own; its address."""
    command = [sys.executable, "-m", "agentkv.cli", "serve", MODEL, "--port", "0", "--ledger", "memory", "--no-context"]
    command += ["--device-memory", str(MEMORY_TOKENS * BYTES_PER_TOKEN), *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"}, **pipes) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        if " is ready at " not in line:
            raise SystemExit(f"agentkv serve did not start: {line}")
        try:
            yield line.split(" is ready at ")[1].strip().removesuffix("/v1")
        finally:
            process.terminate()
            process.wait(60)


@contextlib.contextmanager
def llamacpp_server(*, ram_mib: int) -> Iterator[str]:
    """llama.cpp's server with as much KV in two slots; `ram_mib` of host memory for prompts that had to leave them."""
    import llamacpp

    with llamacpp.server(slots=2, tokens=MEMORY_TOKENS // 2, ram_mib=ram_mib) as url:
        yield url.removesuffix("/v1")


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def said(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def call(
    client: httpx2.Client, messages: list[dict[str, str]], *, tokens: int, task: str = "", stop_after: int = 0
) -> dict[str, Any]:
    """Stream an answer: text, seconds to the first piece, prompt tokens and those of them that were not computed."""
    body = {"model": MODEL, "messages": messages, "max_tokens": tokens, "temperature": 0, "stream": True}
    body |= {"stream_options": {"include_usage": True}}
    told: dict[str, Any] = {"text": "", "first_s": 0.0, "usage": {}, "timings": {}}
    began_s = time.monotonic()
    with client.stream(
        "POST", "/v1/chat/completions", json=body, headers={"x-agentkv-task": task or "main"}
    ) as response:
        assert response.status_code == 200, response.read()[:300]
        pieces = 0
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            told["usage"] = chunk.get("usage") or told["usage"]
            told["timings"] = chunk.get("timings") or told["timings"]
            piece = chunk["choices"][0]["delta"].get("content") if chunk.get("choices") else None
            if piece:
                told["first_s"] = told["first_s"] or time.monotonic() - began_s
                told["text"] += piece
                pieces += 1
                if stop_after and pieces >= stop_after:
                    break
    return told


def reused(told: dict[str, Any]) -> int:
    """Prompt tokens that were not computed: as usage says it, or as llama.cpp's timings do."""
    details = told["usage"].get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens") or told["timings"].get("cache_n") or 0)


def sub_agents(client: httpx2.Client, *, rounds: int = 2) -> dict[str, float]:
    """The main context's share that was still there when it went on, the worst round, and the longest first token."""
    main = [user(prompt(1, MAIN_WORDS))]
    answer = call(client, main, tokens=8)
    shares, waits = [], []
    for round_number in range(rounds):
        held = answer["usage"]["prompt_tokens"]
        for number in range(SUBS):
            work = [user(prompt(100 * round_number + number + 10, SUB_WORDS))]
            call(client, work, tokens=8, task=f"sub-{round_number}-{number}")
        main = [*main, said(answer["text"]), user(f"Round {round_number} is done. Go on.")]
        answer = call(client, main, tokens=8)
        shares.append(min(1.0, reused(answer) / held))
        waits.append(answer["first_s"])
    return {"kept_share": min(shares), "first_token_s": max(waits), "main_tokens": answer["usage"]["prompt_tokens"]}


def aborted_thought(client: httpx2.Client) -> dict[str, float]:
    """What is reused of prompt and half answer, and how soon another call is served after the hang-up."""
    ask = [user(prompt(2, 300) + " Tell a long story about it.")]
    half = call(client, ask, tokens=600, task="thought", stop_after=60)
    began_s = time.monotonic()
    call(client, [user("Hi.")], tokens=1, task="other")
    free_s = time.monotonic() - began_s
    again = call(client, [*ask, said(half["text"]), user("Stop. Shorter.")], tokens=8, task="thought")
    prompt_tokens = again["usage"]["prompt_tokens"]
    return {"reused_share": reused(again) / prompt_tokens, "next_call_s": free_s, "prompt_tokens": prompt_tokens}


def scenarios(url: str) -> dict[str, dict[str, float]]:
    """Both, against the server at `url`."""
    alone = httpx2.Limits(max_keepalive_connections=0)
    with httpx2.Client(base_url=url, timeout=600, trust_env=False, limits=alone) as client:
        call(client, [user("Hello.")], tokens=2, task="warm-up")
        return {"sub_agents": sub_agents(client), "aborted_thought": aborted_thought(client)}
