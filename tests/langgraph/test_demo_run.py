"""The whole demo on a scripted engine: what it prints, what it leaves, how it fails and how it is interrupted."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from agentkv_langgraph import LangGraphHost
from agentkv_langgraph.demo import scene
from agentkv_langgraph.demo.command import nothing_moved, register
from agentkv_langgraph.demo.settings import Memory, Settings
from typer.testing import CliRunner

from agentkv import AgentKV

ANSWER = "The tests of pricing fail because totals are cut."


@pytest.fixture
def made(monkeypatch, tmp_path, block_engine) -> list[AgentKV]:
    """Makes the demo run on scripted engines; the list holds each AgentKV that it made, tiered and not."""
    kvs: list[AgentKV] = []

    def maker(self: Memory, model: str, folder: Path, console: Any) -> Any:
        def make(*, tiers: bool, policy: Any, saved: bool = True) -> AgentKV:
            engine = block_engine(itertools.repeat(ANSWER))
            kvs.append(AgentKV.with_engine(engine, policy=policy, host=LangGraphHost()))
            return kvs[-1]

        return make

    monkeypatch.setattr(Memory, "maker", maker)
    monkeypatch.setenv("AGENTKV_CACHE", str(tmp_path / "cache"))
    return kvs


def demo(*options: str) -> Any:
    app = typer.Typer()
    app.callback()(lambda: None)
    register(app)
    return CliRunner().invoke(app, ["demo", *options], catch_exceptions=False)


LADDER = ("--keep-s", "0", "--host-s", "1", "--drop-tokens", "0")


@pytest.fixture
def naps(monkeypatch) -> None:
    """The work is to sleep: short naps that are soon known as such, and at last one that outlives what is known."""

    def naps_only(project: Any, *, task_index: int, turns: int, seed: int) -> list[Any]:
        lengths = ["0.8"] * (turns - 1) + ["5"]
        return [{"tool": f"nap {s}", "argv": ["sleep", s], "command": f"nap {n}"} for n, s in enumerate(lengths)]

    monkeypatch.setattr(scene, "work_list", naps_only)


def test_a_run_with_comparison_shows_bills_and_the_closing_table_and_leaves_nothing(made, naps, tmp_path) -> None:
    """Work, bills, table, JSON; the same calls with the same tokens again; no file stays."""
    out = tmp_path / "out.json"
    result = demo("--tasks", "2", "--turns", "3", "--compare", "--json", str(out), *LADDER)
    assert 0 == result.exit_code, result.output
    shown = " ".join(result.output.split())
    for words in ("up to 1 s go", "task 2: done", "Bill of demo-", "Closing table", "with recompute"):
        assert words in shown
    run, on, off = made
    for again in (on, off):
        forced = [ids for ids in again.engine.forced if ids]
        assert len(run.engine.requests) == len(again.engine.requests) == len(forced) == 2 * (3 + 2)
    told = json.loads(out.read_text())
    assert {"task 1", "task 2"} == set(told["run"]["tasks"]) == set(told["again_with_recompute"]["tasks"])
    assert told["run"]["blocks_to_host"] > 0
    assert told["run"]["blocks_to_disk"] > 0
    assert [3, 3] == [len(task["tools"]) for task in told["again_with_offload"]["tasks"].values()]
    assert [] == list((tmp_path / "cache").iterdir())


def test_all_tasks_share_their_instructions_and_each_history_only_grows(made, naps) -> None:
    """The system message is one text, and each prompt of a task is a prefix of its next one."""
    demo("--tasks", "3", "--turns", "2", *LADDER)
    requests = made[0].engine.requests
    assert 1 == len({request.messages[0] for request in requests})
    by_task: dict[str, list[Any]] = {}
    for request in requests:
        by_task.setdefault(request.caller.task, []).append(request.messages)
    assert 3 == len(by_task)
    for prompts in by_task.values():
        for before, after in itertools.pairwise(prompts):
            assert before == after[: len(before)]


def test_a_run_in_which_nothing_moved_fails_and_says_why(made, naps) -> None:
    """Exit 1, with the tiers, the longest tool and what to change."""
    result = demo("--tasks", "1", "--turns", "1", "--keep-s", "50", "--host-s", "60")
    assert 1 == result.exit_code
    for words in ("no block reached host and disk", "The longest tool", "--keep-s"):
        assert words in result.output


def test_tiers_that_are_off_are_not_missed(made, user_repo) -> None:
    """Without host and disk there is nothing to reach."""
    options = ("--tasks", "1", "--turns", "1", "--host-memory", "none")
    result = demo("--repo", str(user_repo), *options)
    assert 0 == result.exit_code, result.output
    assert "host off, disk off" in " ".join(result.output.split())


def test_a_task_without_budget_stops_alone(made, naps) -> None:
    """It says so on its line; the bill shows what it had spent."""
    result = demo("--tasks", "1", "--turns", "2", "--budget", "250", "--host-memory", "none")
    assert 0 == result.exit_code, result.output
    assert "stopped by its budget" in result.output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--repo", "/nowhere"), "no folder"),
        (("--keep-s", "9", "--host-s", "1"), "keep_s"),
        (("--device-memory", "much"), "--device-memory"),
        (("--keep-s", "1", "--policy", "lazy"), "ladder"),
    ],
)
def test_bad_options_are_refused_before_a_model_is_loaded(made, options, words) -> None:
    """One sentence that names the option."""
    from agentkv.errors import ConfigError

    with pytest.raises(ConfigError, match=words):
        demo(*options)
    assert [] == made


def test_a_tier_that_no_block_reached_is_named() -> None:
    """Only tiers that were on count."""
    from agentkv_langgraph.demo.closing import Outcome

    from agentkv.budget.bill import Bill
    from agentkv.budget.ledger import MoveFact

    moved = [MoveFact(task="t", action="demote", to="disk", blocks=3)]
    run = Outcome(bills={"task 1": Bill.from_facts("t", moved)}, wall_s=1.0, stats={})
    settings = Settings(
        tasks=1, turns=1, repo=None, budget_tokens=1, seed=0, keep_s=1, host_s=2, drop_tokens=0, tool_timeout_s=1,
        policy_name="ladder",
    )  # fmt: skip
    assert "reached host," in nothing_moved(run, has_host=True, has_disk=True, settings=settings)
    assert "" == nothing_moved(run, has_host=False, has_disk=True, settings=settings)
    counted = {"engine": {"kv": {"bytes": {"d2h": 9, "write": 0}}}}
    assert "reached disk," in nothing_moved(
        replace(run, stats=counted), has_host=True, has_disk=True, settings=settings
    )


PROGRAM = """
import importlib.util, itertools, sys, typer
spec = importlib.util.spec_from_file_location("engines", {conftest!r})
engines = importlib.util.module_from_spec(spec)
spec.loader.exec_module(engines)
from agentkv import AgentKV
from agentkv_langgraph import LangGraphHost
from agentkv_langgraph.demo import command
from agentkv_langgraph.demo.settings import Memory

