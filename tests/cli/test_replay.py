"""`agentkv replay`: what it prints of a record, and what it says of a file that is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from agentkv.cli import replay
from agentkv.errors import ConfigError


def run(*arguments: str) -> Any:
    app = typer.Typer()
    app.callback()(lambda: None)
    replay.register(app)
    return CliRunner().invoke(app, ["replay", *arguments], catch_exceptions=False)


@pytest.fixture
def record(tmp_path) -> Path:
    """A session of four calls that had the engine to itself: 0.05 s a step and 2 ms a prompt token."""
    header = {
        "model": "m",
        "policy": {"name": "keep"},
        "block_tokens": 16,
        "block_bytes": 16_000,
        "device_blocks": 500,
        "host_blocks": 0,
        "disk_blocks": 0,
        "shared_tokens": 0,
        "rates_bytes_s": {},
    }
    lines: list[dict[str, Any]] = [{"v": "agentkv.trace/1", "recorded": header}]
    at_s, cached, prompts = 0.0, 0, (300, 500, 900, 1000)
    for i, prompt in enumerate(prompts):
        prefill_s, decode_s = 0.05 + 0.002 * (prompt - cached), 19 * 0.05
        times = {"submitted_s": at_s, "prefill_s": prefill_s, "decode_s": decode_s, "ttft_s": prefill_s}
        times |= {"total_s": prefill_s + decode_s, "queued_s": 0.0, "restore_s": 0.0, "recompute_s": 0.0}
        lines.append(
            {
                "session": "a",
                "tool": "pytest",
                "prompt_tokens": prompt,
                "output_tokens": 20,
                "reuse_tokens": prompt,
                "next_prompt_tokens": prompts[i + 1] if i < 3 else 0,
                "duration_s": 1.0,
                "call": {"cached_tokens": cached, **times},
            }
        )
        at_s += prefill_s + decode_s + 1.0
        cached = prompt + 19
    path = tmp_path / "record.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_json_has_both_errors_and_both_sides(record) -> None:
    """A session alone never waits, and is predicted to a few percent."""
    told = json.loads(run(str(record), "--draws", "2", "--json").output)
    assert 0.0 == told["stall_error"] == told["runs"][0]["measured"]["stall_s"]
    assert told["task_time_error"] < 0.05
    assert told["runs"][0]["measured"]["task_time_s"] == pytest.approx(9.0, rel=0.3)


def test_people_get_a_table_and_a_sentence(record) -> None:
    """A row for each record, and the errors of the means."""
    shown = run(str(record), str(record), "--draws", "1").output
    assert 2 == shown.count("record.jsonl")
    assert "Over all runs the mean stall is off by 0%" in " ".join(shown.split())


def test_a_plain_trace_is_refused_with_what_to_do(tmp_path) -> None:
    """It has no times of its own."""
    path = tmp_path / "trace.jsonl"
    path.write_text('{"v": "agentkv.trace/1"}\n')
    with pytest.raises(ConfigError, match="agentkv demo --record"):
        run(str(path))
