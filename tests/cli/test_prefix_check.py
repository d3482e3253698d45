"""`agentkv prefix-check`: records and scripts, what is printed, and when it ends with 1."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from agentkv.cli import app
from agentkv.cli.prefix_check import REFUSED
from agentkv.context.bodies import call_of
from agentkv.context.check import Check
from agentkv.context.explain import Seen
from agentkv.core.message import Message
from agentkv.core.usage import Usage
from agentkv.errors import ConfigError

EXAMPLE = Path(__file__).parents[2] / "examples" / "prefix_check.py"
SYSTEM = {"role": "system", "content": "You are careful. " * 300}
ASK = {"role": "user", "content": "find the bug"}
KEYS = st.sampled_from(["messages", "role", "content", "tool_calls", "function", "arguments", "name", "id", "tools", "usage",
                        "response", "choices", "message", "text", "parameters", "session", "time", "request", "type"])  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in "ab"]


def run(*argv: Any) -> Any:
    return CliRunner().invoke(app, ["prefix-check", *map(str, argv)], catch_exceptions=False)


def told(*argv: Any) -> Any:
    return json.loads(run(*argv, "--json").stdout)


def step(number: int, arguments: str = '{"x":  1}') -> list[dict[str, Any]]:
    call = {"id": f"c{number}", "type": "function", "function": {"name": "a", "arguments": arguments}}
    return [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": f"c{number}", "content": f"result {number}"},
    ]


def rows(*systems: Any, **more: Any) -> list[dict[str, Any]]:
    """A tool loop: one request for each of `systems`, each two messages longer than the one before."""
    said, result = [], []
    for number, system in enumerate(systems):
        result.append({"model": "m", "messages": [system, ASK, *said], "tools": TOOLS, **more})
        said = [*said, *step(number)]
    return result


@pytest.fixture
def trace(tmp_path):
    """Writes rows (or raw lines) as a trace."""

    def write(*lines: Any) -> Any:
        path = tmp_path / "trace.jsonl"
        path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
        return path

    return write


def clocked(minute: int) -> dict[str, Any]:
    return {"role": "system", "content": f"It is 12:0{minute}. {SYSTEM['content']}"}


def test_an_append_only_trace_passes_the_gate(trace) -> None:
    """Nothing listed, all of them extend."""
    path = trace(*rows(*[SYSTEM] * 5))
    ended = run(path, "--max-breaks", 0, "--min-append", 1)
    assert 0 == ended.exit_code
    assert "5 calls in 1 sessions: 100.0% of those that follow another extend it, 0 break it" in ended.output
    assert [] == told(path)["rows"]
    assert 5 == len(told(path, "--all")["rows"])


def test_a_clock_fails_the_gate_with_its_place_and_cost(trace) -> None:
    """Case P2: exit code 1, the byte, the tokens, and what to do."""
    path = trace(*rows(*map(clocked, range(3))))
    ended = run(path, "--max-breaks", 1)
    assert 1 == ended.exit_code
    for words in ("clock", "message 0 (system)", 'volatile=("clock",)', "FAILED: 2 breaks, at most 1 are allowed"):
        assert words in ended.output
    row = told(path)["rows"][0]
    assert ("clock", 0, 10) == (row["cause"], row["message"], row["character"])
    assert row["lost_tokens"] > 500
    assert 0 == run(path).exit_code


def test_a_share_is_a_gate_too(trace) -> None:
    """One of four later calls breaks."""
    path = trace(*rows(SYSTEM, SYSTEM, clocked(1), clocked(1), clocked(1)))
    assert 0 == run(path, "--min-append", 0.75).exit_code
    ended = run(path, "--min-append", 0.8)
    assert 1 == ended.exit_code
    assert "75.0% of the calls extend the one before, 80.0% are asked for" in ended.output


def test_prompt_text_is_shown_only_when_asked_for(trace) -> None:
    """A report may be kept where prompts must not be."""
    path = trace(*rows(*map(clocked, range(2))))
    assert "0. You are" not in run(path).output + json.dumps(told(path))
    shown = run(path, "--text").output
    assert "was '0. You are c'" in shown
    assert "now '1. You are c'" in shown
    assert "0. You are" in told(path, "--text")["rows"][0]["before"]


def test_bad_lines_are_counted_and_left_out(trace) -> None:
    """Not JSON, no object, no messages, half a call, a nesting without end, bytes that are no UTF-8."""
    good = rows(SYSTEM, SYSTEM)
    bad = [
        "{",
        "[]",
        "{}",
        '{"messages": [7]}',
        '{"messages": [{"role": "assistant", "tool_calls": [1]}]}',
        "[" * 100_000,
    ]
    path = trace(good[0], *bad, "", good[1])
    with path.open("ab") as more:
        more.write(b"\xff\xfe\n")
    result = told(path)
    assert (2, 7, 1.0) == (result["calls"], result["bad_lines"], result["append_share"])
    assert "7 lines were left out (line 2: " in run(path).output


@pytest.mark.parametrize("lines", [(), ("{",)])
def test_a_trace_without_any_call_is_an_error(trace, lines) -> None:
    """A gate that saw nothing must not pass."""
    with pytest.raises(ConfigError, match="no model call found"):
        run(trace(*lines))


def test_a_file_that_is_not_there_is_an_error(tmp_path) -> None:
    """With what to give."""
    with pytest.raises(ConfigError, match="give a trace"):
        run(tmp_path / "none.jsonl")


def test_sessions_are_told_apart_by_name_or_by_their_request(trace) -> None:
    """Two mixed sessions without names, and two with; neither breaks the other."""
    one = rows(SYSTEM, SYSTEM)
    other = [row | {"messages": [SYSTEM, {"role": "user", "content": "another"}, *row["messages"][2:]]} for row in one]
    mixed = [one[0], other[0], one[1], other[1]]
    assert (2, 0) == (told(trace(*mixed))["sessions"], told(trace(*mixed))["breaks"])
    named = [one[0] | {"session": "a"}, one[0] | {"metadata": {"thread_id": "b"}}, one[1] | {"session": "a"}]
    assert (2, 0) == (told(trace(*named))["sessions"], told(trace(*named))["breaks"])


def test_nodes_of_one_session_are_watched_each_for_itself(trace) -> None:
    """A planner and a coder take turns; each extends its own prompt, and a clock in one of them is found."""
    planner = rows(*[{"role": "system", "content": "You plan. " * 50}] * 3, session="s")
    coder = rows(*map(clocked, range(3)), session="s")
    mixed = [one for pair in zip(planner, coder, strict=True) for one in pair]
    result = told(trace(*mixed))
    assert (2, 2, {"clock": 2}) == (result["sessions"], result["breaks"], result["causes"])


def test_the_answer_in_a_record_shows_what_was_dumped_again(trace) -> None:
    """Case P6: the model wrote other bytes than the next prompt holds."""
    first, second = rows(SYSTEM, SYSTEM)
    written = {"role": "assistant", "content": None, "tool_calls": step(0, '{"x":1}')[0]["tool_calls"]}
    record = {"request": first, "response": {"choices": [{"message": written}]}}
    assert {"tool args re-dumped": 1} == told(trace(record, second))["causes"]
    thinking = {**step(0)[0], "reasoning_content": "hm"}
    record = {"request": first, "response": {"choices": [{"message": thinking}]}}
    assert {"reasoning dropped": 1} == told(trace(record, second))["causes"]


def test_expiry_and_size_are_the_providers(trace) -> None:
    """Neither is a break; both options have their effect."""
    usage = {"prompt_tokens": 2000, "prompt_tokens_details": {"cached_tokens": 0}}
    lines = [row | {"usage": usage, "time": number * 400} for number, row in enumerate(rows(SYSTEM, SYSTEM))]
    assert {"cache expired": 1} == told(trace(*lines), "--max-breaks", 0)["causes"]
    assert {} == told(trace(*lines), "--lifetime-s", 500)["causes"]
    assert {"below minimum size": 1} == told(trace(*lines), "--min-tokens", 4096)["causes"]


SCRIPT = """
import sys
from agentkv.context.explain import seen
from agentkv.core.message import Message
print("noise of the script", sys.argv[1:])
for minute in range(3):
    seen(session="s", model="m", messages=[Message(role="system", content=f"It is 12:0{minute}.")])
