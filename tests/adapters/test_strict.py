"""StrictServer, as users' tests see it: what it knows, what it refuses, and its faults."""

from __future__ import annotations

import openai
import pytest

from agentkv import AgentKV, Message, Request
from agentkv.adapters.strict import CHAT_FIELDS, StrictServer

REQUEST = Request(messages=(Message(role="user", content="hello there, this is a prompt"),))


def client(server, **options):
    return openai.OpenAI(base_url=server.url, api_key="k", max_retries=0, **options)


def test_an_unknown_field_is_refused_by_name():
    """As strict servers do."""
    with StrictServer() as server, client(server) as asking, pytest.raises(openai.BadRequestError, match="nvext"):
        asking.chat.completions.create(model="m", messages=[], extra_body={"nvext": {}})
    assert 1 == server.rejected


def test_a_field_that_it_was_told_of_is_taken():
    """`accepts` is what it knows."""
    with StrictServer(accepts=CHAT_FIELDS | {"nvext"}, answer="fine") as server, client(server) as asking:
        answer = asking.chat.completions.create(model="m", messages=[], extra_body={"nvext": {}})
    assert "fine" == answer.choices[0].message.content


@pytest.mark.parametrize("fault", ["html", "close", "hang"])
def test_faults_reach_the_client_as_errors(fault):
    """And none of them keeps the server from closing."""
    broken = pytest.raises((openai.APIError, AttributeError, ValueError, TypeError))
    with StrictServer(fault=fault) as server, client(server, timeout=0.3) as asking, broken:
        len(asking.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}]).choices)


def test_usage_that_cannot_be_true_is_not_billed():
    """A server that lies is counted here, and the agent goes on."""
    with StrictServer(fault="lie") as server, AgentKV.remote(base_url=server.url, model="m", ledger="memory") as kv:
        with kv.task("t", final=False):
            answer = kv.submit(REQUEST).result(20)
        assert answer.estimated
        assert 0 < answer.usage.input_tokens < 1000
        assert 0 <= answer.usage.cached_tokens <= answer.usage.input_tokens


@pytest.mark.parametrize("fault", ["html", "close", "endless"])
def test_a_broken_probe_costs_the_agent_nothing(fault):
    """The model call fails or not as it would have; hints have their receipts, and nothing else is raised."""
    with StrictServer() as server, AgentKV.remote(base_url=server.url, model="m", ledger="memory", timeout_s=1) as kv:
        server.fault = fault
        with kv.task("t"), kv.tool("pytest"):
            pass
        server.fault = ""
        with kv.task("u"):
            assert "ok" == kv.submit(REQUEST).result(20).text
