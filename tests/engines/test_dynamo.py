"""The Dynamo adapter against the real frontend and router, with its mock engine of two workers."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from agentkv import AgentKV, Message, Request, Sampling
from agentkv.adapters.base import Outcome
from agentkv.adapters.dynamo import Dynamo, told
from agentkv.adapters.found import probe
from agentkv.adapters.strict_rules import CHAT_FIELDS, refusal
from agentkv.core.hint import Hint, HintKind, SessionFacts, ToolFacts, ToolStatus

pytestmark = [pytest.mark.weights, pytest.mark.timeout(300)]
NOTES = " ".join(f"Note {number}: item {number * 7 % 31}." for number in range(60))
SPOKEN = {"X-Dynamo-Session-ID": "s"}


def ask(running, extra=None, *, messages=None, max_tokens=8):
    body = {"model": "smollm2", "max_tokens": max_tokens, "messages": messages or [{"role": "user", "content": NOTES}]}
    body |= {} if extra is None else extra.body
    headers = {} if extra is None else dict(extra.headers)
    return httpx.post(f"{running.url}/chat/completions", json=body, headers=headers, timeout=30)


def until(found, seconds=10.0):
    ends = time.monotonic() + seconds
    while not (value := found()) and time.monotonic() < ends:
        time.sleep(0.05)
    return value


def refused(running):
    """How many requests the frontend has refused as invalid, by its own count."""
    text = httpx.get(f"{running.url.removesuffix('/v1')}/metrics", timeout=10).text
    lines = [line for line in text.splitlines() if line.startswith("dynamo_frontend_failures_total")]
    return sum(float(line.rpartition(" ")[2]) for line in lines if "InvalidRequest" in line)


def test_it_is_found_by_its_own_words(dynamo_server):
    """An address is enough."""
    with dynamo_server() as running:
        assert "dynamo" == probe(running.url, within_s=5)


def test_whatever_we_send_is_taken(dynamo_server):
    """Every field and header at its bounds, and names that nobody would give; the frontend counts no refusal."""
    names = ["run-7:coder", "a b", "a\r\nX-Evil: 1", "ü" * 300, "../../etc/passwd", "x" * 1000, "\x00", "unattributed"]
    with dynamo_server() as running:
        adapter = Dynamo(running.url, details=True)
        for turn, name in enumerate(names):
            for facts in ({}, {"priority": -100, "osl": 1}, {"priority": 100, "osl": 10**12, "salt": "a\nb" * 400}):
                extra = adapter.carries(SessionFacts(session=name, parent=names[turn - 1], turn=turn, **facts))
                answer = ask(running, extra)
                assert (200, "usage") == (answer.status_code, *(key for key in answer.json() if key == "usage"))
        adapter.close()
        assert 0 == refused(running)


REQUESTS = {
    "plain": ({}, {}),
    "empty nvext": ({"nvext": {}}, {}),
    "all hints": ({"nvext": {"agent_hints": {"priority": 5, "osl": 3, "speculative_prefill": True}}}, {}),
    "negative priority": ({"nvext": {"agent_hints": {"priority": -100}}}, {}),
    "priority that is no i32": ({"nvext": {"agent_hints": {"priority": 2**31}}}, {}),
    "priority with a fraction": ({"nvext": {"agent_hints": {"priority": 1.5}}}, {}),
    "negative osl": ({"nvext": {"agent_hints": {"osl": -1}}}, {}),
    "osl that is text": ({"nvext": {"agent_hints": {"osl": "5"}}}, {}),
    "prefill that is a number": ({"nvext": {"agent_hints": {"speculative_prefill": 1}}}, {}),
    "unknown hint": ({"nvext": {"agent_hints": {"ttl": 5}}}, {}),
    "unknown in nvext": ({"nvext": {"session_control": {}}}, {}),
    "cache_control": ({"nvext": {"cache_control": {"type": "ephemeral"}}}, {}),
    "unknown at the top": ({"id_slot": 1}, {}),
    "vLLM's priority": ({"priority": 1}, {}),
    "salt in nvext": ({"nvext": {"cache_salt": "t"}}, {}),
    "salt at the top": ({"cache_salt": "t"}, {}),
    "salt that is a number": ({"nvext": {"cache_salt": 5}}, {}),
    "extra fields": ({"nvext": {"extra_fields": ["worker_id", "timing", "nonsense"]}}, {}),
    "extra fields that are text": ({"nvext": {"extra_fields": "timing"}}, {}),
    "no messages": ({"messages": []}, {}),
    "longest id": ({}, {"X-Dynamo-Session-ID": "a" * 256}),
    "too long an id": ({}, {"X-Dynamo-Session-ID": "a" * 257}),
    "too long a parent": ({}, SPOKEN | {"X-Dynamo-Parent-Session-ID": "a" * 257}),
}


def test_the_strict_server_refuses_what_the_real_one_refuses(dynamo_server):
    """And nothing else: users' tests against it hold on the real one."""
    with dynamo_server() as running:
        differs = {}
        for name, (fields, headers) in REQUESTS.items():
            body = {"model": "smollm2", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}], **fields}
            real = httpx.post(f"{running.url}/chat/completions", json=body, headers=headers, timeout=30)
            lower = {key.lower(): value for key, value in headers.items()}
            ours = refusal("dynamo", body, lower, accepts=CHAT_FIELDS, priorities=False, names_fields=True)
            if (real.status_code == 200) != (ours is None):
                differs[name] = (real.status_code, real.text[:200], ours)
        assert {} == differs


