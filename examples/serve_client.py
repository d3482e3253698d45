"""A client of `agentkv serve`: a chat, a stream, a response that goes on, and a wait that is told.

agentkv serve smollm2-135m                                     # in another terminal
python examples/serve_client.py http://127.0.0.1:8000
python examples/serve_client.py --scripted                     # a server of its own, without a model
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator

import httpx
from openai import OpenAI


@contextlib.contextmanager
def server() -> Iterator[str]:
    """The address given, or that of a scripted server on a thread."""
    if "--scripted" not in sys.argv:
        yield sys.argv[1]
        return
    from agentkv import AgentKV, ScriptedEngine
    from agentkv.runtime.serving import Served
    from agentkv.server.admission import Life
    from agentkv.server.http import HttpServer, bind

    life = Life()
    with AgentKV.with_engine(ScriptedEngine(["A cache keeps what was computed.", "It saves time.", "Yes."])) as kv:
        served = Served(kv, life=life)
        with HttpServer(served.app, bind("127.0.0.1", 0, guarded=False), life=life) as running:
            yield running.url
        served.close()


def hint(kind: str, number: int) -> dict[str, object]:
    """What is told of a tool: that it runs and about how long it takes, or that it has ended."""
    now_ms = time.time_ns() // 1_000_000
    told: dict[str, object] = {"v": "agentkv.hint/1", "id": f"hint-{number}", "kind": kind, "ts_ms": now_ms}
    told |= {"session": "example", "call": {"id": "call-1", "tool": "pytest"}}
    if kind == "tool_start":
        told["wait"] = {"p10_ms": 3000, "p50_ms": 12_000, "p90_ms": 40_000, "source": "declared"}
    return told


def main() -> None:
    key = os.environ.get("AGENTKV_API_KEY", "none")
    headers = {"x-agentkv-task": "example"}  # calls of one task share budget, bill and KV
    with server() as url, OpenAI(base_url=f"{url}/v1", api_key=key, default_headers=headers) as client:
        model = client.models.list().data[0].id
        ask = [{"role": "user", "content": "What is a KV cache?"}]
        stream = client.chat.completions.create(
            model=model, messages=ask, max_tokens=30, stream=True, stream_options={"include_usage": True}
        )
        for chunk in stream:
            print(
                chunk.choices[0].delta.content or "" if chunk.choices else f"\n{chunk.usage.total_tokens} tokens",
                end="",
            )
        print()

        first = client.responses.create(model=model, input="What is it good for?", max_output_tokens=30)
        second = client.responses.create(
            model=model, input="Are you sure?", previous_response_id=first.id, max_output_tokens=30
        )
        cached = second.usage.input_tokens_details.cached_tokens if second.usage else 0
        print(f"{first.output_text}\n{second.output_text}  ({cached} tokens were not computed again)")

        with httpx.Client(base_url=url, headers={"authorization": f"Bearer {key}"}) as plain:
            for number, kind in enumerate(("tool_start", "tool_end")):
                told = plain.post("/v1/agentkv/hints", json=hint(kind, number)).json()
                print(kind, told["receipts"][0]["outcome"])


if __name__ == "__main__":
    main()
