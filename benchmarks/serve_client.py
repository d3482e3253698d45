"""The callers of benchmarks/serve.py, in a process of their own: rounds of streams, and a storm of mixed calls.

Reads one JSON object a line ({"deed": "streams" | "storm", ...}) and answers each with one.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from typing import Any

import httpx2

WORDS = ("red", "blue", "green", "open", "close", "read", "write", "file", "test", "fail", "pass", "loop", "call")


def prompt(number: int, words: int = 24) -> str:
    """A prompt of its own for each number, the same in every run."""
    rng = random.Random(number)  # noqa: S311  no secret
    return f"{number}: " + " ".join(rng.choice(WORDS) for _ in range(words))


async def stream(client: httpx2.AsyncClient, body: dict[str, Any]) -> int:
    """One stream; how many tokens it had."""
    tokens = 0
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200, (await response.aread())[:300]
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                usage = json.loads(line[6:]).get("usage")
                tokens = usage["completion_tokens"] if usage else tokens
    return tokens


async def streams(client: httpx2.AsyncClient, *, model: str, count: int, tokens: int, first: int) -> dict[str, Any]:
    """`count` streams at once."""
    bodies = [
        {
            "model": model,
            "messages": [{"role": "user", "content": prompt(first + number)}],
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for number in range(count)
    ]
    began_s = time.monotonic()
    results = await asyncio.gather(*(stream(client, body) for body in bodies), return_exceptions=True)
    took_s = time.monotonic() - began_s
    failed = [repr(one) for one in results if isinstance(one, BaseException)]
    return {"seconds": took_s, "tokens": sum(one for one in results if isinstance(one, int)), "failed": failed}


async def storm(
    client: httpx2.AsyncClient, *, model: str, calls: int, at_once: int, cancelled: float, malformed: float, seed: int
) -> dict[str, Any]:
    """`calls` calls, some hung up on at a random moment, some malformed; what went wrong."""
    rng, gate = random.Random(seed), asyncio.Semaphore(at_once)  # noqa: S311  no secret
    plan = [(rng.random(), rng.uniform(0.001, 0.4), rng.random() < 0.5, rng.randrange(2, 12)) for _ in range(calls)]
    counts = {"answered": 0, "cancelled": 0, "refused": 0}
    wrong: list[str] = []

    async def one(number: int) -> None:
        kind, patience_s, streamed, tokens = plan[number]
        body = {"model": model, "messages": [{"role": "user", "content": prompt(number)}], "max_tokens": tokens}
        content = json.dumps({**body, "stream": streamed}).encode()
        bad = kind < malformed
        if bad:
            content = rng.choice([content[:-9], content.replace(b"max_tokens", b"max_tokenz"), b"\xff", b"[]", b""])
        async with gate:
            try:
                async with asyncio.timeout(patience_s if malformed <= kind < malformed + cancelled else 300):
                    async with client.stream("POST", "/v1/chat/completions", content=content) as response:
                        text = (await response.aread()).decode()
            except TimeoutError:
                counts["cancelled"] += 1
                return
        whole = "[DONE]" in text if streamed else '"finish_reason"' in text
        if bad and response.status_code == 400:
            counts["refused"] += 1
        elif not bad and response.status_code == 200 and whole:
            counts["answered"] += 1
        else:
            wrong.append(f"{number}: {response.status_code} {text[:200]}")

    results = await asyncio.gather(*(one(number) for number in range(calls)), return_exceptions=True)
    wrong += [repr(error) for error in results if error is not None]
    return {**counts, "wrong": wrong}


async def main(url: str) -> None:
    limits = httpx2.Limits(max_connections=64, max_keepalive_connections=64)
    while line := await asyncio.to_thread(sys.stdin.readline):
        deed = json.loads(line)
        work = {"streams": streams, "storm": storm}[deed.pop("deed")]
        async with httpx2.AsyncClient(base_url=url, timeout=600, limits=limits, trust_env=False) as client:
            result = await work(client, **deed)
        print(json.dumps(result), flush=True)  # every connection is closed


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