"""


def test_a_script_is_run_and_every_call_in_it_is_watched(tmp_path) -> None:
    """Its own output goes to standard error, its arguments behind --."""
    path = tmp_path / "agent.py"
    path.write_text(SCRIPT)
    ended = run(path, "--json", "--max-breaks", 1, "--", "--fast", "x")
    assert 1 == ended.exit_code
    assert ({"clock": 2}, 3) == (json.loads(ended.stdout)["causes"], json.loads(ended.stdout)["calls"])
    assert "noise of the script ['--fast', 'x']" in ended.stderr


@pytest.mark.parametrize(
    ("ending", "words"),
    [("raise SystemExit(3)", "agent.py ended with 3"), ("1 / 0", "agent.py failed: ZeroDivisionError"), ("exit()", "")],
)
def test_a_script_that_fails_fails_the_gate_after_the_report(tmp_path, ending, words) -> None:
    """What it did before is told."""
    path = tmp_path / "agent.py"
    path.write_text(SCRIPT + ending + "\n")
    ended = run(path)
    assert (bool(words), "clock (2x)" in ended.stdout) == (bool(ended.exit_code), True)
    assert words in ended.stdout


def test_help_teaches_what_a_prefix_is_and_how_to_gate() -> None:
    """Somebody who never heard of it can start from here."""
    shown = " ".join(run("--help").output.replace("│", " ").split())
    for words in ("begins with the same bytes", "A clock in the system prompt", "--max-breaks 0", "TRACE|SCRIPT"):
        assert words in shown


# -- reading a row

odd = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["", "a", "\ud800", "tool", "user", "f"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.dictionaries(KEYS, odd | st.lists(st.dictionaries(KEYS, odd), max_size=3), max_size=6), max_size=4))
def test_any_row_is_a_call_or_refused_with_a_reason(rows) -> None:
    """Nothing else is raised, in reading or in comparing."""
    check = Check(count=lambda text, _model: len(text))
    for row in [*rows, *({"messages": [one], "tools": [one], "usage": one, "time": 1} for one in rows)]:
        try:
            call = call_of(row)
        except REFUSED:
            continue
        check.feed(call)
        check.feed(call)
    assert check.breaks <= check.calls


def test_a_declared_fold_is_no_break_for_a_listener_either() -> None:
    """Whoever folds tells so with the call."""
    check = Check(count=lambda text, _model: len(text))
    first = Seen(session="s", task="", model="", messages=(Message(role="user", content="a"),), tools=())
    check.feed(first)
    told = check.feed(replace(first, messages=(Message(role="user", content="b"),), declared="fold")).told
    assert ("fold", 0) == (told.cause, check.breaks)


@pytest.mark.parametrize(
    ("given", "usage"),
    [
        ({"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 4}}, (10, 4)),
        ({"input_tokens": 10, "input_tokens_details": {"cached_tokens": 4}}, (10, 4)),
        ({"input_tokens": 6, "cache_read_input_tokens": 4, "cache_creation_input_tokens": 2}, (12, 4)),
        ({"prompt_tokens": 10}, None),
        ({"prompt_tokens": "10", "prompt_tokens_details": None}, None),
        ("7", None),
    ],
)
def test_usage_is_read_in_each_providers_words(given, usage) -> None:
    """Cached tokens inside the input, or beside it; unknown is unknown."""
    expected = None if usage is None else Usage(input_tokens=usage[0], cached_tokens=usage[1], calls=1)
    assert expected == call_of({"messages": [ASK], "usage": given}).usage


@pytest.mark.parametrize(
    ("given", "at_s"),
    [
        (12.5, 12.5),
        (1_767_225_600_000, 1_767_225_600),
        ("2026-01-01T00:00:00Z", 1_767_225_600),
        ("soon", None),
        (True, None),
    ],
)
def test_times_are_seconds_milliseconds_or_iso(given, at_s) -> None:
    """What recorders write."""
    assert at_s == call_of({"messages": [ASK], "time": given}).at_s


def test_parts_legacy_calls_and_templates_are_seen() -> None:
    """Another image, another function call, another template argument: each is another prompt."""
    image = {"type": "image_url", "image_url": {"url": "data:1"}}
    one = call_of({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, image]}]})
    other = call_of({"messages": [{"role": "user", "content": ["a", image | {"image_url": {"url": "data:2"}}]}]})
    assert "a\n" == one.messages[0].content[:2] == other.messages[0].content[:2]
    assert one.messages != other.messages
    legacy = call_of(
        {
            "messages": [{"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}],
            "functions": [{"name": "f"}],
        }
    )
    assert ("f", "f") == (legacy.messages[0].tool_calls[0].name, legacy.tools[0].name)
    assert call_of({"messages": [ASK], "chat_template_kwargs": {"thinking": True}}).template


def test_the_example_breaks_at_every_call_and_its_layout_never(tmp_path) -> None:
    """And what it writes is a trace that fails the gate."""
    path = tmp_path / "trace.jsonl"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    argv = [sys.executable, str(EXAMPLE), str(path)]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=200, check=True)
    careless, careful = done.stdout.split("With a layout:")
    assert 5 == careless.count("tool order (and clock)")
    assert 5 == careful.count("extends the prompt before")
    assert "  0 tokens computed again" in careful
    assert 1 == run(path, "--max-breaks", 4).exit_code


AGENT = """
import itertools, sys
from agentkv import AgentKV, Context, Message, Request, ScriptedEngine, ToolCall

