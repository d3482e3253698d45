"""The examples run: without a model where they can."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("langgraph_agent.py", ("It is the version in the first line.", "Bill of version", "shell (python)")),
        ("remote_openai.py", ("It saves time.", "refused: task 'two-questions'", "Bill of two-questions")),
    ],
)
def test_an_example_runs_and_prints_its_bill(name, words) -> None:
    """As its docstring says."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    argv = [sys.executable, str(EXAMPLES / name), "--scripted"]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert (0, "") == (done.returncode, done.stderr)
    for word in words:
        assert word in done.stdout


@pytest.mark.weights
def test_the_next_day_starts_from_disk(tmp_path) -> None:
    """Two processes, two turns: the second one finds the whole first turn on disk."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    argv = [sys.executable, str(EXAMPLES / "resume_tomorrow.py"), str(tmp_path)]
    printed = [subprocess.run(argv, env=env, capture_output=True, text=True, timeout=200, check=True) for _ in range(2)]
    first, second = (int(done.stdout.splitlines()[-1].split()[0]) for done in printed)
    assert 0 == first
    assert second > 60
    assert "turn 2: " in printed[1].stdout
