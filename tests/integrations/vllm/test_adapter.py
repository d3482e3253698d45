"""The vLLM adapter against the plug-in's real door and its real books: a hint in, a receipt out."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from dataclasses import replace

import pytest
from agentkv_vllm.door import Door
from agentkv_vllm.sessions import MOST_CALLS, Sessions
from agentkv_vllm.side import Side

from agentkv.adapters.base import Adapter, Outcome, Routing
from agentkv.adapters.probe import Known
from agentkv.adapters.vllm import Vllm, hidden
from agentkv.clock import ManualClock
from agentkv.core.forecast import Forecast
from agentkv.core.hint import Hint, HintKind, SessionFacts, ToolFacts

URL = "http://127.0.0.1:1/v1"


def hint(kind, session="run-7", wait_s=5.0, **more):
    call = ToolFacts(call_id="c", tool="pytest") if kind.startswith("tool") else None
    wait = Forecast(remaining_s=(wait_s,), n=9, source="history") if kind == "tool_start" else None
    return Hint(
        id="h", kind=HintKind(kind), at_s=0, ts_ms=time.time_ns() // 10**6, task="t", session=session, call=call,
        wait=wait, **more,
    )  # fmt: skip


@pytest.fixture
def side(socket_path):
    side = Side(Sessions())
    side.open(socket_path)
    yield side
    side.close()


@pytest.fixture
def adapter(socket_path):
    adapter = Vllm(URL, socket=socket_path)
    yield adapter
    adapter.close()


def outcome(adapter, *args, **more):
    return adapter.deliver(hint(*args, **more), 1.0).outcome


def test_it_is_what_an_adapter_is(adapter):
    """Both protocols, and the name under which it is found."""
    from agentkv.adapters.found import ENGINES

    assert isinstance(adapter, Routing)
    assert "agentkv.adapters.vllm:Vllm" == ENGINES["vllm"]
    made: Adapter = adapter
    assert ("vllm", ((), None)) == (made.name, made.tick())


def test_hints_do_something_real_where_the_plug_in_knows_the_session(side, adapter):
    """And nothing is promised for one that never called."""
    assert Outcome.ADVISORY is outcome(adapter, "tool_start")
    side.sessions.begins("run-7")
    side.sessions.ends("run-7")
    assert Outcome.ADVISORY is outcome(adapter, "turn_end")
    assert Outcome.APPLIED is outcome(adapter, "tool_start")
    assert Outcome.APPLIED is outcome(adapter, "tool_end")
    receipt = adapter.deliver(hint("session_end"), 1.0)
    assert (Outcome.APPLIED, "session_end", "run-7") == (receipt.outcome, receipt.kind, receipt.session)


def test_what_is_known_of_the_session_goes_along(side, adapter):
    """Its priority orders who gives way."""
    side.sessions.begins("run-7")
    outcome(adapter, "tool_start", about=SessionFacts(session="run-7", priority=40, tokens=99, turn=3, osl=7))
    assert 40 == side.sessions.get("run-7").priority


def test_a_session_has_the_same_name_in_requests_and_hints(side, adapter):
    """Also a hostile one, which travels as its digest."""
    name = "../../x\r\nEvil: 1"
    carried = adapter.carries(SessionFacts(session=name)).body["kv_transfer_params"]["agentkv"]["session"]
    side.sessions.begins(carried)
    assert Outcome.APPLIED is outcome(adapter, "tool_start", session=name)


def test_without_the_plug_in_hints_are_unsupported_and_requests_name_no_session_to_it(adapter):
    """Stock vLLM takes a label; whether a prewarm would help is said."""
    assert Outcome.UNSUPPORTED is outcome(adapter, "tool_start")
    assert Outcome.ADVISORY is outcome(adapter, "turn_end")
    assert adapter.wants_prewarm
    assert {"session_id": "run-7"} == adapter.carries(SessionFacts(session="run-7")).body


def killed(side, socket_path):
    """The side is gone, its socket's file is not."""
    kept = socket_path.with_suffix(".kept")
    socket_path.rename(kept)
    side.close()
    kept.rename(socket_path)


def test_a_socket_that_nobody_serves_is_no_plug_in(side, socket_path):
    """An engine that was killed leaves its file: requests name no session to it, hints are unsupported, a prewarm helps."""
    killed(side, socket_path)
    adapter = Vllm(URL, socket=socket_path)
    assert not adapter.plugged
    assert adapter.wants_prewarm
    assert {"session_id": "run-7"} == adapter.carries(SessionFacts(session="run-7")).body
    assert Outcome.UNSUPPORTED is outcome(adapter, "tool_start")


