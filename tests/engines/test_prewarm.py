"""Prewarm on real engines: a context that another one drove out is there again when its tool ends."""

from __future__ import annotations

import time

import pytest

from agentkv import AgentKV, Message, Request, Sampling

pytestmark = [pytest.mark.weights, pytest.mark.slow, pytest.mark.timeout(600)]


def notes(name, lines):
    return (
        f"You are {name}. " + " ".join(f"Note {n} of {name}: item {n * 7 % 31}." for n in range(lines)) + " Summarise."
    )


def after_a_tool(url, *, prewarm, lines):
    """The call after a tool during which another session filled the engine's memory, and the receipts."""
    with AgentKV.remote(base_url=url, model="smollm2", ledger="memory", context=None, prewarm=prewarm) as kv:

        def ask(task, messages):
            with kv.task(task, final=False):
                return kv.submit(Request(messages=tuple(messages), sampling=Sampling(max_tokens=6))).result(300)

        talk = [Message(role="user", content=notes(f"ada-{prewarm}", lines))]
        first = ask("ada", talk)
        wait_s = max(30.0, 20 * first.timing.ttft_s)  # the others come first, on a machine that is slow today too
        talk += [Message(role="assistant", content=first.text), Message(role="user", content="12 passed. Go on.")]
        with kv.task("ada", final=False), kv.tool("pytest", expect_s=wait_s):
            for name in ("bob", "cyd"):
                ask(name, [Message(role="user", content=notes(f"{name}-{prewarm}", lines))])
            ends_s = time.monotonic() + 2 * wait_s
            while prewarm and "prewarm ada: applied" not in str(kv.stats()["reach"]) and time.monotonic() < ends_s:
                time.sleep(0.1)
        second = ask("ada", talk)
        bill = kv.report("ada")
    return second, [call for call in bill.calls if call.purpose == "prewarm"]


def test_a_stock_vllm_has_the_context_back(vllm_server, tmp_path):
    """Without our plug-in nothing else helps: its pool holds one context and a half."""
    with vllm_server(stock=True, pool_tokens=1280, block_tokens=32, folder=str(tmp_path)) as running:
        cold, none = after_a_tool(running.url, prewarm=False, lines=60)
        warm, paid = after_a_tool(running.url, prewarm=True, lines=60)
    print("vllm", cold.usage, cold.timing.ttft_s, warm.usage, warm.timing.ttft_s, dict(warm.cached_by))
    assert ([], 1) == (none, len(paid))
    assert cold.usage.cached_tokens < 0.2 * cold.usage.input_tokens
    assert warm.usage.cached_tokens > 0.9 * warm.usage.input_tokens
