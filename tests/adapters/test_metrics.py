"""What `/metrics` says: whether a server has room, and where a call's cached tokens came from."""

from __future__ import annotations

import threading
import time

import pytest

from agentkv import AgentKV, Message, Request
from agentkv.adapters import metrics
from agentkv.adapters.http import Endpoint
from agentkv.adapters.metrics import Hits, Load, samples
from agentkv.adapters.strict import CHAT_FIELDS, Asked, StrictServer, _raw

NAMES = frozenset(("a", "b"))


class Metered(StrictServer):
    """vLLM's counters; `call(device=..., host=...)` is a call that ended there."""

    def __init__(self) -> None:
        super().__init__(accepts=CHAT_FIELDS | {"session_id"})
        self.by = {"device": 0, "host": 0, "disk": 0}
        self.finished = self.waiting = self.running = 0
        self.routes = {
            "GET /version": lambda _: (200, {"version": "0.33.0"}),
            "GET /v1/models": lambda _: (200, {"data": [{"id": "m"}]}),
        }

    def _serve(self, http, method) -> None:
        if http.path != "/metrics" or self.fault:
            return super()._serve(http, method)
        self.asked.append(Asked(method=method, path=http.path, headers={}, body={}))
        return _raw(http, 200, "text/plain", self.text().encode())

    def call(self, **by) -> None:
        self.finished += 1
        for source, tokens in by.items():
            self.by[source] += tokens

    def text(self) -> str:
        lines = [f'vllm:num_requests_waiting{{engine="0"}} {self.waiting}.0']
        lines += [f'vllm:num_requests_running{{engine="0"}} {self.running}.0']
        lines += [
            f'vllm:prompt_tokens_cached_by_source_total{{engine="0",source="{source}"}} {tokens}.0'
            for source, tokens in self.by.items()
        ]
        lines += [f'vllm:request_success_total{{engine="0",finished_reason="stop"}} {self.finished}.0']
        return "\n".join(["# HELP x y", *lines])


class Slow:
    """An endpoint whose answers take `seconds`, or wait until `goes_on`; each call grows by one finished request."""

    def __init__(self, seconds=0.0) -> None:
        self.seconds, self.finished = seconds, 0
        self.goes_on, self.asked = threading.Event(), threading.Event()
        self.goes_on.set()
        self.within: list[float] = []

    def text(self, path, within_s) -> str:
        self.within.append(within_s)
        self.asked.set()
        time.sleep(self.seconds)
        self.goes_on.wait(60)
        return f"vllm:request_success_total {self.finished}"


@pytest.fixture(autouse=True)
def _patient(monkeypatch, request):
    """A loaded machine is slow to answer; only hanging is tested with the real patience."""
    if "hang" not in request.node.name:
        monkeypatch.setattr(metrics, "HITS_WITHIN_S", 5.0)


@pytest.fixture
def server():
    with Metered() as made:
        yield made


@pytest.fixture
def endpoint(server):
    made = Endpoint(server.url)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a 1\na 2", {("a", ""): 3.0}),
        ('a{source="x"} 1\na{source="y",z="1"} 2', {("a", "x"): 1.0, ("a", "y"): 2.0}),
        ("a NaN\na -1\na +Inf\na\na x\nb{ 7\nb 1e3", {("b", ""): 1000.0}),
        ("", {}),
        ("aa 1\n# a 1", {}),
    ],
)
def test_samples_are_read_and_nonsense_is_left_out(text, found):
    """Bounded, by name and source."""
    assert found == samples(text, NAMES)


def test_a_server_where_requests_wait_has_no_room(server, endpoint):
    """By its own words."""
    load = Load(endpoint)
    assert "" == load.busy(5)
    server.waiting = 3
    assert "3 requests" in load.busy(5)


@pytest.mark.parametrize(("computes", "room"), [([True, False], True), ([True, True], False)])
def test_a_server_without_metrics_may_tell_of_its_slots(computes, room):
    """llama.cpp: room is a slot that does not compute."""
    slots = [{"id": number, "is_processing": one} for number, one in enumerate(computes)]
    with StrictServer(routes={"GET /slots": lambda _: (200, slots)}) as server:
        endpoint = Endpoint(server.url)
        assert room is (Load(endpoint).busy(5) == "")
        endpoint.close()


def test_a_server_that_says_nothing_is_neither():
    """Whoever asks counts his own calls."""
    with StrictServer() as server:
        endpoint = Endpoint(server.url)
        assert Load(endpoint).busy(5) is None
        endpoint.close()


def test_a_calls_hits_are_what_the_counters_grew_by(server, endpoint):
    """By the tier that they came from."""
    server.by["host"] = 32
    hits = Hits(endpoint)
    hits.start()
    server.call(device=128, host=256)
    assert {"device": 128, "host": 256} == hits.of_call(384)
    server.call(disk=128)
    assert {"disk": 128} == hits.of_call(0)


def test_nothing_is_said_where_another_call_ended_too(server, endpoint):
    """Whose tokens those were nobody knows; the next call is told again."""
    server.by["host"] = 32
    hits = Hits(endpoint)
    hits.start()
    server.call(device=128)
    server.call(device=256)
    assert hits.of_call(0) is None
    server.call(device=64)
    assert {"device": 64} == hits.of_call(64)


