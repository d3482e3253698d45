"""Public hosts: nobody's own as far as anybody can see, so they are asked nothing and told nothing unless they are named."""

from __future__ import annotations

import openai
import pytest

from agentkv import AgentKV, Message, Request, ScriptedEngine
from agentkv.adapters.places import is_own
from agentkv.adapters.probe import identify, provider
from agentkv.adapters.strict import CHAT_FIELDS, StrictServer
from agentkv.errors import ConfigError

PUBLIC_HOSTS = """api.groq.com api.together.xyz api.deepseek.com api.x.ai api.fireworks.ai api.cohere.com router.huggingface.co
    api.perplexity.ai integrate.api.nvidia.com api.cerebras.ai api.sambanova.ai dashscope.aliyuncs.com api.moonshot.ai
    openrouter.ai x.openai.azure.com bedrock-runtime.eu-west-1.amazonaws.com generativelanguage.googleapis.com
    api.mistral.ai llm.example.com localhost.example.com local.example internal.example 8.8.8.8 172.32.0.1 193.168.0.1
    [2606:4700::1111] [::ffff:8.8.8.8] 134744072 0x8080808 224.0.0.1"""
OWN_HOSTS = """localhost LOCALHOST. api.localhost 127.0.0.1 127.9.9.9 [::1] 10.1.2.3 172.16.0.1 172.31.255.255 192.168.1.1
    169.254.1.1 100.64.0.1 [fe80::1] [fd00::1] [::ffff:192.168.1.1] gpu1 GPU-1 gpu1.local vllm.ns.svc.cluster.local
    nas.home.arpa llm.corp.internal 0.0.0.0"""


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    """A loaded machine is slow to say what it is."""
    monkeypatch.setattr("agentkv.adapters.found.PROBE_S", 20.0)


@pytest.fixture
def public(monkeypatch):
    """A server, which looks like Dynamo, at an address that counts as a public one."""
    monkeypatch.setattr("agentkv.adapters.probe.is_own", lambda _: False)
    with StrictServer(dialect="dynamo", accepts=CHAT_FIELDS | {"nvext", "session_id"}) as server:
        yield server


def gets(server):
    return [one.path for one in server.asked if one.method == "GET"]


def submit(kv):
    with kv.task("t", final=False):
        kv.submit(Request(messages=(Message(role="user", content="hello"),))).result(20)


def chat(kv, server, **options):
    with (
        kv.task("t", final=False),
        openai.OpenAI(base_url=server.url, api_key="k", max_retries=0, http_client=kv.http_client(**options)) as client,
    ):
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hello"}])
    return [one for one in server.asked if one.method == "POST"][-1]


@pytest.mark.parametrize("host", PUBLIC_HOSTS.split())
def test_a_public_host_is_nobodys_own(host):
    """Whoever serves there: a list of those that we know is never whole."""
    assert not is_own(f"https://{host}/v1")
    assert "" == provider(f"https://{host}:8443/v1")
    assert "" == identify(f"https://{host}/v1").engine  # at once: there is no network here


@pytest.mark.parametrize("host", OWN_HOSTS.split())
def test_what_no_public_host_can_be_is_the_users_own(host):
    """It may be asked what it is."""
    assert provider(f"http://{host}:8000/v1") is None


@pytest.mark.parametrize("address", ["", "http://", "http://[::1", "nonsense", "http://h:99999999/"])
def test_what_is_no_address_raises_nothing(address):
    """Nor is it asked anything that would."""
    assert provider(address) in ("", None)


def test_a_public_host_is_neither_asked_nor_told_nor_prewarmed(public):
    """Not even where prewarming is allowed: nobody knows what it costs there."""
    with AgentKV.remote(base_url=public.url, model="m", ledger="memory", prewarm=True, probe=True) as kv:
        submit(kv)
        with kv.task("t", final=False), kv.tool("pytest", expect_s=30):
            pass
        sent = chat(kv, public, keep_alive=True)
        (way,) = kv._doors.ways()._ways.values()
        assert way.warm is None
    assert [] == gets(public)
    assert {"model", "messages"} == set(sent.body)
    assert not [name for name in sent.headers if "dynamo" in name]


def test_other_public_hosts_of_ones_own_clients_are_none_of_ours(public):
    """They take no place among the endpoints that are told hints."""
    with AgentKV.with_engine(ScriptedEngine(["ok"]), ledger="memory") as kv:
        assert {"model", "messages"} == set(chat(kv, public).body)
        assert {} == kv.stats()["reach"]
    assert [] == gets(public)


@pytest.mark.parametrize(("speaks", "asks"), [("dynamo", False), ("ask", True)])
def test_a_public_host_that_the_user_names_is_his_own(public, speaks, asks):
    """It is told what it understands, and prewarmed; it is asked only where he says that."""
    with AgentKV.remote(base_url=public.url, model="m", ledger="memory", prewarm=True, speaks=speaks) as kv:
        submit(kv)
        (way,) = kv._doors.ways()._ways.values()
        assert way.warm is not None
    sent = next(one for one in public.asked if one.method == "POST")
    assert "nvext" in sent.body
    assert asks is bool(gets(public))


@pytest.mark.parametrize(("speaks", "asks"), [("dynamo", False), ("ask", True)])
def test_clients_of_ones_own_name_theirs_as_well(public, speaks, asks):
    """By its address, however that is written."""
    with AgentKV.with_engine(ScriptedEngine(["ok"]), ledger="memory") as kv:
        assert "nvext" in chat(kv, public, speaks={f"{public.url}/": speaks}).body
    assert asks is bool(gets(public))


def test_an_engine_that_nobody_knows_is_refused_at_once():
    """A typo would be told nothing for ever."""
    with AgentKV.with_engine(ScriptedEngine(["ok"]), ledger="memory") as kv, pytest.raises(ConfigError, match="vlm"):
        kv.http_client(speaks={"https://llm.example.com/v1": "vlm"})
