"""The demo's parts: tools that end when they must, output within its bound, work lists, recording, the board."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from agentkv_langgraph.demo.board import Board, Line, where_blocks_are
from agentkv_langgraph.demo.project import Project, sample_project, user_project
from agentkv_langgraph.demo.record import Recorder, Turn, Wait, replay_task
from agentkv_langgraph.demo.runner import Crew
from agentkv_langgraph.demo.settings import Memory
from agentkv_langgraph.demo.tools import Stopped, run_tool
from agentkv_langgraph.demo.worklist import work_list
from agentkv_langgraph.demo.workshop import workshop

from agentkv.core.residency import Residency
from agentkv.errors import ConfigError


def run(tmp_path, program: str, *, timeout_s: float = 20.0, stop: threading.Event | None = None) -> str:
    argv = [sys.executable, "-c", program]
    return run_tool(argv, cwd=tmp_path, env=os.environ, timeout_s=timeout_s, stop=stop or threading.Event())


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pid: int) -> None:
    ends_s = time.monotonic() + 5
    while is_alive(pid) and time.monotonic() < ends_s:
        time.sleep(0.01)
    assert not is_alive(pid)


def test_a_tools_output_and_exit_code_are_reported(tmp_path) -> None:
    """Both channels, without terminal codes."""
    program = (
        "import sys; print('\\x1b[31mred\\x1b[0m'); sys.stdout.flush(); print('bad', file=sys.stderr); sys.exit(3)"
    )
    assert "red\nbad\n(exit code 3)" == run(tmp_path, program)
    assert "cannot run /nowhere/tool" in run_tool(
        ["/nowhere/tool"], cwd=tmp_path, env=os.environ, timeout_s=1, stop=threading.Event()
    )


CHILD = "import subprocess, sys, time; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); time.sleep({})"


@pytest.mark.parametrize("sleeps", [60, 0], ids=["killed by its deadline", "ended before its child"])
def test_nothing_that_a_tool_started_outlives_it(tmp_path, sleeps) -> None:
    """Its whole process group goes, whether it was killed or left a child behind."""
    output = run(tmp_path, CHILD.format(sleeps), timeout_s=1.0)
    wait_until_gone(int(output.split()[0]))
    assert ("killed after 1 s" in output) is (sleeps > 0)


def test_a_stopped_demo_ends_its_tools_at_once(tmp_path) -> None:
    """Stopped is raised and the children are gone."""
    stop, pid_file = threading.Event(), tmp_path / "pid"
    program = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    crew = Crew()
    crew.start("tool", lambda: run(tmp_path, program, stop=stop))
    while not (pid_file.exists() and pid_file.read_text()):
        time.sleep(0.01)
    stop.set()
    crew.join(5)
    assert isinstance(crew.errors["tool"], Stopped)
    wait_until_gone(int(pid_file.read_text()))


def test_a_flood_of_output_is_cut_without_being_held(tmp_path) -> None:
    """Head and tail are kept."""
    output = run(tmp_path, "print('first'); print('x' * 10_000_000); print('last')")
    assert len(output) < 300_000
    assert output.startswith("first")
    assert output.endswith("last")


def snapshot(root) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(root)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def test_a_users_code_base_is_never_written_to(user_repo, tmp_path) -> None:
    """Every tool of a long work list runs, and no file or folder has changed."""
    project = user_project(user_repo, tmp_path / "run")
    before, folders = snapshot(user_repo), sorted(user_repo.rglob("*"))
    for item in work_list(project, task_index=0, turns=5, seed=0):
        output = run_tool(item["argv"], cwd=project.root, env=project.env, timeout_s=60, stop=threading.Event())
        assert "cannot run" not in output
        if item["tool"].startswith("test"):
            assert "1 passed" in output
    assert (before, folders) == (snapshot(user_repo), sorted(user_repo.rglob("*")))


def test_the_sample_has_failing_tests_findings_and_a_history(tmp_path) -> None:
    """Real bugs: some tests fail, most pass, the linter finds things, git has commits."""
    project = sample_project(tmp_path)
    assert "tests/test_stock.py" in project.tests
    assert "parcel/pricing.py" in project.sources
    items = {item["tool"]: item for item in work_list(project, task_index=0, turns=9, seed=0)}

    def output(argv: list[str]) -> str:
        return run_tool(argv, cwd=project.root, env=project.env, timeout_s=60, stop=threading.Event())

    pytest_argv = [*items["test_file"]["argv"][:-1], "tests/test_stock.py"]
    assert "1 failed, 4 passed" in output(pytest_argv)
    assert "F401" in output(items["lint"]["argv"])
    if project.git is not None:
        assert "Stock and prices" in output(items["git_log"]["argv"])


def test_tasks_get_different_work_and_a_seed_repeats_it(tmp_path) -> None:
    """Different orders and files; the same seed gives the same lists; all of it is plain JSON."""
    project = sample_project(tmp_path)
    lists = [work_list(project, task_index=n, turns=6, seed=3) for n in range(4)]
    assert 4 == len({json.dumps(todo) for todo in lists})
    assert lists == [work_list(project, task_index=n, turns=6, seed=3) for n in range(4)]
    assert all(any(item["tool"] == "test_suite" for item in todo) for todo in lists)


def bare_project(root, **programs) -> Project:
    options = {"python": None, "ruff": None, "git": None, "files": (), "env": {}}
    return Project(root=root, original=root, **{**options, **programs})


def test_a_work_list_uses_what_is_there_and_says_when_nothing_is(tmp_path) -> None:
    """Without git, pytest and ruff files are still read; without files there is nothing to do."""
    (tmp_path / "notes.txt").write_text("x" * 300)
    todo = work_list(bare_project(tmp_path, files=("notes.txt",)), task_index=3, turns=3, seed=0)
    assert ["cat notes.txt"] * 3 == [item["command"] for item in todo]
    with pytest.raises(ConfigError, match="nothing to work on"):
        work_list(bare_project(tmp_path), task_index=0, turns=3, seed=0)


def test_a_missing_or_empty_repo_is_refused(tmp_path) -> None:
    """With its path."""
    with pytest.raises(ConfigError, match="no folder"):
        user_project(tmp_path / "missing", tmp_path / "run")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="holds no files"):
        user_project(tmp_path / "empty", tmp_path / "run")


def test_a_recorded_run_is_repeated_with_its_tokens_and_waits(make_kv, block_engine) -> None:
    """Same prompts, forced token ids, the same tools for the same time, and another AgentKV's bill."""
    from agentkv_langgraph import ChatAgentKV

    first, second = (make_kv(engine=block_engine(itertools.repeat("one two"))) for _ in range(2))
    recorder = Recorder(first)
    with recorder.task("t"):
        ChatAgentKV(recorder).invoke("hello")
        with recorder.tool("shell", args={"cmd": "sleep"}):
            time.sleep(0.05)
        ChatAgentKV(recorder).invoke("again")
    steps = recorder.steps["t"]
    assert [Turn, Wait, Turn] == [type(step) for step in steps]
    replay_task(second, "t", steps, threading.Event())
    assert [request.messages for request in first.engine.requests] == [r.messages for r in second.engine.requests]
    assert [step.token_ids for step in steps if isinstance(step, Turn)] == second.engine.forced
    before, after = first.report("t"), second.report("t")
    assert before.usage == after.usage
    assert after.tools[0].actual_s == pytest.approx(before.tools[0].actual_s, abs=0.05)


