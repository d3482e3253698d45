"""An endpoint that is another engine now: it is asked again, beside the agent, and hears nothing of its predecessor's fields."""

from __future__ import annotations

import contextlib
import time

import openai
import pytest

from agentkv import AgentKV, ScriptedEngine
from agentkv.adapters.base import Unreachable
from agentkv.adapters.dynamo import Dynamo
from agentkv.adapters.found import AGE_S, Found
from agentkv.adapters.probe import identify
from agentkv.adapters.strict import CHAT_FIELDS, StrictServer
from agentkv.clock import ManualClock
from agentkv.core.hint import Hint, HintKind, SessionFacts

ABOUT = SessionFacts(session="s", task="s")
SLOTS = {"GET /props": lambda _: (200, {"total_slots": 2}), "GET /slots": lambda _: (200, [{"id": 0}, {"id": 1}])}
BUSY = (503, {"error": {"message": "Loading model", "code": 503}})


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    """A loaded machine is slow to say what it is."""
    monkeypatch.setattr("agentkv.adapters.found.PROBE_S", 20.0)


@pytest.fixture
def server():
    with StrictServer(dialect="dynamo", accepts=CHAT_FIELDS | {"nvext", "session_id", "id_slot"}) as made:
        yield made


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def found(server, clock):
    made = Found(server.url, clock=clock)
    yield made
    made.close()


def until(condition):
    ends = time.monotonic() + 30
    while not condition() and time.monotonic() < ends:
        time.sleep(0.005)
    assert condition()


def fields(found):
    extra = found.carries(ABOUT)
    return set() if extra is None else {*extra.body, *extra.headers}


def gets(server):
    return [one for one in server.asked if one.method == "GET"]


def becomes(server, engine):
    """The server is another one now."""
    server.dialect = engine if engine in ("dynamo", "vllm") else "openai"
    server.routes = dict(SLOTS) if engine == "llama.cpp" else {}


@pytest.mark.parametrize(("engine", "told"), [("vllm", {"session_id"}), ("llama.cpp", {"id_slot"}), ("", set())])
def test_an_engine_that_was_away_may_be_another_one_now(found, server, monkeypatch, engine, told):
    """Before it is told anything; the old adapter lets go of its connections."""
    closed, close = [], Dynamo.close

    def noted(adapter):
        closed.append(adapter)
        close(adapter)

    monkeypatch.setattr(Dynamo, "close", noted)
    assert {"nvext", "X-Dynamo-Session-ID"} == fields(found)
    becomes(server, engine)
    found.reset()
    assert (engine or "unknown", told) == (found.name, fields(found))
    assert 1 == len(closed)


@pytest.mark.parametrize("cause", ["a call", "a hint"])
def test_an_engine_is_asked_again_after_a_while(found, server, clock, cause):
    """By whatever comes next, and on a thread of its own."""
    fields(found)
    becomes(server, "vllm")
    clock.advance(AGE_S - 1)
    fields(found)
    before = len(gets(server))
    clock.advance(2)
    if cause == "a call":
        fields(found)
    else:
        found.deliver(Hint(id="h", kind=HintKind.TURN_START, at_s=0, ts_ms=0, task="s", session="s", about=ABOUT), 5.0)
    until(lambda: found.name == "vllm")
    assert {"session_id"} == fields(found)
    assert len(gets(server)) > before


def test_a_call_does_not_wait_for_that(found, server, clock):
    """A server that answers no question has all the time it wants."""
    fields(found)
    server.fault, server.fault_at = "hang", "/props"
    clock.advance(AGE_S + 1)
    began_s = time.monotonic()
    assert {"nvext", "X-Dynamo-Session-ID"} == fields(found)
    assert time.monotonic() - began_s < 10


def test_it_is_asked_once_in_that_while(found, server, clock):
    """Not by each of the calls that come meanwhile."""
    fields(found)
    clock.advance(AGE_S + 1)
    asked = len(gets(server))
    for _ in range(20):
        fields(found)
    until(lambda: gets(server)[-1].path == "/v1/models" and len(gets(server)) > asked)
    first = len(gets(server)) - asked
    for _ in range(20):
        fields(found)
    time.sleep(0.2)
    assert first == len(gets(server)) - asked


def test_what_nobody_knew_is_asked_again_too(found, server, clock):
    """Somebody starts an engine there."""
    becomes(server, "")
    assert set() == fields(found)
    becomes(server, "dynamo")
    clock.advance(AGE_S + 1)
    until(lambda: "nvext" in fields(found))


@pytest.mark.parametrize("state", ["loading", "away", "the same"])
def test_an_engine_that_comes_back_as_itself_keeps_its_books(found, server, clock, state):
    """While it loads its model, or is away, nobody knows better: what is saved in files is found again afterwards."""
    becomes(server, "llama.cpp")
    assert {"id_slot"} == fields(found)
    adapter = found._adapter
    if state == "loading":
        server.routes = {f"GET {path}": lambda _: BUSY for path in ("/props", "/version", "/health", "/server_info")}
    elif state == "away":
        server.fault = "close"
    found.reset()
    server.fault = ""
    becomes(server, "llama.cpp")
    found.reset()
    assert found._adapter is adapter


def test_a_server_that_loads_its_model_is_nothing_unknown(server):
    """It is asked again as one that does not answer: soon, and not in ten minutes."""
    server.dialect = "openai"
    server.routes = {f"GET {path}": lambda _: BUSY for path in ("/props", "/version", "/health", "/server_info")}
    with pytest.raises(Unreachable, match="503"):
        identify(server.url, within_s=20)


def test_an_engine_that_was_named_is_not_asked(server, clock):
    """The user knows better, now as before."""
    found = Found(server.url, clock=clock, engine="vllm")
    fields(found)
    clock.advance(2 * AGE_S)
    fields(found)
    found.reset()
    found.close()
    assert [] == [one.path for one in gets(server) if one.path != "/metrics"]


def test_a_closed_one_makes_no_new_adapter(found, server):
    """It could never be closed."""
    fields(found)
    found.close()
    becomes(server, "vllm")
    found.reset()
    assert "dynamo" == found.name


def test_a_refusal_is_a_reason_to_ask(server, monkeypatch):
    """Its fields are refused, so perhaps it is not what it was: the next call carries none of them, no header either."""
    monkeypatch.setattr("agentkv.adapters.found._MOST_AGAIN_S", 0.0)  # not again within half a minute
    with AgentKV.with_engine(ScriptedEngine(["ok"]), ledger="memory") as kv, kv.task("t", final=False):

        def ask():
            with openai.OpenAI(base_url=server.url, api_key="k", max_retries=0, http_client=kv.http_client()) as client:
                client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hello"}])
            return [one for one in server.asked if one.method == "POST"][-1]

        assert "x-dynamo-session-id" in ask().headers
        becomes(server, "")
        server.accepts = CHAT_FIELDS
        ask()
        until(lambda: [told["adapter"] for told in kv.stats()["reach"]["others"].values()] == ["unknown"])
        sent = ask()
        assert "nvext" not in sent.body
        assert "x-dynamo-session-id" not in sent.headers
        becomes(server, "dynamo")  # and its successor is told what it refused
        server.accepts = CHAT_FIELDS | {"nvext"}
        (way,) = kv._doors.ways()._ways.values()
        way.found.reset()
        assert "nvext" in ask().body


def test_a_reset_of_an_endpoint_that_never_answered_asks_nothing():
    """There is nothing that could be another one now."""
    found = Found("http://127.0.0.1:1/v1", clock=ManualClock())
    with contextlib.closing(found):
        found.reset()
        assert "unknown" == found.name
