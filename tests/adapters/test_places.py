"""Places: which endpoint a request goes to, on one host with several of them too, and whose address it is."""

from __future__ import annotations

import httpx2
import openai
import pytest

from agentkv import AgentKV, Message, Request, ScriptedEngine
from agentkv.adapters.inject import place_of
from agentkv.adapters.places import place
from agentkv.adapters.probe import Endpoints, Known
from agentkv.adapters.strict import CHAT_FIELDS, StrictServer

MESSAGES = [{"role": "user", "content": "hello"}]
COMPLETION = {"id": "c", "object": "text_completion", "created": 0, "model": "m", "choices": []}
TWO = {
    "GET /llama/props": lambda _: (200, {"total_slots": 2}),
    "GET /llama/slots": lambda _: (200, [{"id": 0}, {"id": 1}]),
    "GET /dyn/health": lambda _: (200, {"instances": []}),
}
"""A llama.cpp server and a Dynamo frontend behind one gateway."""


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    """A loaded machine is slow to say what it is."""
    monkeypatch.setattr("agentkv.adapters.found.PROBE_S", 20.0)


@pytest.fixture
def gateway():
    with StrictServer(routes=dict(TWO), accepts=CHAT_FIELDS | {"id_slot", "nvext"}) as server:
        yield server


@pytest.fixture
def kv():
    with AgentKV.with_engine(ScriptedEngine(["ok"]), ledger="memory") as made:
        yield made


def root(server):
    return server.url.removesuffix("/v1")


def chat(kv, base_url, **options):
    with openai.OpenAI(
        base_url=base_url, api_key="k", max_retries=0, http_client=kv.http_client(), **options
    ) as client:
        return client.chat.completions.create(model="m", messages=MESSAGES)


def posts(server):
    return [one for one in server.asked if one.method == "POST"]


@pytest.mark.parametrize(
    ("url", "where"),
    [
        ("http://h:80/v1/chat/completions", "http://h"),
        ("https://h:443/v1/completions", "https://h"),
        ("http://h:8000/chat/completions", "http://h:8000"),
        ("http://h:8000/v1/messages?beta=true", "http://h:8000"),
        ("http://h/llama/v1/chat/completions", "http://h/llama"),
        ("http://h/llama/v1/responses", "http://h/llama"),
        ("http://h/a%20b/v1/completions", "http://h/a%20b"),
        ("http://user:secret@H:8000/v1/completions", "http://h:8000"),
        ("http://[::1]:8000/v1/chat/completions", "http://[::1]:8000"),
        (
            "https://x.openai.azure.com/openai/deployments/gpt/chat/completions?api-version=1",
            "https://x.openai.azure.com/openai/deployments/gpt",
        ),
        ("https://g/v1beta/openai/chat/completions", "https://g/v1beta/openai"),
    ],
)
def test_a_request_goes_to_what_stands_before_its_route(url, where):
    """Without query, password, a scheme's own port, and the version that a server has with and without."""
    assert where == place_of(httpx2.Request("POST", url))


@pytest.mark.parametrize(
    ("base_url", "url"),
    [
        ("http://h:8000", "http://h:8000/v1/chat/completions"),
        ("http://h:8000/v1/", "http://h:8000/v1/chat/completions"),
        ("http://H:80/llama/v1//", "http://h/llama/v1/completions"),
        ("http://h/a b/v1", "http://h/a%20b/v1/chat/completions"),
        ("http://bücher.example/v1", "http://bücher.example/v1/chat/completions"),
        ("https://x/openai/deployments/gpt?api-version=1", "https://x/openai/deployments/gpt/chat/completions"),
        ("http://h/messages", "http://h/messages/chat/completions"),
        ("http://[::1]:8000/v1", "http://[::1]:8000/v1/messages"),
    ],
)
def test_an_address_is_the_place_of_the_requests_that_go_to_it(base_url, url):
    """However it is written: what an AgentKV calls itself and what people's clients call are one endpoint."""
    assert place(base_url) == place_of(httpx2.Request("POST", url))


@pytest.mark.parametrize("address", ["http://h:99999/v1", "http://h:eighty/v1", "no address", ""])
def test_what_is_no_address_raises_nothing(address):
    """Whoever calls it finds out."""
    assert place(address) == place(address)


def test_two_engines_on_one_host_get_their_own_fields(gateway):
    """Neither those of the other one, which it might refuse."""
    with (
        AgentKV.remote(base_url=f"{root(gateway)}/llama/v1", model="m", ledger="memory") as kv,
        kv.task("t", final=False),
    ):
        kv.submit(Request(messages=(Message(role="user", content="hello"),))).result(20)
        chat(kv, f"{root(gateway)}/dyn/v1")
        chat(kv, f"{root(gateway)}/llama/v1/")
        others = kv.stats()["reach"]["others"]
    own, dynamo, again = posts(gateway)
    assert ("id_slot" in own.body, "nvext" in own.body) == (True, False)
    assert ("id_slot" in dynamo.body, "nvext" in dynamo.body) == (False, True)
    assert "x-dynamo-session-id" in dynamo.headers
    assert own.body["id_slot"] == again.body["id_slot"]  # one adapter keeps the books of one server's slots
    assert {f"{root(gateway)}/dyn"} == set(others)


def test_a_clients_endpoint_is_asked_under_its_own_path(kv, gateway):
    """What is at the root of the host is somebody else's."""
    with kv.task("t", final=False):
        chat(kv, f"{root(gateway)}/llama/v1")
    assert "id_slot" in posts(gateway)[0].body
    assert all(one.path.startswith("/llama/") for one in gateway.asked)


def test_a_query_is_no_part_of_an_endpoint(kv, gateway):
    """As Azure's `api-version`, and whatever a gateway wants."""
    gateway.routes |= {
        f"POST /llama/v1/{route}": lambda _: (200, COMPLETION) for route in ("chat/completions", "completions")
    }
    with kv.task("t", final=False):
        for version in ("1", "2"):
            chat(kv, f"{root(gateway)}/llama/v1", default_query={"api-version": version})
    assert 1 == len(kv.stats()["reach"]["others"])
    assert [True, True] == ["id_slot" in one.body for one in posts(gateway)]


def test_what_one_refuses_the_other_is_still_told(kv, gateway):
    """Left out for the one that refused it, and kept for no other."""
    gateway.routes["GET /other/health"] = TWO["GET /dyn/health"]
    gateway.routes["POST /other/v1/chat/completions"] = lambda body: (
        (400, {"error": {"message": "unknown field nvext"}}) if "nvext" in body else (200, COMPLETION)
    )
    with kv.task("t", final=False):
        for path in ("other", "dyn", "other"):
            chat(kv, f"{root(gateway)}/{path}/v1")
    told = [(one.path.split("/")[1], "nvext" in one.body) for one in posts(gateway)]
    assert [("other", True), ("other", False), ("dyn", True), ("other", False)] == told


def test_what_is_remembered_is_of_one_path(tmp_path):
    """A day later too."""
    known = Known(engine="vllm", version="1", models=("m",))
    endpoints = Endpoints(tmp_path)
    endpoints.refused("http://h/a/v1", known, frozenset({"session_id"}))
    assert (("", "", "session_id"),) == Endpoints(tmp_path).learned("http://h/a", known).refused
    assert () == Endpoints(tmp_path).learned("http://h/b/v1", known).refused
