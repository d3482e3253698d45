"""Foreign engines with and without our hints. So far: llama.cpp (the real one), hosted caches by the price list, and what
hints and added fields cost an agent.

llama.cpp: 3 agents share 2 slots; each computes its context, waits for a tool, and calls again. Waits are scaled down (2-4 s
for 5-20 s): a save and a restore take some tens of milliseconds, so only the order counts. Model calls go one at a time, so
that a time to first token is the call's own and greedy text can be compared: a batch shared with others changes low bits
with or without hints. `llamacpp_ttft_ratio` is against the same server without hints, whose slots are all that it has;
`llamacpp_ttft_ratio_ram` against one with its own cache in main memory (`--cache-ram`, its default), which does much of
the same without being told. `dead_adapter_cost`: an agent's loop beside a server that hangs, against nobody to tell.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import socket
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import openai
from common import arguments, emit, interleaved, median, say
from engines_hosted import replay
from llamacpp import server

from agentkv import AgentKV, Message, Request, Sampling, ScriptedEngine
from agentkv.adapters.base import Outcome
from agentkv.adapters.found import Found
from agentkv.adapters.inject import Extra, Injector
from agentkv.adapters.llamacpp import LlamaCpp
from agentkv.clock import SystemClock
from agentkv.runtime.reach import Reach
from agentkv.runtime.routes import Route

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
    with AgentKV.remote(base_url=url, model="m", ledger="memory", context=None) as kv:
        kv._doors.ways().close()
        kv.engine.routing = None
        adapter = LlamaCpp(url, clock=SystemClock())
        reach = Reach(adapter, clock=SystemClock())
        if hints:
            kv.engine.routing = Route(adapter)
            kv.subscribe(reach.tell)

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
        reach.close()
        for receipt in reach.receipts():
            if receipt.outcome is Outcome.FAILED:
                print(receipt, file=sys.stderr)
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


def llamacpp(args) -> dict[str, object]:
    """The whole section."""
    if importlib.util.find_spec("xllamacpp") is None:
        raise SystemExit("llama.cpp's server is missing: pip install xllamacpp")
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


def dead_adapter(args) -> dict[str, object]:
    """The cost of a server that takes connections and never answers, as a share of a loop of calls and tools."""
    hanging = socket.socket()
    hanging.bind(("127.0.0.1", 0))
    hanging.listen(64)

    def loop(url: str | None) -> float:
        with AgentKV.with_engine(ScriptedEngine(["ok"] * 400), ledger="memory") as kv:
            reach = None
            if url is not None:
                reach = Reach(Found(url, clock=SystemClock()), clock=SystemClock())
                kv.subscribe(reach.tell)
            began_s = time.perf_counter()
            with kv.task("t"):
                for _ in range(args.steps):
                    kv.submit(Request(messages=(Message(role="user", content="hi"),))).result(5)
                    with kv.tool("pytest"):
                        time.sleep(args.tool_ms / 1000)
            spent_s = time.perf_counter() - began_s
            if reach is not None:
                reach.close()
            return spent_s

    url = f"http://127.0.0.1:{hanging.getsockname()[1]}/v1"
    sides = interleaved({"nobody": lambda: loop(None), "dead": lambda: loop(url)}, args.repeats)
    hanging.close()
    best = {name: min(values) for name, values in sides.items()}
    return {"dead_adapter_cost": best["dead"] / best["nobody"] - 1, "dead_adapter_s": best}


def injection(args) -> dict[str, object]:
    """Microseconds that added fields and headers cost a request, at a context of about 25k tokens; the best of many."""
    messages = [{"role": "user", "content": "word " * 100} for _ in range(250)]
    content = json.dumps({"model": "m", "messages": messages}).encode()
    client = openai.DefaultHttpxClient()
    request = client.build_request(
        "POST", "http://x/v1/chat/completions", content=content, headers={"content-type": "application/json"}
    )
    injector = Injector()
    extra = Extra(body={"id_slot": 1, "cache_salt": "a"}, headers={"X-Session-ID": "run-7"})
    answer = SimpleNamespace(status_code=200)

    def once() -> float:
        began_s = time.perf_counter()
        flow = injector.flow(request, extra)
        next(flow)
        with contextlib.suppress(StopIteration):
            flow.send(answer)
        return time.perf_counter() - began_s

    spent = sorted(once() for _ in range(500))
    client.close()
    say(args, f"injection: median {spent[250] * 1e6:.0f} us, best {spent[0] * 1e6:.0f} us, {len(content)} bytes")
    return {"inject_us": spent[0] * 1e6, "inject_us_median": spent[250] * 1e6, "inject_body_bytes": len(content)}


def main() -> None:
    args = arguments(
        __doc__ or "",
        notes=(int, 120, "lines of each agent's context (13 tokens each)"),
        turns=(int, 3, "calls of each agent"),
        threads=(
            int,
            2,
            "threads of the server; one where others compute as well: its threads wait for each other in a loop",
        ),
        only=(str, "", "one section: hosted, inject, dead, llamacpp"),
        trace=(str, "", "recorded waits for the hosted caches, in a format of docs/traces.md; without: made-up ones"),
        steps=(int, 20, "calls and tools of the loop beside a dead server"),
        tool_ms=(float, 50.0, "how long each of its tools takes"),
        repeats=(int, 7, "rounds of it"),
    )
    sections = {
        "hosted": lambda: replay(args.trace),
        "inject": lambda: injection(args),
        "dead": lambda: dead_adapter(args),
        "llamacpp": lambda: llamacpp(args),
    }
    result: dict[str, object] = {}
    for name, section in sections.items():
        if args.only in ("", name):
            result |= section()
    emit(args, result)


if __name__ == "__main__":
    main()
