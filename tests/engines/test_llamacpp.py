"""The llama.cpp adapter against the real server with a real model: what a hint does there, to the token."""

from __future__ import annotations

import time

import httpx
import pytest

from agentkv import AgentKV, Message, Request, Sampling
from agentkv.adapters.base import Outcome, Unreachable
from agentkv.adapters.found import probe
from agentkv.adapters.http import Endpoint
from agentkv.adapters.llamacpp import LlamaCpp
from agentkv.core.forecast import Forecast
from agentkv.core.hint import Hint, HintKind, ToolFacts

pytestmark = [pytest.mark.weights, pytest.mark.timeout(300)]
NOTES = " ".join(f"Note {number}: item {number * 7 % 31}." for number in range(14))


def chat(url, slot, messages):
    body = {"messages": messages, "max_tokens": 8, "temperature": 0, **({} if slot is None else {"id_slot": slot})}
    return httpx.post(f"{url}/chat/completions", json=body, timeout=200).json()


def hint(kind, session, wait_s=20.0):
    call = ToolFacts(call_id="c", tool="pytest") if kind.startswith("tool") else None
    wait = Forecast(remaining_s=(wait_s,), n=9, source="history") if kind == "tool_start" else None
    return Hint(id="h", kind=HintKind(kind), at_s=0, ts_ms=0, task=session, session=session, call=call, wait=wait)


def test_a_context_that_left_and_came_back_gives_the_same_text_without_computing_it_again(llamacpp_server):
    """Saved, its slot used by another, restored: what the next call reuses and says is what a kept context gives."""
    first = [{"role": "user", "content": f"{NOTES} Summarise."}]
    with llamacpp_server(slots=2, threads=1) as url:
        assert "llama.cpp" == probe(url, within_s=5)
        kept = chat(url, 1, first)
        second = [*first, {"role": "assistant", "content": kept["choices"][0]["message"]["content"]}]
        second.append({"role": "user", "content": "12 passed. Go on."})
        expected = chat(url, 1, second)
        httpx.post(f"{url[:-3]}/slots/1?action=erase", json={}, timeout=200)
        adapter = LlamaCpp(url)
        try:
            for session in ("a", "b"):
                slot = adapter.fields(session)["id_slot"]
                assert "usage" in chat(url, slot, first if session == "a" else [{"role": "user", "content": "hello"}])
                adapter.ended(session, tokens=300, cached_tokens=None)
            assert Outcome.APPLIED is adapter.deliver(hint("tool_start", "a"), 30).outcome
            slot = adapter.fields("c")["id_slot"]
            chat(url, slot, [{"role": "user", "content": "hello you"}])
            adapter.ended("c", tokens=30, cached_tokens=None)
            slot = adapter.fields("a")["id_slot"]
            again = chat(url, slot, second)
            deeds, _ = adapter.tick()
            assert ("restore", Outcome.APPLIED) in [(deed.kind, deed.outcome) for deed in deeds]
            assert expected["timings"]["cache_n"] == again["timings"]["cache_n"] > 120
            assert expected["choices"][0]["message"]["content"] == again["choices"][0]["message"]["content"]
        finally:
            adapter.close()


def test_three_agents_on_two_slots_keep_their_contexts(llamacpp_server):
    """Through AgentKV, with nothing said but tools: every call after a tool finds its context, and nothing fails."""
    with (
        llamacpp_server(slots=2, threads=1) as url,
        AgentKV.remote(base_url=url, model="m", ledger="memory", context=None) as kv,
    ):
        talks = {name: [Message(role="user", content=f"You are {name}. {NOTES}")] for name in ("ada", "bob", "cyd")}
        cached = []
        for turn in range(2):
            for name, messages in talks.items():
                with kv.task(name, final=False):
                    request = Request(messages=tuple(messages), sampling=Sampling(max_tokens=6))
                    answer = kv.submit(request).result(200)
                    if turn:
                        cached.append(answer.usage.cached_tokens / answer.usage.input_tokens)
                    with kv.tool("pytest", expect_s=20):
                        time.sleep(0.1)
                messages += [Message(role="assistant", content=answer.text), Message(role="user", content="Go on.")]
        for name in talks:
            kv.finish(name)
        ends = time.monotonic() + 20
        while kv.stats()["reach"]["queued"] and time.monotonic() < ends:
            time.sleep(0.05)
        reach = kv.stats()["reach"]
    assert ("llama.cpp", 0) == (reach["adapter"], reach["failed"])
    assert min(cached) > 0.8


def test_the_end_of_a_session_leaves_neither_slot_nor_file(llamacpp_server, tmp_path):
    """The file shrinks to a header: prompts do not stay on the server's disk."""
    with llamacpp_server(slots=1, threads=1, folder=str(tmp_path)) as url:
        adapter = LlamaCpp(url)
        slot = adapter.fields("a")["id_slot"]
        chat(url, slot, [{"role": "user", "content": NOTES}])
        adapter.ended("a", tokens=300, cached_tokens=None)
        with adapter._turn:
            work = adapter._work.begin(adapter._pool, adapter._pool.save("a"))
        assert work.over.wait(30)
        (file,) = tmp_path.iterdir()
        assert file.stat().st_size > 1_000_000
        assert Outcome.APPLIED is adapter.deliver(hint("session_end", "a"), 30).outcome
        assert file.stat().st_size < 1000
        adapter.close()


def test_the_real_server_refuses_what_we_believe_it_refuses(llamacpp_server):
    """A file that is not there is an answer with a status, not a hang."""
    with llamacpp_server(slots=1, threads=1) as url:
        server = Endpoint(url)
        with pytest.raises(Unreachable) as refused:
            server.post("/slots/0?action=restore", {"filename": "nothing.bin"}, 30)
        server.close()
        assert 400 == refused.value.status
