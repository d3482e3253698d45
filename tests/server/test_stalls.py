"""Waits that clients tell of: hints and TokenCake's events become tool calls on the bill, and never an error."""

from __future__ import annotations

import itertools

import pytest

from agentkv import Budget, HintKind
from agentkv.core.forecast import Forecast
from agentkv.core.hint import Hint, ToolFacts
from agentkv.hints.wire import WireHint, safe
from agentkv.server import stalls
from agentkv.server.keys import Keys

numbers = itertools.count()


def hint(kind: str, *, session: str = "job", call: str | None = "c1", **more) -> dict:
    body = {"v": "agentkv.hint/1", "id": f"h{next(numbers)}", "kind": kind, "ts_ms": 0, "session": session, **more}
    if call is not None:
        body["call"] = {"id": call, "tool": "pytest"}
    return body


def told(place, *hints: dict, **options) -> list[str]:
    response = place.http.post("/v1/agentkv/hints", json={"hints": list(hints)}, **options)
    assert 200 == response.status_code, response.text
    return [receipt["outcome"] for receipt in response.json()["receipts"]]


def tools_of(place, task: str = "job") -> list[tuple[str, str]]:
    return [(tool.tool, tool.status) for tool in place.kv.report(task).tools]


def heard(place) -> list[Hint]:
    hints: list[Hint] = []
    place.kv.subscribe(hints.append)
    return hints


def test_a_tool_is_told_from_start_to_end(scripted_place):
    """Start, progress and end are the runtime's own tool call: hint, forecast, bill."""
    place = scripted_place("x")
    hints = heard(place)
    wait = {"p10_ms": 3000, "p50_ms": 12_000, "p90_ms": 40_000, "source": "declared"}
    assert ["applied"] * 3 == [
        *told(place, hint("tool_start", wait=wait)),
        *told(place, hint("tool_update", wait=wait)),
        *told(place, hint("tool_end")),
    ]
    assert [HintKind.TOOL_START, HintKind.TOOL_UPDATE, HintKind.TOOL_END] == [one.kind for one in hints]
    assert ("job", 12.0) == (hints[0].task, hints[0].call.expect_s)
    assert [("pytest", "succeeded")] == tools_of(place)


def test_hints_come_alone_in_lists_and_in_envelopes(scripted_place):
    """What our own adapters send is understood."""
    place = scripted_place("x")
    facts = ToolFacts(call_id="c9", tool="make")
    start = Hint(
        id="e1",
        kind=HintKind.TOOL_START,
        at_s=0,
        ts_ms=0,
        task="job",
        call=facts,
        wait=Forecast(remaining_s=(1.0, 2.0, 3.0), n=3, source="prior"),
    )
    envelope = WireHint.of(start).to_envelope()
    assert ["applied"] == [r["outcome"] for r in place.http.post("/v1/agentkv/hints", json=envelope).json()["receipts"]]
    alone = place.http.post("/v1/agentkv/hints", json=hint("tool_error", call="c9")).json()
    assert ["applied"] == [receipt["outcome"] for receipt in alone["receipts"]]
    assert [("make", "failed")] == tools_of(place)


def test_what_cannot_be_taken_is_told_and_harms_nobody(scripted_place):
    """Newer versions, unknown kinds, ends without a start, repeats: an outcome each, and the status is 200."""
    place = scripted_place("x")
    start = hint("tool_start")
    assert ["applied", "repeated"] == told(place, start, start)
    assert ["repeated"] == told(place, hint("tool_start"))  # the call runs already
    assert ["applied", "repeated"] == told(
        place, hint("tool_end"), start
    )  # delivered late and twice: nothing starts anew
    assert [("pytest", "succeeded")] == tools_of(place)
    assert ["applied"] == told(place, hint("tool_start"))
    assert ["skipped"] * 3 == told(place, {"v": "agentkv.hint/2"}, hint("tool_dance"), {})
    assert ["advisory"] * 4 == told(
        place,
        hint("tool_end", call="never"),
        hint("tool_update", call="never"),
        hint("turn_start"),
        hint("session_end"),
    )
    for body in (b"{", b"[]", b'{"hints": 5}', b'"x"'):
        assert 400 == place.http.post("/v1/agentkv/hints", content=body).status_code


def test_a_budget_that_refuses_the_tool_is_a_failed_hint(scripted_place):
    """Nothing is raised into whoever told it."""
    place = scripted_place("x")
    with place.kv.task("job", budget=Budget(tool_calls=0), final=False):
        pass
    receipt = place.http.post("/v1/agentkv/hints", json=hint("tool_start")).json()["receipts"][0]
    assert ("failed", True) == (receipt["outcome"], "tool_calls" in receipt["detail"])


