"""The server under load: what HTTP costs, what goes wrong, what is left behind; and two scenarios beside llama.cpp's.

`http_overhead`: 32 streams at once through a socket, from a process of its own, beside 32 calls at once in this process,
on the same engine in alternating rounds: how much longer a token takes. Then 1,000 calls, 10 % hung up on and 5 %
malformed: `errors`, and `leaked_blocks`, `leaked_threads`, `leaked_fds` when all of it is over.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
from common import arguments, emit, interleaved, median, say
from serve_client import prompt
from serve_scenarios import MODEL, agentkv_server, llamacpp_server, scenarios

from agentkv import AgentKV, Message, Request, Sampling
from agentkv.runtime.serving import Served
from agentkv.server.admission import Life
from agentkv.server.http import HttpServer, bind

STREAMS, TOKENS = 32, 48


class Callers:
    """The process that calls."""

    def __init__(self, url: str) -> None:
        script = str(Path(__file__).with_name("serve_client.py"))
        self._process = subprocess.Popen(
            [sys.executable, script, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __call__(self, deed: str, **about: Any) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        print(json.dumps({"deed": deed, "model": MODEL, **about}), file=stdin, flush=True)
        result: dict[str, Any] = json.loads(stdout.readline())
        return result

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)
        assert self._process.stdout is not None
        self._process.stdout.close()


def in_process(kv: AgentKV, first: int) -> float:
    """Seconds a token of as many calls at once, read one after the other."""
    began_s = time.monotonic()
    calls = [
        kv.submit(
            Request(
                messages=(Message(role="user", content=prompt(first + number)),),
                sampling=Sampling(max_tokens=TOKENS),
            )
        )
        for number in range(STREAMS)
    ]
    tokens = 0
    for stream in calls:
        for _ in stream:
            pass
        tokens += stream.result().usage.output_tokens
    return (time.monotonic() - began_s) / tokens


def overhead(kv: AgentKV, callers: Callers, repeats: int, failed: list[str]) -> dict[str, float]:
    def through_http() -> float:
        told = callers("streams", count=STREAMS, tokens=TOKENS, first=0)
        failed.extend(told["failed"])
        return float(told["seconds"] / max(1, told["tokens"]))

    in_process(kv, 0), through_http()  # both warm, and every prompt known
    sides = interleaved({"inside": lambda: in_process(kv, 0), "http": through_http}, repeats)
    inside, http = median(sides["inside"]), median(sides["http"])
    return {"http_overhead": http / inside - 1, "inside_tokens_s": 1 / inside, "http_tokens_s": 1 / http}


def footprint() -> dict[str, int]:
    process = psutil.Process()
    return {"threads": threading.active_count(), "fds": process.num_fds()}


def settled(kv: AgentKV, life: Life) -> None:
    for _ in range(6000):
        stats = kv.engine.stats()
        if not (life.active or stats["running"] or stats["waiting"] or stats["loading"]):
            return
        time.sleep(0.05)


def storm(kv: AgentKV, callers: Callers, life: Life, calls: int, failed: list[str]) -> dict[str, Any]:
    """The figures of the storm, between two moments at which nothing is under way."""
    callers("storm", calls=100, at_once=32, cancelled=0.1, malformed=0.05, seed=1)
    settled(kv, life)
    before = footprint()
    told = callers("storm", calls=calls, at_once=32, cancelled=0.1, malformed=0.05, seed=2)
    settled(kv, life)
    time.sleep(1)
    after = footprint()
    failed.extend(told.pop("wrong"))
    kv.finish("unattributed")
    tiers = kv.engine.stats()["kv"]
    device, template = tiers["device"], tiers["template_blocks"]  # what all prompts begin with stays for the next task
    leaked = {f"leaked_{name}": max(0, after[name] - before[name]) for name in before}
    return {**told, **leaked, "leaked_blocks": device["used"] - template + device["pinned"]}


def beside_llamacpp(args: Any) -> dict[str, Any]:
    """Both scenarios against both servers; llama.cpp's without and with its prompt cache in host memory."""
    say(args, "scenarios: agentkv serve")
    with agentkv_server() as url:
        results: dict[str, Any] = {"agentkv": scenarios(url)}
    import llamacpp

    if not llamacpp.installed():
        return {**results, "left_out": {"llamacpp": "xllamacpp is not installed"}}
    for name, ram_mib in (("llamacpp", 0), ("llamacpp_ram", 8192)):
        say(args, f"scenarios: {name}")
        with llamacpp_server(ram_mib=ram_mib) as url:
            results[name] = scenarios(url)
    return results


def main() -> None:
    args = arguments(
        __doc__ or "",
        repeats=(int, 6, "rounds of each side"),
        calls=(int, 1000, "calls of the storm"),
        scenarios=(int, 1, "1: the two scenarios too"),
    )
    failed: list[str] = []
    with AgentKV.local(MODEL, device_memory="256MiB", ledger="memory", context=None) as kv:
        life = Life()
        served = Served(kv, life=life)
        with HttpServer(served.app, bind("127.0.0.1", 0, guarded=False), life=life) as server:
            callers = Callers(server.url)
            figures: dict[str, Any] = overhead(kv, callers, args.repeats, failed)
            say(args, f"overhead of a token: {figures['http_overhead']:.1%}")
            figures |= storm(kv, callers, life, args.calls, failed)
            callers.close()
        served.close()
    figures["errors"] = len(failed)
    for one in failed[:5]:
        say(args, one)
    if args.scenarios:
        figures["scenarios"] = beside_llamacpp(args)
        figures["kept_share"] = figures["scenarios"]["agentkv"]["sub_agents"]["kept_share"]
        figures["reused_share"] = figures["scenarios"]["agentkv"]["aborted_thought"]["reused_share"]
    emit(args, figures)


if __name__ == "__main__":
    main()
