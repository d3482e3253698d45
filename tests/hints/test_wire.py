"""The neutral hint on the wire: round trips, forward compatibility, hostile input, and nothing private in it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentkv import AgentKV, Message, Request, Sampling, ScriptedEngine, log
from agentkv.core.forecast import Forecast
from agentkv.core.hint import Hint, HintKind, ToolFacts
from agentkv.hints.wire import (
    WireCall,
    WireContext,
    WireHint,
    WireKeep,
    WireNext,
    WireWait,
    read,
    read_envelope,
    safe,
)

PAGE = Path(__file__).parents[2] / "docs" / "hints.md"
SCHEMA = json.loads(re.findall(r"```json\n(\{\n.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[0])
CHECK = jsonschema.Draft202012Validator(SCHEMA)

names = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.:@-]{0,40}", fullmatch=True)
counts = st.integers(0, 2**53)
waits = st.tuples(counts, counts, counts).map(sorted)
hints = st.builds(
    WireHint,
    id=names, kind=st.sampled_from(HintKind), ts_ms=counts, session=names, parent=st.just("") | names,
    final=st.booleans(), turn=st.none() | counts,
    call=st.none() | st.builds(WireCall, id=names, tool=names, attempt=st.integers(1, 99), n_parallel=st.integers(1, 99)),
    wait=st.none() | st.builds(
        lambda w, n, s: WireWait(p10_ms=w[0], p50_ms=w[1], p90_ms=w[2], n=n, source=s),
        waits, counts, st.sampled_from(["history", "declared", "prior"]),
    ),
    next=st.none() | st.builds(WireNext, priority=st.integers(-100, 100), osl=st.none() | counts),
    ctx=st.none() | st.builds(WireContext, model=st.just("") | names, tokens=counts, salt=st.just("") | names),
    keep=st.none() | st.builds(
        WireKeep, tier=st.sampled_from(["device", "host", "disk"]), ttl_ms=counts,
        strength=st.sampled_from(["retain", "demote", "drop"]),
    ),
)  # fmt: skip
anything = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def tool_hint(session="run-7:coder", tool="pytest", call_id="call_1", elapsed_s=0.0, kind=HintKind.TOOL_START):
    return Hint(
        id="hint-1", kind=kind, at_s=5.0, ts_ms=1000, task="run-7", session=session,
        call=ToolFacts(call_id=call_id, tool=tool, command="pytest", elapsed_s=elapsed_s),
        wait=Forecast(remaining_s=(3.0, 12.0, 40.0), n=23, source="history"),
    )  # fmt: skip


@given(hints)
@settings(max_examples=150)
def test_what_is_written_is_read_back(hint):
    """JSON, text, bytes and envelope hold the same hint, and each is what the schema says."""
    CHECK.validate(hint.to_json())
    assert hint == read(hint.to_json())
    assert hint == read(hint.to_line())
    assert hint == read(hint.to_line().encode())
    assert [hint] == read_envelope(hint.to_envelope())


@given(hints, st.dictionaries(st.text(max_size=8).map(lambda name: f"new_{name}"), anything, max_size=3))
@settings(max_examples=50)
def test_unknown_fields_are_ignored(hint, more):
    """A later sender may say more, at any level, and is understood."""
    body = hint.to_json() | more
    for part in ("call", "wait", "next", "ctx", "keep"):
        if part in body:
            body[part] = body[part] | more
    assert hint == read(body)


@pytest.mark.parametrize(
    ("change", "counter"),
    [
        ({"kind": "tool_dream"}, "wire_hint_unknown_kind"),
        ({"v": "agentkv.hint/2"}, "wire_hint_newer"),
        ({"v": "agentkv.hint/1.5"}, "wire_hint_unreadable"),
        ({"v": "other.hint/2"}, "wire_hint_unreadable"),
        ({"v": 1}, "wire_hint_unreadable"),
        ({"kind": ["tool_start"]}, "wire_hint_unreadable"),
        ({"session": 7}, "wire_hint_unreadable"),
        ({"ts_ms": "now"}, "wire_hint_unreadable"),
        ({"ts_ms": float("nan")}, "wire_hint_unreadable"),
        ({"ts_ms": -1}, "wire_hint_unreadable"),
    ],
)
def test_what_this_version_cannot_know_is_skipped_and_counted(change, counter):
    """Nothing is guessed and nothing raises; the counter tells why."""
    before = log.counters[counter]
    assert read(WireHint.of(tool_hint()).to_json() | change) is None
    assert before + 1 == log.counters[counter]


@pytest.mark.parametrize(
    "part",
    [
        {"wait": {"p10_ms": 5, "p50_ms": 4, "p90_ms": 9}},
        {"wait": "soon"},
        {"call": {"id": 1}},
        {"keep": {"tier": "moon"}},
    ],
)
def test_a_part_that_cannot_be_read_is_left_out(part):
    """The rest of the hint still holds."""
    before = log.counters["wire_part_unreadable"]
    hint = read(WireHint.of(tool_hint()).to_json() | part)
    assert getattr(hint, next(iter(part))) is None
    assert "run-7:coder" == hint.session
    assert before + 1 == log.counters["wire_part_unreadable"]


@given(anything)
@settings(max_examples=150)
def test_reading_never_raises(body):
    """Whatever a peer sends."""
    assert read(body) is None
    assert [] == read_envelope(body)
    assert [] == read_envelope({"actions": [body, {"action_type": "agentkv.tool_wait", "payload": body}]})


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '"' + "a" * 1_000_000 + '"', b"\xff\xfe", "1e999"])
def test_no_text_breaks_the_reader(text):
    """Broken, deep and endless texts are skipped."""
    assert read(text) is None


def test_foreign_and_newer_actions_are_left_alone():
    """An envelope may hold what is meant for others."""
    envelope = WireHint.of(tool_hint()).to_envelope()
    ours = envelope["actions"][0]
    envelope["actions"] = [{"action_type": "kv.fetch", "payload": {}}, ours | {"action_version": "2.0"}, ours]
    before = log.counters["wire_hint_newer"]
    assert 1 == len(read_envelope(envelope))
    assert before + 1 == log.counters["wire_hint_newer"]


def test_the_envelope_has_every_field_that_decoders_require():
    """vLLM's classes take exactly these, each of this type."""
    envelope = WireHint.of(tool_hint()).to_envelope()
    assert {"protocol_version": str, "message_id": str, "actions": list} == {k: type(v) for k, v in envelope.items()}
    expected = {"action_id": str, "action_type": str, "action_version": str, "payload": dict}
    assert expected == {name: type(value) for name, value in envelope["actions"][0].items()}


