"""What the SDK itself costs: a decorated node, a tool scope, an agent's middleware beside tracing (`overhead_host.py`),
and the way from a tool's start to the first copied byte.

The dispatch part runs on real weights while the engine decodes for other sessions.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from common import a_over_a, arguments, emit, interleaved, median, quantile, say
from overhead_host import dead_sink, middleware, nodes

from agentkv import AgentKV, Request, Sampling, ScriptedEngine
from agentkv.core.residency import Receipt
from agentkv.policy import ladder


def per_call_us(fn: Callable[[], object], calls: int) -> float:
    started = time.perf_counter()
    for _ in range(calls):
        fn()
    return (time.perf_counter() - started) / calls * 1e6


def scopes(repeats: int) -> dict[str, float]:
    """Node and tool overhead against the bare function, engine idle: the fastest round, which is what the code costs, and
    the median, which is that and what else the machine does.
    """
    with AgentKV.with_engine(ScriptedEngine(["done"]), ledger="memory") as kv:

        def bare(state: dict[str, int]) -> dict[str, int]:
            return state

        decorated = kv.node(bare)
        state = {"n": 1}

        def tool() -> None:
            with kv.tool("pytest", args={"cmd": "pytest -q tests"}):
                bare(state)

        with kv.task("bench", final=False):
            kv.submit(Request(prompt="hello")).result(10)
            sides = interleaved(
                {
                    "bare": lambda: per_call_us(lambda: bare(state), 2000),
                    "node": lambda: per_call_us(lambda: decorated(state), 2000),
                    "tool": lambda: per_call_us(tool, 500),
                },
                repeats,
            )
    return {
        "node_us": round(min(sides["node"]) - min(sides["bare"]), 2),
        "tool_us": round(min(sides["tool"]) - min(sides["bare"]), 2),
        "node_median_us": round(median(sides["node"]) - median(sides["bare"]), 2),
        "tool_median_us": round(median(sides["tool"]) - median(sides["bare"]), 2),
        "a_over_a": round(a_over_a(sides["tool"]), 3),
    }


def dispatch(calls: int, context_tokens: int) -> dict[str, float]:
    """Tool starts while two other sessions decode: time to the submission and to the first byte of the first copy."""
    receipts: list[Receipt] = []
    with AgentKV.local(
        device_memory="512MiB",
        host_memory="1GiB",
        policy=ladder(keep_s=0.5, host_s=60, drop_tokens=256),
        ledger="memory",
    ) as kv:
        stop = threading.Event()

        def decode_for_others(name: str) -> None:
            while not stop.is_set():
                with kv.task(name, final=True):
                    request = Request(prompt=f"{name} counts: one, two,", sampling=Sampling(max_tokens=200))
                    for _ in kv.submit(request):
                        if stop.is_set():
                            break

        others = [threading.Thread(target=decode_for_others, args=(f"other-{i}",)) for i in range(2)]
        for thread in others:
            thread.start()
        kv.on_receipt(receipts.append)
        submitted, first_byte = [], []
        words = "the agent reads the log and finds the failing test again "
        try:
            for number in range(calls):
                with kv.task(f"bench-{number}"):
                    prompt = f"call {number}: " + words * (context_tokens // 11)
                    kv.submit(Request(prompt=prompt, sampling=Sampling(max_tokens=2))).result(120)
                    receipts.clear()
                    started_s = time.monotonic()
                    with kv.tool("pytest", expect_s=5.0):
                        deadline = time.monotonic() + 5
                        while not receipts and time.monotonic() < deadline:
                            time.sleep(0.002)
                    if receipts and receipts[0].blocks:
                        submitted.append((receipts[0].submitted_s - started_s) * 1e3)
                        first_byte.append((receipts[0].first_byte_s - started_s) * 1e3)
        finally:
            stop.set()
            for thread in others:
                thread.join()
    return {
        "dispatch_p50_ms": round(median(submitted), 3),
        "dispatch_p99_ms": round(quantile(submitted, 0.99), 3),
        "first_byte_p50_ms": round(median(first_byte), 3),
        "first_byte_p99_ms": round(quantile(first_byte, 0.99), 3),
        "dispatch_calls": len(submitted),
    }


def main() -> None:
    args = arguments(
        __doc__ or "", repeats=(int, 15, "rounds"), calls=(int, 100, "tool starts"), context=(int, 400, "tokens")
    )
    say(args, "node and tool scopes ...")
    result = scopes(args.repeats)
    say(args, "nodes, an agent's middleware beside tracing, hints that nobody takes ...")
    result |= {**nodes(args.repeats), **middleware(args.repeats), **dead_sink(args.repeats)}
    say(args, "dispatch while others decode ...")
    emit(args, {**result, **dispatch(args.calls, args.context)})


if __name__ == "__main__":
    main()
