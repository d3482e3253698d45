"""Foreign engines with and without our hints: one section for each, and what hints and added fields cost an agent.

The engines' sections are in `engines_*.py`: llama.cpp, vLLM with our plug-in, Dynamo (all of them the real ones), and hosted
caches by the price list. `dead_adapter_cost`: an agent's loop beside a server that hangs, against nobody to tell.
`inject_us`: added fields and headers (`engines_inject.py`). A section whose engine is not installed is left out, with the reason under
`left_out`; `run.py` counts a bar whose figure is missing as short.
"""

from __future__ import annotations

import importlib
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from common import arguments, emit, interleaved, say
from engines_hosted import replay
from engines_inject import injection

from agentkv import AgentKV, Message, Request, ScriptedEngine
from agentkv.adapters.found import Found
from agentkv.clock import SystemClock
from agentkv.runtime.reach import Reach

ENGINES = {"llamacpp": "engines_llamacpp", "dynamo": "engines_dynamo", "vllm": "engines_vllm"}
"""Modules with a function of the section's name, and `missing()`, which says why it cannot run."""


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


def engine(name: str, args: Any) -> dict[str, object]:
    """The section of a real engine; why it is left out where that is not installed."""
    try:
        module = importlib.import_module(ENGINES[name])
    except ModuleNotFoundError as error:
        return {"left_out": {name: str(error)}}
    why = getattr(module, "missing", str)()
    if why:
        say(args, f"{name}: left out: {why}")
        return {"left_out": {name: why}}
    result: dict[str, object] = getattr(module, name)(args)
    return result


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
        only=(str, "", f"one section: hosted, inject, dead, {', '.join(ENGINES)}"),
        trace=(str, "", "recorded waits for the hosted caches, in a format of docs/traces.md; without: made-up ones"),
        steps=(int, 20, "calls and tools of the loop beside a dead server"),
        tool_ms=(float, 50.0, "how long each of its tools takes"),
        repeats=(int, 7, "rounds of it"),
    )
    sections: dict[str, Callable[[], dict[str, object]]] = {
        "hosted": lambda: replay(args.trace),
        "inject": lambda: injection(args),
        "dead": lambda: dead_adapter(args),
    }
    sections |= {name: partial(engine, name, args) for name in ENGINES}
    if args.only and args.only not in sections:
        raise SystemExit(f"there is no section {args.only!r}; there are {', '.join(sections)}")
    result: dict[str, object] = {}
    left_out: dict[str, object] = {}
    for name, section in sections.items():
        if args.only in ("", name):
            found = section()
            left_out |= found.pop("left_out", {})  # type: ignore[call-overload]
            result |= found
    if left_out:
        result["left_out"] = left_out
    emit(args, result)


if __name__ == "__main__":
    main()
