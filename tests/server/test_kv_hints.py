"""Hints inside of a call, in the envelope that vLLM's classes read, and hints through the clients in this process."""

from __future__ import annotations

import itertools

import openai
import pytest

from agentkv import AgentKV, HintKind, ScriptedEngine
from agentkv.core.forecast import Forecast
from agentkv.core.hint import Hint, ToolFacts
from agentkv.hints.wire import WireHint
from agentkv.server.openapi import document

numbers = itertools.count()
ROUTES = ["chat/completions", "completions", "responses"]


def hint(kind, task="job"):
    wait = Forecast(remaining_s=(1.0, 2.0, 3.0), n=3, source="prior") if kind == "tool_start" else None
    about = {"at_s": 0, "ts_ms": 0, "task": task, "call": ToolFacts(call_id="c1", tool="make"), "wait": wait}
    return WireHint.of(Hint(id=f"k{next(numbers)}", kind=HintKind(kind), **about))


def envelope(*kinds, task="job"):
    actions = [action for kind in kinds for action in hint(kind, task).to_envelope()["actions"]]
    return {**hint("tool_end").to_envelope(), "actions": actions}


def chat(place, route="chat/completions", **fields):
    body = {"model": "scripted", "messages": [{"role": "user", "content": "hello"}], **fields}
    if route == "completions":
        body["prompt"] = body.pop("messages")[0]["content"]
    if route == "responses":
        body["input"] = body.pop("messages")
    return place.http.post(f"/v1/{route}", json=body, headers={"x-agentkv-task": "job"})


@pytest.fixture
def place(scripted_place):
    made = scripted_place("one", "two", "three")
    assert "scripted" == made.kv.engine.model
    return made


@pytest.mark.parametrize("route", ROUTES)
def test_a_call_brings_the_end_of_its_tool_along(place, route):
    """One request instead of two: the hint is taken before the call begins, with a receipt in a header."""
    assert "applied" == chat(place, route, kv_hints=envelope("tool_start")).headers["x-agentkv-hints"]
    answer = chat(place, route, kv_hints=envelope("tool_end"))
    assert (200, "applied") == (answer.status_code, answer.headers["x-agentkv-hints"])
    assert [("make", "succeeded")] == [(tool.tool, tool.status) for tool in place.kv.report("job").tools]


def test_the_document_knows_them_at_every_endpoint_that_takes_them():
    """So that what is made of it sends them."""
    schemas = document("m")["components"]["schemas"]
    asked = ("ChatRequest", "CompletionRequest", "ResponseRequest")
    assert asked == tuple(name for name in asked if "kv_hints" in schemas[name]["properties"])
    action = schemas["Envelope"]["properties"]["actions"]["items"]["properties"]
    told = hint("tool_end").to_envelope()["actions"][0]
    assert told.keys() == action.keys()
    assert (told["action_type"], told["action_version"]) == (
        action["action_type"]["const"],
        action["action_version"]["const"],
    )


def test_each_hint_has_its_receipt(place):
    """In their order; a tool of which nobody knows is advisory."""
    answer = chat(place, kv_hints=envelope("tool_update", "tool_start", "tool_end"))
    assert "advisory,applied,applied" == answer.headers["x-agentkv-hints"]


def test_actions_of_others_are_left_to_others(place):
    """The call is answered; nobody is told anything of them."""
    action = {"action_id": "1", "action_type": "kv.fetch", "action_version": "1.0", "payload": {}}
    answer = chat(place, kv_hints={"actions": [action]})
    assert 200 == answer.status_code
    assert "x-agentkv-hints" not in answer.headers
    assert 200 == chat(place, kv_hints=None).status_code


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("given", ["x", 7, [], {}, {"actions": {}}, {"actions": [{}] * 65}, True])
def test_what_is_no_envelope_is_refused_by_name(place, given, route):
    """As every field that cannot have its effect."""
    answer = chat(place, route, kv_hints=given)
    assert (400, "kv_hints") == (answer.status_code, answer.json()["error"]["param"])


@pytest.mark.parametrize("payload", [None, 7, "x", {"v": "agentkv.hint/1"}, {"v": "agentkv.hint/2"}, [[]] * 9])
def test_a_hint_that_nobody_can_read_costs_the_call_nothing(place, payload):
    """It is counted, as elsewhere."""
    action = envelope("tool_end")["actions"][0] | {"payload": payload}
    assert 200 == chat(place, kv_hints={"actions": [action]}).status_code


def test_clients_in_this_process_tell_hints_too():
    """The same route, and the same tasks; the end of a tool may come with a call."""
    with AgentKV.with_engine(ScriptedEngine(["one"]), ledger="memory") as kv, kv.openai() as client:
        told = client.post("/agentkv/hints", body=hint("tool_start").to_json(), cast_to=object)
        assert ["applied"] == [receipt["outcome"] for receipt in told["receipts"]]
        with kv.task("job", final=False):
            client.chat.completions.create(
                model=kv.engine.model, messages=[{"role": "user", "content": "hello"}],
                extra_body={"kv_hints": envelope("tool_end")},
            )  # fmt: skip
        report = kv.report("job")
    assert [("make", "succeeded")] == [(tool.tool, tool.status) for tool in report.tools]
    assert 1 == report.usage.calls


async def test_async_clients_in_this_process_tell_hints_too():
    """What is open when everything is closed counts as cancelled."""
    kv = AgentKV.with_engine(ScriptedEngine(["one"]), ledger="memory")
    with kv:
        async with kv.async_openai() as client:
            told = await client.post("/agentkv/hints", body=hint("tool_start").to_json(), cast_to=object)
            assert ["applied"] == [receipt["outcome"] for receipt in told["receipts"]]
            with pytest.raises(openai.NotFoundError):
                await client.post("/agentkv/nothing", body={}, cast_to=object)
