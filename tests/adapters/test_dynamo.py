"""The Dynamo adapter against a server as strict as the real one: what goes with a request, and what a hint becomes."""

from __future__ import annotations

import struct
import sys

import ormsgpack
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from agentkv import AgentKV, Message, Request
from agentkv.adapters.base import Outcome, Routing
from agentkv.adapters.dynamo import FINAL, PARENT, SESSION, Dynamo, headers_of, hidden, told
from agentkv.adapters.dynamo_events import packed, record_of
from agentkv.adapters.strict import StrictServer
from agentkv.adapters.strict_rules import CHAT_FIELDS, LONGEST_ID_BYTES, refusal
from agentkv.clock import ManualClock
from agentkv.core.forecast import Forecast
from agentkv.core.hint import Hint, HintKind, SessionFacts, ToolFacts, ToolStatus
from agentkv.core.task import UNATTRIBUTED

MESSAGES = [{"role": "user", "content": "hi"}]
TEXTS = st.text(max_size=400)
FACTS = st.builds(
    SessionFacts, session=TEXTS, parent=TEXTS, salt=TEXTS, priority=st.integers(), osl=st.none() | st.integers(),
    turn=st.integers(),
)  # fmt: skip


def hint(kind, session="s", *, call=True, about=None, **facts):
    told_of = ToolFacts(call_id="c1", tool="pytest", **facts) if call else None
    wait = Forecast(remaining_s=(20.0,), n=9, source="history") if kind == "tool_start" else None
    return Hint(
        id="h", kind=HintKind(kind), at_s=0, ts_ms=1_000_000, task=session, session=session, call=told_of, wait=wait,
        about=about,
    )  # fmt: skip


@pytest.fixture
def server():
    with StrictServer(dialect="dynamo") as made:
        yield made


@pytest.fixture
def adapter(server, monkeypatch):
    monkeypatch.delenv("DYN_REQUEST_TRACE_TOOL_EVENTS_ZMQ_ENDPOINT", raising=False)
    made = Dynamo(server.url, clock=ManualClock(5.0), details=False)
    yield made
    made.close()


@pytest.fixture
def frontend():
    """A PULL socket such as a frontend binds; `take()` gives the next event's frames."""
    context = zmq.Context()
    socket = context.socket(zmq.PULL)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    socket.setsockopt(zmq.RCVTIMEO, 3000)
    yield f"tcp://127.0.0.1:{port}", socket.recv_multipart
    socket.close(linger=0)
    context.term()


def takes(extra):
    """Whether the strict server takes a request that carries `extra`."""
    body = {"model": "m", "messages": MESSAGES, **extra.body}
    headers = {name.lower(): value for name, value in extra.headers.items()}
    return None is refusal("dynamo", body, headers, accepts=CHAT_FIELDS, priorities=False, names_fields=True)


def test_a_request_says_who_calls_and_how_urgently(adapter):
    """In the body what Dynamo reads there, in its own headers the rest."""
    extra = adapter.carries(SessionFacts(session="run-7:coder", parent="run-7", priority=5, osl=300, salt="tenant"))
    assert {"agent_hints": {"priority": 5, "osl": 300}, "cache_salt": hidden("tenant")} == extra.body["nvext"]
    assert {SESSION: "run-7:coder", PARENT: "run-7"} == extra.headers
    assert takes(extra)


def test_what_is_not_known_is_not_said(adapter):
    """A first call of which nothing is known carries its name alone."""
    extra = adapter.carries(SessionFacts(session="s"))
    assert ({}, {SESSION: "s"}) == (extra.body, extra.headers)


def test_callers_that_nobody_knows_get_no_name(adapter):
    """Under one name they would all be kept on one worker."""
    assert adapter.carries(SessionFacts(session=UNATTRIBUTED)) is None
    child = adapter.carries(SessionFacts(session="s", parent=UNATTRIBUTED))
    assert {SESSION: "s"} == child.headers


