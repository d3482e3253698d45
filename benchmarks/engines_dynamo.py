"""NVIDIA Dynamo with and without what we tell it: its frontend and router, and its mock engine with two workers.

`dynamo_rejected`: of 1,000 hinted requests through AgentKV, those that the frontend counts as invalid or that failed here;
`dynamo_identified` of them stand in its own records with the session that made them, and `dynamo_tool_events` events of tools. `dynamo_hits`: the share of prompts
after a first turn that was cached, by the usage that was reported, and the router's own `kv_hit_rate`, for each router with
and without session affinity (the server's `--router-session-affinity-ttl-secs` and our header) and speculative prefill.
The mock engine answers at random and keeps 8,192 tokens in each worker, less than the sessions hold together.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import dynamo as example
import httpx
from common import say

from agentkv import AgentKV, Message, PriorityClass, Request, Sampling
from agentkv.adapters.dynamo import EVENTS_VARIABLE, Dynamo, told
from agentkv.core.hint import SessionFacts

AGENTS, CALLS = 50, 20
NAMES = ("coder", "a b", "x\r\nX-Evil: 1", "ü" * 200, "../../etc/passwd", "y" * 1000)
"""Some of what people call their tasks."""
SESSIONS, TURNS, BLOCKS = 12, 6, 512
PAUSE_S = 0.3
"""Of a tool, between two turns: long enough for a prefill of the next one."""


def dynamo(args: Any) -> dict[str, object]:
    """The whole section."""
    result = rejected()
    say(args, f"dynamo: {result['dynamo_rejected']} of {result['dynamo_requests']} rejected")
    hits: dict[str, dict[str, Any]] = {}
    for router, affinity_s, prefill in itertools.product(("kv", "round-robin"), (0, 60), (False, True)):
        name = " + ".join(word for word, told_so in (("affinity", affinity_s), ("prefill", prefill)) if told_so)
        with example.server(router=router, affinity_s=affinity_s, blocks=BLOCKS) as running:
            side = hits.setdefault(router, {})[name or "none"] = conversations(running.url, prefill=prefill)
        say(args, f"dynamo, {router}, {name or 'none'}: {side}")
    return result | {"dynamo_hits": hits}


def rejected() -> dict[str, object]:
    """`AGENTS` agents with tools, `CALLS` calls each, through AgentKV."""
    failures: list[str] = []
    with example.server() as running, told_where(running.events):
        before = counted(running.url, "dynamo_frontend_failures_total", "InvalidRequest")
        with AgentKV.remote(base_url=running.url, model=example.MODEL, ledger="memory", context=None) as kv:

            def live(number: int) -> None:
                name, priority = f"{number}-{NAMES[number % len(NAMES)]}", list(PriorityClass)[number % 3]
                messages = [Message(role="user", content=f"You are {number}.")]
                with kv.task(name, priority=priority):
                    for _ in range(CALLS):
                        try:
                            sampling = Sampling(max_tokens=4)
                            answer = kv.submit(Request(messages=tuple(messages), sampling=sampling)).result(60)
                        except Exception as error:
                            failures.append(repr(error)[:200])
                            return
                        messages += [Message(role="assistant", content=answer.text), Message(role="user", content="on")]
                        if number % 2:
                            with kv.tool("pytest", expect_s=1):
                                pass

            with ThreadPoolExecutor(8) as pool:
                list(pool.map(live, range(AGENTS)))
            reach = kv.stats()["reach"]
        requests = counted(running.url, "dynamo_frontend_requests_total", "success")
        invalid = counted(running.url, "dynamo_frontend_failures_total", "InvalidRequest") - before
        time.sleep(0.5)
        records = running.records()
    ends = [one for one in records if one["event_type"] == "request_end"]
    calls = [one for one in ends if not one.get("agent_context", {}).get("session_final")]
    return {
        "dynamo_rejected": int(invalid) + len(failures),
        "dynamo_requests": int(requests),
        "dynamo_identified": sum("agent_context" in one for one in calls),
        "dynamo_sessions": len({one["agent_context"]["session_id"] for one in calls if "agent_context" in one}),
        "dynamo_tool_events": sum(one["event_type"].startswith("tool_") for one in records),
        "dynamo_receipts": {name: reach[name] for name in ("applied", "advisory", "unsupported", "failed")},
        "dynamo_failures": failures[:3],
    }


@contextlib.contextmanager
def told_where(events: str) -> Iterator[None]:
    """Tool events go there meanwhile."""
    before = os.environ.get(EVENTS_VARIABLE)
    os.environ[EVENTS_VARIABLE] = events
    try:
        yield
    finally:
        os.environ.pop(EVENTS_VARIABLE)
        if before is not None:
            os.environ[EVENTS_VARIABLE] = before


def conversations(url: str, *, prefill: bool) -> dict[str, float]:
    """Sessions side by side, each growing by an answer and a question a turn; what was cached after their first turns."""
    adapter = Dynamo(url, speculative_prefill=prefill, details=True)
    cached, tokens, rates = [], [], []
    lock = threading.Lock()

    def talk(number: int) -> None:
        notes = " ".join(f"Note {line} of {number}: item {line * 7 % 31}." for line in range(45))
        messages = [{"role": "user", "content": f"Agent {number}. {notes}"}]
        with httpx.Client(timeout=60) as client:
            for turn in range(TURNS):
                extra = adapter.carries(SessionFacts(session=f"agent-{number}", turn=turn + 1))
                assert extra is not None
                body = {"model": example.MODEL, "max_tokens": 120, "messages": messages, **extra.body}
                answer = client.post(f"{url}/chat/completions", json=body, headers=dict(extra.headers)).json()
                usage, hit_rate = answer["usage"], told(answer).hit_rate
                if turn:
                    with lock:
                        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
                        tokens.append(usage["prompt_tokens"])
                        if hit_rate is not None:
                            rates.append(hit_rate)
                time.sleep(PAUSE_S)
                text = answer["choices"][0]["message"]["content"]
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "12 passed. Go on."}]

    with ThreadPoolExecutor(SESSIONS) as pool:
        list(pool.map(talk, range(SESSIONS)))
    adapter.close()
    share = {"cached_share": round(sum(cached) / sum(tokens), 3)}
    return share | ({"kv_hit_rate": round(sum(rates) / len(rates), 3)} if rates else {})


def counted(url: str, metric: str, label: str) -> float:
    """A counter of the frontend, over all label sets that hold `label`."""
    lines = httpx.get(f"{url.removesuffix('/v1')}/metrics", timeout=10).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(metric) and label in line)


def missing() -> str:
    """Why this section cannot run here; "" if it can."""
    return "" if example.installed() else "Dynamo is missing: make engines ARGS='--only dynamo'"
