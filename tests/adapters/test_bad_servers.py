"""Every adapter against bad servers and hostile names: receipts say failed, the agent goes on, state is learned again."""

from __future__ import annotations

import importlib
import re
import time

import pytest

from agentkv import AgentKV, Message, Request, Sampling
from agentkv.adapters.base import Outcome, Unreachable
from agentkv.adapters.found import ENGINES, Found, adapter_for
from agentkv.adapters.http import Endpoint
from agentkv.adapters.probe import Known
from agentkv.adapters.strict import CHAT_FIELDS, StrictServer
from agentkv.clock import SystemClock
from agentkv.core.forecast import Forecast
from agentkv.core.hint import Hint, HintKind, SessionFacts, ToolFacts
from agentkv.errors import AgentKVError

FAULTS = ["hang", "html", "close", "endless", "drip", "nonsense"]
HOSTILE = [
    "../../etc/passwd",
    "a\r\nX-Evil: 1",
    "a\nb",
    "x" * 5000,
    "\x00",
    "ü\u202e",
    "\ud800",
    '"}],"evil":1',
    "-rf",
    ".",
    "${HOME}",
    "a b",
    "C:\\x",
    "..",
    "a\n",
    "%2e%2e%2fetc%2fpasswd",
    "%0d%0aX-Evil: 1",
    "\u2025\uff0fetc",
    "run-\uff17",
    "r\u0443n-7",
    "a\u2028b",
    "y" * 10_000,
]
WRITTEN = [name for name, where in ENGINES.items() if importlib.util.find_spec(where.partition(":")[0]) is not None]
RARE = [fault if fault in ("hang", "nonsense") else pytest.param(fault, marks=pytest.mark.slow) for fault in FAULTS]
MOST_S = 3.0
"""What a whole agent's tools may take longer beside a broken server, over and above its model calls' own time-outs."""


@pytest.fixture(params=WRITTEN)
def engine(request, monkeypatch, tmp_path):
    """Every engine that has an adapter."""
    monkeypatch.setenv("AGENTKV_CACHE", str(tmp_path))
    monkeypatch.setenv("AGENTKV_VLLM_SOCKET", str(tmp_path / "no-socket"))
    monkeypatch.setattr("agentkv.adapters.llamacpp.ACTION_S", 0.3)  # 30 s, for a busy server's sake
    monkeypatch.delenv("DYN_REQUEST_TRACE_TOOL_EVENTS_ZMQ_ENDPOINT", raising=False)
    return request.param


def server_of(engine, **options):
    """A server that is as strict as this engine."""
    dialect = engine if engine in ("dynamo", "vllm") else "openai"
    accepts = CHAT_FIELDS | {"id_slot", "prompt_cache_key", "prompt_cache_options", "service_tier", "cache_control"}
    routes = {}
    if engine == "llama.cpp":
        routes["GET /props"] = lambda _: (200, {"total_slots": 2})
        routes["GET /slots"] = lambda _: (200, [{"id": 0}, {"id": 1}])
        for slot in (0, 1):
            for deed in ("save", "restore", "erase"):
                routes[f"POST /slots/{slot}?action={deed}"] = lambda _: (200, {"timings": {"restore_ms": 1.0}})
    return StrictServer(**{"dialect": dialect, "accepts": accepts, "routes": routes, **options})


def remote(server, engine, **options):
    return AgentKV.remote(
        base_url=server.url, model="m", ledger="memory", api_key="k", context=None, speaks=engine, **options
    )  # fmt: skip


def call(kv, text="hi", seconds=10.0):
    request = Request(messages=(Message(role="user", content=text),), sampling=Sampling(max_tokens=4))
    return kv.submit(request).result(seconds)


def hint(kind, session, **about):
    tool = ToolFacts(call_id="c\r\n", tool="../pytest") if kind.startswith("tool") else None
    wait = Forecast(remaining_s=(20.0,), n=9, source="history") if kind == "tool_start" else None
    return Hint(
        id="h", kind=HintKind(kind), at_s=0, ts_ms=0, task=session, session=session, call=tool, wait=wait,
        about=SessionFacts(session=session, **about),
    )  # fmt: skip