def test_a_session_stays_on_its_worker(dynamo_server):
    """With affinity on the server, and our header; without the header it goes around."""
    with dynamo_server(router="round-robin", affinity_s=60) as running:
        adapter = Dynamo(running.url, details=True)
        kept = {told(ask(running, adapter.carries(SessionFacts(session="s"))).json()).worker for _ in range(6)}
        nobody = adapter.carries(SessionFacts(session="unattributed"))
        spread = {told(ask(running, nobody).json()).worker for _ in range(6)}
        adapter.close()
    assert (1, 2) == (len(kept), len(spread))
    assert kept < spread


def test_who_is_more_important_goes_first(dynamo_server):
    """Where the router queues: a call of a person passes those that were there before, and one of a batch does not."""
    with dynamo_server(workers=1, queue_threshold=0, speedup=0.5) as running:
        adapter, ended = Dynamo(running.url), []

        def call(name, priority):
            messages = [{"role": "user", "content": " ".join(f"{name}{number}" for number in range(800))}]
            ask(
                running, adapter.carries(SessionFacts(session=name, priority=priority)), messages=messages, max_tokens=4
            )
            ended.append(name)

        with ThreadPoolExecutor(12) as pool:
            for number in range(10):
                pool.submit(call, f"step{number}", 0)
                time.sleep(0.02)
            time.sleep(0.1)
            pool.submit(call, "person", 50)
            time.sleep(0.02)
            pool.submit(call, "batch", -50)
        adapter.close()
    assert 12 == len(ended)
    assert ended.index("person") < 5
    assert ended.index("batch") > ended.index("person") + 4


