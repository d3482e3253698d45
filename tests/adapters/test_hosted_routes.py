"""The older completions of a hosted provider, by their published schema: what reaches them in the end is all that they know."""

from __future__ import annotations

import sys
from pathlib import Path

import openai
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from hosted_servers import CHAT, COMPLETIONS, Hosted, problem

from agentkv import AgentKV, ScriptedEngine
from agentkv.adapters import probe

BODY = {"model": "gpt-5.6", "prompt": "once"}


@pytest.mark.parametrize(
    ("field", "known"),
    [
        ({"user": "u"}, True), ({"stop": ["a"]}, True), ({"suffix": "b"}, True), ({"max_tokens": "many"}, False),
        ({"prompt_cache_key": "k"}, False), ({"service_tier": "flex"}, False), ({"messages": []}, False),
        ({"prompt_cache_options": {"ttl": "30m"}}, False),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_completions_know_less_than_chats(field, known):
    """Nothing of caches and tiers: the server refuses what the provider would."""
    assert known is (problem(BODY | field, *COMPLETIONS) == "")
    assert "" == problem({"model": "gpt-5.6", "messages": [], "prompt_cache_key": "k"}, *CHAT)


@pytest.mark.parametrize("engine", ["openai", "anthropic"])
@pytest.mark.parametrize("model", ["gpt-4.1", "gpt-5.6", "some-model"])
def test_what_a_completion_carries_is_what_its_schema_takes(monkeypatch, engine, model):
    """As it is accepted, with the caller's own fields in it."""
    monkeypatch.setitem(probe.PROVIDERS, "127.0.0.1", engine)
    with (
        Hosted() as hosted,
        AgentKV.with_engine(ScriptedEngine(["ok"]), ledger="memory") as kv,
        kv.task("a", final=False),
        openai.OpenAI(base_url=hosted.url, api_key="k", max_retries=0, http_client=kv.http_client()) as client,
    ):
        for _ in range(2):
            answer = client.completions.create(model=model, prompt="once", max_tokens=5, user="mine")
            assert "ok" == answer.choices[0].text
        last = hosted.bodies("/v1/completions")[-1]
        assert [] == hosted.refusals
    assert {"model": model, "prompt": "once", "max_tokens": 5, "user": "mine"} == last
