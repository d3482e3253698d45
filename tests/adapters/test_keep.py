"""The wire's fields that need more than a hint: what a session is, how much it says, and what the policy would keep."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest

from agentkv import AgentKV, Message, Request, Sampling
from agentkv.adapters.keep import Rates, keep_of, wire_hint
from agentkv.adapters.strict import StrictServer
from agentkv.core.forecast import Forecast
from agentkv.core.hint import Hint, HintKind, SessionFacts, ToolFacts
from agentkv.core.task import Caller, PriorityClass
from agentkv.core.usage import Timing, Usage
from agentkv.hints.wire import read, read_envelope
from agentkv.runtime.sessions import MOST_SESSIONS, SessionBook, parent_of, session_of

DOC = Path(__file__).parents[2] / "docs" / "hints.md"
SCHEMA = json.loads(
    next(block for block in re.findall(r"```json\n(.*?)```", DOC.read_text(), re.DOTALL) if "$schema" in block)
)


def waits(*seconds):
    return Forecast(remaining_s=tuple(float(s) for s in seconds), n=9, source="history")


def hint(kind="tool_start", *, wait=None, elapsed_s=0.0, **about):
    facts = (
        ToolFacts(call_id="c", tool="pytest", elapsed_s=elapsed_s, n_parallel=2) if kind.startswith("tool") else None
    )
    known = SessionFacts(
        session="run-7:coder", **({"parent": "run-7", "turn": 12, "tokens": 18_231, "model": "m"} | about)
    )
    return Hint(
        id="h",
        kind=HintKind(kind),
        at_s=0,
        ts_ms=1,
        task="run-7",
        session="run-7:coder",
        call=facts,
        wait=wait,
        about=known,
    )


def test_everything_known_of_a_session_travels():
    """And comes back the same, alone and in an envelope."""
    wired = wire_hint(hint(wait=waits(40, 60, 90), priority=50, osl=300, salt="tenant-a"))
    body = wired.to_json()
    assert ("run-7", 12, {"priority": 50, "osl": 300}) == (body["parent"], body["turn"], body["next"])
    assert {"model": "m", "tokens": 18_231, "salt": "tenant-a"} == body["ctx"]
    assert 2 == body["call"]["n_parallel"]
    assert {"tier": "host", "strength": "demote"} == {name: body["keep"][name] for name in ("tier", "strength")}
    assert wired == read(wired.to_line())
    assert [wired] == read_envelope(wired.to_envelope())
    jsonschema.validate(body, SCHEMA)
    action = wired.to_envelope()["actions"][0]
    assert ("agentkv.tool_wait", "1.0") == (action["action_type"], action["action_version"])


@pytest.mark.parametrize("kind", [str(kind) for kind in HintKind])
def test_every_kind_fits_its_schema(kind):
    """With much known and with nothing."""
    wait = waits(3, 9) if kind == "tool_start" else None
    for about in ({}, {"parent": "", "turn": 0, "tokens": 0, "model": ""}):
        jsonschema.validate(wire_hint(hint(kind, wait=wait, **about)).to_json(), SCHEMA)


def test_a_later_version_of_it_is_still_read():
    """What is added to version 1 is ignored, part by part."""
    body = wire_hint(hint(wait=waits(40, 60, 90))).to_json()
    for part in (body, *(value for value in body.values() if isinstance(value, dict))):
        part["added"] = {"later": [1]}
    assert wire_hint(hint(wait=waits(40, 60, 90))) == read(body)


def test_a_wait_that_is_nearly_over_is_retained_and_a_long_one_is_not():
    """By the policy's own rule; the ttl is how long nine of ten such waits still last."""
    rates = Rates(host_s=50e-6)
    assert "retain" == keep_of(waits(0.5, 0.6, 0.7), 20_000, rates=rates).strength
    demoted = keep_of(waits(60, 70, 80), 20_000, rates=rates)
    assert ("host", "demote", 78_000) == (demoted.tier, demoted.strength, demoted.ttl_ms)


def test_what_has_passed_of_a_wait_is_taken_off():
    """The decision is about what is left."""
    late = wire_hint(hint(wait=waits(100, 110, 120), elapsed_s=90.0))
    early = wire_hint(hint(wait=waits(100, 110, 120)))
    assert late.keep.ttl_ms < early.keep.ttl_ms
    assert late.wait.p50_ms == 20_000


def test_nothing_is_kept_of_a_session_that_is_over():
    """Its end says so twice."""
    assert "drop" == wire_hint(hint("session_end")).keep.strength
    assert wire_hint(hint("turn_end")).keep is None


# -- what is known of sessions


def test_a_branch_is_a_session_of_its_own_with_the_outer_one_as_parent():
    """A sub-agent's context is another."""
    task, outer, inner = (Caller(task="t", branch=branch) for branch in ("", "a:1", "a:1|b:2"))
    assert ["t", "t:a:1", "t:a:1|b:2"] == [session_of(caller) for caller in (task, outer, inner)]
    assert ["", "t", "t:a:1"] == [parent_of(session_of(caller), caller) for caller in (task, outer, inner)]


def test_the_next_outputs_length_is_expected_from_the_last_ones():
    """The mean of the last sixteen; nothing before the first."""
    book, caller = SessionBook(), Caller(task="t")
    book.begun("t", caller, model="m", priority=PriorityClass.BATCH)
    assert (None, 1, -50, "m") == (
        book.facts("t").osl,
        book.facts("t").turn,
        book.facts("t").priority,
        book.facts("t").model,
    )
    for number in range(20):
        book.ended("t", Usage(input_tokens=1000, output_tokens=100 + number, calls=1))
    assert (112, 1119) == (book.facts("t").osl, book.facts("t").tokens)


def test_the_load_time_is_what_prefill_showed():
    """Of calls that computed enough to tell."""
    book = SessionBook()
    book.ended("t", Usage(input_tokens=10, calls=1), Timing(prefill_s=9.0))
    assert book.facts("t").load_s is None
    book.ended("t", Usage(input_tokens=2000, cached_tokens=1000, calls=1), Timing(prefill_s=2.0))
    assert pytest.approx(4.0) == book.facts("t").load_s


def test_the_book_is_bounded_and_forgets_what_is_over():
    """Precision is lost, never an answer."""
    book = SessionBook()
    for number in range(MOST_SESSIONS + 10):
        book.begun(f"s{number}", Caller(task="t"))
    assert 0 == book.facts("s0").turn
    book.forget("s4100")
    assert 0 == book.facts("s4100").turn


def test_an_agents_hints_carry_all_of_it():
    """Through AgentKV: the second tool call of a task knows of its turns, its context and its output."""
    with StrictServer() as server, AgentKV.remote(base_url=server.url, model="m", ledger="memory", salt="x") as kv:
        heard = []
        kv.subscribe(heard.append)
        with kv.task("a", final=False, priority=PriorityClass.FOREGROUND):
            for _ in range(2):
                kv.submit(
                    Request(messages=(Message(role="user", content="hi " * 99),), sampling=Sampling(max_tokens=4))
                ).result(20)
                with kv.tool("pytest", expect_s=20), kv.tool("ls", expect_s=1):
                    pass
        starts = [wire_hint(one) for one in heard if one.kind is HintKind.TOOL_START]
    last = starts[-1]
    assert (2, 50, 1) == (last.turn, last.next.priority, last.next.osl)
    assert ("m", "x", True) == (last.ctx.model, last.ctx.salt, last.ctx.tokens > 50)
    assert (1, 2) == (starts[-2].call.n_parallel, last.call.n_parallel)
    assert starts[-2].keep is not None
