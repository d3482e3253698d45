"""vLLM's real CPU build with the plug-in: KV that left for the disk is back before its call, and gives the same text."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from agentkv import AgentKV, Message, Request, Sampling
from agentkv.adapters.base import Outcome
from agentkv.adapters.found import probe
from agentkv.adapters.probe import Known
from agentkv.adapters.vllm import Vllm
from agentkv.adapters.vllm_door import DoorCaller
from agentkv.core.forecast import Forecast
from agentkv.core.hint import Hint, HintKind, SessionFacts, ToolFacts

pytestmark = [pytest.mark.weights, pytest.mark.timeout(600)]
BLOCK = 32


@pytest.fixture(scope="module")
def running(vllm_server, tmp_path_factory):
    """A pool for one context and a half, a CPU tier for one, a disk for all."""
    folder = tmp_path_factory.mktemp("v")
    with vllm_server(pool_tokens=1920, cpu_mib=32, block_tokens=BLOCK, admin=True, folder=str(folder)) as running:
        yield running


@pytest.fixture
def door(running):
    caller = DoorCaller(Path(running.socket))
    yield caller
    caller.close()


@pytest.fixture
def adapter(running):
    adapter = Vllm(running.url, socket=running.socket)
    yield adapter
    adapter.close()


def notes(name, lines=90):
    return f"You are {name}. " + " ".join(f"Note {n} of {name}: item {n * 7 % 31}." for n in range(lines))


def chat(running, messages, adapter=None, session=""):
    extra = adapter.carries(SessionFacts(session=session)).body if adapter is not None else {}
    body = {"model": "smollm2", "messages": messages, "max_tokens": 16, "temperature": 0, **extra}
    answer = httpx.post(f"{running.url}/chat/completions", json=body, timeout=300)
    assert 200 == answer.status_code, answer.text
    told = answer.json()
    usage = told["usage"]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return told["choices"][0]["message"]["content"], usage["prompt_tokens"], cached


def turn(name, said=None):
    first = [{"role": "user", "content": f"{notes(name)} Summarise."}]
    return (
        first
        if said is None
        else [*first, {"role": "assistant", "content": said}, {"role": "user", "content": "Go on."}]
    )


def hint(kind, session, wait_s=30.0):
    call = ToolFacts(call_id="c", tool="pytest") if kind.startswith("tool") else None
    wait = Forecast(remaining_s=(wait_s,), n=9, source="history") if kind == "tool_start" else None
    return Hint(
        id="h", kind=HintKind(kind), at_s=0, ts_ms=time.time_ns() // 10**6, task=session, session=session, call=call,
        wait=wait,
    )  # fmt: skip


def settled(door, before, within_s=60.0):
    """The counts once a promotion that began after `before` has ended."""
    ends = time.monotonic() + within_s
    while time.monotonic() < ends:
        state = door.state()
        if state["promotions"] > before["promotions"] and not state["under_way"]:
            return state
        time.sleep(0.02)
    raise AssertionError(f"no promotion: {state}")


def push_out(running, adapter, *names):
    """Other sessions' contexts, until nothing else is left in the pool and the CPU tier."""
    for name in names:
        chat(running, turn(name), adapter, name)
        adapter.deliver(hint("tool_start", name, 5000.0), 5)


def test_a_context_from_the_disk_gives_the_text_of_one_that_stayed(running, door, adapter):
    """Out of the pool and out of the CPU tier, promoted after a hint, and not a token of the next answer differs."""
    assert "vllm" == probe(running.url, within_s=10)
    said, _, _ = chat(running, turn("ada"), adapter, "ada")
    expected, tokens, kept = chat(running, turn("ada", said), adapter, "ada")
    assert kept > 0.95 * tokens
    before = door.state()
    assert Outcome.APPLIED is adapter.deliver(hint("tool_start", "ada", 5000.0), 5).outcome
    push_out(running, adapter, "bob", "cyd")
    receipt = adapter.deliver(hint("tool_end", "ada"), 5)
    assert (Outcome.APPLIED, "due now") == (receipt.outcome, receipt.detail[-7:])
    state = settled(door, before)
    assert state["promoted_blocks"] - before["promoted_blocks"] > 0.5 * tokens / BLOCK
    assert before["missing_blocks"] == state["missing_blocks"]
    again, tokens, cached = chat(running, turn("ada", said), adapter, "ada")
    assert cached > 0.95 * tokens
    assert expected == again


def test_an_idle_engine_starts_to_bring_blocks_back_at_the_low_quantile(running, door, adapter):
    """Not before, and within a fraction of a second; no request comes meanwhile, and the engine sleeps until then."""
    chat(running, turn("eve"), adapter, "eve")
    adapter.deliver(hint("tool_start", "eve", 5000.0), 5)
    push_out(running, adapter, "bob", "cyd")
    before = door.state()
    assert "wakes" == before["idle"]
    began = time.monotonic()
    adapter.deliver(hint("tool_start", "eve", 3.0), 5)
    time.sleep(1)
    assert before["promotions"] == door.state()["promotions"]
    state = settled(door, before)
    assert time.monotonic() - began > 2
    assert state["started_ms"][-1] < 1000


def test_a_prompt_longer_than_the_cpu_tier_is_answered(running, door, adapter):
    """After it was pushed out: what fits of its beginning comes back, the rest is computed."""
    long = [{"role": "user", "content": f"{notes('liz', 130)} Summarise."}]
    said, tokens, _ = chat(running, long, adapter, "liz")
    assert tokens * 22.5 / 1024 > 33
    push_out(running, adapter, "bob")
    again, tokens, cached = chat(running, long, adapter, "liz")
    assert 0.3 < cached / tokens
    assert len(said) > 0
    assert len(again) > 0
    assert not door.state()["under_way"]