volatile = ("clock",) if "--mended" in sys.argv else ()
with AgentKV.with_engine(ScriptedEngine(itertools.repeat("ok")), context=Context(volatile=volatile)) as kv:
    said = [Message(role="user", content="find the bug")]
    for minute in range(4):
        system = Message(role="system", content=f"It is 12:0{minute}. " + "You are careful. " * 200)
        with kv.task("agent", final=False):
            answer = kv.submit(Request(messages=(system, *said))).result(30)
        call = ToolCall(id=f"c{minute}", name="look", arguments="{}")
        said += [
            Message(role="assistant", content=answer.text, tool_calls=(call,)),
            Message(role="tool", content=f"nothing in file {minute}", tool_call_id=call.id),
        ]
"""


def test_a_script_with_an_agentkv_of_its_own_is_watched(tmp_path) -> None:
    """Every call that its engine answers; a clock fails the gate, and what mends it passes."""
    script = tmp_path / "agent.py"
    script.write_text(AGENT)
    ended = run(script, "--max-breaks", 0, "--lifetime-s", 0)
    assert 1 == ended.exit_code
    assert "4 calls in 1 sessions" in ended.output
    assert "FAILED: 3 breaks, at most 0 are allowed" in ended.output
    assert {"clock": 3} == told(script)["causes"]
    mended = run(script, "--max-breaks", 0, "--min-append", 1, "--", "--mended")
    assert 0 == mended.exit_code, mended.output
    assert "4 calls in 1 sessions: 100.0% of those that follow another extend it, 0 break it" in mended.output