@pytest.mark.parametrize("fault", RARE)
def test_an_agent_goes_on_beside_a_server_that_breaks(engine, fault):
    """Its tools are not delayed; its call fails as it would without us; when the server is back, so is the agent."""
    with server_of(engine) as server, remote(server, engine, timeout_s=0.5) as kv:
        with kv.task("t", final=False):
            assert "ok" == call(kv).text
            server.fault = fault
            began_s = time.monotonic()
            for _ in range(5):
                with kv.tool("pytest", expect_s=20):
                    pass
            assert time.monotonic() - began_s < MOST_S
            if fault != "drip":  # white space before an answer is still an answer, for as long as one waits
                with pytest.raises(AgentKVError):
                    call(kv, seconds=20)
            server.fault = ""
            assert "ok" == call(kv, "again").text
            with kv.tool("pytest"):
                pass
        kv.finish("t")
        reach = kv.stats()["reach"]
    assert engine in (reach["adapter"], "unknown")


def failed(receipts):
    return any(receipt.outcome is Outcome.FAILED for receipt in receipts)


@pytest.mark.parametrize("fault", FAULTS)
def test_what_could_not_be_told_is_a_failed_receipt(engine, fault):
    """Not applied, not advisory: whoever has to ask the server and gets no answer says so, within its patience."""
    with server_of(engine) as server:
        adapter = adapter_for(Known(engine=engine, models=("m",)), server.url, api_key="k", clock=SystemClock())
        adapter.carries(SessionFacts(session="s", model="m", turn=1))
        adapter.ended("s", tokens=500, cached_tokens=None)
        before = len(server.asked)
        server.fault = fault
        began_s = time.monotonic()
        receipts = [
            adapter.deliver(hint(kind, "s", model="m"), 0.3) for kind in ("tool_start", "tool_end", "session_end")
        ]
        spent_s = time.monotonic() - began_s
        asked = len(server.asked) - before
        ends_s = time.monotonic() + 2 * MOST_S
        while (
            asked and not failed(receipts) and time.monotonic() < ends_s
        ):  # what hangs has its receipt when it is given up
            receipts += adapter.tick()[0]
            time.sleep(0.01)
        adapter.close()
    assert all(isinstance(receipt.outcome, Outcome) for receipt in receipts)
    assert (asked > 0) == failed(receipts)
    assert not any(receipt.outcome is Outcome.APPLIED for receipt in receipts)
    assert spent_s < 3 * (0.3 + MOST_S)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_that_is_broken_when_it_is_asked_who_it_is(fault):
    """It is asked again later; requests go as they are, and closing does not wait."""
    with StrictServer(fault=fault) as server:
        found = Found(server.url, clock=SystemClock())
        began_s = time.monotonic()
        first = found.deliver(hint("tool_start", "s"), 0.3)
        carried = found.carries(SessionFacts(session="s"))
        found.close()
        assert time.monotonic() - began_s < 4
    assert first.outcome in (Outcome.FAILED, Outcome.UNSUPPORTED)
    assert carried is None or not carried.body


def test_a_server_that_takes_none_of_our_fields_refuses_once(engine):
    """Whatever it was said to be: from the second call on it gets what the user wrote."""
    with StrictServer() as server, remote(server, engine, salt="tenant") as kv:
        for turn in range(4):
            with kv.task("t", final=False):
                assert "ok" == call(kv, f"turn {turn}").text
                if turn == 1:
                    refused = server.rejected
        assert refused == server.rejected <= 2


def test_usage_that_cannot_be_true_is_neither_billed_nor_believed(engine):
    """Minus five tokens of which a trillion were cached."""
    with server_of(engine, fault="lie") as server, remote(server, engine) as kv, kv.task("t", final=False):
        for _ in range(3):
            answer = call(kv)
            with kv.tool("pytest", expect_s=5):
                pass
            assert answer.estimated
            assert 0 <= answer.usage.cached_tokens <= answer.usage.input_tokens < 1000


