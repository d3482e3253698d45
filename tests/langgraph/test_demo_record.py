"""`agentkv demo --record`: the file that a run leaves, read back as a trace and as a record."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import typer
from agentkv_langgraph import LangGraphHost
from agentkv_langgraph.demo import scene
from agentkv_langgraph.demo.closing import Outcome
from agentkv_langgraph.demo.command import nothing_moved, register
from agentkv_langgraph.demo.settings import Memory, Settings
from typer.testing import CliRunner

from agentkv import AgentKV
from agentkv.errors import ConfigError
from agentkv.sim import record as records
from agentkv.sim import trace

ANSWER = "The tests of pricing fail because totals are cut."
TASKS, TURNS = 2, 2


_made: dict[str, Path] = {}


@pytest.fixture
def recorded(monkeypatch, tmp_path, block_engine) -> Path:
    """The file of one run of two tasks with two naps each, on a scripted engine."""
    if "path" in _made:
        return _made["path"]

    def maker(self: Memory, model: str, folder: Path, console: Any) -> Any:
        def make(*, tiers: bool, policy: Any, saved: bool = True) -> AgentKV:
            return AgentKV.with_engine(block_engine(itertools.repeat(ANSWER)), policy=policy, host=LangGraphHost())

        return make

    def naps_only(project: Any, *, task_index: int, turns: int, seed: int) -> list[Any]:
        return [{"tool": "nap", "argv": ["sleep", "0.1"], "command": f"sleep 0.1 {n}"} for n in range(turns)]

    monkeypatch.setattr(Memory, "maker", maker)
    monkeypatch.setattr(scene, "work_list", naps_only)
    monkeypatch.setenv("AGENTKV_CACHE", str(tmp_path / "cache"))
    app = typer.Typer()
    app.callback()(lambda: None)
    register(app)
    path = tmp_path / "record.jsonl"
    options = ["--tasks", str(TASKS), "--turns", str(TURNS), "--keep-s", "0", "--host-s", "9", "--drop-tokens", "0"]
    CliRunner().invoke(app, ["demo", *options, "--disk", "none", "--record", str(path)], catch_exceptions=False)
    return _made.setdefault("path", path)


def test_a_record_is_a_trace_that_loads_whole(recorded) -> None:
    """One session for each task, a wait after each call but the last, and nothing skipped."""
    told = trace.load(recorded, strict=True)
    assert TASKS == len(told.sessions)
    for session in told.sessions:
        assert [False] * (TURNS + 1) + [True] == [wait.ends for wait in session]
        assert ["nap", "nap", "", ""] == [wait.tool for wait in session]
        assert ["sleep", "sleep", "", ""] == [wait.command for wait in session]
        assert all(0.1 <= wait.duration_s < 60 for wait in session[:TURNS])
    assert 0.0 == min(told.arrivals_s)


def test_a_record_holds_no_prompt_and_no_arguments(recorded) -> None:
    """Names, counts and times only."""
    text = recorded.read_text()
    for word in (ANSWER, "pricing", "careful software engineer", "sleep 0.1"):
        assert word not in text


def test_a_record_names_the_policy_with_its_numbers(recorded) -> None:
    """What `make_policy` needs to make it again."""
    head = json.loads(recorded.read_text().splitlines()[0])
    assert {"name": "ladder", "keep_s": 0.0, "host_s": 9.0, "drop_tokens": 0} == head["recorded"]["policy"]


def test_moves_stand_with_the_wait_in_which_they_ended(recorded) -> None:
    """A write to host at each tool start, with its bytes."""
    told = [json.loads(line) for line in recorded.read_text().splitlines()[1:]]
    moved = [move for line in told for move in line.get("moves", ())]
    assert {"host"} <= {move["to"] for move in moved}
    assert all(move["bytes"] >= 0 and move["at_s"] >= 0 for move in moved)


def test_a_run_without_tiers_cannot_be_replayed_and_says_so(recorded) -> None:
    """A scripted engine has no block counts: nothing to simulate."""
    with pytest.raises(ConfigError, match="cannot be replayed"):
        records.read(recorded)


def test_a_policy_by_name_needs_no_disk_to_show_tiering() -> None:
    """Only the ladder sends contexts to disk by plan; under the others a run is good once the host was reached."""
    settings = {"tasks": 1, "turns": 1, "repo": None, "budget_tokens": 1, "seed": 0, "keep_s": 1.0, "host_s": 2.0}
    written = {"engine": {"kv": {"bytes": {"d2h": 4096, "write": 0}}}}
    run = Outcome(bills={}, wall_s=1.0, stats=written)
    said = {
        name: nothing_moved(
            run,
            has_host=True,
            has_disk=True,
            settings=Settings(**settings, drop_tokens=1, tool_timeout_s=1.0, policy_name=name),
        )
        for name in ("ladder", "lazy")
    }
    assert "no block reached disk" in said["ladder"]
    assert "" == said["lazy"]
    assert {"name": "lazy"} == Settings(**settings, drop_tokens=1, tool_timeout_s=1.0, policy_name="lazy").policy_named