def test_hints_find_the_session_of_a_call(engine_place):
    """A wait is told for the session that a call used; while it runs the engine expects it back; its end destroys it."""
    place = engine_place()
    hints = heard(place)
    answer = place.http.post(
        "/v1/chat/completions",
        json={"model": place.kv.engine.model, "messages": [{"role": "user", "content": "x" * 64}], "max_tokens": 2},
        headers={"x-agentkv-task": "Úkol 1".encode()},
    )
    session = answer.headers.get("x-agentkv-session", "")
    assert "" == session  # it is not ASCII
    assert ["applied"] == told(place, hint("tool_start", session=safe("Úkol 1")))
    started = [one for one in hints if one.kind is HintKind.TOOL_START]
    assert [("Úkol 1", "Úkol 1#1")] == [(one.task, one.session) for one in started]
    assert ["applied"] == told(place, hint("tool_end", session=safe("Úkol 1#1")))
    assert place.kv.engine.residency("Úkol 1#1") is not None
    assert ["applied"] == told(place, hint("session_end", session=safe("Úkol 1"), final=True))
    assert place.kv.engine.residency("Úkol 1#1") is None


def test_a_session_ends_without_its_task(engine_place):
    """A hint with a parent is about one session of that task."""
    place = engine_place()
    body = {"model": place.kv.engine.model, "messages": [{"role": "user", "content": "x" * 64}], "max_tokens": 2}
    for name in ("one", "two"):
        headers = {"x-agentkv-task": "job", "x-agentkv-session": name}
        answer = place.http.post("/v1/chat/completions", json=body, headers=headers)
        assert name == answer.headers["x-agentkv-session"]
    assert ["applied"] == told(place, hint("session_end", session="one", parent="job", final=True))
    assert place.kv.engine.residency("one") is None
    assert place.kv.engine.residency("two") is not None


def test_a_tenant_tells_of_its_own_tasks_only(scripted_place):
    """Another tenant's hint about the same name is about its own task."""
    keys = Keys.read(None, {"AGENTKV_API_KEYS": "alice=sk-alice-1234,bob=sk-bob-12345"})
    place = scripted_place("x", keys=keys)
    alice, bob = ({"authorization": f"Bearer {key}"} for key in ("sk-alice-1234", "sk-bob-12345"))
    assert ["applied"] == told(place, hint("tool_start"), headers=alice)
    assert ["advisory"] == told(place, hint("tool_end"), headers=bob)
    assert ["advisory"] == told(place, hint("tool_end", session="alice/job"), headers=bob)
    assert ["applied"] == told(place, hint("tool_end"), headers=alice)
    assert ([("pytest", "succeeded")], []) == (tools_of(place, "alice/job"), tools_of(place, "bob/job"))


def event(place, name: str, lifecycle: str = "tc-1", **more):
    return place.http.post("/v1/tokencake/events", json={"event": name, "lifecycle_id": lifecycle, **more})


def test_tokencakes_events_are_tool_calls(scripted_place):
    """Start and finish of a call's lifecycle; unknown is 404, a second start 409, anything else 400."""
    place = scripted_place("x", "y")
    hints = heard(place)
    body = {"model": "scripted", "messages": [{"role": "user", "content": "x"}]}
    xargs = {"tokencake": {"lifecycle_id": "tc-1", "agent_type": "coder", "importance": 0.5}}
    place.http.post("/v1/chat/completions", json=body | {"vllm_xargs": xargs}, headers={"x-agentkv-task": "job"})
    assert 200 == event(place, "stall_started", kind="pytest", estimated_duration_s=12).status_code
    assert 409 == event(place, "stall_started").status_code
    assert 200 == event(place, "stall_finished").status_code
    assert [404, 404] == [event(place, name, "tc-2").status_code for name in ("stall_started", "stall_finished")]
    assert 404 == event(place, "stall_finished").status_code
    for bad in ({"kind": 5}, {"estimated_duration_s": -1}, {"estimated_duration_s": "long"}, {"more": 1}):
        assert 400 == event(place, "stall_started", **bad).status_code
    assert 400 == event(place, "stall_danced").status_code
    started = next(one for one in hints if one.kind is HintKind.TOOL_START)
    assert ("job", "pytest", 12.0) == (started.task, started.call.tool, started.call.expect_s)
    assert [("pytest", "succeeded")] == tools_of(place)


def test_what_is_remembered_is_bounded(scripted_place, monkeypatch):
    """The oldest open wait is closed as cancelled when there are too many; closing the server closes the others."""
    monkeypatch.setattr(stalls, "MOST_OPEN", 3)
    place = scripted_place("x")
    for number in range(5):
        told(place, hint("tool_start", call=f"c{number}"))
    assert [("pytest", "cancelled")] * 2 == tools_of(place)
    place._served.close()
    assert [("pytest", "cancelled")] * 5 == tools_of(place)


@pytest.mark.parametrize("kind", ["tool_start", "tool_update", "tool_end", "tool_error", "turn_end"])
def test_hints_never_break_a_closed_kv(scripted_place, kind):
    """The server outlives what it serves for a moment: an outcome, never a 5xx."""
    place = scripted_place("x")
    place.kv.close()
    assert told(place, hint(kind))[0] in {"failed", "advisory"}