def test_metrics_without_end_are_given_up(engine):
    """Chats work beside them, and nobody waits."""
    with server_of(engine, fault="endless", fault_at="/metrics") as server, remote(server, engine) as kv:
        began_s = time.monotonic()
        with kv.task("t", final=False):
            for _ in range(3):
                assert "ok" == call(kv).text
                with kv.tool("pytest"):
                    pass
        assert time.monotonic() - began_s < 5


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_neither_headers_nor_files_nor_paths(engine, name):
    """A session's name travels as it is only where it is a plain word; the server is asked nothing that it refuses."""
    with server_of(engine) as server:
        adapter = adapter_for(Known(engine=engine, models=("m",)), server.url, api_key="k", clock=SystemClock())
        extra = adapter.carries(SessionFacts(session=name, parent=name + "'", model="m", salt=name, turn=1))
        for header, value in ({} if extra is None else extra.headers).items():
            assert re.fullmatch(r"[A-Za-z0-9-]+", header)
            assert re.fullmatch(r"[\x21-\x7e]{1,256}", value)
            assert name not in value
        assert extra is None or name not in (value for _, value in leaves(dict(extra.body)))
        adapter.ended(name, tokens=500, cached_tokens=None)
        for kind in ("tool_start", "tool_end", "session_end"):
            adapter.deliver(hint(kind, name, model="m"), 1.0)
        adapter.tick()
        adapter.close()
    assert 0 == server.rejected
    for asked in server.asked:
        assert "x-evil" not in asked.headers
        assert asked.path.isascii()
        assert ".." not in asked.path
        for key, value in leaves(asked.body):
            if key == "filename":
                assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", value)


def leaves(value, key=""):
    """Every (key, value) at the end of a JSON tree."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from leaves(part, name)
    elif isinstance(value, list):
        for part in value:
            yield from leaves(part, key)
    else:
        yield key, value


def test_an_agent_with_a_hostile_name_gets_its_answer(engine):
    """Through AgentKV: the name is a task's key and nothing else."""
    with server_of(engine) as server, remote(server, engine) as kv:
        for name in HOSTILE:
            if name == "\ud800":
                continue  # no text for a database
            with kv.task(name, final=False):
                assert "ok" == call(kv).text
                with kv.tool("pytest"):
                    pass
            kv.finish(name)
    assert 0 == server.rejected
    assert not any("x-evil" in asked.headers for asked in server.asked)


def test_a_server_that_lost_everything_is_learned_again(llama):
    """Slots and files are gone in the middle: what cannot be restored is computed, and the agent notices nothing."""
    with remote(llama, "llama.cpp") as kv:
        for turn in range(4):
            for task in ("a", "b", "c"):
                with kv.task(task, final=False):
                    assert "ok" == call(kv, f"turn {turn}").text
                    with kv.tool("pytest", expect_s=20):
                        time.sleep(0.02)
            if turn == 1:
                llama.files.clear()
                llama.slots.update(dict.fromkeys(llama.slots, 0))
        for task in ("a", "b", "c"):
            kv.finish(task)
        ends = time.monotonic() + 10
        while kv.stats()["reach"]["queued"] and time.monotonic() < ends:
            time.sleep(0.01)
        last = kv.stats()["reach"]
    assert not last["away"]
    assert {0} == set(llama.slots.values()) | set(llama.files.values())
    deeds = [deed for deed, _, _ in llama.deeds]
    assert "restore" in deeds[deeds.index("save") :]


def test_an_answer_without_end_is_not_kept():
    """Some megabytes are enough to see that; memory is not filled until the time is over."""
    with StrictServer(fault="endless") as server:
        endpoint = Endpoint(server.url)
        began_s = time.monotonic()
        with pytest.raises(Unreachable, match="does not end"):
            endpoint.get("/anything", 30)
        endpoint.close()
    assert time.monotonic() - began_s < 10
