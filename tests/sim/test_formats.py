"""What records of each format say, and how a file's format is found."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path

import pytest

from agentkv.errors import ConfigError
from agentkv.sim.trace import load

T0_S = 1_780_000_000.0


def at(seconds):
    return datetime.fromtimestamp(T0_S + seconds, UTC).isoformat().replace("+00:00", "Z")


def lines(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def weka(step, **changes):
    told = {"session": "w1", "step": step, "tool": "tool", "start": 10.0 * step, "dur": 4, "prompt_tok": 100 + step}
    return told | {"out_tok": 5, "next_prompt_tok": 101 + step, "reuse_tok": 64, "llm_s": 2.0} | changes


def tracelab(index, *, came_s, out_s, tools=(), event="tool_result", **changes):
    told = {"session_id": "s", "round_index": index, "input_tokens_total": 1000 * (index + 1), "output_tokens": 50}
    told["prefix_tokens"] = 1000 * index
    told["timing_events"] = [
        {"event_type": event, "timestamp": at(came_s)},
        {"event_type": "text", "timestamp": at(out_s)},
    ]
    told["tools"] = [
        {"tool_name": name, "emitted_at": at(start), "tool_wall_latency_ms": wall_ms, "input_chars": 7}
        for name, start, wall_ms in tools
    ]
    return told | changes


def test_a_weka_line_is_a_wait_of_a_kind_without_a_tool(tmp_path):
    """All its fields arrive under our names."""
    trace = load(lines(tmp_path / "w.jsonl", weka(0), weka(1, tool="human", dur=7)))
    first, second = trace.sessions[0]
    assert ("tool", "", 4.0, 100, 5, 101, 64, 2.0) == (
        first.kind, first.tool, first.duration_s, first.prompt_tokens, first.output_tokens,
        first.next_prompt_tokens, first.reuse_tokens, first.llm_s,
    )  # fmt: skip
    assert ("human", 7.0) == (second.kind, second.duration_s)


def test_local_tools_lines_carry_tool_and_command_and_censoring(tmp_path):
    """Names, the time-out and the censored mark are kept; there are no tokens."""
    record = {"session": "l1", "step": 0, "tool": "pytest", "arg": "python -m pytest", "start": 0.0, "dur": 60.0,
              "arg_bytes": 12, "n_par": 1, "timeout_s": 60, "censored": True}  # fmt: skip
    (wait,) = load(lines(tmp_path / "l.jsonl", record)).waits()
    assert ("pytest", "python -m pytest", True, 60.0, 12, 0) == (
        wait.tool, wait.command, wait.censored, wait.timeout_s, wait.arg_bytes, wait.prompt_tokens,
    )  # fmt: skip


def test_overlapping_parallel_calls_become_one_wait_for_the_last(tmp_path):
    """Two calls that ran side by side: the session waited until the later end; both are still there as calls."""
    base = {"session": "l1", "tool": "grep", "arg": "rg", "n_par": 2}
    trace = load(
        lines(
            tmp_path / "l.jsonl",
            base | {"step": 0, "start": 1.0, "dur": 0.5},
            base | {"step": 1, "start": 1.1, "dur": 2.0, "tool": "bash"},
            base | {"step": 2, "start": 9.0, "dur": 0.5, "n_par": 1},
        )
    )
    together, alone = trace.sessions[0]
    assert 2 == len(trace)
    assert (2.1, "bash", 2) == (pytest.approx(together.duration_s), together.tool, len(together.calls))
    assert () == alone.calls
    assert ["grep", "bash", "grep"] == [wait.tool for wait in trace.waits()]


def test_a_tracelab_round_waits_for_its_last_tool(tmp_path):
    """Wall latencies in ms, emitted at wall-clock times: the wait is from the first emission to the last result."""
    trace = load(
        lines(
            tmp_path / "t.jsonl",
            tracelab(0, came_s=0, out_s=8, tools=[("Bash", 10, 860), ("WebSearch", 11, 19_000)], event="user_message"),
            tracelab(1, came_s=30, out_s=40),
            tracelab(2, came_s=100, out_s=101, event="user_message"),
        )
    )
    tools, person, end = trace.sessions[0]
    assert ("tool", 20.0, "WebSearch", 2) == (tools.kind, pytest.approx(tools.duration_s), tools.tool, tools.parallel)
    assert [0.86, 19.0] == [pytest.approx(call.duration_s) for call in tools.calls]
    assert ("human", 60.0) == (person.kind, pytest.approx(person.duration_s))
    assert end.ends
    assert 2 == len(trace)
    assert (2000, 1000) == (tools.next_prompt_tokens, tools.reuse_tokens)
    assert 8.0 == pytest.approx(tools.llm_s)
    assert (0.0,) == trace.arrivals_s


def test_a_person_who_writes_while_tools_run_makes_the_wait_mixed(tmp_path):
    """A round with tools whose next input holds a person's text."""
    trace = load(
        lines(
            tmp_path / "t.jsonl",
            tracelab(0, came_s=0, out_s=8, tools=[("Bash", 10, 1000)]),
            tracelab(1, came_s=30, out_s=40, event="user_message"),
        )
    )
    assert "mixed" == trace.sessions[0][0].kind


