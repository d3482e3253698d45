"""Prices on the facts of real calls: own devices, own files, calls that were given up."""

from __future__ import annotations

import sys
from decimal import Decimal
from pathlib import Path

import pytest

from agentkv import AgentKV, Message, Request, ScriptedEngine
from agentkv.core.residency import Residency
from agentkv.core.task import Caller
from agentkv.core.usage import Usage
from agentkv.engine.remote import RemoteEngine
from agentkv.errors import ConfigError, GenerationCancelled, RemoteError

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from usage_server import Reply, Server, chunk

ASK = Request(messages=(Message(role="user", content="What is the answer?"),))


class OwnDevice(ScriptedEngine):
    """An engine with contexts of its own, as the embedded one has."""

    def residency(self, session: str) -> Residency | None:
        """None is known."""
        return None


def test_call_on_an_own_device_is_free_and_says_so():
    """No list price applies, whatever the model is called."""
    with AgentKV.with_engine(OwnDevice(["yes"], model="gpt-4.1"), context=None) as kv:
        kv.submit(ASK).result(20)
        kv.record_call(caller=Caller(task="t"), model="gpt-4.1", usage=Usage(input_tokens=1_000_000, calls=1))
        (own,) = kv.report("unattributed").calls
        (theirs,) = kv.report("t").calls
    assert (Decimal(0), "self-hosted") == (own.cost_usd, own.price)
    assert Decimal(2) == theirs.cost_usd
    assert theirs.price.startswith("gpt-4.1 in prices.yaml of ")


@pytest.mark.parametrize("as_text", [False, True])
def test_row_of_ones_own_prices_ones_own_device(tmp_path, as_text):
    """Whoever charges tokens for it gets what the file says."""
    path = tmp_path / "own.yaml"
    path.write_text("rows: [{model: scripted, input: 1, output: 1000000}]", encoding="utf-8")
    with AgentKV.with_engine(ScriptedEngine(["yes"]), context=None, prices=str(path) if as_text else path) as kv:
        usage = kv.submit(ASK).result(20).usage
        (call,) = kv.report("unattributed").calls
    assert usage.output_tokens + Decimal(usage.input_tokens) / 1_000_000 == call.cost_usd
    assert "scripted in own.yaml" == call.price


def test_wrong_file_is_told_before_anything_runs(tmp_path):
    """At the start, not at the first bill."""
    with pytest.raises(ConfigError, match="cannot be read"):
        AgentKV.with_engine(ScriptedEngine(["yes"]), prices=tmp_path / "none.yaml")


def test_call_that_is_given_up_is_billed_for_what_came(monkeypatch):
    """What was reported so far counts, to the token."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    parts = tuple(
        chunk(f"part {n}", usage={"prompt_tokens": 1000, "completion_tokens": n}, model="gpt-4.1") for n in (1, 2, 3)
    )
    with (
        Server(replies=[Reply(status=503), Reply(chunks=parts, hold=True)]) as server,
        AgentKV.remote(base_url=server.url, model="gpt-4.1", ledger="memory", context=None) as kv,
    ):
        stream = kv.submit(ASK)
        for number, _ in enumerate(stream, 1):
            if number == 3:
                break
        stream.cancel()
        with pytest.raises(GenerationCancelled):
            stream.result(20)
        refused, given_up = kv.report("unattributed").calls
        server.release()
    assert ("failed", "503", Usage(), 0) == (refused.status, refused.error, refused.usage, refused.cost_usd)
    assert ("aborted", "GenerationCancelled") == (given_up.status, given_up.error)
    assert Usage(input_tokens=1000, output_tokens=3, calls=1) == given_up.usage
    assert Decimal("0.002024") == given_up.cost_usd
    assert not given_up.estimated


def test_server_that_is_not_reached_costs_nothing():
    """Both tries are facts, neither has tokens."""
    engine = RemoteEngine(base_url="http://127.0.0.1:9/v1", model="gpt-4.1", api_key="none", max_retries=1)
    with AgentKV.with_engine(engine, context=None) as kv:
        with pytest.raises(RemoteError):
            kv.submit(ASK).result(20)
        calls = kv.report("unattributed").calls
    assert [("failed", "ConnectError", Usage()), ("failed", "RemoteError", Usage())] == [
        (call.status, call.error, call.usage) for call in calls
    ]
    assert [0, 0] == [call.cost_usd for call in calls]