def test_a_stopped_recorder_cancels_running_calls_and_starts_no_more(make_kv, block_engine) -> None:
    """The running call ends as cancelled."""
    from agentkv.engine.base import Request
    from agentkv.errors import GenerationCancelled

    recorder = Recorder(make_kv(engine=block_engine(itertools.repeat("one two three"), latency_s=5.0)))
    stream = recorder.submit(Request(prompt="x"))
    recorder.stop()
    with pytest.raises(GenerationCancelled):
        stream.result()
    with pytest.raises(Stopped):
        recorder.submit(Request(prompt="x"))


def test_a_call_that_starts_while_the_demo_stops_is_cancelled_too(make_kv, block_engine) -> None:
    """Between the look at the flag and the note of the stream there is no gap."""
    from agentkv.engine.base import Request
    from agentkv.errors import GenerationCancelled

    class StopsMeanwhile(block_engine):
        def submit(self, request):
            recorder.stop()
            return super().submit(request)

    recorder = Recorder(make_kv(engine=StopsMeanwhile(itertools.repeat("one two three"), latency_s=5.0)))
    with pytest.raises(GenerationCancelled):
        recorder.submit(Request(prompt="x")).result()


def test_a_runs_folder_is_gone_afterwards_and_a_dead_runs_folder_is_swept(tmp_path) -> None:
    """A living run's folder stays; one whose process was killed goes when the next run starts."""
    program = f"""
from pathlib import Path
from agentkv_langgraph.demo.workshop import workshop
with workshop(Path({str(tmp_path)!r})) as folder:
    (folder / "blocks").write_text("x")
    print(folder, flush=True)
    input()
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", program], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        theirs = Path(other.stdout.readline().strip())
        with workshop(tmp_path) as mine:
            assert {mine, theirs} == set(tmp_path.iterdir())
        assert [theirs] == list(tmp_path.iterdir())
        other.kill()
    with workshop(tmp_path) as mine:
        assert [mine] == list(tmp_path.iterdir())
    assert [] == list(tmp_path.iterdir())


def test_blocks_are_shown_in_every_tier_that_has_a_copy() -> None:
    """Empty tiers are left out; lost blocks are told."""
    where = Residency(
        session="s", tokens=160, block_bytes=1, total_blocks=10, device_blocks=4, host_blocks=7, disk_blocks=9, missing_blocks=1
    )  # fmt: skip
    assert "device 4 · host 7 · disk 9 · lost 1" == where_blocks_are(where)
    assert "-" == where_blocks_are(None)


def test_the_board_tells_each_thing_once() -> None:
    """News are taken out by whoever shows them."""
    line = Line(key="k", title="task 1")
    board = Board([line])
    board.entered(line, "run_tool", "pytest -q")
    board.entered(line, "decide")
    board.over(line)
    assert ["task 1: running a tool: pytest -q", "task 1: done"] == board.take_news()
    assert [] == board.take_news()


@pytest.mark.parametrize(
    ("host", "disk", "shown"),
    [
        ("1GiB", None, "host 1.0 GiB, disk a temporary folder"),
        ("1GiB", "none", "host 1.0 GiB, disk off"),
        ("none", None, "host off, disk off"),
        ("1GiB", "/d", "host 1.0 GiB, disk /d"),
    ],
)
def test_tiers_can_be_switched_off(host, disk, shown) -> None:
    """`none` is off; the disk goes with the host tier, through which its blocks travel."""
    assert f"device 1.0 MiB, {shown}" == str(Memory("1MiB", host, disk))


def test_sizes_that_cannot_work_are_refused_with_the_options_name() -> None:
    """As everywhere, before anything is loaded."""
    with pytest.raises(ConfigError, match="--device-memory"):
        Memory("much", "1GiB", None)
    with pytest.raises(ConfigError, match="--disk needs the host tier"):
        Memory("1MiB", "none", "/d")