@given(FACTS)
def test_whatever_a_session_is_called_its_request_is_taken(about):
    """Names that are no plain identifiers travel as a digest: no header of their own, never too long; numbers fit."""
    adapter = Dynamo("http://127.0.0.1:1/v1", details=True)
    extra = adapter.carries(about)
    assert takes(extra)
    for value in extra.headers.values():
        assert value.isascii()
        assert value.isprintable()
        assert " " not in value
        assert 0 < len(value.encode()) <= LONGEST_ID_BYTES


def test_names_never_meet():
    """Two sessions whose names only differ in what a header cannot hold are two sessions there, too."""
    assert headers_of(SessionFacts(session="a\r\nb")) != headers_of(SessionFacts(session="a\nb"))


def test_a_salt_is_a_secret(adapter):
    """Its digest parts caches as well; the text itself stays here."""
    extra = adapter.carries(SessionFacts(session="s", salt="top-secret"))
    assert "top-secret" not in str(extra)
    assert hidden("a") != hidden("b")


@pytest.mark.parametrize(
    ("facts", "tool", "sent"),
    [
        ({}, False, True),
        ({}, True, False),  # it is rendered without tools there: another beginning
        ({"salt": "t"}, False, False),  # and without a salt: a tenant's prompt in the cache of all
        ({"purpose": "summary"}, False, False),
    ],
)
def test_the_next_turn_is_prefilled_where_that_can_help(server, facts, tool, sent):
    """Dynamo's speculative prefill knows neither tools nor salt."""
    adapter = Dynamo(server.url, speculative_prefill=True)
    if tool:
        adapter.deliver(hint("tool_start"), 1)
    extra = adapter.carries(SessionFacts(session="s", turn=2, **facts))
    assert sent == ("speculative_prefill" in extra.body.get("nvext", {}).get("agent_hints", {}))


@pytest.mark.parametrize(("given", "sent"), [("", False), ("0", False), ("1", True)])
def test_a_prefill_is_asked_for_by_the_environment(server, monkeypatch, given, sent):
    """Where the adapter is found by its address there is nobody else to ask for it; the default is off."""
    monkeypatch.setenv("AGENTKV_DYNAMO_PREFILL", given)
    nvext = Dynamo(server.url).carries(SessionFacts(session="s")).body["nvext"]
    assert sent == ("agent_hints" in nvext)


def test_the_end_of_a_session_is_a_request_of_its_own(adapter, server):
    """Of one token, with the session's name; once."""
    adapter.carries(SessionFacts(session="s", model="m"))
    receipts = [adapter.deliver(hint("session_end", call=False), 1) for _ in range(2)]
    (asked,) = [one for one in server.asked if one.method == "POST"]
    assert ("s", "true") == (asked.headers[SESSION.lower()], asked.headers[FINAL.lower()])
    assert ("m", 1) == (asked.body["model"], asked.body["max_tokens"])
    assert [Outcome.ADVISORY] * 2 == [receipt.outcome for receipt in receipts]
    assert "it made no call there" == receipts[1].detail
    assert 0 == server.rejected


def test_an_end_that_does_not_arrive_is_a_failed_receipt(adapter, server):
    """Nothing is raised; Reach tells it again."""
    adapter.carries(SessionFacts(session="s", model="m"))
    server.fault = "close"
    assert Outcome.FAILED is adapter.deliver(hint("session_end", call=False), 1).outcome
    server.fault = ""
    assert "told as the session's last request" == adapter.deliver(hint("session_end", call=False), 5).detail


def test_a_frontend_that_was_away_is_not_told_of_sessions_that_it_lost(adapter, server):
    """There is nothing there to be released."""
    adapter.carries(SessionFacts(session="s", model="m"))
    adapter.reset()
    assert "it made no call there" == adapter.deliver(hint("session_end", call=False), 1).detail
    assert [] == server.asked


def test_without_an_address_tool_events_are_unsupported(adapter):
    """The receipt says what to set."""
    receipt = adapter.deliver(hint("tool_start"), 1)
    assert Outcome.UNSUPPORTED is receipt.outcome
    assert "DYN_REQUEST_TRACE_TOOL_EVENTS_ZMQ_ENDPOINT" in receipt.detail