def test_nothing_is_said_that_the_answer_contradicts(server, endpoint):
    """The answer knows better."""
    server.by["host"] = 32
    hits = Hits(endpoint)
    hits.start()
    server.call(device=128)
    assert hits.of_call(100) is None


def test_nothing_is_asked_where_nothing_can_be_learnt(server, endpoint):
    """The answer said how much, and all of it comes from the device: an agent's call does not wait for more."""
    hits = Hits(endpoint)
    hits.start()
    asked = len(server.asked)
    server.call(device=128)
    assert hits.of_call(128) is None
    assert asked == len(server.asked)


def test_a_server_that_started_anew_is_believed_from_the_next_call_on(server, endpoint):
    """Counters that shrink."""
    hits = Hits(endpoint)
    server.call(device=128)
    hits.start()
    server.by, server.finished = {"device": 0, "host": 0, "disk": 0}, 0
    assert hits.of_call(0) is None
    server.call(device=32)
    assert {"device": 32} == hits.of_call(0)


def test_a_calls_end_does_not_wait_for_anothers():
    """While one end is looked at, others are told nothing at once; and neither is told what may be the other's."""
    slow = Slow()
    hits = Hits(slow)
    hits.start()
    slow.goes_on.clear()
    slow.asked.clear()
    slow.finished = 1
    told = []
    first = threading.Thread(target=lambda: told.append(hits.of_call(0)))
    first.start()
    assert slow.asked.wait(30)
    asked = len(slow.within)
    assert [None] * 24 == [hits.of_call(0) for _ in range(24)]  # would wait for a minute
    assert asked == len(slow.within)
    slow.goes_on.set()
    first.join(30)
    assert [None] == told


def test_after_ends_that_crossed_the_counters_are_read_anew(server, endpoint):
    """What grew in between is nobody's; from the next call on it is told again."""
    hits = Hits(endpoint)
    hits.start()
    with hits._lock:
        assert hits.of_call(0) is None
    server.call(host=64)
    assert hits.of_call(0) is None
    server.call(host=32)
    assert {"host": 32} == hits.of_call(0)


def test_both_looks_at_one_end_share_one_bound():
    """The counters had not moved at the first one: the second has what is left."""
    slow = Slow(seconds=0.5)
    hits = Hits(slow)
    hits.start()
    hits.of_call(0)
    assert 3 == len(slow.within)
    assert slow.within[2] <= metrics.HITS_WITHIN_S - 0.5


def test_nothing_is_said_that_the_prompt_has_no_room_for(server, endpoint):
    """Counters that lie, or that another call moved."""
    hits = Hits(endpoint)
    hits.start()
    server.call(host=4000)
    assert hits.of_call(0, 33) is None
    server.call(host=33)
    assert {"host": 33} == hits.of_call(0, 33)


def test_nothing_is_said_while_another_call_computes(server, endpoint):
    """Its tokens are counted when it is scheduled, long before its end."""
    hits = Hits(endpoint)
    hits.start()
    server.call(host=4000)
    server.running = 1
    assert hits.of_call(0, 5000) is None
    server.call()
    server.running = 0
    assert hits.of_call(0, 5000) is None
    server.call(host=5)
    assert {"host": 5} == hits.of_call(0, 5000)


def test_metrics_that_hang_are_given_up_after_three_calls(server, endpoint):
    """Each costs a call's end a tenth of a second at most."""
    hits = Hits(endpoint)
    hits.start()
    server.fault = "hang"
    for _ in range(5):
        assert hits.of_call(0) is None
    assert 3 <= sum(asked.path == "/metrics" for asked in server.asked) <= 4


def test_a_call_whose_answer_is_silent_is_billed_by_the_metrics(server):
    """Through AgentKV: the usage says nothing of a cache, the counters do."""
    answer = server._chat

    def call(*about):
        server.call(host=2)
        answer(*about)

    server._chat = call
    with AgentKV.remote(base_url=server.url, model="m", ledger="memory", api_key="k") as kv:
        with kv.task("a", final=False):
            generation = kv.submit(Request(messages=(Message(role="user", content="hi"),))).result(20)
        bill = kv.report("a")
    assert ({"host": 2}, 2) == (dict(generation.cached_by), generation.usage.cached_tokens)
    assert 2 == bill.usage.cached_tokens


@pytest.mark.parametrize("lie", [{"host": 10**6}, {"host": 3, "disk": 10**9}])
def test_a_bills_parts_never_exceed_their_whole(server, lie):
    """Counters that say more than the prompt had are not believed, neither as the sum nor as its parts."""
    answer = server._chat

    def call(*about):
        server.call(**lie)
        answer(*about)

    server._chat = call
    with AgentKV.remote(base_url=server.url, model="m", ledger="memory", api_key="k") as kv:
        with kv.task("a", final=False):
            generation = kv.submit(Request(messages=(Message(role="user", content="hi"),))).result(20)
        bill = kv.report("a")
    assert ({}, 0) == (dict(generation.cached_by), generation.usage.cached_tokens)
    assert ({}, 0) == (bill.cached_by, bill.usage.cached_tokens)