@pytest.mark.parametrize("says", [b"", b"hello\n", b'{"v":"agentkv.reply/9"}\n', None])
def test_a_socket_at_which_something_else_listens_is_no_plug_in(socket_path, says):
    """It hangs up, talks otherwise or not at all; whoever makes a call waits for that once in a while at most."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(socket_path))
    listener.listen()
    came = []

    def serve():
        with contextlib.suppress(OSError):
            while True:
                line, _ = listener.accept()
                came.append(line)
                if says is not None:
                    line.sendall(says)
                    line.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    adapter = Vllm(URL, socket=socket_path, clock=ManualClock(0.0))
    for _ in range(50):
        assert "kv_transfer_params" not in adapter.carries(SessionFacts(session="run-7")).body
    assert not adapter.plugged
    for _ in range(2):  # after one second, then after two
        adapter._clock.advance(1.1)
        assert not adapter.plugged
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as last:
        last.connect(str(socket_path))
        ends_s = time.monotonic() + 20
        while len(came) < 3 and time.monotonic() < ends_s:
            time.sleep(0.01)
    listener.shutdown(socket.SHUT_RDWR)
    thread.join(20)
    for line in (listener, *came):
        line.close()
    assert 3 == len(came)  # two of ours, and the last


def test_a_plug_in_that_comes_later_is_noticed_at_once(socket_path, adapter):
    """A new file is a new door."""
    assert not adapter.plugged
    later = Side(Sessions())
    later.open(socket_path)
    assert adapter.plugged
    assert "kv_transfer_params" in adapter.carries(SessionFacts(session="run-7")).body
    later.close()
    assert not adapter.plugged


def test_a_second_server_on_this_machine_is_not_taken_for_the_one_with_the_plug_in(socket_path, side, monkeypatch):
    """The plug-in tells the ports of its own; one that cannot know is believed, and so is a user who names the socket."""
    monkeypatch.setenv("AGENTKV_VLLM_SOCKET", str(socket_path))
    monkeypatch.setenv("AGENTKV_VLLM_PORT", "8000, 9000")
    assert [True, True, False, False] == [
        Vllm(f"http://127.0.0.1{port}/v1").plugged for port in (":8000", ":9000", ":8001", "")
    ]
    assert Vllm("http://127.0.0.1:8001/v1", socket=socket_path).plugged
    side._found_ports = []
    monkeypatch.delenv("AGENTKV_VLLM_PORT")
    monkeypatch.setattr("agentkv_vllm.side.ports", list)
    assert Vllm("http://127.0.0.1:8001/v1").plugged


def test_an_engine_that_was_killed_fails_and_one_that_came_back_is_told(side, adapter, socket_path):
    """Its socket's file is still there; nobody waits long."""
    side.sessions.begins("run-7")
    assert Outcome.APPLIED is outcome(adapter, "tool_start")
    killed(side, socket_path)
    assert adapter.plugged  # nobody has noticed yet
    began = time.monotonic()
    assert Outcome.FAILED is outcome(adapter, "tool_start")
    assert time.monotonic() - began < 4
    assert not adapter.plugged
    assert Outcome.UNSUPPORTED is outcome(adapter, "tool_start")
    again = Side(Sessions())
    again.open(socket_path)
    again.sessions.begins("run-7")
    assert Outcome.APPLIED is outcome(adapter, "tool_start")
    again.close()


def test_a_call_too_many_is_refused_by_an_engine_that_is_there(side, adapter):
    """Its receipt says so: refusals do not make an engine away."""
    side.sessions.begins("run-7")
    calls = [ToolFacts(call_id=str(number), tool="pytest") for number in range(MOST_CALLS + 3)]
    receipts = [adapter.deliver(replace(hint("tool_start"), call=call), 5.0) for call in calls]
    assert {(Outcome.APPLIED, False)} == {(one.outcome, one.refused) for one in receipts[:MOST_CALLS]}
    assert {(Outcome.FAILED, True)} == {(one.outcome, one.refused) for one in receipts[MOST_CALLS:]}


def test_a_door_that_says_nonsense_is_a_failure(socket_path, adapter):
    """An outcome that nobody knows is none."""
    door = Door(socket_path, hear=lambda _: ("splendid", "x"), state=dict)
    assert Outcome.FAILED is outcome(adapter, "tool_start")
    door.close()


@pytest.mark.parametrize(("priority", "sent"), [(True, {"priority": -30}), (False, {}), (None, {})])
def test_a_priority_goes_out_with_its_sign_turned_and_only_where_it_is_taken(priority, sent):
    """There the lower goes first; a stock server refuses the whole request."""
    adapter = Vllm(URL, known=Known(engine="vllm", priority=priority))
    extra = adapter.carries(SessionFacts(session="a", priority=30))
    assert sent == {name: value for name, value in extra.body.items() if name == "priority"}
    assert extra.priority_ok is (priority is True)


def test_a_tenants_salt_parts_caches_and_stays_here():
    """As a digest that every route of vLLM takes, the same in every process."""
    extra = Vllm(URL).carries(SessionFacts(session="a", salt="secret"))
    assert hidden("secret") == extra.body["cache_salt"]
    assert extra.body["cache_salt"].isalnum()
    assert "secret" not in str(extra)


def test_a_caller_that_nobody_knows_carries_nothing():
    """Not one name for all of them."""
    assert Vllm(URL).carries(SessionFacts(session="unattributed")) is None


@pytest.mark.parametrize("url", ["http://gpu-7.example:8000/v1", "http://10.0.0.7/v1"])
def test_a_server_elsewhere_has_no_door_here(url, socket_path, side, monkeypatch):
    """A socket of this machine belongs to an engine of this machine, unless it is named."""
    monkeypatch.setenv("AGENTKV_VLLM_SOCKET", str(socket_path))
    monkeypatch.setenv("AGENTKV_VLLM_PORT", "1")
    assert not Vllm(url).plugged
    assert Vllm(url, socket=socket_path).plugged
    assert Vllm(URL).plugged