def test_without_pyzmq_tool_events_are_unsupported(server, monkeypatch):
    """And everything else works."""
    monkeypatch.setitem(sys.modules, "zmq", None)
    adapter = Dynamo(server.url, tool_events="tcp://127.0.0.1:1")
    receipt = adapter.deliver(hint("tool_start"), 1)
    assert (Outcome.UNSUPPORTED, True) == (receipt.outcome, "pip install" in receipt.detail)
    adapter.close()


def test_a_tool_is_three_frames(server, frontend):
    """Topic, number, and a record that says everything by itself at the end, too."""
    address, take = frontend
    adapter = Dynamo(server.url, tool_events=address)
    about = SessionFacts(session="run:coder", parent="run")
    start = adapter.deliver(hint("tool_start", "run:coder", about=about), 2)
    end = adapter.deliver(
        hint("tool_error", "run:coder", about=about, status=ToolStatus.FAILED, elapsed_s=1.5), 2
    )  # fmt: skip
    first, second = take(), take()
    adapter.close()
    assert [Outcome.ADVISORY] * 2 == [start.outcome, end.outcome]
    assert [b"agent-tool-events"] * 2 == [first[0], second[0]]
    assert [0, 1] == [struct.unpack(">Q", frames[1])[0] for frames in (first, second)]
    assert {
        "schema": "dynamo.request.trace.v1", "event_type": "tool_error", "event_time_unix_ms": 1_000_000,
        "session_id": "run:coder", "parent_session_id": "run",
        "tool": {
            "tool_call_id": "c1", "tool_class": "pytest", "status": "error", "started_at_unix_ms": 998_500,
            "ended_at_unix_ms": 1_000_000, "duration_ms": 1500.0,
        },
    } == ormsgpack.unpackb(second[2])  # fmt: skip
    assert "running" == ormsgpack.unpackb(first[2])["tool"]["status"]


def test_events_that_nobody_takes_are_failed_receipts(server):
    """In the time that a hint has, and nothing is kept for later."""
    adapter = Dynamo(server.url, tool_events="tcp://127.0.0.1:1")
    receipt = adapter.deliver(hint("tool_start"), 0.05)
    assert (Outcome.FAILED, True) == (receipt.outcome, "nobody takes" in receipt.detail)
    adapter.close()


@pytest.mark.parametrize("address", ["nonsense", "tcp://", "tcp://127.0.0.1:99999", "http://127.0.0.1:1"])
def test_an_address_that_is_none_is_a_failed_receipt(server, address):
    """Not an error in the agent."""
    adapter = Dynamo(server.url, tool_events=address)
    assert Outcome.FAILED is adapter.deliver(hint("tool_start"), 0.05).outcome
    adapter.close()


@pytest.mark.parametrize(
    ("kind", "status", "said"),
    [
        ("tool_end", ToolStatus.SUCCEEDED, "succeeded"),
        ("tool_end", ToolStatus.RUNNING, "succeeded"),
        ("tool_error", ToolStatus.RUNNING, "error"),
        ("tool_error", ToolStatus.CANCELLED, "cancelled"),
        ("tool_end", ToolStatus.PAUSED, "cancelled"),
    ],
)
def test_an_end_never_says_that_the_tool_runs(kind, status, said):
    """Terminal records must stand alone."""
    assert said == record_of(hint(kind, status=status))["tool"]["status"]


def test_a_hint_without_a_tool_has_no_record(adapter):
    """Progress has none, either."""
    assert record_of(hint("tool_start", call=False)) is None
    assert Outcome.UNSUPPORTED is adapter.deliver(hint("tool_update"), 1).outcome


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(0, 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=70),
        lambda inner: st.dictionaries(st.text(max_size=5), inner, max_size=20),
        max_leaves=30,
    )
)
def test_our_msgpack_is_msgpack(value):
    """Somebody else's decoder reads the same."""
    assert value == ormsgpack.unpackb(packed(value))


@pytest.mark.parametrize("value", [b"bytes", [1], -1, 2**64, object()])
def test_what_no_record_holds_is_refused(value):
    """Rather than sent as something else."""
    with pytest.raises(TypeError):
        packed(value)


