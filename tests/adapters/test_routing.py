"""A remote engine and its routing: what a request carries, and that whatever was given is given back."""

from __future__ import annotations

import threading
import time

import pytest

from agentkv import Message, Request
from agentkv.adapters.base import Extra
from agentkv.adapters.replay import Keep
from agentkv.adapters.strict import CHAT_FIELDS, StrictServer
from agentkv.core.task import Caller
from agentkv.engine.remote import RemoteEngine
from agentkv.runtime.routes import Route

REQUEST = Request(messages=(Message(role="user", content="hello"),), caller=Caller(task="t"))


class Slots:
    """An adapter that gives `given` to each call, and notes what ends; `gate` holds it up."""

    def __init__(self, given):
        self.given, self.ends, self.error = given, [], None
        self.about = []
        self.gate = threading.Event()
        self.gate.set()
        self.asked = threading.Event()

    def carries(self, about):
        self.asked.set()
        self.about.append(about)
        self.gate.wait(5)
        if self.error is not None:
            raise self.error
        return Extra(body=self.given) if self.given else None

    def ended(self, session, *, tokens, cached_tokens):
        self.ends.append((session, tokens > 0))


@pytest.fixture
def server():
    with StrictServer(accepts=CHAT_FIELDS | {"id_slot"}) as made:
        yield made


@pytest.fixture
def engine(server):
    made = RemoteEngine(base_url=server.url, model="m", api_key="k", max_retries=0)
    yield made
    made.close()


def until(condition):
    ends = time.monotonic() + 20
    while not condition() and time.monotonic() < ends:
        time.sleep(0.005)
    assert condition()


def test_a_call_carries_the_fields_and_ends_before_its_answer_is_there(engine, server):
    """Whoever has the answer may call again at once, and finds the slot idle."""
    slots = Slots({"id_slot": 3})
    engine.routing = Route(slots)
    engine.submit(REQUEST).result(20)
    assert [("t", True)] == slots.ends
    assert 3 == server.asked[-1].body["id_slot"]


def test_a_call_that_was_given_nothing_has_nothing_to_end(engine, server):
    """It goes as it is."""
    slots = Slots({})
    engine.routing = Route(slots)
    engine.submit(REQUEST).result(20)
    assert [] == slots.ends
    assert "id_slot" not in server.asked[-1].body


def test_a_call_that_was_given_nothing_has_nothing_to_end_where_its_request_is_kept(engine):
    """The slot that another call of its session computes in would count as idle."""
    slots = Slots({})
    engine.routing = route = Route(slots)
    route.keep = Keep()
    engine.submit(REQUEST).result(20)
    assert route.keep.get("t") is not None
    assert [] == slots.ends


def test_a_routing_that_fails_costs_the_call_nothing(engine):
    """A log line and a counter."""
    slots = Slots({"id_slot": 0})
    engine.routing = Route(slots)
    slots.error = ValueError("broken")
    assert "ok" == engine.submit(REQUEST).result(20).text


def test_a_call_that_fails_gives_back_what_it_got(engine, server):
    """The slot is not busy for ever."""
    slots = Slots({"id_slot": 0})
    engine.routing = Route(slots)
    server.accepts = {"model"}
    with pytest.raises(Exception, match="Unrecognized"):
        engine.submit(REQUEST).result(20)
    assert [("t", False)] == slots.ends


def test_a_call_that_is_cancelled_while_it_waits_for_a_slot_gives_it_back(engine):
    """What it still gets comes back as soon as it is there."""
    slots = Slots({"id_slot": 0})
    engine.routing = Route(slots)
    slots.gate.clear()
    stream = engine.submit(REQUEST)
    assert slots.asked.wait(5)
    stream.cancel()
    slots.gate.set()
    until(lambda: [("t", False)] == slots.ends)