def maker(self, model, folder, console):
    def make(*, tiers, policy):
        engine = engines.BlockEngine(itertools.repeat("a b c"))
        return AgentKV.with_engine(engine, policy=policy, host=LangGraphHost())
    return make

Memory.maker = maker
app = typer.Typer()
app.callback()(lambda: None)
command.register(app)
app(["demo", "--repo", {repo!r}, "--tasks", "2", "--turns", "4"])
"""


@pytest.mark.skipif(os.name != "posix", reason="signals as on POSIX")
def test_ctrl_c_ends_everything_with_130(tmp_path) -> None:
    """No child process, no file, no thread that would keep the program alive."""
    repo, cache = tmp_path / "repo", tmp_path / "cache"
    repo.mkdir()
    pids = tmp_path / "pids"
    (repo / "test_slow.py").write_text(
        f"import os, time\n\ndef test_slow():\n    open({str(pids)!r}, 'a').write(str(os.getpid()) + '\\n')\n    time.sleep(60)\n"
    )
    program = PROGRAM.format(conftest=str(Path(__file__).with_name("conftest.py")), repo=str(repo))
    env = {**os.environ, "AGENTKV_CACHE": str(cache), "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:  # fmt: skip
        ends_s = time.monotonic() + 60
        while not pids.exists() and process.poll() is None and time.monotonic() < ends_s:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=30)
    assert 130 == process.returncode, output
    assert "Stopped. Nothing is left behind." in output
    assert "Traceback" not in output
    assert [] == list(cache.iterdir())
    for pid in pids.read_text().split():
        assert not Path(f"/proc/{pid}").exists()


@pytest.mark.weights
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_on_real_weights_moves_real_blocks(tmp_path) -> None:
    """The command as a user runs it, shortened: contexts travel to host and disk and the run succeeds."""
    out = tmp_path / "out.json"
    result = demo(
        "--tasks", "2", "--turns", "3", "--policy", "ladder", "--host-s", "2", "--compare", "--json", str(out)
    )
    assert 0 == result.exit_code, result.output
    told = json.loads(out.read_text())["run"]
    assert told["stats"]["engine"]["kv"]["bytes"]["write"] > 0
    assert 2 == len(told["tasks"])
