"""What is asked of an endpoint, and what is remembered of it, for how long."""

from __future__ import annotations

import json
import stat

import pytest

from agentkv import AgentKV, Message, Request
from agentkv.adapters.base import Unreachable
from agentkv.adapters.probe import KEPT_S, Endpoints, Known, identify, provider, takes_priority
from agentkv.adapters.strict import CHAT_FIELDS, StrictServer
from agentkv.core.task import PriorityClass

VLLM = {
    "GET /version": lambda _: (200, {"version": "0.33.0"}),
    "GET /v1/models": lambda _: (200, {"data": [{"id": "m"}]}),
}


class Time:
    """Seconds that pass when told."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def time_s():
    return Time()


@pytest.fixture
def endpoints(tmp_path, time_s):
    return Endpoints(tmp_path, now_s=time_s)


@pytest.fixture
def server():
    with StrictServer(routes=dict(VLLM), accepts=CHAT_FIELDS | {"priority", "session_id"}) as made:
        yield made


def posts(server):
    return [asked for asked in server.asked if asked.method == "POST"]


@pytest.mark.parametrize(
    ("routes", "engine"),
    [
        ({"GET /props": lambda _: (200, {"total_slots": 4, "build_info": "b1"})}, "llama.cpp"),
        (VLLM, "vllm"),
        ({"GET /health": lambda _: (200, {"status": "healthy", "endpoints": [], "instances": []})}, "dynamo"),
        ({"GET /server_info": lambda _: (200, {"radix_eviction_policy": "lru"})}, "sglang"),
        ({"GET /props": lambda _: (200, [1]), "GET /version": lambda _: (200, {"version": 7})}, ""),
        ({}, ""),
    ],
)
def test_an_engine_is_known_by_routes_that_only_it_has(routes, engine):
    """GETs that any server may refuse; what is nothing we know stays unknown."""
    with StrictServer(routes=routes) as server:
        assert engine == identify(server.url, within_s=20).engine
        assert [] == posts(server)


def test_nothing_that_answers_is_no_engine():
    """The whole identification has one deadline."""
    with StrictServer(fault="hang") as server, pytest.raises(Unreachable):
        identify(server.url, within_s=0.2)


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("https://api.openai.com/v1", "openai"), ("https://api.anthropic.com", "anthropic"),
        ("https://x.openai.azure.com", ""), ("http://localhost:8000/v1", None), ("https://openai.com.evil.example", ""),
    ],
)  # fmt: skip
def test_providers_are_known_by_their_address(url, name):
    """A name that only looks like one is somebody else's server."""
    assert name == provider(url)


@pytest.mark.parametrize(("accepts", "taken"), [(CHAT_FIELDS | {"priority"}, True), (CHAT_FIELDS, False)])
def test_a_priority_is_probed_with_one_token(accepts, taken):
    """The least that a request can be; a refusal is an answer."""
    with StrictServer(accepts=accepts) as server:
        assert taken is takes_priority(server.url, api_key="k", model="m")
        (asked,) = server.asked
    assert (1, 1) == (asked.body["max_tokens"], asked.body["priority"])


def test_a_server_that_breaks_says_neither():
    """It is asked again another time."""
    with StrictServer(fault="html") as server, pytest.raises(Unreachable):
        takes_priority(server.url, api_key="", model="m", within_s=1.0)


def test_a_priority_is_asked_for_once_a_day(endpoints, server, time_s, tmp_path):
    """By whichever process; the file is the user's own."""
    known = identify(server.url, within_s=20)
    for _ in range(3):
        assert endpoints.learned(server.url, known, probe_priority=True).priority is True
    assert Endpoints(tmp_path, now_s=time_s).learned(server.url, known, probe_priority=True).priority is True
    assert 1 == len(posts(server))
    assert 0o600 == stat.S_IMODE((tmp_path / "endpoints.json").stat().st_mode)
    time_s.now += KEPT_S
    endpoints.learned(server.url, known, probe_priority=True)
    assert 2 == len(posts(server))


def test_a_priority_is_not_asked_for_unless_allowed(endpoints, server):
    """The user's server, the user's word."""
    assert endpoints.learned(server.url, identify(server.url, within_s=20)).priority is None
    assert [] == posts(server)


def test_a_hosted_provider_is_never_asked(endpoints):
    """Whatever the user allows: there it costs money."""
    known = Known(engine="vllm", models=("m",))
    assert endpoints.learned("https://api.openai.com/v1", known, probe_priority=True).priority is None


def test_another_server_at_the_same_address_is_asked_anew(endpoints, server):
    """Another engine, version or model: nothing that was known holds."""
    known = identify(server.url, within_s=20)
    endpoints.learned(server.url, known, probe_priority=True)
    endpoints.refused(server.url, known, frozenset({"session_id"}))
    newer = Known(engine="vllm", version="0.34.0", models=("m",))
    assert Known(engine="vllm", version="0.34.0", models=("m",)) == endpoints.learned(server.url, newer)


def test_refused_fields_are_remembered_where_the_server_says_what_it_is(tmp_path, server, time_s):
    """Of an unknown server nothing is kept: tomorrow another one listens there."""
    endpoints = Endpoints(tmp_path, now_s=time_s)
    known = identify(server.url, within_s=20)
    endpoints.refused(server.url, known, frozenset({"session_id"}))
    assert (("", "", "session_id"),) == Endpoints(tmp_path, now_s=time_s).learned(server.url, known).refused
    endpoints.refused("http://other:1", Known(), frozenset({"x"}))
    assert "other" not in (tmp_path / "endpoints.json").read_text()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"schema": "other/1"}', '{"schema": "agentkv.endpoints/2", "endpoints": {"a": 1}}']
)
def test_a_broken_file_is_as_good_as_none(tmp_path, text):
    """Asked anew, and written anew."""
    (tmp_path / "endpoints.json").write_text(text)
    known = Known(engine="vllm", version="1", models=("m",))
    endpoints = Endpoints(tmp_path)
    assert known == endpoints.learned("http://h:1", known)
    endpoints.refused("http://h:1", known, frozenset({"x"}))
    assert "agentkv.endpoints/2" == json.loads((tmp_path / "endpoints.json").read_text())["schema"]


@pytest.mark.parametrize(("probe", "sent"), [(True, True), (False, False)])
def test_an_agents_priority_reaches_a_server_that_was_probed(server, monkeypatch, probe, sent):
    """Through AgentKV, with vLLM's sign; blind it is never sent."""
    monkeypatch.setattr("agentkv.adapters.found.PROBE_S", 20.0)
    with (
        AgentKV.remote(base_url=server.url, model="m", ledger="memory", api_key="k", probe=probe) as kv,
        kv.task("a", final=False, priority=PriorityClass.FOREGROUND),
    ):
        kv.submit(Request(messages=(Message(role="user", content="hi"),))).result(20)
    asked = posts(server)[-1].body
    assert sent is ("priority" in asked)
    assert not sent or asked["priority"] < 0
    assert 0 == server.rejected