def test_the_wait_of_an_update_counts_from_now():
    """What has passed since the start of the call is taken off."""
    wired = WireHint.of(tool_hint(elapsed_s=10.0, kind=HintKind.TOOL_UPDATE))
    assert 2000 <= wired.wait.p10_ms <= wired.wait.p50_ms <= wired.wait.p90_ms <= 30_000


def test_a_wait_that_may_never_end_fits_the_schema():
    """Infinity travels as thirty days."""
    forever = Forecast(remaining_s=(30 * 86_400.0,), n=0, source="prior")
    body = WireHint(id="1", kind=HintKind.TOOL_START, ts_ms=0, session="s", wait=WireWait.of(forever)).to_json()
    CHECK.validate(body)
    assert 2_592_000_000 == body["wait"]["p90_ms"]


@pytest.mark.parametrize(
    "name",
    ["a\r\nX-Admin: 1", "../../etc/passwd", "a b", "é", "\ud800", "x" * 5000, "\0", ".hidden", "-rf", "a/b", "{}\n"],
)
def test_hostile_names_travel_as_digests(name):
    """No name is a path, a header, an option or a line of its own; the same name gives the same digest."""
    hint = WireHint.of(
        tool_hint(session=name, tool=name, call_id=name), parent=name, ctx=WireContext(salt=name, model=name)
    )
    body = hint.to_json()
    CHECK.validate(body)
    for shown in (body["session"], body["parent"], body["call"]["tool"], body["call"]["id"], body["ctx"]["salt"]):
        assert re.fullmatch(r"x-[0-9a-f]{32}", shown)
        assert safe(name) == shown
    assert "\n" not in hint.to_line()
    assert hint.to_line().isascii()


def test_a_real_run_emits_what_the_schema_says_and_nothing_private():
    """Turns, tools, progress, failure and the end of a session; no prompt, no arguments, no command."""
    heard = []
    with AgentKV.with_engine(ScriptedEngine(["the secret answer"] * 3)) as kv:
        kv.subscribe(heard.append)
        with kv.task("run-7"):
            kv.submit(
                Request(messages=(Message(role="user", content="the secret prompt"),), sampling=Sampling(max_tokens=4))
            ).result(20)
            with kv.tool("shell", args={"cmd": "secretcommand --token hunter2"}, timeout_s=60) as call:
                call.progress(0.5)
            with pytest.raises(OSError), kv.tool("read\nfile", args="secretpath"):
                raise OSError("secret reason")
    lines = [WireHint.of(hint).to_line() for hint in heard]
    for line in lines:
        CHECK.validate(json.loads(line))
    kinds = {json.loads(line)["kind"] for line in lines}
    assert kinds >= {"turn_start", "turn_end", "tool_start", "tool_update", "tool_end", "tool_error"}
    assert not re.search("secret|hunter2", "".join(lines))