def test_an_ended_session_is_not_found_again(running, door, adapter):
    """Its own beginning, which nobody shares, is computed anew once others have needed the room."""
    chat(running, turn("fay"), adapter, "fay")
    receipt = adapter.deliver(hint("session_end", "fay"), 5)
    assert Outcome.APPLIED is receipt.outcome
    push_out(running, adapter, "bob", "cyd")
    _, tokens, cached = chat(running, turn("fay"), adapter, "fay")
    assert cached < 0.2 * tokens


def test_agents_through_agentkv_find_their_contexts(running, monkeypatch):
    """Nothing said but tools; the adapter is found by what answers at the address, and no hint fails."""
    monkeypatch.setenv("AGENTKV_VLLM_SOCKET", running.socket)
    cached = []
    with AgentKV.remote(base_url=running.url, model="smollm2", ledger="memory", context=None) as kv:
        talks = {name: [Message(role="user", content=f"{notes(name)} Summarise.")] for name in ("gus", "hal")}
        for number in range(2):
            for name, messages in talks.items():
                with kv.task(name, final=False):
                    request = Request(messages=tuple(messages), sampling=Sampling(max_tokens=8))
                    answer = kv.submit(request).result(300)
                    if number:
                        cached.append(answer.usage.cached_tokens / answer.usage.input_tokens)
                    with kv.tool("pytest", expect_s=1):
                        time.sleep(0.2)
                messages += [Message(role="assistant", content=answer.text), Message(role="user", content="Go on.")]
        for name in talks:
            kv.finish(name)
        ends = time.monotonic() + 20
        while kv.stats()["reach"]["queued"] and time.monotonic() < ends:
            time.sleep(0.05)
        reach = kv.stats()["reach"]
    assert ("vllm", 0, 0) == (reach["adapter"], reach["failed"], reach["unsupported"])
    assert min(cached) > 0.9


def test_a_salt_parts_caches_and_a_priority_is_taken(running):
    """The same prompt under another tenant's salt finds nothing; a request with a priority is answered."""
    told = Vllm(running.url, socket=running.socket, known=Known(engine="vllm", priority=True))
    shares = []
    for salt in ("one", "one", "two"):
        extra = told.carries(SessionFacts(session="", salt=salt, priority=20))
        assert {"cache_salt", "priority"} == set(extra.body)
        body = {"model": "smollm2", "messages": turn("kim"), "max_tokens": 1, **extra.body}
        answer = httpx.post(f"{running.url}/chat/completions", json=body, timeout=300)
        assert 200 == answer.status_code, answer.text
        usage = answer.json()["usage"]
        shares.append(((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0) / usage["prompt_tokens"])
    assert (True, True, True) == (shares[0] < 0.1, shares[1] > 0.9, shares[2] < 0.1)


@pytest.mark.parametrize(
    "params",
    [
        {"agentkv": {"session": "../../etc/passwd\r\nX: 1"}},
        {"agentkv": {"session": ["x"] * 100}},
        {"agentkv": "x" * 10_000},
        {"agentkv": {"session": "a", "fetch": True, "keys": [1]}},
        {"other": 1},
    ],
)
def test_hostile_parameters_of_a_request_are_answered_like_any_other(running, params):
    """Whatever stands in kv_transfer_params, the answer comes."""
    body = {"model": "smollm2", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    content = json.dumps(body | {"kv_transfer_params": params})
    headers = {"content-type": "application/json"}
    answer = httpx.post(f"{running.url}/chat/completions", content=content, headers=headers, timeout=200)
    assert 200 == answer.status_code
    assert 200 == httpx.get(f"{running.url}/models", timeout=10).status_code


def test_the_socket_is_private_and_survives_noise(running, door):
    """Only this user's, and nothing that comes in stops the engine."""
    assert 0o600 == stat.S_IMODE(Path(running.socket).stat().st_mode)
    with socket.socket(socket.AF_UNIX) as noise:
        noise.connect(running.socket)
        for _ in range(50):
            noise.sendall(os.urandom(200) + b"\n")
        noise.sendall(b"x" * 15_000)
    assert door.state()["hints"] >= 0
    body = {"model": "smollm2", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    assert 200 == httpx.post(f"{running.url}/chat/completions", json=body, timeout=200).status_code


def test_a_reset_of_its_caches_is_survived(running, door, adapter):
    """vLLM's own route drops device and CPU copies; what is on disk is still found."""
    chat(running, turn("ivy"), adapter, "ivy")
    time.sleep(0.5)
    root = running.url.removesuffix("/v1")
    answer = httpx.post(f"{root}/reset_prefix_cache", params={"reset_external": "true"}, timeout=200)
    assert 200 == answer.status_code
    _, tokens, cached = chat(running, turn("ivy"), adapter, "ivy")
    assert cached > 0.9 * tokens
    assert door.state()["hints"] >= 0


def test_the_plug_in_fits_the_installed_classes(vllm_python):
    """Every abstract method is there, every argument of vLLM's is taken; run by vLLM's own interpreter."""
    script = Path(__file__).with_name("vllm_inside.py")
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), str(root / "integrations")])
    done = subprocess.run(
        [str(vllm_python), str(script)], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
        timeout=240, check=False,
    )  # fmt: skip
    assert 0 == done.returncode, done.stdout[-3000:] + done.stderr[-3000:]
    assert "all fits" in done.stdout