def test_details_come_back():
    """Worker, hit rate and timing, where they were asked for."""
    adapter = Dynamo("http://127.0.0.1:1/v1", details=True)
    assert ["worker_id", "timing"] == adapter.carries(SessionFacts(session="s")).body["nvext"]["extra_fields"]
    answer = {
        "nvext": {
            "worker_id": {"decode_worker_id": 7},
            "timing": {"ttft_ms": 4, "kv_hit_rate": 0.9, "router_queue_depth": 2},
        }
    }
    assert (7, 0.9, 0.004, 2) == (told(answer).worker, told(answer).hit_rate, told(answer).ttft_s, told(answer).queued)


@pytest.mark.parametrize(("session", "details", "asks"), [
    ("s", None, True), (UNATTRIBUTED, None, False), ("s", False, False), (UNATTRIBUTED, True, True),
])  # fmt: skip
def test_details_are_asked_for_where_somebody_is_billed(session, details, asks):
    """Unless told otherwise; a request of nobody goes as it is."""
    extra = Dynamo("http://127.0.0.1:1/v1", details=details).carries(SessionFacts(session=session))
    assert asks == ("extra_fields" in ({} if extra is None else extra.body.get("nvext", {})))


def test_worker_and_hit_rate_stand_in_the_bill(server):
    """As the router told them, call by call, in the facts and in the bill's JSON."""
    with AgentKV.remote(base_url=server.url, model="m", ledger="memory", speaks="dynamo") as kv:
        with kv.task("t"):
            answer = kv.submit(Request(messages=(Message(role="user", content="hello " * 40),))).result(20)
        (call,) = kv.report("t").to_json()["calls"]
    assert ("7", 0.5) == (answer.worker, answer.expected_hit_rate)
    assert ("7", 0.5) == (call["worker"], call["expected_hit_rate"])
    assert answer.usage.input_tokens // 2 == call["usage"]["cached_tokens"] == sum(call["cached_by"].values())
    assert call["estimated"]


@given(st.recursive(st.none() | st.integers() | st.floats() | st.text(), lambda x: st.dictionaries(
    st.sampled_from(["nvext", "worker_id", "timing", "kv_hit_rate", "ttft_ms", "decode_worker_id"]), x), max_leaves=12))  # fmt: skip
def test_lies_about_a_call_are_read_as_nothing(answer):
    """Shapes and numbers that cannot be."""
    read = told(answer)
    assert read.hit_rate is None or 0 <= read.hit_rate <= 1
    assert read.ttft_s is None or 0 <= read.ttft_s < float("inf")


@pytest.mark.parametrize("hit_rate", [1.5, -0.1, float("nan"), "0.5", True])
def test_a_hit_rate_that_is_no_share_is_not_told(hit_rate):
    """More than the whole prompt cannot be held."""
    assert told({"nvext": {"timing": {"kv_hit_rate": hit_rate}}}).hit_rate is None


def test_it_is_a_routing(adapter):
    """The runtime finds out by its methods."""
    assert isinstance(adapter, Routing)


def test_the_whole_way_through_agentkv(server):
    """The frontend is found by its own words; requests and hints are taken; nothing is refused."""
    with AgentKV.remote(base_url=server.url, model="m", ledger="memory", context=None) as kv:
        for name in ("a", "b\r\nX-Evil: 1"):
            with kv.task(name, final=False):
                for _ in range(2):
                    kv.submit(Request(messages=(Message(role="user", content="hi"),))).result(20)
                    with kv.tool("pytest"):
                        pass
            kv.finish(name)
    asked = [one for one in server.asked if one.path.endswith("completions")]
    assert "dynamo" == kv.stats()["reach"]["adapter"]
    assert 0 == server.rejected
    assert all(one.headers.get(SESSION.lower()) for one in asked)
    assert not any("x-evil" in one.headers for one in asked)
    assert {"a"} == {one.headers[SESSION.lower()] for one in asked if not one.headers[SESSION.lower()].startswith("x-")}
    assert 2 == sum(FINAL.lower() in one.headers for one in asked)