@pytest.mark.parametrize("wanted", [True, False])
def test_the_next_turn_is_there_before_it_is_asked_for(dynamo_server, wanted):
    """Speculative prefill: the answer is in the cache, too, when the next turn comes."""
    with dynamo_server() as running:
        adapter = Dynamo(running.url, speculative_prefill=wanted, details=True)
        extra = adapter.carries(SessionFacts(session="s"))
        messages = [{"role": "user", "content": NOTES}]
        first = ask(running, extra, messages=messages, max_tokens=200).json()
        time.sleep(1)
        text = first["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "go on"}]
        usage = ask(running, extra, messages=messages).json()["usage"]
        adapter.close()
    missed = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
    assert wanted == (missed < 64)


def test_tools_and_ends_are_in_its_own_records(dynamo_server):
    """Start and end of a tool, with session and parent; the session's last request says that it is the last."""
    with dynamo_server() as running:
        adapter = Dynamo(running.url, tool_events=running.events)
        about = SessionFacts(session="run:coder", parent="run", model="smollm2")
        ask(running, adapter.carries(about))
        for kind, status, elapsed_s in (
            ("tool_start", ToolStatus.RUNNING, 0.0), ("tool_end", ToolStatus.SUCCEEDED, 1.5),
        ):  # fmt: skip
            call = ToolFacts(call_id="c1", tool="pytest", status=status, elapsed_s=elapsed_s)
            sent = Hint(
                id="h", kind=HintKind(kind), at_s=0, ts_ms=round(time.time() * 1000), task="run", session="run:coder",
                call=call, about=about,
            )  # fmt: skip
            assert Outcome.ADVISORY is adapter.deliver(sent, 5).outcome
        end = Hint(id="h", kind=HintKind.SESSION_END, at_s=0, ts_ms=0, task="run", session="run:coder", about=about)
        assert Outcome.ADVISORY is adapter.deliver(end, 5).outcome
        events = until(lambda: len(found := running.records()) >= 4 and found)
        adapter.close()
    by_kind = {}
    for event in events:
        by_kind.setdefault(event["event_type"], []).append(event)
    contexts = [event["agent_context"] for event in by_kind["tool_start"] + by_kind["tool_end"]]
    assert [{"session_id": "run:coder", "parent_session_id": "run"}] * 2 == contexts
    (ended,) = by_kind["tool_end"]
    assert ("pytest", "succeeded", 1500.0) == tuple(
        ended["tool"][name] for name in ("tool_class", "status", "duration_ms")
    )
    assert [None, True] == [event["agent_context"].get("session_final") for event in by_kind["request_end"]]


def test_an_agent_with_nothing_but_tools(dynamo_server, monkeypatch):
    """Through AgentKV: found, hinted, billed with its cached tokens; the frontend refuses nothing."""
    with dynamo_server() as running:
        monkeypatch.setenv("DYN_REQUEST_TRACE_TOOL_EVENTS_ZMQ_ENDPOINT", running.events)
        with AgentKV.remote(base_url=running.url, model="smollm2", ledger="memory", context=None) as kv:
            messages = [Message(role="user", content=NOTES)]
            with kv.task("ada", final=False):
                for _ in range(3):
                    sampling = Sampling(max_tokens=16)
                    answer = kv.submit(Request(messages=tuple(messages), sampling=sampling)).result(30)
                    with kv.tool("pytest", expect_s=5):
                        time.sleep(0.05)
                    messages += [Message(role="assistant", content=answer.text), Message(role="user", content="Go on.")]
            kv.finish("ada")
            until(lambda: kv.stats()["reach"]["queued"] == 0 and "session_end" in str(kv.stats()["reach"]["last"]))
            reach = kv.stats()["reach"]
        assert ("dynamo", 0) == (reach["adapter"], reach["failed"])
        assert 0 == refused(running)
        records = until(lambda: len(found := running.records()) >= 10 and found)
    events = [record["event_type"] for record in records]
    assert answer.usage.cached_tokens > 0.8 * answer.usage.input_tokens
    assert (3, 3, 4) == tuple(events.count(kind) for kind in ("tool_start", "tool_end", "request_end"))


def test_the_example_runs(dynamo_server):
    """Starting servers of its own, as a newcomer does."""
    command = [sys.executable, str(Path(__file__).parents[2] / "examples" / "dynamo.py")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert (0, "") == (run.returncode, run.stderr)
    assert 9 == len([line for line in run.stdout.splitlines() if "cached" in line])
    assert "'adapter': 'dynamo'" in run.stdout
    assert "'failed': 0" in run.stdout
    assert "tool_end" in run.stdout


def test_a_frontend_that_dies_is_a_failed_receipt(dynamo_server):
    """Nothing is raised; neither a tool nor an end waits for it."""
    with dynamo_server() as running:
        adapter = Dynamo(running.url, tool_events=running.events)
        about = SessionFacts(session="s", model="smollm2")
        ask(running, adapter.carries(about))
    began_s = time.monotonic()
    call = ToolFacts(call_id="c1", tool="pytest")
    start = Hint(id="h", kind=HintKind.TOOL_START, at_s=0, ts_ms=0, task="s", session="s", call=call)
    end = Hint(id="h", kind=HintKind.SESSION_END, at_s=0, ts_ms=0, task="s", session="s")
    assert [Outcome.FAILED] * 2 == [adapter.deliver(hint, 0.2).outcome for hint in (start, end)]
    adapter.close()
    assert time.monotonic() - began_s < 2