def test_a_tool_with_a_negative_latency_skips_its_round(tmp_path):
    """A wall clock that stepped back: about 1 % of published spans."""
    trace = load(
        lines(
            tmp_path / "t.jsonl",
            tracelab(0, came_s=0, out_s=8, tools=[("Bash", 10, -5)]),
            tracelab(1, came_s=30, out_s=40),
        )
    )
    assert {"tool_wall_latency_ms is negative": 1} == trace.skipped.reasons


def test_mooncake_requests_are_joined_by_their_blocks(tmp_path):
    """A request that begins with all full blocks of an earlier one continues it; times are in milliseconds."""
    trace = load(
        lines(
            tmp_path / "m.jsonl",
            {"timestamp": 1000, "input_length": 1100, "output_length": 10, "hash_ids": [0, 1, 2]},
            {"timestamp": 2000, "input_length": 1200, "output_length": 10, "hash_ids": [0, 8, 9]},
            {"timestamp": 61_000, "input_length": 1700, "output_length": 20, "hash_ids": [0, 1, 5, 6]},
        )
    )
    assert [2, 1] == [len(session) for session in trace.sessions]
    wait, end = trace.sessions[0]
    assert (60.0, 1700, 1024) == (wait.duration_s, wait.next_prompt_tokens, wait.reuse_tokens)
    assert end.ends
    assert (0.0, 1.0) == trace.arrivals_s
    assert (3, 3, 1) == (trace.skipped.records, trace.skipped.used, len(trace))


def test_a_shared_beginning_is_no_session_to_continue(tmp_path):
    """Two requests with one system prompt, which a third had alone: three sessions."""
    rows = [
        {"timestamp": at_ms, "input_length": 512 + more, "output_length": 10, "hash_ids": ids}
        for at_ms, more, ids in ((0, 0, [0]), (1000, 400, [0, 5]), (2000, 300, [0, 6]))
    ]
    assert [1, 1, 1] == [len(session) for session in load(lines(tmp_path / "m.jsonl", *rows)).sessions]


def test_mooncake_rows_with_a_session_and_a_delay_need_no_timestamp(tmp_path):
    """The closed-loop form: the wait is the next row's delay in milliseconds."""
    trace = load(
        lines(
            tmp_path / "m.jsonl",
            {"session_id": "c", "timestamp": 0, "input_length": 100, "output_length": 10, "hash_ids": [1]},
            {"session_id": "c", "delay": 2500, "input_length": 200, "output_length": 10, "hash_ids": [1, 2]},
        )
    )
    assert 2.5 == trace.sessions[0][0].duration_s


def test_a_newer_version_of_our_format_is_refused(tmp_path):
    """Half-understood facts would be worse than none."""
    path = lines(tmp_path / "n.jsonl", {"v": "agentkv.trace/9"})
    with pytest.raises(ConfigError, match=r"line 1: version 'agentkv.trace/9'"):
        load(path)


def test_an_unknown_format_name_is_refused(tmp_path):
    """A typo names the choices."""
    with pytest.raises(ConfigError, match="mooncake"):
        load(lines(tmp_path / "n.jsonl", {}), format="mooncak")


def test_a_file_in_no_known_format_is_all_skips(tmp_path):
    """Nothing is guessed."""
    trace = load(lines(tmp_path / "n.jsonl", {"a": 1}, {"b": 2}))
    assert ((), {"no known format": 2}) == (trace.sessions, trace.skipped.reasons)


@pytest.mark.skipif("AGENTKV_TRACES" not in os.environ, reason="AGENTKV_TRACES names no folder with recorded traces")
def test_the_recorded_traces_are_read_whole():
    """Every record is used, but for those whose duration was not recorded."""
    folder = Path(os.environ["AGENTKV_TRACES"])
    waits, calls = load(folder / "weka_claude_code.jsonl"), load(folder / "local_tools.jsonl")
    assert (48_561, {"dur is missing": 116}) == (waits.skipped.records, waits.skipped.reasons)
    assert (2823, {}) == (calls.skipped.records, calls.skipped.reasons)
    assert 2823 == sum(1 for _ in calls.waits())
